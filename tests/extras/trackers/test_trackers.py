"""Exported values, read back by the trackers' own libraries."""

import json
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from make_runs import START, add_measured, add_training, attempt, metrics, recommendation, summary, train_result
from make_runs import spec as toy_spec

from tula_cli.entry_points import make_install_hint
from tula_cli.errors import TrackerError
from tula_cli.extras.trackers.export import ExportResult, export_runs, require_all_sent
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_run
from tula_cli.services.events import Event, WarningEvent, run_work
from tula_cli.spec.sections import Export

KEY = "train-ab12cd34"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a probe, a recommendation and a training half way through."""
    run = RunDir.create(tmp_path, toy_spec())
    add_measured(run, 1, 32)
    run.write_recommendation(recommendation())
    run.write_text("results.csv", "a,b\n")
    add_training(run, rows=metrics())
    run.write_attempt(attempt(f"{KEY}-1"))
    return run


def send(run: RunDir, to: str, uri: str | None = None, *, active: bool = False) -> ExportResult:
    result: list[tuple[ExportResult, ...]] = []

    def work() -> Generator[Event, None, None]:
        result.append((yield from export_runs([open_run(run)], [Export(to=to, uri=uri)], active=lambda _: active)))

    list(work())
    return result[0][0]


def go_back(run: RunDir) -> None:
    """Let the training go on from sample 640, and end."""
    begin = {**metrics()[0], "time": START + 100, "samples": 640, "attempt": 2}
    steps = [{**metrics()[1], "samples": at, "time": START + at, "loss": at / 1000} for at in (1280, 5120)]
    rows = [*metrics()[:2], begin, *steps]
    run.get_training("ab12cd34").metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_train_result(train_result())
    run.write_summary(summary())
    run.write_attempt(attempt(f"{KEY}-1", end=START + 200))


def mlflow_store(uri: str, run: RunDir) -> None:
    """Send to a store of MLflow twice, with a training that goes back between, and read it by MLflow's client."""
    assert send(run, "mlflow", uri, active=True).problem == ""
    go_back(run)
    assert send(run, "mlflow", uri).new_points == 1 and send(run, "mlflow", uri).new_points == 0
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("toy")
    assert experiment is not None
    there = {
        search_run.data.tags["tula.key"]: search_run for search_run in client.search_runs([experiment.experiment_id])
    }
    assert set(there) == {"run", KEY}
    whole, training = there["run"], there[KEY]
    assert whole.data.params["optimizer.lr"] == "0.1" and whole.data.tags["recommendation.objective"] == "knee"
    assert [file.path for file in client.list_artifacts(whole.info.run_id)] == ["report.md", "results.csv"]
    assert training.data.tags["mlflow.parentRunId"] == whole.info.run_id
    assert whole.data.metrics["probes/n001-l000032/step_time"] > 0
    losses = client.get_metric_history(training.info.run_id, "train/loss")
    assert [(first.step, first.value) for first in sorted(losses, key=lambda item: item.step)] == [
        (640, 2.1),
        (1280, 1.9),
        (5120, 5.12),
    ]
    assert losses[0].timestamp == round(1000 * (START + 20))
    assert training.info.status == "FINISHED" and training.info.end_time == round(1000 * (START + 200))
    assert training.data.metrics["actual/hours"] == 0.1 and training.data.params["batch"] == "128"
    assert training.info.run_name == f"{run.id}/{KEY}"


def test_mlflow_has_what_was_sent_in_a_folder(run: RunDir, tmp_path: Path) -> None:
    mlflow_store(f"file://{tmp_path / 'mlruns'}", run)


@pytest.mark.proof
def test_mlflow_has_what_was_sent_in_a_database(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables take MLflow some seconds to make."""
    monkeypatch.chdir(tmp_path)
    mlflow_store(f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}", run)
    assert not any(path.is_file() for path in tmp_path.glob("mlruns/**/*")), (
        "files go beside the database, not below the working directory"
    )


@pytest.mark.proof
def test_a_server_that_is_down_is_reported_and_caught_up_with(run: RunDir, tmp_path: Path) -> None:
    """The port is nobody's. What is sent elsewhere meanwhile has nothing to do with it."""
    assert send(run, "mlflow", "http://127.0.0.1:9").problem.startswith("mlflow: ")
    assert send(run, "mlflow", f"file://{tmp_path / 'mlruns'}").new_runs == 2


def records(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of W&B's files below a folder, in order: their format is LevelDB's log, of W&B's own protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.rglob("*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # what is left of a block is filled up
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record = Record.FromString(whole)
                yield path.parent.name, record
                whole = b""


def test_wandb_has_what_was_sent_in_its_offline_folder(run: RunDir, tmp_path: Path) -> None:
    send(run, "wandb", str(tmp_path / "offline"), active=True)
    go_back(run)
    assert send(run, "wandb", str(tmp_path / "offline")).new_points == 1
    results = [record for _, record in records(tmp_path / "offline")]
    begun = {record.run.display_name: record.run for record in results if record.WhichOneof("record_type") == "run"}
    assert set(begun) == {run.id, f"{run.id}/{KEY}"}
    training = begun[f"{run.id}/{KEY}"]
    assert training.run_group == run.id and training.project == "toy" and training.job_type == "training"
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in results
        if record.WhichOneof("record_type") == "history"
    ]
    curve = [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert curve == [(640, 2.1), (1280, 1.9), (5120, 5.12)], "its steps are samples, and only grow"
    message = {
        item.key or "/".join(item.nested_key): item.value_json for first in results for item in first.summary.update
    }
    assert message["summary/actual/hours"] == "0.1" and message["state"] == '"finished"'


def board(folder: Path) -> Callable[[str], list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    result.Reload()
    return lambda name: [(item.step, round(item.value, 4)) for item in result.Scalars(name)]


def test_tensorboard_has_what_was_sent(run: RunDir) -> None:
    result = send(run, "tensorboard", active=True)
    assert (result.runs, Path(result.uri)) == (2, run.path.absolute() / "exports" / "tensorboard")
    folder = Path(result.uri) / run.id
    assert board(folder / KEY)("train/loss") == [(640, 2.1), (1280, 1.9)]
    assert board(folder / "run")("summary/probes/n001-l000032/step_time")[0][1] > 0
    go_back(run)
    assert send(run, "tensorboard").new_points == 1 and send(run, "tensorboard").new_points == 0
    assert board(folder / KEY)("train/loss") == [(640, 2.1), (1280, 1.9), (5120, 5.12)]
    assert board(folder / KEY)("summary/actual/hours") == [(5120, 0.1)]


def test_tensorboard_writes_into_the_folder_of_a_url(run: RunDir, tmp_path: Path) -> None:
    result = send(run, "tensorboard", f"file://{tmp_path}/a%20board", active=True)
    assert result.uri == str(tmp_path / "a board")
    assert board(tmp_path / "a board" / run.id / KEY)("train/loss") == [(640, 2.1), (1280, 1.9)]


def test_a_run_that_was_moved_goes_on_in_the_place_inside_it(run: RunDir, tmp_path: Path) -> None:
    """It would otherwise be twice in the files that moved with it."""
    send(run, "tensorboard")
    moved = RunDir(shutil.copytree(run.path, tmp_path / "elsewhere" / run.id))
    result = send(moved, "tensorboard")
    assert (result.new_runs, result.new_points, result.uri) == (0, 0, str(moved.path / "exports" / "tensorboard"))
    assert board(Path(result.uri) / run.id / KEY)("train/loss") == [(640, 2.1), (1280, 1.9), (1920, 1.7)]


def test_a_folder_that_cannot_be_written_is_reported(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    work = export_runs([open_run(run)], [Export(to="tensorboard", uri=str(tmp_path / "file"))], active=lambda _: False)
    (message,) = list(work)
    assert "Not a directory" in message.text  # type: ignore[union-attr]


def test_a_package_that_is_missing_is_reported_with_what_to_do(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "tula_cli.extras.trackers.wandb", raising=False)
    warnings: list[Event] = []
    results = run_work(export_runs([open_run(run)], [Export(to="wandb")], active=lambda _: False), warnings.append)
    (warning,) = warnings
    assert isinstance(warning, WarningEvent) and warning.text.startswith("wandb: import of wandb")
    assert "tula-cli[trackers]" in warning.text
    with pytest.raises(TrackerError) as error:
        require_all_sent(results)
    assert error.value.hint == make_install_hint("trackers"), "not to repeat the export"


def test_an_export_that_a_tracker_refused_is_to_be_repeated(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    to = Export(to="tensorboard", uri=str(tmp_path / "file"))
    with pytest.raises(TrackerError) as error:
        require_all_sent(run_work(export_runs([open_run(run)], [to], active=lambda _: False), lambda _: None))
    assert "again" in error.value.hint
