"""Put aside the files that a probe has written outside of its folder: a training must not start from a probe's weights."""

import filecmp
import os
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.run.files import append_json_line
from tula_cli.run.script_attempt import ScriptAttempt

MAX_NAMED = 3
"""Files that are named; of the others there is the number."""


@dataclass(frozen=True)
class ChangedFile:
    """A path that the processes of one node have changed.

    Attributes:
        existed: whether there was something before the probe.
        copy: of it; None without one.
        modified: when that was changed last (ns); None if it is not known.
    """

    path: Path
    existed: bool
    copy: Path | None
    modified: int | None = None

    def is_unchanged(self) -> bool:
        """Return whether what existed is as it was: a file may be opened for writing, as numpy.memmap does, and only read."""
        if not self.existed or not os.path.lexists(self.path):
            return False
        if self.copy is None:
            return self.path.lstat().st_mtime_ns == self.modified
        if self.path.is_symlink() or self.copy.is_symlink():
            return self.path.is_symlink() and self.copy.is_symlink() and self.path.readlink() == self.copy.readlink()
        return self.path.is_file() and filecmp.cmp(self.path, self.copy, shallow=False)


def put_aside_probe_files(attempt: ScriptAttempt) -> str:
    """Move what a start has made since its first step into its folder, and restore what it has changed or removed.

    What was written before the first step stays: it holds nothing of a training (downloads, prepared data, settings).

    Returns:
        What was done, in words; empty if there was nothing to do.
    """
    rows = attempt.changed_files(socket.gethostname())
    stepped = min((row["stepped"] for row in rows if "stepped" in row), default=None)
    if stepped is None:
        return ""
    folders = sorted({Path(row["path"]) for row in rows if row.get("folder") and not row["existed"]}, reverse=True)
    moved: list[str] = []
    remaining: list[str] = []
    for file in _changed_files(rows, folders, since=stepped):
        try:
            if file.is_unchanged():
                continue
            restored = _restore(file, attempt.aside / file.path.relative_to("/"))
        except OSError as error:
            remaining.append(f"{file.path} ({error.strerror})")
            continue
        (moved if restored else remaining).append(str(file.path))
    for folder in folders:  # the deepest first; what the probe made, and holds nothing more
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    text = _describe_moved(moved, remaining, attempt.aside)
    if text:
        append_json_line(attempt.path / "aside.jsonl", {"text": text})
    return text


def _changed_files(
    rows: Sequence[Mapping[str, Any]], folders: Iterable[Path], *, since: float
) -> Iterable[ChangedFile]:
    """Yield what holds something of a training: changed after the first step, by the journal or by its time."""
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "path" in row and not row["folder"]:
            by_path.setdefault(row["path"], []).append(row)
    for name, events in by_path.items():
        copy = next((event["copy"] for event in events if event["copy"]), None)
        modified = next((event["modified"] for event in events if event.get("modified")), None)
        existed = any(event["existed"] for event in events)
        if not existed and not os.path.lexists(name):
            continue  # a draft that was renamed, or a temporary file
        if any(event["late"] for event in events) or _modified_at(Path(name)) >= since:
            yield ChangedFile(Path(name), existed, None if copy is None else Path(copy), modified)
    new_files = {
        file for folder in folders for file in folder.rglob("*") if file.is_file() and str(file) not in by_path
    }
    yield from (ChangedFile(file, False, None) for file in sorted(new_files) if _modified_at(file) >= since)


def _restore(file: ChangedFile, target: Path) -> bool:
    """Put a file aside, and what was there before in its place; return False if that is not known any more."""
    if file.existed and file.copy is None:
        return False
    if os.path.lexists(file.path):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file.path, target)
    if file.copy is not None:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.copy, file.path, follow_symlinks=False)
    return True


def _modified_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _describe_moved(moved: Sequence[str], remaining: Sequence[str], folder: Path) -> str:
    sentences = []
    if moved:
        sentences.append(
            f"the script writes outside of {{out}}: {_list_names(moved)}; put aside in {folder}, so that no training starts from it"
        )
    if remaining:
        sentences.append(
            f"the script changed {_list_names(remaining)}, which could not be restored: check it before a training starts from it"
        )
    return "; ".join(sentences)


def _list_names(names: Sequence[str]) -> str:
    hidden = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")
