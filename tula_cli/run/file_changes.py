"""Reads of files that other nodes change on NFS or Lustre, and the marker by which writers announce a change."""

import contextlib
import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.run.files import list_names, make_folder, write_record

if TYPE_CHECKING:
    from pydantic import BaseModel

# --- Reads that see the newest state
#
# NFS and FUSE keep for up to a minute what a file's attributes are, where a name leads, and that a name leads nowhere. One call
# (Linux's statx with AT_STATX_FORCE_SYNC) has them ask the server; what has changed then makes what was kept of a folder's
# content void as well. Where there is no such call, or the file system keeps nothing, it is a stat like any other.

MAX_ATTRIBUTE_LAG = 60.0
"""Seconds after which a file that another machine has written shows up at the latest."""
_AT_FDCWD = -100  # AT_FDCWD
_AT_STATX_FORCE_SYNC = 0x2000  # AT_STATX_FORCE_SYNC
_STATX_BASIC_STATS = 0x7FF  # STATX_BASIC_STATS
_STATX_BYTES = 256  # bytes of a struct statx
_INODE, _MODIFIED = 32, 112  # bytes before these fields
_REFUSED_ERRNOS = (
    errno.ENOSYS,
    errno.EPERM,
    errno.EINVAL,
)  # by kernels before 4.11, and by containers that do not know it


def read_file_identity(path: Path) -> tuple[int, int] | None:
    """Return inode and time of the last change (ns) of a file or folder, by one call; None where there is none to see."""
    call = _load_statx()
    if call is not None:
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        if call(_AT_FDCWD, os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, buffer) == 0:
            (inode,) = struct.unpack_from("Q", buffer, _INODE)
            seconds, nanoseconds = struct.unpack_from("qI", buffer, _MODIFIED)
            return inode, seconds * 10**9 + nanoseconds
        if ctypes.get_errno() not in _REFUSED_ERRNOS:
            return None
    try:
        plain = path.stat()
    except OSError:
        return None
    return plain.st_ino, plain.st_mtime_ns


def is_listed(path: Path) -> bool:
    """Return whether a folder, which need not be there itself, holds a name.

    The name itself is not asked for: that it is missing would be kept, and hide it for a while once it is there.

    Raises:
        TulaError: the folder cannot be read, or its file system does not answer.
    """
    read_file_identity(path.parent)
    return path.name in list_names(path.parent)


def wait_until_listed(path: Path, *, within: float = MAX_ATTRIBUTE_LAG) -> bool:
    """Wait until a folder holds a name, which another machine has written already; False where it does not show up in time.

    Args:
        path: of the file or folder.
        within: seconds.
    """
    deadline = time.monotonic() + within
    while not is_listed(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(0.5, within))
    return True


@cache
def _load_statx() -> Callable[..., int] | None:
    """Return the C library's call; None where it has none (before glibc 2.28, and elsewhere than on Linux)."""
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    return function


# --- The marker of changes

_NAME = "news"
_FOLDERS = ("orders", "handover", "failures")


def touch_news(run: Path) -> None:
    """Say that something is new in a run directory, once it can be read.

    It takes no space, and no error matters: supervisors look now and then without being told.
    """
    path = run / _NAME
    with contextlib.suppress(OSError):
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def write_with_news(run: Path, name: str, record: "BaseModel") -> None:
    """Replace one of a run's records, and say that it is new.

    Args:
        run: the run directory.
        name: the record's file in there.
        record: what it is to hold.

    Raises:
        TulaError: the disk is full or the folder cannot be written; the old record stands as it was.
    """
    write_record(run / name, record)
    touch_news(run)


def read_news_state(run: Path) -> tuple[int, int] | None:
    """Return what changes when something is told (by one stat); None where there is nothing to see."""
    return read_file_identity(run / _NAME)


def prepare_folders(run: Path, *others: str) -> None:
    """Make what supervisors and ranks will look at: a file system that caches what is missing would hide it for a while.

    Args:
        run: the run directory.
        others: more folders in it.

    Raises:
        OSError: the run directory cannot be written.
    """
    for name in (*_FOLDERS, *others):
        make_folder(run / name)
    touch_news(run)
