"""Files of a run that may be removed: written by tula, and needed only to return to an earlier state.

Links are not followed.
"""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tula_cli.run.files import make_write_error
from tula_cli.run.training_run import CHECKPOINT_PATTERN, DRAFT_PATTERN, TrainingRun

Kind = Literal["checkpoints", "compared", "damaged", "drafts", "scratch"]

_DAMAGED_CHECKPOINT_PATTERN = re.compile(r"damaged-(?:[0-9]+-)?[0-9]{12,}\.(pt|dcp)")
"""The name given to a checkpoint that cannot be read."""
_LINK_DRAFT_PATTERN = re.compile(r"\.(best|last)\.[0-9]+")
_PROBE_FOLDER_PATTERN = re.compile(r"probe-.+\.[0-9]{3}")
_RESUME_TEST_FOLDER_PATTERN = re.compile(r"rehearse-[^.]+")
_RATE_SEARCH_FOLDER_PATTERN = re.compile(r"rates-[^.]+")
KEPT_RESUME_CHECKPOINTS = 2
"""Number of newest checkpoints kept for an unfinished training: one spare in case the newest is damaged."""


@dataclass(frozen=True)
class CleanPolicy:
    """Files to remove in addition to those that are never needed."""

    keep_best: bool = False  # keep only the best checkpoint of finished trainings, which can then not be resumed
    compared: Set[str] = frozenset()  # signatures of finished trainings to remove completely


@dataclass(frozen=True)
class RemovableEntry:
    """A file or folder that may be removed."""

    kind: Kind
    path: Path
    size: int  # bytes of disk usage


class DiskUsage(NamedTuple):
    size: int  # bytes
    modified_at: float  # Unix time of the newest modification


def measure_disk_usage(path: Path) -> DiskUsage:
    """Return the disk usage of a file, or of a folder with its contents; unreadable entries count as 0."""
    size, newest, pending = 0, 0.0, [path]
    while pending:
        try:
            status = os.lstat(here := pending.pop())
            size, newest = size + 512 * status.st_blocks, max(newest, status.st_mtime)
            if stat.S_ISDIR(status.st_mode):
                pending += here.iterdir()
        except OSError:  # removed meanwhile, or not readable
            continue
    return DiskUsage(size, newest)


def list_removable_entries(folder: Path, policy: CleanPolicy) -> Iterator[RemovableEntry]:
    """Yield the removable files of a run. No job of the run may be active.

    Raises:
        BadMeasurements: a record that shows whether a training has finished is damaged.
    """
    for training in _list_folders(folder / "train"):
        yield from _list_removable_of_training(TrainingRun(folder, training.name), policy)
    for attempt in _list_folders(folder / "script"):
        out = attempt / "out"
        if _PROBE_FOLDER_PATTERN.fullmatch(attempt.name) and _is_folder(out):
            yield _make_removable_entry("scratch", out)
        elif _RESUME_TEST_FOLDER_PATTERN.fullmatch(attempt.name):
            yield _make_removable_entry("scratch", attempt)
        elif _RATE_SEARCH_FOLDER_PATTERN.fullmatch(attempt.name):  # branches can start again from copies of "start"
            yield from (
                _make_removable_entry("scratch", copy) for copy in _list_folders(attempt) if copy.name != "start"
            )


def _list_removable_of_training(training: TrainingRun, policy: CleanPolicy) -> Iterator[RemovableEntry]:
    folder = training.path / "checkpoints"
    entries = _list_entries(folder) if _is_folder(folder) else {}
    complete_checkpoints = [
        name
        for name, mode in sorted(entries.items(), reverse=True)
        if CHECKPOINT_PATTERN.fullmatch(name) and _has_type_matching_name(name, mode)
    ]
    if complete_checkpoints:
        is_finished = training.read_result() is not None
        is_removed = is_finished and training.signature in policy.compared
        kept = (
            set()
            if is_removed
            else _list_kept_checkpoints(training, complete_checkpoints, policy, is_finished=is_finished)
        )
        for name in sorted(set(complete_checkpoints) - kept):
            yield _make_removable_entry("compared" if is_removed else "checkpoints", folder / name)
    for name, mode in sorted(entries.items()):
        if stat.S_ISLNK(mode):
            continue
        if _DAMAGED_CHECKPOINT_PATTERN.fullmatch(name):
            yield _make_removable_entry("damaged", folder / name)
        elif DRAFT_PATTERN.fullmatch(name):
            yield _make_removable_entry("drafts", folder / name)
    for name, mode in sorted(_list_entries(training.path).items()):
        if _LINK_DRAFT_PATTERN.fullmatch(name) and stat.S_ISLNK(mode):
            yield _make_removable_entry("drafts", training.path / name)


def _list_kept_checkpoints(
    training: TrainingRun, complete_checkpoints: list[str], policy: CleanPolicy, *, is_finished: bool
) -> set[str]:
    """Return the checkpoints to keep; `complete_checkpoints` is ordered newest first."""
    best = _read_link_target(training.path / "best")
    last = _read_link_target(training.path / "last")
    linked = {best, last} & set(complete_checkpoints)
    if is_finished:
        if policy.keep_best and best in linked:
            return {best}
        return linked if last in linked else {*linked, complete_checkpoints[0]}
    tuning = training.read_tuning()
    if tuning is not None and tuning.chosen is None:
        return set(complete_checkpoints)  # the remaining arms resume from their common checkpoint
    return {*complete_checkpoints[:KEPT_RESUME_CHECKPOINTS], *linked}


def _read_link_target(link: Path) -> str:
    """Return the checkpoint name that a symbolic link of tula points to; empty if there is none."""
    try:
        target = link.readlink()
    except OSError:
        return ""
    return target.name if target.parent == Path("checkpoints") else ""


def remove_entry(entry: RemovableEntry) -> None:
    """Remove a file or folder, and the links to it first. An interrupted removal is completed by the next call.

    Raises:
        NotYours, CannotWrite: the file system refuses the removal.
    """
    path = entry.path
    try:
        if entry.kind in ("checkpoints", "compared"):
            for link in (path.parent.parent / "best", path.parent.parent / "last"):
                if _read_link_target(link) == path.name:
                    link.unlink(missing_ok=True)
        if not _is_folder(path):
            path.unlink(missing_ok=True)
            return
        if CHECKPOINT_PATTERN.fullmatch(path.name):  # renamed first: a partly removed checkpoint must not look complete
            renamed = path.with_name(f".{path.name}.old")
            if _is_folder(renamed):
                _remove_folder(renamed)
            path = path.rename(renamed)
        _remove_folder(path)
    except FileNotFoundError:  # already removed
        return
    except OSError as error:
        raise make_write_error(Path(error.filename or path), error, action="remove") from error


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _make_removable_entry(kind: Kind, path: Path) -> RemovableEntry:
    return RemovableEntry(kind, path, measure_disk_usage(path).size)


def _has_type_matching_name(name: str, mode: int) -> bool:
    """Return whether a checkpoint has the file type of its name: a file, or a folder of shards; never a link."""
    return stat.S_ISDIR(mode) if name.endswith(".dcp") else stat.S_ISREG(mode)


def _list_entries(folder: Path) -> dict[str, int]:
    """Return the file modes of a folder's entries by name, without following links; empty without such a folder."""
    modes: dict[str, int] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                modes[entry.name] = entry.stat(follow_symlinks=False).st_mode
    return modes


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without links; empty if the folder itself is a link."""
    entries = _list_entries(folder) if _is_folder(folder) else {}
    return [folder / name for name, mode in sorted(entries.items()) if stat.S_ISDIR(mode)]


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
