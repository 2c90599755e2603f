"""During a probe: records the files that this process changes, and copies those that existed before.

A probe must leave nothing that a training would start from. Python reports opened, renamed and removed files by audit
events; torch.save, sqlite and safetensors write without them and are hooked. Nothing is undone here: a process may be
killed at any time, so the supervisor reads the journal after it has exited.

A file existed before the probe if it exists when a process of the probe first opens it, and no process of the probe has
created it. Modification times do not show this: file servers have other clocks, and other jobs may write the file too.
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
from functools import cached_property
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
DATABASE_SUFFIXES = ("", "-journal", "-wal", "-shm")
"""Suffixes of the files of an SQLite database, whose other files hold changes that are not in the database yet."""


class FileChangeRecorder:
    """Writes files-<host>-<pid>.jsonl into the attempt's folder: a line for each path, before it is changed."""

    def __init__(self, folder: Path, ignored: list[str]) -> None:
        self.folder = folder
        self.ignored = (
            *SYSTEM_PATH_PREFIXES,
            *(os.path.join(os.path.abspath(path), "") for path in (str(folder), *ignored)),  # noqa: PTH100, PTH118 - strings for startswith
        )
        self.stepped = False
        self._seen: dict[str, bool] = {}  # path -> whether its last record was after the first step
        self._here = threading.local()
        self._copied = 0  # bytes copied by this process
        self._uncopied: set[str] = set()  # existing files that could not be copied
        self._handlers: dict[str, Callable[..., None]] = {
            "open": self._record_open,
            "os.rename": self._record_rename,
            "os.remove": lambda path, dir_fd=-1: self.record_change(path, dir_fd, creates=False),
            "os.truncate": lambda path, *_: self.record_change(path, creates=False),
            "os.link": lambda _, path, *__: self.record_change(path),
            "os.symlink": lambda _, path, *__: self.record_change(path),
            "os.mkdir": lambda path, _mode=0, dir_fd=-1: self.record_change(path, dir_fd, folder=True),
            "sqlite3.connect": self._record_database,
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
        # By the clock of the file server, which may differ from that of this node.
        self._append_row(stepped=self._append_row())
        module = sys.modules.get("safetensors.torch")

        def record_and_serialize(original: Any, tensors: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
            self.record_change(filename, resolve=True)
            return original(tensors, filename, *arguments, **named)

        if hasattr(module, "serialize_file"):
            hook_function(module, "serialize_file", record_and_serialize)

    def _record_open(self, path: Any, _: object, flags: int) -> None:
        if flags & WRITE_FLAGS and not os.path.isdir(path):  # noqa: PTH112 - tempfile opens the folder (O_TMPFILE) to create a file in it
            self.record_change(path, creates=bool(flags & os.O_CREAT), resolve=True)

    def _record_database(self, path: Any, *_: object) -> None:
        database = os.fsdecode(_find_database_file(path))
        if database not in ("", ":memory:"):
            for suffix in DATABASE_SUFFIXES:
                self.record_change(os.path.realpath(database) + suffix)

    def _record_rename(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        before, after = _make_absolute_path(source, source_fd), _make_absolute_path(target, target_fd)
        if _read_status(before) is None:
            return  # the call fails
        is_folder = os.path.isdir(before) and not os.path.islink(before)  # noqa: PTH112, PTH114
        self._record_move(before, after, folder=is_folder)
        for folder, folders, names in os.walk(before) if is_folder else ():
            moved = os.path.join(after, os.path.relpath(folder, before))  # noqa: PTH118
            for name in (*folders, *names):
                self._record_move(os.path.join(folder, name), os.path.join(moved, name), folder=name in folders)  # noqa: PTH118

    def _record_move(self, before: str, after: str, *, folder: bool) -> None:
        self.record_change(before, creates=False, folder=folder)
        self.record_change(after, folder=folder, only_copy=before in self._uncopied)

    def record_change(
        self,
        path: Any,
        dir_fd: int | None = -1,
        *,
        creates: bool = True,
        folder: bool = False,
        resolve: bool = False,
        only_copy: bool = False,
    ) -> None:
        """Record that a path is about to change, and copy the file if it existed before this probe.

        Args:
            path: as it was passed to the call.
            dir_fd: descriptor of the folder that the path is relative to; negative for the working directory.
            creates: whether the call creates the file if it does not exist; otherwise it fails then.
            folder: whether a folder is created, renamed or moved.
            resolve: whether the target of a symbolic link is changed, not the link.
            only_copy: whether an existing file without a copy gets this path: it counts as existing, so that it stays.
        """
        if not isinstance(path, (str, bytes, os.PathLike)) or os.fspath(path) in ("", b""):
            return  # a file descriptor or a file object
        absolute_path = os.path.realpath(path) if resolve else _make_absolute_path(path, dir_fd)
        absolute_path = os.fsdecode(absolute_path)
        if self._seen.get(absolute_path) == self.stepped and not only_copy:
            return
        if absolute_path.startswith(self.ignored) or any(
            f"{os.sep}{name}" in absolute_path for name in CACHE_FOLDER_PREFIXES
        ):
            return
        status = _read_status(absolute_path)
        if status is None and not creates:
            return
        first = absolute_path not in self._seen
        self._seen[absolute_path] = self.stepped
        self._here.busy = True
        try:
            earlier_state: dict[str, Any] = {"existed": None, "copy": None, "modified": None}
            if first:
                earlier_state = self._find_earlier_state(absolute_path, status)
            if only_copy:
                earlier_state["existed"] = True
                self._uncopied.add(absolute_path)
            self._append_row(path=absolute_path, folder=folder, late=self.stepped, **earlier_state)
        finally:
            self._here.busy = False

    def _find_earlier_state(self, absolute_path: str, status: os.stat_result | None) -> dict[str, Any]:
        """Return whether a path existed before this probe, its copy, and its modification time (ns).

        A process that is about to create a path first creates the file <copy>.created; the others look first for the
        path and then for this file.

        Args:
            status: of the path before this call; None if it does not exist.
        """
        copy = self._get_copy_path(absolute_path)
        created = copy.with_name(f"{copy.name}.created")
        if status is None and os.path.lexists(copy):  # another process of the probe has removed it
            return {"existed": True, "copy": str(copy), "modified": None}
        if status is None:
            created.touch()
        if os.path.lexists(created):
            return {"existed": False, "copy": None, "modified": None}
        assert status is not None
        if stat.S_ISDIR(status.st_mode):
            return {"existed": True, "copy": None, "modified": None}
        name = None
        with contextlib.suppress(OSError):  # no space, or not readable: the change is reported without a copy
            name = self._copy_file(absolute_path, copy, status.st_size)
        if name is None:
            self._uncopied.add(absolute_path)
        return {"existed": True, "copy": name, "modified": status.st_mtime_ns}

    @cached_property
    def _copies_folder(self) -> Path:
        folder = self.folder / "before"
        folder.mkdir(parents=True, exist_ok=True)  # now, because NFS caches that a folder does not exist
        return folder

    def _get_copy_path(self, absolute_path: str) -> Path:
        """Return the path of a file's copy: for all nodes the same on the file system of the run, else one for each."""
        parent = absolute_path
        while (status := _read_status(parent)) is None:
            parent = os.path.dirname(parent)  # noqa: PTH120
        node = "" if status.st_dev == os.stat(self._copies_folder).st_dev else f"{socket.gethostname()}-"  # noqa: PTH116
        return self._copies_folder / f"{node}{hashlib.sha256(os.fsencode(absolute_path)).hexdigest()[:32]}"

    def _copy_file(self, absolute_path: str, copy: Path, size: int) -> str | None:
        """Copy a file before the first process of the probe changes it; return the copy, which all processes share.

        None if the copies of this process would exceed MAX_COPIED_BYTES.
        """
        if os.path.lexists(copy):
            return str(copy)
        if self._copied + size > MAX_COPIED_BYTES:
            return None
        self._copied += size
        draft = f"{copy}.{socket.gethostname()}.{os.getpid()}"
        shutil.copy2(absolute_path, draft, follow_symlinks=False)
        try:
            os.link(draft, copy, follow_symlinks=False)
        except FileExistsError:
            pass  # copied by another process meanwhile
        except OSError:  # a file system without hard links
            if not os.path.lexists(copy):
                os.rename(draft, copy)  # noqa: PTH104
                return str(copy)
        os.remove(draft)  # noqa: PTH107
        return str(copy)

    def _append_row(self, **row: Any) -> float:
        """Append a row to this process's journal; return when (Unix time), by the clock of its file server."""
        journal = self.folder / f"files-{socket.gethostname()}-{os.getpid()}.jsonl"
        busy, self._here.busy = getattr(self._here, "busy", False), True
        try:
            with open(journal, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            return os.stat(journal).st_mtime  # noqa: PTH116
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


def _read_status(path: str) -> os.stat_result | None:
    """Return the status of a path, of a link itself; None if it does not exist."""
    try:
        return os.lstat(path)
    except OSError:
        return None
