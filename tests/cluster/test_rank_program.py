"""Which program the ranks of a task run, and what a supervisor learns from it."""

from pathlib import Path
from typing import Any

import pytest

from tula_cli.cluster.allocation import Allocation
from tula_cli.cluster.rank_program import WorkerProgram
from tula_cli.cluster.rank_programs import make_rank_program
from tula_cli.cluster.scripts.probe import ScriptProbe
from tula_cli.cluster.scripts.resume_test import ResumeTest
from tula_cli.cluster.scripts.training import ScriptTraining
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import CheckTask, ProbeTask, ResumeTestTask, Rung, Task, TrainTask
from tula_cli.spec.load import validate_job

SCRIPT = {"command": "train.py -b {batch}", "length": {"epochs": 1}, "reference": {"batch": 8}, "dataset_size": 64}


def tasks(folder: Path, job: dict[str, Any]) -> dict[str, Task]:
    spec = validate_job({"search": {"nodes": [2]}, **job}, source="test")
    common: dict[str, Any] = {"job": "j", "spec": spec, "workdir": str(folder), "nodes": 2}
    return {
        "probe": ProbeTask(id="probe", local_batches=(4, 8), **common),
        "train": TrainTask(id="j-1", signature="s", attempt=1, ladder=(Rung(batch=8),), workers=1, **common),
        "rehearse": ResumeTestTask(id="rehearse", key="k", batch=8, **common),
        "check": CheckTask(id="check", **common),
    }


@pytest.mark.parametrize(
    ("kind", "program"),
    [("probe", ScriptProbe), ("train", ScriptTraining), ("rehearse", ResumeTest), ("check", WorkerProgram)],
)
def test_a_job_with_a_script_runs_it_except_in_checks(tmp_path: Path, kind: str, program: type) -> None:
    task = tasks(tmp_path, {"script": SCRIPT})[kind]
    assert type(make_rank_program(RunDir(tmp_path), task)) is program


def test_a_probe_of_a_script_is_started_at_the_first_unmeasured_batch(tmp_path: Path) -> None:
    program = make_rank_program(RunDir(tmp_path), tasks(tmp_path, {"script": SCRIPT})["probe"])
    command = program.make_leader_command(attempt=2, rendezvous="host:1")
    assert (command.task, command.attempt, command.ranks, command.batch, command.meeting) == (
        "probe",
        2,
        2,
        8,
        "host:1",
    )


def test_ranks_of_the_worker_that_leave_no_result_have_failed(tmp_path: Path) -> None:
    loop = {
        "model": {"name": "resnet18"},
        "dataset": {"name": "digits"},
        "optimizer": {"name": "SGD", "lr": 0.1},
        "train": {"epochs": 1, "reference_batch": 8},
    }
    program = make_rank_program(RunDir(tmp_path), tasks(tmp_path, loop)["train"])
    assert isinstance(program, WorkerProgram)
    failure = program.find_clean_exit_failure()
    assert failure is not None and (failure.outcome, failure.message) == ("unknown", "the ranks ended without a result")
    assert not program.find_rank_rendezvous() and not program.preview_command()


@pytest.mark.parametrize(("launch", "index", "ranks"), [("node", 1, ["2", "3"]), ("rank", 1, ["1"])])
def test_a_check_on_a_cluster_starts_every_rank_of_the_job(
    tmp_path: Path, launch: str, index: int, ranks: list[str]
) -> None:
    cluster = {"kind": "slurm", "gpus_per_node": 2}
    task = tasks(tmp_path, {"script": {**SCRIPT, "launch": launch}, "cluster": cluster})["check"]
    program, allocation = make_rank_program(RunDir(tmp_path), task), Allocation(index, 4, job_id="7", environ={})
    start = program.make_starter(allocation, program.make_leader_command(attempt=1, rendezvous=""))
    assert [command.environment["RANK"] for command in start.make_rank_commands(tmp_path / "log")] == ranks
