"""Method schedule_free: what is evaluated and saved, and what it refuses."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from worker_jobs import (
    LeavesAt,
    are_equal,
    copy_weights,
    make_spec,
    make_train_task,
    make_trainer,
    read_rows,
    train_to_end,
)

from tula_cli.errors import SpecError
from tula_cli.run.directory import RunDir
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import checkpoint, evaluation
from tula_cli.worker.train import loop as worker_train_loop

ADAM = {"name": "AdamW", "lr": 0.01, "momentum": None}
FREE: dict[str, Any] = {"method": "schedule_free"}
NORM: dict[str, Any] = {"model": {"args": {"norm": True, "dropout": 0.3}}}
LARGE: dict[str, Any] = {"dataset": {"args": {"size": 640}}}  # of which a tenth is four batches of 16


@pytest.mark.parametrize(("optimizer", "kind"), [({}, SGDScheduleFree), (ADAM, AdamWScheduleFree)])
def test_it_takes_the_place_of_sgd_and_of_adamw_and_learns(
    alone: Ranks, optimizer: dict[str, Any], kind: type[torch.optim.Optimizer]
) -> None:
    job = make_spec(train={**FREE, "epochs": 7}, optimizer=optimizer)
    assert isinstance(make_trainer(job, alone).base, kind)
    _, steps = train_to_end(job, alone)
    assert float(steps[-1].loss) < 0.5 * float(steps[0].loss)


def test_the_averaged_weights_are_evaluated_and_saved_and_no_step_changes(alone: Ranks) -> None:
    subject = make_trainer(make_spec(train=FREE), alone)
    stream = worker_train_loop.run_steps(subject)
    for _ in range(5):
        next(stream)
    before = copy_weights(subject)
    with subject.method.use_evaluated_weights(subject):
        averaged = copy_weights(subject)
    assert not are_equal(averaged, before)
    state = checkpoint.make_checkpoint_state(subject, best={})
    assert are_equal(state["model"], averaged)
    assert are_equal(copy_weights(subject), before)
    fresh = make_trainer(make_spec(train=FREE), alone)
    checkpoint.restore_checkpoint(fresh, state)
    assert are_equal(copy_weights(fresh), before)
    stream.close()


def after_steps(ranks: Ranks, count: int, **changes: dict[str, Any]) -> worker_train_loop.Trainer:
    subject = make_trainer(make_spec(train=FREE, **changes), ranks)
    for _ in itertools.islice(worker_train_loop.run_steps(subject), count):
        pass
    return subject


def test_batchnorms_statistics_are_taken_anew_at_the_averaged_weights(alone: Ranks) -> None:
    subject = after_steps(alone, 6, **NORM, **LARGE)
    conv, norm = subject.parallel.module[0], subject.parallel.module[1]
    before = copy_weights(subject)
    with subject.method.use_evaluated_weights(subject), torch.no_grad():
        seen = [
            conv(images) for images, _ in itertools.islice(worker_train_loop.list_upcoming_micro_batches(subject), 4)
        ]
    random = torch.get_rng_state()
    result = evaluation.Evaluator(subject).evaluate()
    mean = torch.stack([output.mean((0, 2, 3)) for output in seen]).mean(0)
    variance = torch.stack([output.transpose(0, 1).flatten(1).var(1) for output in seen]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, variance)
    assert torch.equal(torch.get_rng_state(), random)
    assert norm.momentum == 0.1 and all(module.training for module in subject.parallel.modules())
    after = copy_weights(subject)
    assert all(torch.equal(after[name], value) for name, value in before.items() if not name.startswith("1."))
    again = evaluation.Evaluator(subject).evaluate()
    assert again == result and are_equal(copy_weights(subject), after), "of the position alone"
    saved = checkpoint.make_checkpoint_state(subject, best={})["model"]
    assert all(torch.equal(saved[name], value) for name, value in after.items() if "running" in name)


def test_statistics_of_the_steps_would_be_others(alone: Ranks) -> None:
    """They trail the points that are trained, while the average is far behind those."""
    subject = after_steps(alone, 40, **NORM, **LARGE, optimizer={"lr": 1.0})
    norm = subject.parallel.module[1]
    stale = norm.running_var.clone()
    evaluation.Evaluator(subject).evaluate()
    assert float((stale / norm.running_var).log().abs().max()) > 0.05


class Counting(torch.nn.Module):
    """Counts its passes in training mode, as spectral norm and vector quantisation keep what they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return value


def test_nothing_but_batchnorm_sees_those_batches(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = after_steps(alone, 2, **NORM, **LARGE)
    subject.parallel.module.append(counter := Counting())
    evaluation.average_batch_norm_statistics(subject)
    assert float(counter.passes) == 0
    monkeypatch.setattr(
        worker_train_loop, "list_upcoming_micro_batches", lambda _: pytest.fail("there is no BatchNorm")
    )
    evaluation.Evaluator(after_steps(alone, 2)).evaluate()
    evaluation.Evaluator(subject).evaluate(max_batches=1)  # of which only the time is wanted


def test_a_run_that_left_while_statistics_were_taken_goes_on_as_if_it_had_not(alone: Ranks, tmp_path: Path) -> None:
    """The 20th question is after the first of two training batches, the 22nd after one of the evaluation's."""
    job = make_spec(train=FREE, **NORM, dataset={"args": {"size": 320, "eval_size": 40}})
    task, data = make_train_task(job), build_datasets(job)

    def end(name: str, *calls: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        run = RunDir.create(tmp_path / name, job)
        for call in calls:
            run_training(task, run, alone, data, preemption=LeavesAt(alone, call))
            assert run.get_training(task.signature).find_newest_checkpoint_samples() == 320, (
                "in the first epoch's evaluation"
            )
        run_training(task, run, alone, data)
        state = torch.load(run.get_training(task.signature).path / "last", weights_only=True)["model"]
        return state, [row["eval_loss"] for row in read_rows(run, task, "epoch")]

    whole, losses = end("whole")
    for call in range(20, 23):
        state, result = end(str(call), call)
        assert are_equal(state, whole) and result == losses


@pytest.mark.parametrize("schedule", [{"kind": "cosine"}, {"kind": "multistep", "milestones": [1]}])
def test_a_learning_rate_that_falls_is_refused(schedule: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as error:
        make_spec(train=FREE, schedule=schedule)
    assert (
        f"must be constant with train.method: schedule_free, which averages weights instead of decreasing the learning rate, got {schedule['kind']}"
        in str(error.value.problems or error.value)
    )


def test_a_missing_package_is_reported_with_the_line_to_type(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(SpecError, match="needs the package schedulefree") as error:
        make_trainer(make_spec(train=FREE), alone)
    assert error.value.hint == "pip install 'tula-cli[schedulefree]'"
