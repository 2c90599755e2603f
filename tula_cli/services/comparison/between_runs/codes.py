"""The user's own code that two runs were measured, or trained, with."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import CodeSnapshot, ProbeTask

_LARGEST = 200_000
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


def code_difference(before: RunDir, after: RunDir) -> CodeDifference:
    """Compare the snapshots that the newest jobs of two runs were submitted with.

    Args:
        before: a run, or one of its parts.
        after: the other.
    """
    one, other = snapshot_of(before), snapshot_of(after)
    digests = one.digest if one else "", other.digest if other else ""
    files = tuple(_files(before, one, after, other)) if one or other else ()
    return CodeDifference(files, (_commit(one), _commit(other)), digests)


def snapshot_of(run: RunDir) -> CodeSnapshot | None:
    """Return the code that a run was measured with, else what its newest task runs; None where its job names none."""
    tasks = run.tasks()
    names = [task.code for task in tasks if isinstance(task, ProbeTask) and task.code]
    names += [task.code for task in tasks if task.code]
    found = [snapshot for name in dict.fromkeys(names) if (snapshot := run.code(name)) is not None]
    return max(found, key=lambda snapshot: snapshot.taken_at, default=None)


def _commit(snapshot: CodeSnapshot | None) -> str:
    if snapshot is None or not snapshot.commit:
        return ""
    return snapshot.commit[:12] + " and changes" * snapshot.dirty


def _files(
    before: RunDir, one: CodeSnapshot | None, after: RunDir, other: CodeSnapshot | None
) -> Iterator[ChangedFile]:
    names = sorted({*(one.files if one else ()), *(other.files if other else ())})
    for name in names:
        old = _content(before.code_dir(one.name) / name) if one and name in one.files else None
        new = _content(after.code_dir(other.name) / name) if other and name in other.files else None
        if old == new:
            continue
        state = "only in B" if old is None else "only in A" if new is None else "changed"
        counted = _lines(old, new)
        yield ChangedFile(name, state, *counted)


def _content(path: Path) -> bytes | None:
    """Return what a copied file holds; None where it is not there any more, or is only a link."""
    try:
        return None if path.is_symlink() else path.read_bytes()
    except OSError:
        return None


def _lines(old: bytes | None, new: bytes | None) -> tuple[int | None, int | None]:
    """Return how many lines were added and removed; None of what is no text, or too long."""
    texts = [content or b"" for content in (old, new)]
    if any(b"\0" in text or len(text) > _LARGEST for text in texts):
        return None, None
    before, after = (text.decode(errors="replace").splitlines() for text in texts)
    told = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return sum(line.startswith("+") for line in told), sum(line.startswith("-") for line in told)
