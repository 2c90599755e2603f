"""`tula evaluate` as a service: which weights, on what, and what came of it."""

import os
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from make_damages import write_checkpoint
from make_results import make_inspection
from make_runs import FakeLauncher

from tula_cli.cluster.slurm import sbatch
from tula_cli.errors import BadMeasurements, DeviceFault, JobFailed, OverBudget, SpecError
from tula_cli.options import EvaluationRequest
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import write_record
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.results import EvaluationRecord
from tula_cli.run.records.tasks import MAX_RESTARTS, EvaluateTask, Rung, TrainTask
from tula_cli.run.snapshot import Snapshot
from tula_cli.services.evaluate import PreparedEvaluation, prepare_evaluation, run_evaluation
from tula_cli.services.events import EvaluationPlanned, Note, run_work
from tula_cli.services.status import read_job_progress
from tula_cli.services.waiting import DetachedJobs, Submission
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_measurement_signature, compute_train_signature

OWN_TEST = {"name": "digits", "test": {"name": "mine:Digits"}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, make.spec())


def add_training(run: RunDir, name: str, *checkpoints: int, best: int | None = None, at: float = 0.0) -> TrainTask:
    """Add a training that was submitted `at` seconds after the start of all, with its checkpoints."""
    task = TrainTask(
        id=f"train-{name}-1", job=f"train-{name}", spec=run.read_spec(), workdir="/data", nodes=2, signature=name, attempt=1,
        ladder=(Rung(batch=64),), workers="auto", code="c0de",
    )  # fmt: skip
    run.write_task(task)
    run.write_job(make.scheduler_job(task.job, at=make.START + at))
    files = run.get_training(name)
    for samples in checkpoints:
        files.get_checkpoint_path(samples).parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(files.get_checkpoint_path(samples))
    if best is not None:
        (files.path / "best").symlink_to(f"checkpoints/{best:012d}.pt")
    return task


def ready(run: RunDir, spec: JobSpec | None = None, **request: Any) -> PreparedEvaluation:
    return prepare_evaluation([Run(run.path, spec or run.read_spec())], EvaluationRequest(**request))


def start(
    prepared: PreparedEvaluation, launcher: FakeLauncher, *, confirm: bool = True
) -> EvaluationRecord | DetachedJobs:
    submission = Submission(lambda _: launcher, lambda _: make_inspection(), lambda _: confirm, wait=False)
    return run_work(run_evaluation(prepared, submission), lambda _: None)


# --- which


def test_the_best_weights_of_the_training_that_was_started_last_are_evaluated(run: RunDir) -> None:
    add_training(run, "aaaa", 500, at=0)
    add_training(run, "bbbb", 100, 200, best=100, at=5)
    task = ready(run).task
    assert (task.signature, task.weights, task.samples, task.code, task.workdir) == (
        "bbbb",
        "best",
        100,
        "c0de",
        "/data",
    )
    assert task.path == str(run.get_training("bbbb").get_checkpoint_path(100))
    assert task.local_batch == 32 and task.nodes == 1  # a GPU's share of the training's batch
    assert ready(run, weights="last").task.samples == 200
    assert ready(run, training="aaaa").task.weights == "last"  # no epoch of it has ended


def test_last_weights_that_were_deleted_are_not_replaced_by_others(run: RunDir) -> None:
    add_training(run, "aaaa", 100, best=100)
    files = run.get_training("aaaa")
    result = make.train_result("aaaa").model_copy(update={"samples": 200})
    write_record(files.path / "result.json", result)
    with pytest.raises(BadMeasurements, match="the last weights of training aaaa have been deleted") as error:
        ready(run, weights="last")
    assert error.value.hint == "use --weights best" and ready(run).task.weights == "best"
    write_checkpoint(files.get_checkpoint_path(200))
    assert ready(run, weights="last").task.samples == 200


def test_a_file_is_evaluated_with_the_model_of_the_training(run: RunDir, tmp_path: Path) -> None:
    add_training(run, "aaaa", 100)
    (tmp_path / "own.pt").write_bytes(b"PK one")
    task = ready(run, weights=str(tmp_path / "own.pt")).task
    assert (task.weights, task.path, task.samples) == (str(tmp_path / "own.pt"), str(tmp_path / "own.pt"), None)
    (tmp_path / "own.pt").write_bytes(b"PK another")
    assert ready(run, weights=str(tmp_path / "own.pt")).task.key != task.key


def test_what_is_not_there_is_reported(run: RunDir) -> None:
    with pytest.raises(BadMeasurements, match="nothing has been trained for toy yet"):
        ready(run)
    other = run.path.with_name("toy-of-b")
    with pytest.raises(BadMeasurements, match=rf"yet \(.*{run.id}, .*toy-of-b\)"):
        prepare_evaluation([Run(path, run.read_spec()) for path in (run.path, other)], EvaluationRequest())
    add_training(run, "aaaa")
    with pytest.raises(BadMeasurements, match="training aaaa has saved no weights yet"):
        ready(run)
    add_training(run, "bbbb", 100, at=5)
    with pytest.raises(BadMeasurements, match="training bbbb has not finished an epoch yet"):
        ready(run, weights="best")
    with pytest.raises(SpecError, match="--training cccc: this training does not exist") as caught:
        ready(run, training="cccc")
    assert caught.value.hint == "choose from: aaaa, bbbb"
    with pytest.raises(SpecError, match="--weights bst: this file does not exist"):
        ready(run, weights="bst")
    with pytest.raises(SpecError, match=f"--weights {__file__} is not a weights file"):
        ready(run, weights=__file__)
    with pytest.raises(SpecError, match="this folder contains no sharded checkpoint"):
        ready(run, weights=run.path)
    os.mkfifo(run.path / "pipe")
    with pytest.raises(SpecError, match="pipe is not a weights file"):
        ready(run, weights=run.path / "pipe")
    with pytest.raises(SpecError, match="this job has section script"):
        ready(run, make.script_spec(epochs=3))


def test_test_set_metrics_and_cluster_are_those_of_now_and_all_else_that_of_the_training(run: RunDir) -> None:
    trained = add_training(run, "aaaa", 100)
    now = make.spec(
        dataset=OWN_TEST,
        train={"epochs": 9, "metrics": {"f1": "mine:f1"}},
        cluster={"gpus_per_node": 2},
        loss={"name": "L1Loss"},
    )
    spec = ready(run, now).task.spec
    assert spec.dataset.test == now.dataset.test and spec.train.metrics == now.train.metrics
    assert spec.cluster == now.cluster
    assert (spec.train.epochs, spec.loss) == (trained.spec.train.epochs, trained.spec.loss)
    assert ready(run, now).task.key != ready(run).task.key


def test_metrics_that_the_training_did_not_have_are_written_with_the_best_and_the_end_of_now(tmp_path: Path) -> None:
    old = {
        "epochs": 9,
        "metrics": {"f1": "mine:f1"},
        "best_checkpoint": {"metric": "f1"},
        "early_stopping": {"target": 1},
    }
    run = RunDir.create(tmp_path, make.spec(train=old))
    add_training(run, "aaaa", 100)
    task = ready(run, make.spec(train={"epochs": 9, "metrics": {"error": "mine:error"}})).task
    run.write_task(task)
    assert task in run.read_snapshot().tasks  # one that cannot be read ends every command on the run


def test_another_code_behind_the_test_set_is_evaluated_anew(run: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    task = add_training(run, "aaaa", 100).model_copy(update={"workdir": str(folder)})
    run.write_task(task)
    job = make.spec(dataset=OWN_TEST)
    (folder / "mine.py").write_text("Digits = 1\n")
    key = ready(run, job, weights="last").task.key
    assert ready(run, job, weights="last").task.key == key
    (folder / "mine.py").write_text("Digits = 2\n")
    assert ready(run, job, weights="last").task.key != key


def test_a_test_set_names_neither_run_nor_training() -> None:
    plain, value = make.spec(), make.spec(dataset=OWN_TEST)
    assert compute_measurement_signature(plain) == compute_measurement_signature(value)
    assert compute_train_signature(plain, nodes=1, batch=8) == compute_train_signature(value, nodes=1, batch=8)


# --- the job


def test_it_is_submitted_once_and_told_from_then_on(run: RunDir) -> None:
    add_training(run, "aaaa", 100)
    launcher = FakeLauncher()
    task = ready(run).task
    assert start(ready(run), launcher) == DetachedJobs((task.job,), ())
    assert start(ready(run), launcher) == DetachedJobs((task.job,), (task.job,))
    run.get_training("aaaa").write_evaluation(make.evaluation(task))
    launcher.says[task.job] = "ended"
    assert start(ready(run), launcher) == make.evaluation(task)
    assert launcher.submitted == [task.job]
    assert start(ready(run, fresh=True), launcher) == DetachedJobs((task.job,), ())
    assert run.get_training("aaaa").read_evaluation(task.key) is None, "what was known does not stand for what runs"


def test_a_cluster_is_asked_for_and_this_machine_is_not(run: RunDir) -> None:
    add_training(run, "aaaa", 100)
    start(ready(run), FakeLauncher(), confirm=False)
    with pytest.raises(OverBudget):
        start(ready(run, make.spec(cluster={"kind": "slurm"})), FakeLauncher(), confirm=False)


class Ends(FakeLauncher):
    """A launcher whose jobs have ended when they are submitted: with an outcome, or a result."""

    def __init__(self, outcome: str = "", message: str = "") -> None:
        super().__init__()
        self.outcome, self.message = outcome, message

    def submit(self, run: RunDir, task: EvaluateTask) -> Any:  # type: ignore[override]
        job = super().submit(run, task)  # type: ignore[arg-type]
        self.says[task.job] = "ended"
        if self.outcome:
            settings = {"outcome": self.outcome, "message": self.message, "rank": 1}
            run.write_attempt(make.attempt(task.id, start=make.START, end=make.START + 9, **settings))
        else:
            run.get_training(task.signature).write_evaluation(make.evaluation(task))
        return job


def waited(run: RunDir, launcher: FakeLauncher) -> tuple[Any, list[Any]]:
    message: list[Any] = []
    submission = Submission(lambda _: launcher, lambda _: make_inspection(), lambda _: True, wait=True)
    return run_work(run_evaluation(ready(run), submission), message.append), message


def test_one_waits_for_the_result(run: RunDir) -> None:
    add_training(run, "aaaa", 100)
    result, message = waited(run, Ends())
    assert result.metrics == {"top1": 91.5, "loss": 0.31}
    assert isinstance(message[0], EvaluationPlanned)
    assert [type(event) for event in waited(run, Ends())[1]] == [Note]


@pytest.mark.parametrize(("outcome", "kind"), [("user", JobFailed), ("device_fault", DeviceFault)])
def test_a_failure_is_reported_with_its_words(outcome: str, kind: type[Exception], run: RunDir) -> None:
    add_training(run, "aaaa", 100)
    with pytest.raises(kind, match=r"evaluation failed \(rank 1 on n1\): SpecError: no folder data/test"):
        waited(run, Ends(outcome, "SpecError: no folder data/test"))


def test_the_supervisor_starts_it_again_after_a_lost_process_and_not_after_the_users_error(run: RunDir) -> None:
    add_training(run, "aaaa", 100)
    task = ready(run).task
    assert not run.is_finished(task)
    assert make.execute_reaction(run, task, Failure(outcome="signal")) == task
    assert make.execute_reaction(run, task, Failure(outcome="signal"), before=MAX_RESTARTS) is None
    assert make.execute_reaction(run, task, Failure(outcome="user")) is None
    run.write_task(task)
    assert read_job_progress(Snapshot(run.path), [task], {}).done == 0
    run.get_training("aaaa").write_evaluation(make.evaluation(task))
    assert run.is_finished(task)
    assert read_job_progress(Snapshot(run.path), [task], {}).is_complete


def test_on_slurm_it_has_the_time_of_a_training(run: RunDir) -> None:
    add_training(run, "aaaa", 100)
    task = ready(run, make.spec(cluster={"kind": "slurm", "minutes": 77})).task
    assert sbatch.make_submitit_parameters(run, task)["time"] == 77
