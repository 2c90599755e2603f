"""The user's own code that two runs were measured, or trained, with."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import CodeSnapshot, ProbeTask

_MAX_BYTES = 200_000
"""Bytes of a file whose lines are counted: 400 kB with every third line changed took 5 s, and it grows faster than the file."""


@dataclass(frozen=True)
class ChangedFile:
    """A file of the code that is not the same; lines as git counts them, None where they were not counted."""

    name: str
    state: str  # "changed", "only in A", "only in B"
    added: int | None = None
    removed: int | None = None


@dataclass(frozen=True)
class CodeDifference:
    """How the code of two runs differs; empty where it does not, or neither has any."""

    files: tuple[ChangedFile, ...] = ()
    commits: tuple[str, str] = ("", "")  # of git, and whether files differ from it; empty where there is no repository
    digests: tuple[str, str] = ("", "")

    @property
    def same(self) -> bool:
        return not self.files and self.digests[0] == self.digests[1] and self.commits[0] == self.commits[1]


def compare_code(before: RunDir, after: RunDir) -> CodeDifference:
    """Compare the snapshots that the newest jobs of two runs were submitted with.

    Args:
        before: a run, or one of its parts.
        after: the other.
    """
    snapshot_before, snapshot_after = snapshot_of(before), snapshot_of(after)
    digests = snapshot_before.digest if snapshot_before else "", snapshot_after.digest if snapshot_after else ""
    files = (
        tuple(_changed_files(before, snapshot_before, after, snapshot_after))
        if snapshot_before or snapshot_after
        else ()
    )
    return CodeDifference(files, (_describe_commit(snapshot_before), _describe_commit(snapshot_after)), digests)


def snapshot_of(run: RunDir) -> CodeSnapshot | None:
    """Return the code that a run was measured with, else what its newest task runs; None where its job names none."""
    tasks = run.tasks()
    names = [task.code for task in tasks if isinstance(task, ProbeTask) and task.code]
    names += [task.code for task in tasks if task.code]
    snapshots = [snapshot for name in dict.fromkeys(names) if (snapshot := run.code(name)) is not None]
    return max(snapshots, key=lambda snapshot: snapshot.taken_at, default=None)


def _describe_commit(snapshot: CodeSnapshot | None) -> str:
    if snapshot is None or not snapshot.commit:
        return ""
    return snapshot.commit[:12] + " and changes" * snapshot.dirty


def _changed_files(
    before: RunDir, snapshot_before: CodeSnapshot | None, after: RunDir, snapshot_after: CodeSnapshot | None
) -> Iterator[ChangedFile]:
    names = sorted(
        {*(snapshot_before.files if snapshot_before else ()), *(snapshot_after.files if snapshot_after else ())}
    )
    for name in names:
        old = (
            _read_file(before.code_dir(snapshot_before.name) / name)
            if snapshot_before and name in snapshot_before.files
            else None
        )
        new = (
            _read_file(after.code_dir(snapshot_after.name) / name)
            if snapshot_after and name in snapshot_after.files
            else None
        )
        if old == new:
            continue
        state = "only in B" if old is None else "only in A" if new is None else "changed"
        counted = _count_changed_lines(old, new)
        yield ChangedFile(name, state, *counted)


def _read_file(path: Path) -> bytes | None:
    """Return what a copied file holds; None where it is not there any more, or is only a link."""
    try:
        return None if path.is_symlink() else path.read_bytes()
    except OSError:
        return None


def _count_changed_lines(old: bytes | None, new: bytes | None) -> tuple[int | None, int | None]:
    """Return how many lines were added and removed; None of what is no text, or too long."""
    texts = [content or b"" for content in (old, new)]
    if any(b"\0" in text or len(text) > _MAX_BYTES for text in texts):
        return None, None
    lines_before, after = (text.decode(errors="replace").splitlines() for text in texts)
    diff_lines = list(difflib.unified_diff(lines_before, after, n=0, lineterm=""))[2:]
    return sum(line.startswith("+") for line in diff_lines), sum(line.startswith("-") for line in diff_lines)
