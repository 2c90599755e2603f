"""Trainings that measure their gradient noise and grow their batch by it (`train.ramp: noise`): a kill changes nothing."""

import contextlib
import random
from pathlib import Path

import pytest
from worker_jobs import Interrupted, LeavesAt, are_equal, load_final_weights, make_spec, make_staged_task, read_rows

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.preemption import PreemptionHandler
from tula_cli.worker.ranks import Ranks


def train(run: RunDir, ranks: Ranks, task: TrainTask, preemption: PreemptionHandler | None = None) -> None:
    run_training(task, run, ranks, build_datasets(task.spec), preemption=preemption)


def test_the_noise_is_measured_after_each_epoch_if_the_job_asks_for_it(alone: Ranks, run: RunDir) -> None:
    task = make_staged_task(epochs=3)
    train(run, alone, task)
    assert [row["epoch"] for row in read_rows(run, task, "noise")] == [1, 2, 3]
    assert [(row["batch"], row["stage"]) for row in read_rows(run, task, "stage")] == [(8, 1), (16, 2)]


def test_stages_by_noise_alone_measure_nothing(alone: Ranks, run: RunDir) -> None:
    task = make_staged_task(epochs=2, measured=False)
    train(run, alone, task)
    assert not list(read_rows(run, task, "noise")) and len(list(read_rows(run, task, "epoch"))) == 2


def break_off(run: RunDir, ranks: Ranks, task: TrainTask, rng: random.Random) -> None:
    """Start a training that ends somewhere: between two steps, in a measurement, or in an evaluation."""
    if rng.random() < 0.5:
        train(run, ranks, task, LeavesAt(ranks, rng.randint(1, 60)))
        return
    job = task.spec.model_copy(
        update={"dataset": make_spec(dataset={"args": {"ends_after": rng.randint(1, 500)}}).dataset}
    )
    with contextlib.suppress(Interrupted):
        train(run, ranks, task.model_copy(update={"spec": job}))


@pytest.mark.parametrize(
    ("method", "kills"),
    [
        ("lrs", 3),
        *(pytest.param(method, 8, marks=pytest.mark.proof) for method in ("ags", "ramp", "static")),
    ],
)
def test_random_kills_change_no_bit(method: str, kills: int, alone: Ranks, tmp_path: Path) -> None:
    rng, task = random.Random(method), make_staged_task(method=method)
    whole, run = (RunDir.create(tmp_path / name, task.spec) for name in ("whole", "run"))
    train(whole, alone, task)
    for _ in range(kills):
        break_off(run, alone, task, rng)
    train(run, alone, task)
    assert are_equal(load_final_weights(run, task), load_final_weights(whole, task))
    batches = [[(row["batch"], row["samples"]) for row in read_rows(item, task, "epoch")] for item in (run, whole)]
    assert batches[0] == batches[1]
