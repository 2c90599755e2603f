"""Which checkpoint the first start of a resume test leaves behind: files are written by hand, and the kill is only noted."""

import json
import os
from pathlib import Path

import pytest

from tula_cli.shim.tula_shim import supervision
from tula_cli.shim.tula_shim.plan import read_plan
from tula_cli.shim.tula_shim.supervision import StepKiller

LATER = 2_000_000_000.0  # Unix time
EARLIER = 1_000_000_000.0


def write_plan(folder: Path, *, settled: float) -> Path:
    message = folder / "told"
    message.mkdir()
    wanted = {"checkpoint": str(folder / "c*"), "after": 5, "settled": settled}
    path = message / "plan.json"
    path.write_text(json.dumps({"version": 1, "task": "r", "folder": str(message), "rehearsal": wanted}))
    return path


def killed_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: dict[int, str], *, name: str, clock: float = LATER
) -> tuple[int, int]:
    """Return the steps of the checkpoint that was noted, and the step of the kill.

    Args:
        folder: of the checkpoint; another holds what the process tells.
        monkeypatch: takes the kill away.
        content: what is written to the checkpoint behind a step.
        name: of the file.
        clock: of the file server, Unix time.
    """
    outcome: list[int] = []
    monkeypatch.setattr(supervision.os, "kill", lambda *_: outcome.append(1))
    plan = write_plan(folder, settled=0.0)
    seen = StepKiller(read_plan(str(plan)))
    step = 0
    while not outcome and step < 100:
        step += 1
        seen.after_step(step, 16.0 * (step - 1), 0, 160)
        if step in content:
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content[step])
            os.utime(path, (clock + step, clock + step))
    noted = json.loads((plan.parent / "rehearsal.json").read_text())
    assert noted["killed"] and noted["samples"] == 16.0 * noted["steps"]
    return noted["steps"], step


@pytest.mark.parametrize("clock", [LATER, EARLIER])
def test_of_a_script_that_saves_each_other_step_the_last_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    saves = dict.fromkeys(range(10, 90, 2), "state")
    assert killed_at(tmp_path, monkeypatch, saves, name="c", clock=clock) == (14, 15)


def test_a_checkpoint_from_before_the_start_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").write_text("of an earlier start")
    assert killed_at(tmp_path, monkeypatch, dict.fromkeys(range(10, 90, 4), "state"), name="c") == (14, 15)


def test_the_process_is_killed_once_its_checkpoint_has_not_changed_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread still writes it; the clock of the file server is years behind."""
    checkpoint, waits = tmp_path / "c", []

    def write_further(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) < 10:
            os.utime(checkpoint, (EARLIER + len(waits), EARLIER + len(waits)))
        sleep(seconds)

    sleep = supervision.time.sleep
    monkeypatch.setattr(supervision.time, "sleep", write_further)
    checkpoint.write_text("")
    seen = StepKiller(read_plan(str(write_plan(tmp_path, settled=0.2))))
    monkeypatch.setattr(supervision.os, "kill", lambda *_: None)
    seen._checkpoint = {}
    seen._kill_process()
    assert len(waits) >= 10, "it waits for each change"


@pytest.mark.parametrize("name", ["c", "c/shard"])
def test_a_checkpoint_that_still_grows_is_that_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    growing = {step: "x" * step for step in range(10, 14)}
    assert killed_at(tmp_path, monkeypatch, growing, name=name) == (10, 15)


@pytest.mark.parametrize("name", ["c", "c/shard"])
def test_a_checkpoint_that_is_overwritten_in_place_is_another_even_if_it_is_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    longer = {step: f"{step}" + "x" * step for step in range(10, 90, 2)}
    assert killed_at(tmp_path, monkeypatch, longer, name=name) == (14, 15)


def test_a_file_differs_at_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = {step: "x" * (supervision.SAMPLE_BYTES * 3 + step) + f"{step}" for step in range(10, 90, 2)}
    assert killed_at(tmp_path, monkeypatch, longer, name="c") == (14, 15)


def test_the_files_of_a_folder_are_written_one_after_the_other(tmp_path: Path) -> None:
    """Each of three checkpoints writes two files, at different steps; a log only grows."""
    folder, files, new = tmp_path / "c", supervision._CheckpointFiles(), []
    folder.mkdir()
    for number, name in enumerate("ababab"):
        (folder / name).write_text(f"{number}")
        with (folder / "log").open("a") as log:
            log.write("line")
        for path in (folder / name, folder / "log"):
            os.utime(path, (LATER + number, LATER + number))
        new.append(files.is_new_checkpoint(str(folder)))
    assert new == [True, False] * 3
