"""The locks of a run, for submitting its jobs and for sending it to a tracker: one command holds each, on any machine."""

import contextlib
import os
import shutil
import socket
from pathlib import Path

from tula_cli.errors import TulaError
from tula_cli.run.files import make_folder, make_write_error, write_file_atomically
from tula_cli.run.owner import require_ownership

STALE_SECONDS = 300.0
"""Seconds after which a lock is considered abandoned by its owner."""


class FolderLock:
    """A lock in the form of a folder: creating one is atomic on NFS and Lustre, where file locks are unreliable."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def acquire(self) -> str:
        """Acquire the lock; return "", or its owner if another command line holds it.

        A lock is broken if its process has ended, or if its owner has not renewed it for STALE_SECONDS.

        Raises:
            NotYours: the run, or the lock, belongs to another user.
            TulaError: the folder cannot be written.
        """
        require_ownership(self.path.parent)
        try:
            make_folder(self.path.parent)
        except OSError as error:
            raise make_write_error(self.path, error) from error
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            owner = _read_owner(self.path)
            if self._is_stale(owner):
                self._break_lock(owner)
            require_ownership(self.path)  # another user may hold it indefinitely, so raise at once
            return owner or "another process"
        except OSError as error:
            raise make_write_error(self.path, error) from error
        try:
            write_file_atomically(self.path / "owner", f"{_make_owner_name()}\n")
        except TulaError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return ""

    def renew(self) -> None:
        """Renew the lock so that it does not become stale: sbatch on a busy controller takes a minute per job."""
        if _read_owner(self.path) == _make_owner_name():
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        """Release the lock unless another process has taken it over."""
        if _read_owner(self.path) == _make_owner_name():
            shutil.rmtree(self.path, ignore_errors=True)

    def _break_lock(self, owner: str) -> None:
        aside = self.path.with_name(f".lock.{socket.gethostname()}.{os.getpid()}")
        with contextlib.suppress(OSError):  # another process may have broken it meanwhile
            self.path.rename(aside)
            if _read_owner(aside) == owner:
                shutil.rmtree(aside)
            else:
                aside.rename(self.path)

    def _is_stale(self, owner: str) -> bool:
        host, _, pid = owner.partition(":")
        if host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            return True
        try:  # owned by another host, or the pid on this host may be reused
            return _read_file_system_time(self.path.parent) - self.path.stat().st_mtime > STALE_SECONDS
        except OSError:
            return False  # just released


def _read_file_system_time(folder: Path) -> float:
    """Return the time by the clock of a folder's file system.

    That clock also sets the lock's time; this machine's may differ by minutes.

    Raises:
        OSError: nothing can be written there.
    """
    clock = folder / f".clock.{socket.gethostname()}.{os.getpid()}"
    os.close(os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        return clock.stat().st_mtime
    finally:
        clock.unlink()


def _make_owner_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _read_owner(lock: Path) -> str:
    try:
        return (lock / "owner").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
