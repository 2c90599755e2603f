import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_tracker import RUNS_BY_ADDRESS, UNREACHABLE_ADDRESSES, FakeRun
from make_results import Truth, make_probe
from make_runs import (
    START,
    add_measured,
    add_out_of_memory,
    add_training,
    attempt,
    metrics,
    recommendation,
    summary,
    train_result,
)
from make_runs import spec as toy_spec

from tula_cli.errors import NotYours, SpecError, TrackerError, TulaError
from tula_cli.extras.trackers import export as service
from tula_cli.extras.trackers.destination import resolve_destination
from tula_cli.extras.trackers.export import ExportResult, export_runs, list_requested_trackers
from tula_cli.options import ExportRequest
from tula_cli.run import owner
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import read_text
from tula_cli.run.job_runs import open_run
from tula_cli.services.events import Event, WarningEvent
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Export

KEY = "train-ab12cd34"


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    """A place of the fake tracker that no other test has."""
    name: str = request.node.name
    RUNS_BY_ADDRESS.pop(name, None)
    return name


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, toy_spec())


def send(run: RunDir, *places: str, active: bool = False, **how: Any) -> tuple[tuple[ExportResult, ...], list[Event]]:
    """Send a run to places of the fake tracker; return what was sent, and what was told."""
    trackers = [Export(to="fake_tracker:FakeTracker", uri=place) for place in places]
    how = {"reports": lambda _: (), **how}
    work, message = export_runs([open_run(run)], trackers, active=lambda _: active, **how), []
    while True:
        try:
            message.append(next(work))
        except StopIteration as end:
            return end.value, message


def write(run: RunDir, rows: Sequence[dict[str, Any]]) -> None:
    run.get_training("ab12cd34").metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(run: RunDir, rows: Sequence[dict[str, Any]]) -> None:
    """Add a training that has begun."""
    add_training(run, rows=rows)
    run.write_attempt(attempt(f"{KEY}-1"))


def curve(place: str, name: str) -> dict[int, float]:
    """Return a curve of the training at a place: every point of it, none twice."""
    points = [point for point in RUNS_BY_ADDRESS[place][KEY].received_points if name in point.values]
    results = {point.samples: point.values[name] for point in points}
    assert len(results) == len(points), "a point came twice"
    return results


def test_settings_probes_and_the_recommendation_are_sent(run: RunDir, place: str) -> None:
    add_measured(run, 1, 32)
    add_out_of_memory(run, 1, 64)
    run.write_recommendation(recommendation())
    run.write_text("results.csv", "a,b\n")
    (result,), _ = send(run, place)
    whole, expected = RUNS_BY_ADDRESS[place]["run"], make_probe(Truth(), 1, 32)
    assert (result.runs, result.new_runs, result.files, result.problem) == (1, 1, 1, "")
    assert whole.tracker_run.name == run.id and whole.received_files == ["results.csv"] and whole.state == "finished"
    assert whole.received_params["optimizer.lr"] == 0.1 and whole.received_params["search.nodes"] == "1 2"
    assert whole.received_params["env.hardware"] == expected.environment.hardware
    assert whole.received_summary["recommended/batch"] == recommendation().choice.batch
    assert whole.received_tags["recommendation.objective"] == "knee"
    assert (whole.received_summary["probes/measured"], whole.received_summary["probes/in_all"]) == (1, 2)
    assert whole.received_summary["probes/n001-l000032/step_time"] == pytest.approx(expected.step_times[0])
    assert whole.received_summary["probes/n001-l000032/samples_per_second"] == pytest.approx(
        32 / expected.step_times[0]
    )
    assert whole.received_summary["probes/n001-l000032/peak_memory"] == expected.memory.peak


def test_a_training_is_a_run_with_curves_by_samples(run: RunDir, place: str) -> None:
    rows = metrics()
    rows[2] |= {
        "ags": {"mean": 1.25, "scaled": 0.5, "at_cap": 0.1, "at_floor": 0.0, "factors": 9.0},
        "diagnostics": {"norm": {"q50": 2.0}, "delta": {"q50": 0.25}, "steps": 10},
        "metrics": {"f1": 0.5},
    }
    rows.append({"kind": "noise", "time": START + 55, "samples": 1920, "epoch": 1.5, "batch": 128, "scale": 640.0})
    trained(run, rows)
    send(run, place)
    training = RUNS_BY_ADDRESS[place][KEY]
    assert curve(place, "train/loss") == {640: 2.1, 1280: 1.9, 1920: 1.7}
    assert curve(place, "eval/top1") == {1280: 61.0} and curve(place, "eval/f1") == {1280: 0.5}
    assert curve(place, "train/samples_per_second") == pytest.approx({640: 128 / 0.12, 1920: 128 / 0.11})
    assert curve(place, "ags/mean") == {1280: 1.25} and curve(place, "ags/at_cap") == {1280: 0.1}
    assert curve(place, "gradients/delta_q50") == {1280: 0.25} and curve(place, "noise/scale") == {1920: 640.0}
    assert curve(place, "attempt") == {0: 1.0} and training.received_points[0].time == START
    assert (
        training.received_params["batch"],
        training.received_params["nodes"],
        training.received_params["predicted.hours"],
    ) == (128, 2, 0.25)


def test_nothing_is_sent_twice(run: RunDir, place: str) -> None:
    add_measured(run, 1, 32)
    trained(run, metrics())
    send(run, place)
    before = [run.openings for run in RUNS_BY_ADDRESS[place].values()]
    (result,), _ = send(run, place)
    assert (result.runs, result.new_runs, result.new_points, result.files) == (2, 0, 0, 0)
    assert [run.openings for run in RUNS_BY_ADDRESS[place].values()] == before, (
        "what has nothing new is not even opened"
    )
    write(run, [*metrics(), {**metrics()[-1], "samples": 2560, "loss": 1.5}])
    assert send(run, place)[0][0].new_points == 1 and curve(place, "train/loss")[2560] == 1.5


def test_two_commands_that_send_the_same_run_send_each_value_once(run: RunDir, place: str) -> None:
    """Two commands that wait for one training open their sessions before either has sent anything."""
    trained(run, metrics())
    tracker = resolve_destination(Export(to="fake_tracker:FakeTracker", uri=place), open_run(run))
    first, second = (service.Session(open_run(run), tracker, lambda _: ()) for _ in range(2))
    assert [*first.send_updates(active=True), *second.send_updates(active=True)] == []
    points = first.new_points
    assert points > 0 and second.new_points == 0
    assert second._lock.acquire() == ""
    write(run, [*metrics(), *({**metrics()[-1], "samples": samples} for samples in (2560, 3200))])
    assert list(first.send_updates(active=True)) == [] and first.new_points == points  # the other command sends them
    second._lock.release()
    list(first.send_updates(active=True))
    assert first.new_points > points and 2560 in curve(place, "train/loss")


def test_the_newest_position_waits_for_all_its_rows_while_the_training_goes_on(run: RunDir, place: str) -> None:
    rows = metrics()
    step = {**rows[1], "samples": 1280, "loss": 1.95, "time": START + 39}
    trained(run, [*rows[:2], step])
    send(run, place, active=True)
    assert curve(place, "train/loss") == {640: 2.1}
    write(run, [*rows[:2], step, rows[2], rows[4]])  # the epoch's row is of the same position
    send(run, place, active=True)
    assert curve(place, "train/loss") == {640: 2.1, 1280: 1.9} and curve(place, "eval/top1") == {1280: 61.0}
    send(run, place, active=False)
    assert curve(place, "train/loss")[1920] == 1.7, "nothing more comes"


def test_a_report_is_sent_where_it_has_changed(run: RunDir, place: str, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    for text, files in (("one", 1), ("one", 0), ("two", 1)):
        report.write_text(text)
        assert send(run, place, reports=lambda _: (report,))[0][0].files == files
    assert RUNS_BY_ADDRESS[place]["run"].received_files == ["report.md"] * 2


def test_a_row_that_is_being_written_waits(run: RunDir, place: str) -> None:
    trained(run, metrics())
    path = run.get_training("ab12cd34").metrics_path
    whole = path.read_text()
    path.write_text(whole[:-30])
    send(run, place)
    assert 1920 not in curve(place, "train/loss")
    path.write_text(whole)
    send(run, place)
    assert curve(place, "train/loss")[1920] == 1.7


def resumed(samples: int, *, at: float) -> list[dict[str, Any]]:
    """Return the rows of a start from a checkpoint, and of two steps after it."""
    begin = {"kind": "start", "time": at, "samples": samples, "epoch": 0.5, "attempt": 2, "batch": 128, "nodes": 2}
    steps = [
        {**metrics()[1], "samples": samples + more, "time": at + more, "loss": 9.0 + more / 1000}
        for more in (100, 1500)
    ]
    return [begin, *steps]


def test_a_training_that_goes_back_leaves_no_point_twice(run: RunDir, place: str) -> None:
    """A training that resumes at an earlier checkpoint cuts metrics.jsonl. Only points after those that were sent are sent."""
    trained(run, metrics())
    send(run, place)
    write(run, [*metrics()[:2], *resumed(640, at=START + 100)])
    send(run, place)
    assert curve(place, "train/loss") == {640: 2.1, 1280: 1.9, 1920: 1.7, 2140: 10.5}


def test_a_tracker_that_is_down_is_reported_once_and_caught_up_with(run: RunDir, place: str) -> None:
    trained(run, metrics())
    UNREACHABLE_ADDRESSES.add(place)
    looks = iter([True, True, False, False])
    sleeps: list[float] = []
    trackers = [Export(to="fake_tracker:FakeTracker", uri=place)]
    work = export_runs(
        [open_run(run)],
        trackers,
        follow=True,
        every=1,
        active=lambda _: next(looks),
        sleep=sleeps.append,
    )
    answer = list(work)
    assert [event.text for event in answer if isinstance(event, WarningEvent)] == ["the tracker is down; wait"]
    UNREACHABLE_ADDRESSES.discard(place)
    (result,), answer = send(run, place)
    assert result.new_points == 4 and not result.problem and not any(isinstance(item, WarningEvent) for item in answer)


def test_it_follows_to_the_end_of_the_jobs(run: RunDir, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run, metrics())
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr("tula_cli.extras.trackers.export.time.monotonic", lambda: float(next(clock)))
    more = [*metrics(), {**metrics()[-1], "samples": 2560, "loss": 1.5, "time": START + 70}]

    def active(_: Run) -> bool:
        seen.append(len(RUNS_BY_ADDRESS[place].get(KEY, FakeRun("", None)).received_points))  # type: ignore[arg-type]
        if len(seen) == 3:
            write(run, more)
        return len(seen) < 6

    seen: list[int] = []
    trackers = [Export(to="fake_tracker:FakeTracker", uri=place)]
    list(export_runs([open_run(run)], trackers, follow=True, active=active, sleep=lambda _: None))
    assert seen[0] == 0 and 3 in seen and curve(place, "train/loss")[2560] == 1.5
    assert RUNS_BY_ADDRESS[place][KEY].state in ("killed", "failed"), "its job is over and there is no result"


@pytest.mark.parametrize(
    ("outcome", "cancelled", "result", "active", "state"),
    [
        ("done", False, True, False, "finished"),
        ("user", False, False, False, "failed"),
        ("user", False, False, True, "failed"),
        ("time_limit", False, False, True, "running"),
        ("cancelled", True, False, False, "killed"),
    ],
)
def test_the_state_is_how_the_training_ended(
    run: RunDir, place: str, outcome: str, cancelled: bool, result: bool, active: bool, state: str
) -> None:
    trained(run, metrics())
    run.write_attempt(attempt(f"{KEY}-1", end=START + 90, outcome=outcome, message="ValueError: bad"))
    if cancelled:
        run.mark_job_cancelled(KEY)
    if result:
        run.write_train_result(train_result())
        run.write_summary(summary())
    send(run, place, active=active)
    value = RUNS_BY_ADDRESS[place][KEY]
    assert value.state == state
    why = "" if outcome == "done" else ": ValueError: bad"
    assert value.received_tags["attempt.01"] == f"2 nodes, batch 128: {outcome}{why}"
    if result:
        assert value.received_summary["actual/hours"] == 0.1 and value.received_summary["best/top1"] == 83.0
        assert value.received_tags["relaunches"] == "out of memory at batch 128"


def test_after_ctrl_c_the_next_export_continues(run: RunDir, place: str) -> None:
    add_measured(run, 1, 32)
    trackers = [Export(to="fake_tracker:FakeTracker", uri=place)]
    first = export_runs([open_run(run)], trackers, follow=True, active=lambda _: True, sleep=lambda _: None)
    next(first)
    with pytest.raises(KeyboardInterrupt, match="the next export sends the missing values"):
        first.throw(KeyboardInterrupt)
    assert send(run, place)[0][0].new_runs == 0


def test_what_may_be_a_secret_is_not_sent(tmp_path: Path, place: str) -> None:
    slurm = {"environment": {"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO"}, "setup": ["export WANDB_API_KEY=abc123"]}
    job = toy_spec(
        cluster={"kind": "slurm", "slurm": slurm},
        dataset={"name": "mine:Data", "args": {"url": "https://me:pass@host/x", "tokenizer": "gpt2", "api_key": "k"}},
    )
    run = RunDir.create(tmp_path, job)
    send(run, place)
    given = RUNS_BY_ADDRESS[place]["run"].received_params
    assert given["dataset.args.tokenizer"] == "gpt2" and given["cluster.slurm.environment.NCCL_DEBUG"] == "INFO"
    assert given["cluster.setup"] == "export WANDB_API_KEY=***"
    assert not any(word in str(given) for word in ("hf_abc", "abc123", "pass@", "'k'"))


def test_it_is_written_in_the_run_what_was_sent_and_another_user_s_run_is_left_alone(
    run: RunDir, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_measured(run, 1, 32)
    send(run, place)
    (record,) = (run.path / "exports").glob("*.json")
    known = json.loads(read_text(record))
    assert known["uri"] == place and set(known["runs"]) == {"run"}
    monkeypatch.setattr(owner.os, "geteuid", lambda: 4711)
    monkeypatch.setattr(owner, "_owns_all_new_files", lambda *_: False)
    with pytest.raises(NotYours):
        send(run, place)


def test_a_damaged_curve_is_reported(run: RunDir, place: str) -> None:
    add_training(run, rows=metrics())
    run.get_training("ab12cd34").metrics_path.write_bytes(b"\x8f\xe1\n")
    _, message = send(run, place)
    assert ["cannot be read" in event.text for event in message if isinstance(event, WarningEvent)] == [True]


def test_a_run_that_cannot_be_written_is_reported(run: RunDir, place: str) -> None:
    (run.path / "exports").write_text("")
    with pytest.raises(TulaError, match=r"exports.*: Not a directory"):
        send(run, place)


# --- which trackers


def with_exports(**changes: Any) -> JobSpec:
    return toy_spec(export=[{"to": "tensorboard"}, {"to": "mlflow"}], **changes)


def test_trackers_are_those_named_else_those_of_the_job() -> None:
    assert [item.to for item in list_requested_trackers(with_exports(), [], ExportRequest())] == [
        "tensorboard",
        "mlflow",
    ]
    assert [
        requested_tracker.to
        for requested_tracker in list_requested_trackers(with_exports(), ["wandb"], ExportRequest(uri="x", project="p"))
    ] == ["wandb"]


@pytest.mark.parametrize(
    ("to", "uri", "words"),
    [
        ([], None, "no tracker was given"),
        ([], "x", "but no tracker is named"),
        (["mlflow", "wandb"], "x", "are settings of one tracker"),
        (["mlflo"], None, "did you mean mlflow"),
        (["mlflow"], "http://me:pw@host", "must not contain a user name or password"),
        (["tensorboard"], "http://x.example", "--uri: must be a folder for tensorboard, got http://x.example"),
        (["tensorboard"], "file://host/board", "set a path, or file:///path"),
    ],
)
def test_what_does_not_go_together_is_refused(to: list[str], uri: str | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        list_requested_trackers(toy_spec(), to, ExportRequest(uri=uri))


@pytest.mark.parametrize(
    ("to", "uri", "place"),
    [
        ("mlflow", "databricks", "databricks"),
        ("mlflow", "databricks://team", "databricks://team"),
        ("mlflow", "http://host:5000", "http://host:5000"),
        ("mlflow", "runs", "{here}/runs"),
        ("mlflow", "sqlite:///runs.db", "sqlite:///{here}/runs.db"),
        ("mlflow", "sqlite:////data/runs.db", "sqlite:////data/runs.db"),
        ("tensorboard", "databricks", "{here}/databricks"),
        ("tensorboard", "file:///data/my%20runs", "/data/my runs"),
        ("mlflow", "file:///data/my%20runs", "file:///data/my%20runs"),
        ("fake_tracker:FakeTracker", "place", "place"),
    ],
)
def test_an_address_is_valid_from_every_folder(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to: str, uri: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    destination = resolve_destination(Export(to=to, uri=uri), open_run(run))
    assert destination.uri == place.format(here=tmp_path)


def test_an_exporter_of_one_s_own_that_is_not_there_is_reported(run: RunDir) -> None:
    with pytest.raises(SpecError, match="has no 'Nobody'"):
        list(service.export_runs([open_run(run)], [Export(to="fake_tracker:Nobody")], active=lambda _: False))


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("os.path:sep", "os.path:sep: TypeError: 'str' object is not callable"),
        ("os.path:join", "os.path:join: TypeError: .*argument"),
        ("argparse:Namespace", "argparse:Namespace: AttributeError: .*no attribute 'open'"),
    ],
)
def test_an_exporter_of_one_s_own_that_is_none_is_reported(run: RunDir, to: str, words: str) -> None:
    (warning,) = export_runs([open_run(run)], [Export(to=to)], active=lambda _: False)
    assert isinstance(warning, WarningEvent) and re.match(words, warning.text)


def test_points_are_not_sent_again_after_an_error_behind_them(
    run: RunDir, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run, metrics())
    with monkeypatch.context() as patch:
        patch.setattr(FakeRun, "tags", refuse)
        send(run, place)
    send(run, place)
    samples = [point.samples for point in RUNS_BY_ADDRESS[place][KEY].received_points]
    assert len(samples) == len(set(samples)) and RUNS_BY_ADDRESS[place][KEY].received_tags, "the rest followed"


def refuse(*_: object) -> None:
    raise TrackerError("the tracker is down", "wait")


@pytest.mark.parametrize("result", [("tensorboard", "/a b"), ("mlflow", "sqlite:////a b/mlflow.db")])
def test_the_command_that_shows_the_data_is_quoted_for_the_shell(result: tuple[str, str]) -> None:
    to, uri = result
    *_, command = service.describe_exports([ExportResult(to, uri, "toy", 1, 1, 0, 0)])
    assert f" '{uri}'" in command
