"""In a probe: which files this process changes, and copies of those that were there before.

A probe must leave nothing that a training would start from. Python reports what it opens, renames and removes by audit
events; torch.save, sqlite and safetensors write without them and are asked beforehand. Nothing is undone here: a process may
be killed at any time, so the supervisor reads the journal once it has ended.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

MAX_COPY = 2**30
"""Bytes of a file that is copied before it is changed; the change of a larger one is only reported."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CACHES = ("__pycache__", ".git", ".triton", ".nv", "torchinductor_", "torch_extensions")
"""Folders (or how their names begin) whose files are made from others and change no training."""
SYSTEM = ("/dev/", "/proc/", "/sys/")


class Files:
    """Writes files-<host>-<pid>.jsonl into the attempt's folder: a line for each path, before it is changed."""

    def __init__(self, folder: Path, ignored: list[str]) -> None:
        self.folder = folder
        self.since = _modified(folder / "plan.json") or time.time()
        self.ignored = (*SYSTEM, *(os.path.join(os.path.abspath(path), "") for path in (str(folder), *ignored)))  # noqa: PTH100, PTH118 - run at each open
        self.stepped = False
        self._seen: dict[str, bool] = {}  # path -> whether it was seen after the first step
        self._here = threading.local()
        self._copies = 0
        handlers: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "os.rename": self._renamed,
            "os.remove": lambda path, dir_fd=-1: self.changing(path, dir_fd),
            "os.truncate": lambda path, *_: self.changing(path),
            "os.link": lambda _, path, *__: self.changing(path),
            "os.symlink": lambda _, path, *__: self.changing(path),
            "os.mkdir": lambda path, _mode=0, dir_fd=-1: self.changing(path, dir_fd, folder=True),
            "sqlite3.connect": lambda path, *_: self.changing(path, resolve=True),
        }
        self._handlers = handlers

    def listen(self) -> None:
        """Take note of what is written from now on, to the end of the process: audit hooks cannot be removed."""
        handlers = self._handlers

        def heard(event: str, arguments: tuple[Any, ...]) -> None:
            if event in handlers and not getattr(self._here, "busy", False):
                try:
                    handlers[event](*arguments)
                except Exception:  # noqa: BLE001 - the script's own call would fail in its place
                    return

        sys.addaudithook(heard)

    def first_step(self) -> None:
        """Take note that training has begun: what is written from here on holds something of it."""
        self.stepped = True
        self._write(stepped=time.time())
        module = sys.modules.get("safetensors.torch")
        serialize = getattr(module, "serialize_file", None)
        if module is None or serialize is None:
            return

        @functools.wraps(serialize)
        def serializing(tensors: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
            self.changing(filename, resolve=True)
            return serialize(tensors, filename, *arguments, **named)

        module.serialize_file = serializing  # type: ignore[attr-defined]

    def _opened(self, path: Any, _: object, flags: int) -> None:
        if flags & WRITING:
            self.changing(path, resolve=True)

    def _renamed(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self.changing(source, source_fd)
        self.changing(target, target_fd)

    def changing(self, path: Any, dir_fd: int | None = -1, *, folder: bool = False, resolve: bool = False) -> None:
        """Take note that a path is about to change, and copy what is there from before this probe.

        Args:
            path: as the call was given it.
            dir_fd: of the folder that it starts from; negative for the working directory.
            folder: whether it is a folder that is made.
            resolve: whether what a link leads to is changed, not the link.
        """
        if not isinstance(path, (str, bytes, os.PathLike)) or os.fspath(path) in ("", b"", ":memory:"):
            return  # a descriptor, or a file object
        place = os.fsdecode(path)
        if isinstance(dir_fd, int) and dir_fd >= 0:
            place = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), place)  # noqa: PTH118
        place = os.path.realpath(place) if resolve else os.path.abspath(place)  # noqa: PTH100
        if self._seen.get(place) == self.stepped:
            return
        if place.startswith(self.ignored) or any(f"{os.sep}{name}" in place for name in CACHES):
            return
        first = place not in self._seen
        self._seen[place] = self.stepped
        self._here.busy = True
        try:
            existed, copy = self._kept(place) if first else (None, None)
            self._write(path=place, folder=folder, late=self.stepped, existed=existed, copy=copy)
        finally:
            self._here.busy = False

    def _kept(self, place: str) -> tuple[bool, str | None]:
        """Return whether there is something from before this probe at a path, and the copy of it."""
        try:
            status = os.lstat(place)
        except OSError:
            return False, None
        if status.st_mtime >= self.since and not stat.S_ISDIR(status.st_mode):
            return False, None
        if stat.S_ISDIR(status.st_mode) or status.st_size > MAX_COPY:
            return True, None
        self._copies += 1
        copy = self.folder / "before" / f"{socket.gethostname()}-{os.getpid()}-{self._copies}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(place, copy, follow_symlinks=False)
        return True, str(copy)

    def _write(self, **row: Any) -> None:
        journal = self.folder / f"files-{socket.gethostname()}-{os.getpid()}.jsonl"
        busy, self._here.busy = getattr(self._here, "busy", False), True
        try:
            with open(journal, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        finally:
            self._here.busy = busy


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
