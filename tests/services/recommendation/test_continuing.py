"""A training that was interrupted: what another one leaves behind, and what its parts on other nodes cost."""

from pathlib import Path

import make_runs
import pytest
from make_results import make_inspection

from tula_cli.cluster import relaunch
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import write_file_atomically
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services import messages, train
from tula_cli.services.plans import TrainPlan
from tula_cli.services.train import warn_interrupted_training
from tula_cli.spec.job import JobSpec


def plan(run: RunDir, spec: JobSpec | None = None, *, nodes: int, batch: int) -> TrainPlan:
    return train.plan_training(
        Run(run.path, spec or run.read_spec()), nodes=nodes, batch=batch, inspect=lambda _: make_inspection()
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A training on 2 nodes at batch 128 stands at 640 samples."""
    run = RunDir.create(tmp_path, make_runs.spec(search={"nodes": [1, 2], "min_batch": 32}))
    task = plan(run, nodes=2, batch=128).task
    run.write_task(task)
    checkpoint = run.get_training(task.signature).get_checkpoint_path(640)
    checkpoint.parent.mkdir(parents=True)
    write_file_atomically(checkpoint, b"")
    return run


def first(run: RunDir) -> TrainTask:
    return next(task for task in run.read_tasks() if isinstance(task, TrainTask))


def test_each_part_of_a_training_is_paid_for_its_own_nodes(run: RunDir) -> None:
    begun = first(run)
    task = begun.model_copy(update={"id": f"{begun.job}-2", "attempt": 2, "nodes": 1})
    run.write_task(task)
    run.write_train_result(make_runs.train_result(begun.signature))
    hour = 3600.0
    run.write_attempt(make_runs.attempt(begun.id, start=make_runs.START, end=make_runs.START + hour))
    run.write_attempt(make_runs.attempt(task.id, start=make_runs.START + hour, end=make_runs.START + 3 * hour))
    relaunch.write_summary(run, task)
    summary = run.get_training(begun.signature).read_summary()
    assert summary is not None and summary.actual_hours == pytest.approx(3)
    price = run.read_spec().pricing.price
    assert summary.actual_cost == pytest.approx(price * (2 * 1 + 1 * 2))


def test_a_training_that_other_settings_make_one_of_its_own_says_what_it_leaves_behind(run: RunDir) -> None:
    begun = first(run)
    ended = run.read_spec().model_copy(update={"train": run.read_spec().train.model_copy(update={"epochs": 11})})
    assert warn_interrupted_training(run, plan(run, ended, nodes=2, batch=128).task) == [
        messages.earlier_training_other_settings(training=begun.signature, samples=640, keys=["train.epochs"])
    ]
    assert not warn_interrupted_training(run, begun), "it is begun"
    assert not warn_interrupted_training(run, plan(run, ended, nodes=1, batch=128).task), (
        "another configuration is meant to be another"
    )
