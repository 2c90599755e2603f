"""Exports without `tula export`: beside a command that waits."""

from pathlib import Path
from typing import Any

import pytest
from make_runs import (
    START,
    FakeLauncher,
    add_measured,
    add_probes,
    add_training,
    attempt,
    metrics,
    summary,
    train_result,
)
from make_runs import spec as toy_spec

from tula_cli.run.directory import RunDir
from tula_cli.services.events import WarningEvent, run_work
from tula_cli.services.waiting import wait_for_jobs

JOB = "train-ab12cd34"


def run_with(tmp_path: Path, **changes: Any) -> RunDir:
    return RunDir.create(tmp_path, toy_spec(**changes))


def training(run: RunDir) -> None:
    """Add a training that is over."""
    add_training(run, rows=metrics())
    run.write_attempt(attempt(f"{JOB}-1", end=START + 90))
    run.write_train_result(train_result())
    run.write_summary(summary())


def events(run: RunDir) -> list[str]:
    """Return what has event files below the run's own folder of TensorBoard."""
    return sorted(path.parent.name for path in (run.path / "exports" / "tensorboard").rglob("events.out.tfevents.*"))


def waited(run: RunDir, *jobs: str) -> list[str]:
    """Wait for jobs as a command does; return its warnings."""
    message: list[Any] = []
    run_work(wait_for_jobs(run, FakeLauncher(says=dict.fromkeys(jobs, "ended")), jobs), message.append)
    return [event.text for event in message if isinstance(event, WarningEvent)]


def test_a_command_that_waits_sends_what_is_new(tmp_path: Path) -> None:
    run = run_with(tmp_path, export=[{"to": "tensorboard"}])
    training(run)
    assert waited(run, JOB) == []
    assert set(events(run)) == {"run", JOB}


def test_probes_on_this_machine_are_sent_when_they_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are timed: nothing shares the cores with them."""
    run = run_with(tmp_path, export=[{"to": "tensorboard"}])
    job = add_probes(run, 1, (32,))
    started = []
    begin = FakeLauncher.query_states

    def query_states(self: FakeLauncher, *arguments: Any) -> Any:
        started.append(events(run))
        add_measured(run, 1, 32)
        return begin(self, *arguments)

    monkeypatch.setattr(FakeLauncher, "query_states", query_states)
    assert waited(run, job) == []
    assert started[0] == [] and events(run) == ["run"]


@pytest.mark.parametrize(
    ("export", "words"),
    [
        ({"to": "tensorboard", "uri": "file"}, "export: tensorboard: NotADirectoryError: "),
        ({"to": "broken_tracker:make"}, "export: broken_tracker:make: ZeroDivisionError: of mine; "),
    ],
)
def test_a_tracker_that_fails_is_a_warning_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: dict[str, str], words: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_tracker.py").write_text("def make(uri, project):\n    raise ZeroDivisionError('of mine')\n")
    run = run_with(tmp_path, export=[export])
    training(run)
    (message,) = waited(run, JOB)
    assert message.startswith(words) and "run tula export to send the missing values" in message


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    training(run)
    assert waited(run, JOB) == [] and not (run.path / "exports").exists()
