"""Who of this user's jobs has this machine: a lock that the kernel drops with the process that holds it."""

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path


def path() -> Path:
    """Return the file that is locked. Its folder is everyone's, so that another user may have made a file of its name."""
    return Path(tempfile.gettempdir()) / f"tula-{os.getuid()}.lock"


def opened(*, make: bool = True) -> int | None:
    """Return a descriptor of the file; None where it is not this user's own, no file, or not there and not to be made."""
    try:
        lock = os.open(path(), os.O_RDWR | make * os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        return None
    found = os.fstat(lock)
    if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode):
        return lock
    os.close(lock)
    return None


def locked(lock: int, holder: str) -> bool:
    """Try to take the lock; where it is had, write down who has it, with the process to look at."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(OSError):  # words alone: a full disk keeps nobody from the machine
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{holder}, process {os.getpid()}".encode(), 0)
    return True


def holder() -> str:
    """Return which job has the machine, as it has written down; empty where none has, or it cannot be told."""
    lock = opened(make=False)
    if lock is None:
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(lock, 4096, 0).decode(errors="replace")
    finally:
        os.close(lock)
    return ""
