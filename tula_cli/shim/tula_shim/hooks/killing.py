"""A rehearsal of a resume: this process asks its script for a checkpoint, sees one come, and kills itself some steps later."""

from __future__ import annotations

import glob
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from ..output import write_json
from ..plan import Plan

PATIENCE = 120.0
"""Seconds at most for a checkpoint to be written: some are, by a thread, while training goes on."""


class Killing:
    """Counts the steps to the checkpoint and beyond. From within, for from outside a short script is over before it is seen."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.wanted: dict[str, Any] = plan.rehearsal or {}
        self._since = 0.0  # Unix time of the first step
        self._found: dict[str, Any] | None = None
        self._last = 0  # step after which it ends
        self._seen = _Newest()

    def after_step(self, step: int, before: float | None, rank: int, dataset: int | None) -> None:
        """Take note of a step, of the samples of this rank before it, and of what its data loader holds. May not return.

        Raises:
            OSError: what was seen cannot be written.
        """
        if not self.wanted:
            return
        self._since = self._since or time.time()
        if step == self.wanted.get("ask_at"):
            self._ask(str(self.wanted.get("ask", "")), rank)
        if rank == 0:
            self._look(step, before, dataset)
            if self._found is not None and step >= self._last:
                self._kill()

    def _ask(self, how: str, rank: int) -> None:
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        elif rank == 0 and how.startswith("file:"):
            path = Path(how[len("file:") :])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        elif rank == 0 and how == "hooks":
            write_json(self.plan.folder / "save.json", {"then": "go on"})

    def _look(self, step: int, samples: float | None, dataset: int | None) -> None:
        """Take note of the newest checkpoint, which holds what was trained up to the step before: a script may save each step."""
        seen = _newest(str(self.wanted["checkpoint"]))
        if seen.changed < self._since:
            return
        before, self._seen = self._seen, seen
        if not seen.replaces(before):
            return
        if self._found is None:
            self._last = step - 1 + int(self.wanted["after"])
        self._found = {"steps": step - 1, "samples": samples, "dataset": dataset, "killed": False}
        self._write()

    def _kill(self) -> None:
        deadline, settled = time.time() + PATIENCE, float(self.wanted.get("settled", 2.0))
        while time.time() - self._changed() < settled and time.time() < deadline:
            time.sleep(settled / 20)
        assert self._found is not None
        self._found["killed"] = True
        self._write()
        os.kill(os.getpid(), signal.SIGKILL)

    def _write(self) -> None:
        assert self._found is not None
        write_json(self.plan.folder / "rehearsal.json", self._found)

    def _changed(self) -> float:
        """Return when a checkpoint was written last (Unix time); 0 where there is none."""
        return _newest(str(self.wanted["checkpoint"])).changed


class _Newest(NamedTuple):
    """The checkpoint that was written last, as far as files tell."""

    changed: float = 0.0  # Unix time
    path: str = ""
    inode: int = 0
    size: int = 0  # bytes

    def replaces(self, before: _Newest) -> bool:
        """Return whether this is another checkpoint, not the one before that is still being written (which grows)."""
        if (self.path, self.inode) != (before.path, before.inode):
            return True
        return self.changed > before.changed and os.path.isfile(self.path) and self.size <= before.size  # noqa: PTH113


def _newest(pattern: str) -> _Newest:
    return max((_state(path) for path in glob.iglob(pattern, recursive=True)), default=_Newest())  # noqa: PTH207 - an absolute pattern


def _state(path: str) -> _Newest:
    """Return what there is at a path; of a folder, when its newest file was written."""
    files = [file for file in Path(path).rglob("*") if file.is_file()] if os.path.isdir(path) else [Path(path)]  # noqa: PTH112
    try:
        own, changed = os.stat(path), max((file.stat().st_mtime for file in files), default=0.0)  # noqa: PTH116
    except OSError:
        return _Newest()  # replaced meanwhile
    return _Newest(changed, path, own.st_ino, own.st_size)
