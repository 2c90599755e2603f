"""During a probe: records the files that this process changes, and copies those that existed before.

A probe must leave nothing that a training would start from. Python reports opened, renamed and removed files by audit
events; torch.save, sqlite and safetensors write without them and are hooked. Nothing is undone here: a process may be
killed at any time, so the supervisor reads the journal after it has exited.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from urllib.parse import unquote, urlsplit

from .function_hooks import hook_function

MAX_COPIED_BYTES = 2**30
"""Limit in bytes of the copies of a process; changes of further files are only reported."""
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CACHE_FOLDER_PREFIXES = ("__pycache__", ".git", ".triton", ".nv", "torchinductor_", "torch_extensions")
"""Folders, or prefixes of their names, whose files are derived from others and affect no training."""
SYSTEM_PATH_PREFIXES = ("/dev/", "/proc/", "/sys/")


class FileChangeRecorder:
    """Writes files-<host>-<pid>.jsonl into the attempt's folder: a line for each path, before it is changed."""

    def __init__(self, folder: Path, ignored: list[str]) -> None:
        self.folder = folder
        self.since = _get_modification_time(folder / "plan.json") or time.time()
        self.ignored = (
            *SYSTEM_PATH_PREFIXES,
            *(os.path.join(os.path.abspath(path), "") for path in (str(folder), *ignored)),  # noqa: PTH100, PTH118 - strings for startswith
        )
        self.stepped = False
        self._seen: dict[str, bool] = {}  # path -> whether its last record was after the first step
        self._here = threading.local()
        self._copied = 0  # bytes copied by this process
        self._handlers: dict[str, Callable[..., None]] = {
            "open": self._record_open,
            "os.rename": self._record_rename,
            "os.remove": lambda path, dir_fd=-1: self.record_change(path, dir_fd),
            "os.truncate": lambda path, *_: self.record_change(path),
            "os.link": lambda _, path, *__: self.record_change(path),
            "os.symlink": lambda _, path, *__: self.record_change(path),
            "os.mkdir": lambda path, _mode=0, dir_fd=-1: self.record_change(path, dir_fd, folder=True),
            "sqlite3.connect": lambda path, *_: self.record_change(_find_database_file(path), resolve=True),
        }

    def record_writes(self) -> None:
        """Record all writes from now on until the process exits: audit hooks cannot be removed."""

        def handle_event(event: str, arguments: tuple[Any, ...]) -> None:
            if event in self._handlers and not getattr(self._here, "busy", False):
                try:
                    self._handlers[event](*arguments)
                except Exception:  # noqa: BLE001 - otherwise the script's own call would fail
                    return

        sys.addaudithook(handle_event)

    def mark_first_step(self) -> None:
        """Record the first step of the training: files written from now on may contain its results."""
        self.stepped = True
        self._append_row(stepped=time.time())
        module = sys.modules.get("safetensors.torch")

        def record_and_serialize(original: Any, tensors: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
            self.record_change(filename, resolve=True)
            return original(tensors, filename, *arguments, **named)

        if hasattr(module, "serialize_file"):
            hook_function(module, "serialize_file", record_and_serialize)

    def _record_open(self, path: Any, _: object, flags: int) -> None:
        if flags & WRITE_FLAGS and not os.path.isdir(path):  # noqa: PTH112 - tempfile opens the folder (O_TMPFILE) to create a file in it
            self.record_change(path, resolve=True)

    def _record_rename(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        before, after = _make_absolute_path(source, source_fd), _make_absolute_path(target, target_fd)
        is_folder = os.path.isdir(before) and not os.path.islink(before)  # noqa: PTH112, PTH114
        self.record_change(before, folder=is_folder)
        self.record_change(after, folder=is_folder)
        for folder, folders, names in os.walk(before) if is_folder else ():
            moved = os.path.join(after, os.path.relpath(folder, before))  # noqa: PTH118
            for name in (*folders, *names):
                self.record_change(os.path.join(folder, name), folder=name in folders)  # noqa: PTH118
                self.record_change(os.path.join(moved, name), folder=name in folders)  # noqa: PTH118

    def record_change(self, path: Any, dir_fd: int | None = -1, *, folder: bool = False, resolve: bool = False) -> None:
        """Record that a path is about to change, and copy the file if it is older than this probe.

        Args:
            path: as it was passed to the call.
            dir_fd: descriptor of the folder that the path is relative to; negative for the working directory.
            folder: whether a folder is created, renamed or moved.
            resolve: whether the target of a symbolic link is changed, not the link.
        """
        if not isinstance(path, (str, bytes, os.PathLike)) or os.fspath(path) in ("", b"", ":memory:"):
            return  # a file descriptor or a file object
        absolute_path = os.path.realpath(path) if resolve else _make_absolute_path(path, dir_fd)
        absolute_path = os.fsdecode(absolute_path)
        if self._seen.get(absolute_path) == self.stepped:
            return
        if absolute_path.startswith(self.ignored) or any(
            f"{os.sep}{name}" in absolute_path for name in CACHE_FOLDER_PREFIXES
        ):
            return
        first = absolute_path not in self._seen
        self._seen[absolute_path] = self.stepped
        self._here.busy = True
        try:
            earlier_state = (
                self._back_up_file(absolute_path) if first else {"existed": None, "copy": None, "modified": None}
            )
            self._append_row(path=absolute_path, folder=folder, late=self.stepped, **earlier_state)
        finally:
            self._here.busy = False

    def _back_up_file(self, absolute_path: str) -> dict[str, Any]:
        """Return whether a path existed before this probe, its copy, and its modification time (ns)."""
        status = None
        with contextlib.suppress(OSError):
            status = os.lstat(absolute_path)
        is_folder = status is not None and stat.S_ISDIR(status.st_mode)
        if status is None or is_folder or status.st_mtime >= self.since:
            return {"existed": is_folder, "copy": None, "modified": None}
        copy = None
        with contextlib.suppress(OSError):  # no space, or not readable: the change is reported without a copy
            copy = self._copy_file(absolute_path, status.st_size)
        return {"existed": True, "copy": copy, "modified": status.st_mtime_ns}

    def _copy_file(self, absolute_path: str, size: int) -> str | None:
        """Return the copy of a file, shared by all processes of a node and made before the first of them changes it.

        None if the copies of this process would exceed MAX_COPIED_BYTES.
        """
        name = hashlib.sha256(os.fsencode(absolute_path)).hexdigest()[:32]
        copy = self.folder / "before" / f"{socket.gethostname()}-{name}"
        if os.path.lexists(copy):
            return str(copy)
        if self._copied + size > MAX_COPIED_BYTES:
            return None
        self._copied += size
        copy.parent.mkdir(parents=True, exist_ok=True)
        draft = f"{copy}.{os.getpid()}"
        shutil.copy2(absolute_path, draft, follow_symlinks=False)
        try:
            os.link(draft, copy, follow_symlinks=False)
        except FileExistsError:
            pass  # copied by another process meanwhile
        except OSError:  # a file system without hard links
            os.rename(draft, copy)  # noqa: PTH104
            return str(copy)
        os.remove(draft)  # noqa: PTH107
        return str(copy)

    def _append_row(self, **row: Any) -> None:
        journal = self.folder / f"files-{socket.gethostname()}-{os.getpid()}.jsonl"
        busy, self._here.busy = getattr(self._here, "busy", False), True
        try:
            with open(journal, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        finally:
            self._here.busy = busy


def _make_absolute_path(path: Any, dir_fd: int | None) -> Any:
    """Return an absolute path; a relative one starts at the folder of the descriptor, if there is one."""
    if isinstance(dir_fd, int) and dir_fd >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))  # noqa: PTH118
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100


def _find_database_file(path: Any) -> Any:
    """Return the file of an SQLite database, which may be named by a URI ("file:runs.db?mode=rwc")."""
    if not isinstance(path, (str, bytes)) or not os.fsdecode(path).startswith("file:"):
        return path
    return unquote(urlsplit(os.fsdecode(path)).path)


def _get_modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
