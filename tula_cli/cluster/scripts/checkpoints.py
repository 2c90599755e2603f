"""The checkpoints that a script writes: where, when, whether they are complete, and how the shim waits for one."""

import glob
import re
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tula_cli.run.files import is_regular_file, read_change_time
from tula_cli.run.records.scripts import KillPlan
from tula_cli.run.script_attempt import ScriptAttempt
from tula_cli.spec.scripts.placeholders import fill_text
from tula_cli.spec.scripts.script import Resume, Script

UNCHANGED_SECONDS = 2.0
"""Seconds without a change after which a checkpoint counts as completely written."""
_ZIP_CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Suffixes of files of torch.save, which are ZIP files with the table of contents at the end."""
_NUMBER_PATTERN = re.compile(r"\d+")


def find_newest_checkpoint(
    resume: Resume,
    values: Mapping[str, str | float],
    *,
    workdir: Path,
    since: float,
    left_out: tuple[str, float] = ("", 0.0),
) -> tuple[Path | None, list[Path]]:
    """Return the newest complete checkpoint (None if there is none), and the damaged ones that are newer.

    A folder that lacks files which the previous one has is incomplete: its process was killed between two files.

    Args:
        values: values of the placeholders in the pattern.
        since: Unix time; older checkpoints belong to another training.
        left_out: path and time (Unix time) of an unusable checkpoint, which is ignored unless it was changed since.
    """
    names = glob.iglob(make_checkpoint_pattern(resume, values, workdir=workdir), recursive=True)  # noqa: PTH207 - an absolute pattern
    candidates = ((path, read_checkpoint_change_time(path)) for path in map(Path, names))
    useless, unusable_since = left_out
    usable = (
        (when, path)
        for path, when in candidates
        if when >= since and not (str(path) == useless and when <= unusable_since)
    )
    paths = [path for _, path in sorted(usable, reverse=True)]
    sound = [path for path in paths if is_complete_checkpoint(path)]
    complete = (
        path for number, path in enumerate(sound) if not _is_missing_files_of_older_folder(path, sound[number + 1 :])
    )
    best = next(complete, None)
    return best, paths if best is None else paths[: paths.index(best)]


def _is_missing_files_of_older_folder(path: Path, older: Iterable[Path]) -> bool:
    """Return whether a folder lacks files of the next older folder with the same name, ignoring numbers in names."""
    older_folder = next((folder for folder in older if _mask_numbers(folder.name) == _mask_numbers(path.name)), None)
    if older_folder is None or not (path.is_dir() and older_folder.is_dir()):
        return False
    return bool(_list_names_without_numbers(older_folder) - _list_names_without_numbers(path))


def _list_names_without_numbers(folder: Path) -> set[str]:
    return {_mask_numbers(str(file.relative_to(folder))) for file in _list_files(folder)}


def _mask_numbers(name: str) -> str:
    """Return a name with its numbers (step, rank) masked, so that files of fewer ranks do not count as missing."""
    return _NUMBER_PATTERN.sub("#", name)


def make_checkpoint_pattern(resume: Resume, values: Mapping[str, str | float], *, workdir: Path) -> str:
    """Return the absolute glob pattern of a script's checkpoints; special characters in folders are escaped."""
    literal = {name: glob.escape(value) if isinstance(value, str) else value for name, value in values.items()}
    return str(Path(glob.escape(str(workdir))) / fill_text(resume.checkpoint, literal))


def make_kill_plan(
    script: Script, values: Mapping[str, str | float], *, workdir: Path, after: int, ask_at: int, first: int = 1
) -> KillPlan:
    """Return how the shim requests a checkpoint, if the script saves on request, and kills the start after it.

    Args:
        script: script with a section resume.
        values: values of the placeholders in paths.
        after: steps from the checkpoint to the end.
        ask_at: step at whose end a checkpoint is requested.
        first: step from which on checkpoints count.
    """
    assert script.resume is not None
    ask = fill_text(script.save, values) if script.save != "none" else ""
    if ask.startswith("file:"):
        ask = f"file:{workdir / ask.removeprefix('file:')}"
    pattern = make_checkpoint_pattern(script.resume, values, workdir=workdir)
    return KillPlan(checkpoint=pattern, after=after, ask=ask, ask_at=ask_at, first=first, settled=UNCHANGED_SECONDS)


def read_checkpoint_change_time(path: Path) -> float:
    """Return when a checkpoint was last changed (Unix time), for a folder its newest file; 0 if it does not exist."""
    return max((read_change_time(file) for file in _list_files(path)), default=0.0)


def is_settled_since(path: Path, since: float) -> bool:
    """Return whether a checkpoint was written after `since` (Unix time) and is no longer being written."""
    return since < read_checkpoint_change_time(path) < time.time() - UNCHANGED_SECONDS


def is_complete_checkpoint(path: Path) -> bool:
    """Return whether a checkpoint is complete, as far as its files show: its process may have been killed."""
    return all(_is_complete_file(file) for file in _list_files(path))


def _list_files(path: Path) -> Iterable[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _is_complete_file(file: Path) -> bool:
    try:
        if not is_regular_file(file) or file.stat().st_size == 0:
            return False
        with open(file, "rb") as opened:
            first_bytes = opened.read(4)
        if file.suffix not in _ZIP_CHECKPOINT_SUFFIXES:
            return True
        # Leading zeros are blocks that a lost node never wrote.
        return zipfile.is_zipfile(file) if first_bytes == b"PK\x03\x04" else first_bytes != b"\0\0\0\0"
    except OSError:
        return False


def find_position_at_time(attempt: ScriptAttempt, when: float) -> tuple[int, float | None]:
    """Return the steps, and the samples of rank 0, that were complete when a checkpoint was written (Unix time).

    A row of a save, or of an evaluation or new epoch at that time, records the step in which the checkpoint was written.
    Without one, the last row or heartbeat before it is used, which gives rather too few steps than too many.
    """
    rows = attempt.read_rows(0)
    gaps = [row for row in rows if row["kind"] == "gap" and row["time"] >= when]
    after = [row for row in gaps if "save" in row["causes"] or row["time"] - row["seconds"] <= when]
    if after:
        return after[0]["step"] - 1, after[0].get("before")  # "samples" may include prefetched ones
    stood = [(row["step"], row["samples"]) for row in rows if "step" in row and row["time"] <= when]
    heartbeat = attempt.read_heartbeat(0)
    if heartbeat is not None and heartbeat.stepped_at <= when:
        stood.append((heartbeat.step, heartbeat.samples))
    return max(stood, key=lambda stand: stand[0], default=(0, None))


def list_earlier_saves(
    attempt: ScriptAttempt, checkpoint: Path, saved_at: float
) -> list[tuple[float, int, float | None]]:
    """Return when an attempt saved checkpoints like one of `saved_at`, with the steps and samples as of rank 0.

    These are the calls of torch.save with its path, except for numbers in it and an ending such as .tmp. If there are
    none, they are those with a name that the step of the checkpoint saved and that has since been renamed. No row has
    the files saved after the last step, so those of the newest row are used. Other files that the same step saved, such
    as best weights, and checkpoints saved in another way do not count.
    """
    rows = [row for row in attempt.read_rows(0) if row["kind"] == "gap" and row.get("saved")]
    names = [*next((row["saved"] for row in rows if row["time"] >= saved_at), rows[-1]["saved"] if rows else ())]
    paths = [_mask_numbers(str(checkpoint))]
    if not any(_is_path_or_part(name, paths) for name in names):
        paths = [_mask_numbers(name) for name in names if not Path(name).exists()]
    return [
        (max(times), row["step"] - 1, row["before"])
        for row in rows
        if (times := [when for name, when in row["saved"].items() if _is_path_or_part(name, paths)])
    ]


def _is_path_or_part(name: str, paths: Iterable[str]) -> bool:
    """Return whether a saved file is one of `paths`, in one that is a folder, or one with an ending such as .tmp."""
    name = _mask_numbers(name)
    return any(name.startswith(path) and name[len(path) :][:1] in ("", "/", ".", "~") for path in paths)
