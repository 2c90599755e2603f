"""Where train.early_stopping is expected to end a training, by earlier ones of the same job."""

from pathlib import Path
from typing import Any

import make_runs as make
import pytest

from tula_cli.run.directory import RunDir
from tula_cli.run.files import write_atomic
from tula_cli.run.imports import Source
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.services.expected_end import predict_end
from tula_cli.services.train import TrainPlan
from tula_cli.show.train import render_train_plan
from tula_cli.spec.job import JobSpec

UNTIL = {"target": 0.7}


def job(*, until: Any = UNTIL, seed: int = 0, lr: float = 0.1, epochs: int = 10) -> JobSpec:
    train = {"epochs": epochs, "best_checkpoint": {"metric": "top1"}, "early_stopping": until, "seed": seed}
    return make.spec(train=train, optimizer={"lr": lr})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, job())


def task(spec: JobSpec, *, batch: int = 64, name: str = "new") -> TrainTask:
    rung = Rung(batch=batch, prediction=make.prediction(1, batch, hours=1.0))
    return TrainTask(
        id=f"train-{name}-1", job=f"train-{name}", spec=spec, workdir="/", nodes=1, signature=name, attempt=1,
        ladder=(rung,), workers=0,
    )  # fmt: skip


def trained(run: RunDir, name: str, *top1: float, spec: JobSpec, batch: int = 64, done: bool = True) -> None:
    """Add a training with these accuracies, which has ended where `done`."""
    import json

    run.write_task(task(spec, batch=batch, name=name))
    plain = {"kind": "epoch", "eval_loss": 1.0, "top5": None, "perplexity": None}
    rows = [
        {**plain, "samples": 1000 * epoch, "epoch": float(epoch), "top1": value} for epoch, value in enumerate(top1, 1)
    ]
    write_atomic(run.training(name).metrics_path, "".join(f"{json.dumps(row)}\n" for row in rows))
    if done:
        run.write_train_result(make.train_result(name).model_copy(update={"epochs": len(top1)}))


def test_seeds_of_the_same_job_tell_where_it_ends_and_what_it_takes(run: RunDir) -> None:
    trained(run, "a", 50, 71, spec=job(seed=1))
    trained(run, "b", 50, 60, 65, 72, spec=job(until=None, seed=2), done=False)
    trained(run, "c", *[50] * 10, spec=job(until=None, seed=3))
    trained(run, "d", 50, 60, spec=job(seed=4), done=False)  # has not come so far
    result = predict_end(run, task(job()), code="")
    assert result is not None
    assert (result.epoch, result.witnesses, result.batch) == (4, (2, 4, 10), 64)
    assert result.prediction.hours == pytest.approx(0.4)
    assert result.description == "3 earlier trainings of this job at batch 64 reached it after 2 to 10 epochs"


def test_the_nearest_batch_counts(run: RunDir) -> None:
    trained(run, "a", 50, 71, spec=job(), batch=32)
    trained(run, "b", 50, 60, 71, spec=job(), batch=1024)
    result = predict_end(run, task(job(), batch=256), code="")
    assert result is not None and (result.epoch, result.batch) == (3, 1024)


@pytest.mark.parametrize("other", [{"lr": 0.2}, {"epochs": 20}])
def test_other_jobs_tell_nothing(other: dict[str, Any], run: RunDir) -> None:
    trained(run, "a", 50, 71, spec=job(**other))
    assert predict_end(run, task(job()), code="") is None


def test_other_code_a_job_without_an_end_and_one_without_a_prediction_are_reported_nothing(run: RunDir) -> None:
    trained(run, "a", 50, 71, spec=job())
    assert predict_end(run, task(job()), code="") is not None
    assert predict_end(run, task(job()), code="0ther") is None
    assert predict_end(run, task(job(until=None)), code="") is None
    bare = task(job()).model_copy(update={"ladder": (Rung(batch=64),)})
    assert predict_end(run, bare, code="") is None


def test_the_plan_of_a_training_says_which_it_rests_on(run: RunDir) -> None:
    trained(run, "a", 50, 71, spec=job())
    new = task(job())
    plan = TrainPlan(new, new.prediction, "as given", False, None, Source(Path(), ""), price="1 USD")
    assert "train.early_stopping may end it earlier; times and costs are for all epochs" in list(
        render_train_plan(plan)
    )
    known = TrainPlan(**{**vars(plan), "ends": predict_end(run, new, code="")})
    (line,) = [line for line in render_train_plan(known) if isinstance(line, str) and "earlier training" in line]
    assert line == (
        "1 earlier training of this job at batch 64 reached it after 2 epochs: up to epoch 2 of 10 it takes 12.0 min, 0.140 node-h;"
        " the times and costs below are for all epochs"
    )
