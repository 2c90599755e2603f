"""Which checkpoint the first start of a resume test leaves behind: files are written by hand, and the kill is only noted."""

import json
import os
from pathlib import Path

import pytest

from tula_cli.shim.tula_shim import supervision
from tula_cli.shim.tula_shim.plan import read_plan
from tula_cli.shim.tula_shim.supervision import StepKiller

LATER = 2_000_000_000.0  # Unix time


def killed_at(folder: Path, monkeypatch: pytest.MonkeyPatch, content: dict[int, str], *, name: str) -> tuple[int, int]:
    """Return the steps of the checkpoint that was noted, and the step of the kill.

    Args:
        folder: of the checkpoint; another holds what the process tells.
        monkeypatch: takes the kill away.
        content: what is written to the checkpoint behind a step.
        name: of the file.
    """
    outcome: list[int] = []
    monkeypatch.setattr(
        supervision, "CHECKPOINT_TIMEOUT_SECONDS", 0.0
    )  # these files are from tomorrow, and never count as complete
    monkeypatch.setattr(supervision.os, "kill", lambda *_: outcome.append(1))
    message = folder / "told"
    message.mkdir()
    wanted = {"checkpoint": str(folder / "c*"), "after": 5, "settled": 0.0}
    (message / "plan.json").write_text(
        json.dumps({"version": 1, "task": "r", "folder": str(message), "rehearsal": wanted})
    )
    seen = StepKiller(read_plan(str(message / "plan.json")))
    step = 0
    while not outcome and step < 100:
        step += 1
        seen.after_step(step, 16.0 * (step - 1), 0, 160)
        if step in content:
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content[step])
            os.utime(path, (LATER + step, LATER + step))
    noted = json.loads((message / "rehearsal.json").read_text())
    assert noted["killed"] and noted["samples"] == 16.0 * noted["steps"]
    return noted["steps"], step


def test_of_a_script_that_saves_each_other_step_the_last_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert killed_at(tmp_path, monkeypatch, dict.fromkeys(range(10, 90, 2), "state"), name="c") == (14, 15)


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
