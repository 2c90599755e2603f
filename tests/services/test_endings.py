"""The table of endings: what it promises of each class is what a training does, and what the commands end with."""

import time
from pathlib import Path
from typing import get_args

import make_runs as make
import pytest

from tula_cli.host.failures import FAILURE_KINDS
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import NODE_FAILURES, Failure
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services.training_end import make_training_error
from tula_cli.spec.resources import Cluster

CLASSES = get_args(OutcomeClass)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, make.spec(train={"epochs": 4, "max_attempts": 3, "workers": 2}))


@pytest.fixture
def task(run: RunDir) -> TrainTask:
    make.add_training(run)
    task = run.get_training("ab12cd34").read_newest_task()
    assert task is not None
    return task


def test_every_class_is_in_the_table() -> None:
    assert set(FAILURE_KINDS) == set(CLASSES)


@pytest.mark.parametrize("outcome", CLASSES)
def test_a_relaunch_names_the_node_if_the_failure_concerns_it(
    outcome: OutcomeClass, run: RunDir, task: TrainTask
) -> None:
    relaunch = make.execute_reaction(run, task, Failure(outcome=outcome, message="so it was", host="n7"))
    assert relaunch is None or isinstance(relaunch, TrainTask)
    assert relaunch is None or ("n7" in relaunch.cause) == (outcome in NODE_FAILURES)


@pytest.mark.parametrize("outcome", CLASSES)
def test_a_training_that_ended_so_has_the_exit_code_of_the_table(outcome: OutcomeClass, task: TrainTask) -> None:
    last = make.attempt(task.id, end=time.time(), outcome=outcome, message="so it was", rank=3, host="n7")
    error = make_training_error(task, [last], saved_samples=100)
    assert (error.exit_code, error.code) == (FAILURE_KINDS[outcome].error.exit_code, FAILURE_KINDS[outcome].error.code)
    words = "lost its connection to another rank" if outcome == "peer" else "so it was"
    assert words in error.message and error.hint


@pytest.mark.parametrize(
    ("outcome", "kind", "setting"),
    [
        ("time_limit", "slurm", "cluster.minutes"),
        ("host_oom", "slurm", "cluster.slurm.memory"),
        ("host_oom", "my.queue:Queue", "cluster.options"),
    ],
)
def test_the_hint_names_the_setting_that_the_jobs_scheduler_has(
    task: TrainTask, outcome: OutcomeClass, kind: str, setting: str
) -> None:
    value = task.model_copy(update={"spec": task.spec.model_copy(update={"cluster": Cluster(kind=kind)})})
    hint = make_training_error(value, [make.attempt(task.id, end=time.time(), outcome=outcome)], saved_samples=100).hint
    settings = ("cluster.minutes", "cluster.slurm.memory", "cluster.options")
    assert [name for name in settings if name in hint] == [setting]


@pytest.mark.parametrize(
    "advice",
    [
        "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
    ],
)
def test_screens_show_the_facts_of_an_out_of_memory_error_and_the_record_keeps_all(advice: str) -> None:
    facts = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 784.00 MiB. GPU 0 has 79.18 GiB, 552.62 MiB is free."
    )
    failure = Failure(outcome="device_oom", message=f"{facts} {advice}")
    assert (failure.summary, failure.message) == (facts, f"{facts} {advice}")
    assert Failure(outcome="user", message=f"{facts} {advice}").summary == failure.message
