"""The search for a learning rate on the nodes: branches from one checkpoint, a record after each, and what is not repeated."""

from typing import Any

import pytest
from worker_jobs import make_spec

from tula_cli.errors import Diverged
from tula_cli.models import rate_search
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import RateBranch, RateSearch
from tula_cli.run.records.tasks import RateSearchTask
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import auto_tune
from tula_cli.worker.train.rate_search import run_rate_search

LONG = {"method": "lrs", "epochs": 40}


def search(run: RunDir, ranks: Ranks, *batches: int, **changes: Any) -> RateSearch:
    """Search to the end; return the record."""
    job = make_spec(**{"train": LONG, **changes})
    task = RateSearchTask(id="rates-0", job="rates-0", spec=job, workdir=".", nodes=1, key="0", batches=batches)
    run_rate_search(task, run, ranks, build_datasets(job))
    assert run.is_finished(task)
    record = run.read_rate_search("0")
    assert record is not None
    return record


def without_times(branches: tuple[RateBranch, ...]) -> list[RateBranch]:
    return [branch.model_copy(update={"seconds": 0.0}) for branch in branches]


def test_each_learning_rate_is_trained_from_the_same_checkpoint(alone: Ranks, run: RunDir) -> None:
    record = search(run, alone, 32)
    plan = rate_search.plan_rate_search(make_spec(train=LONG), (32,), dataset_size=100)
    assert [(b.batch, b.rule, b.lr) for b in record.branches] == [
        (32, "none", 0.1), (32, "sqrt", 0.2), (32, "linear", 0.4),
    ]  # fmt: skip
    assert len({branch.loss for branch in record.branches}) == 3
    assert all(branch.loss is not None and branch.loss < record.start_loss for branch in record.branches)
    assert record.noise is not None
    assert record.noise[1] <= record.noise[0]
    assert record.start_epoch == pytest.approx(plan.start / 90, abs=0.1)
    assert record.total == 4000
    assert 0.8 * plan.samples < record.samples <= plan.samples, "but for what is dropped at the end of an epoch"


def test_an_interrupted_search_trains_only_the_missing_branches_and_comes_to_the_same(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(run, alone, 32)
    run.write_rate_search(whole.model_copy(update={"branches": whole.branches[:1], "finished": False}))
    trained: list[str] = []
    train_branch = auto_tune.BranchContext.train_branch

    def spied(context: auto_tune.BranchContext, task: Any, arm: Any, length: int, **others: Any) -> Any:
        trained.append(arm.name)
        return train_branch(context, task, arm, length, **others)

    monkeypatch.setattr(auto_tune.BranchContext, "train_branch", spied)
    again = search(run, alone, 32)
    assert trained == ["sqrt-32", "linear-32"]
    assert without_times(again.branches) == without_times(whole.branches)
    assert search(run, alone, 32) == again
    assert len(trained) == 2, "a finished search trains nothing"


def test_a_learning_rate_that_diverges_is_ruled_out_and_other_batches_follow_the_choice(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = rate_search.compute_lr_scale
    monkeypatch.setattr(
        rate_search,
        "compute_lr_scale",
        lambda job, batch: 1e38 if job.train.lr_scaling == "linear" else scale(job, batch),
    )
    record = search(run, alone, 32, 16)
    assert [(b.batch, b.rule, b.diverged) for b in record.branches[:3]] == [
        (32, "none", False), (32, "sqrt", False), (32, "linear", True),
    ]  # fmt: skip
    chosen = rate_search.find_branch_with_highest_lr(record.branches[:3], record.start_loss)
    assert chosen is not None
    assert (record.branches[3].batch, record.branches[3].rule) == (16, chosen.rule)


def test_where_the_reference_batch_diverges_there_is_nothing_to_search(alone: Ranks, run: RunDir) -> None:
    with pytest.raises(Diverged, match=r"at train\.reference_batch 8"):
        search(run, alone, 32, optimizer={"lr": 1e30})


@pytest.mark.parametrize("method", ["ramp", "ags", "ortho"])
def test_branches_train_with_the_method_of_the_job(alone: Ranks, run: RunDir, method: str) -> None:
    ags = {"granularity": "tensor", "source": "small_batch"} if method == "ags" else {}
    record = search(run, alone, 32, train={**LONG, "method": method}, ags=ags)
    assert [branch.rule for branch in record.branches] == ["none", "sqrt", "linear"]
    assert len({branch.loss for branch in record.branches}) == 3
