"""No record of a run holds a secret that the text of another program has quoted."""

from pathlib import Path

import pytest
from make_runs import add_failed, add_out_of_memory, attempt, script_spec, spec, summary
from worker_jobs import make_train_task

from tula_cli.cluster.scripts.training import ScriptTraining
from tula_cli.diagnostics import Diagnostic
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import Record
from tula_cli.run.records.failures import Failure, Recovery, Relaunch
from tula_cli.run.records.inspections import ClusterReport, Inspection, NodeReport
from tula_cli.run.records.probes import Failed, OutOfMemory, ScriptObservation
from tula_cli.run.records.recommendations import Recommendation, StartEstimate
from tula_cli.run.records.results import Summary
from tula_cli.run.records.scripts import ObservedStart, RankResult, ScriptFailure
from tula_cli.spec.load import validate_job
from tula_cli.worker.build.loaders import TrainingPosition
from tula_cli.worker.train.training_log import MetricsFile

SECRET = "s3cr3tXYZ9"
QUOTED = f"HTTPError: 403 of https://user:{SECRET}@host/x?sig={SECRET} (HF_TOKEN={SECRET}, --password {SECRET})"
FIELDS: list[tuple[type[Record], str]] = [
    (OutOfMemory, "message"), (ScriptObservation, "notes"), (Failure, "message"), (Failure, "detail"),
    (Summary, "warnings"), (Inspection, "estimate_error"), (Inspection, "notes"), (Inspection, "warnings"),
    (Inspection, "script"), (Recommendation, "warnings"), (StartEstimate, "reason"), (NodeReport, "write_error"), (ClusterReport, "network_error"),
    (ScriptFailure, "text"), (RankResult, "notes"), (ObservedStart, "why"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "field"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_recorded_text_is_written_without_secrets(record: type[Record], field: str) -> None:
    annotation = str(record.model_fields[field].annotation)
    value = Diagnostic("code", {"reason": QUOTED}, QUOTED) if "Diagnostic" in annotation else QUOTED
    copied = record.model_construct(
        **{field: (value,) if "tuple" in annotation else value}
    )  # as model_copy does, it validates nothing
    written = copied.model_dump_json(include={field})
    assert "HTTPError: 403" in written and SECRET not in written


def test_a_failure_is_written_without_secrets_wherever_it_is_carried() -> None:
    failure = Failure(outcome="user").model_copy(update={"message": QUOTED})
    recovery = Recovery(failure=failure, decision=Relaunch())
    task = make_train_task(spec()).model_copy(update={"recovery": recovery})
    carriers: list[Record] = [
        attempt("t").model_copy(update={"failure": failure}),
        Failed.model_construct(id="p", nodes=1, gpus_per_node=1, local_batch=8, failure=failure),
        task,
        summary().model_copy(update={"recoveries": (recovery,)}),
    ]
    for carrier in carriers:
        written = carrier.model_dump_json()
        assert "HTTPError: 403" in written and SECRET not in written


def test_records_are_read_without_secrets_too() -> None:
    assert SECRET not in attempt("t", outcome="user", message=QUOTED).message
    assert SECRET not in summary(warnings=(QUOTED,)).warnings[0]


def test_what_failed_and_what_was_warned_of_is_recorded_without_secrets(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "tula-runs", spec())
    add_failed(run, 2, 8, QUOTED)
    add_out_of_memory(run, 4, 8, assumed=True)
    task = make_train_task(spec())
    with MetricsFile(run, task, is_first=True, samples=0) as metrics:
        metrics.add_row("warning", TrainingPosition(), 0.0, message=QUOTED, nested={"causes": [QUOTED]})
    scripted = task.model_copy(update={"spec": script_spec(epochs=2)})
    ScriptTraining(run, scripted)._add_row("warning", 0, message=QUOTED)
    rows = list(run.get_training(task.signature).read_metrics())
    assert len(rows) == 2 and all("HTTPError: 403" in row["message"] for row in rows)
    (failed,) = [result for result in run.read_results() if isinstance(result, Failed)]
    assert "HTTPError: 403" in failed.message
    assert [file for file in run.path.rglob("*") if file.is_file() and SECRET in file.read_text()] == []


def test_what_a_job_runs_from_keeps_its_words_in_a_private_folder(tmp_path: Path) -> None:
    script = {
        "command": f"python train.py --password {SECRET} -b {{local_batch}}",
        "length": {"epochs": 1},
        "reference": {"batch": 8},
    }
    run = RunDir.create(tmp_path / "tula-runs", validate_job({"script": script}, source="test"))
    read = RunDir.open(run.path).read_spec().script
    assert read is not None and SECRET in str(read.command) and SECRET in (run.path / "spec.yaml").read_text()
    assert run.path.stat().st_mode & 0o077 == 0
