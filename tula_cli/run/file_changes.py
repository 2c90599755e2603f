"""Reading files that other nodes change on NFS or Lustre, and the marker by which writers announce changes."""

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
"""Seconds after which a file written by another machine becomes visible at the latest."""
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
    """Return the inode and modification time (ns) of a file or folder with one call; None if it is not visible."""
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
    """Return whether a folder, which need not exist, contains a name.

    The name itself is not looked up: the file system would cache that it is missing and hide it for a while after it is
    created.

    Raises:
        TulaError: the folder cannot be read, or its file system does not answer.
    """
    read_file_identity(path.parent)
    return path.name in list_names(path.parent)


def wait_until_listed(path: Path, *, within: float = MAX_ATTRIBUTE_LAG) -> bool:
    """Wait until a folder lists a name that another machine has written; return False if it does not appear in time.

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
    """Return the C library's statx, or None if it has none (glibc before 2.28, systems other than Linux)."""
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    return function


# --- The marker of changes

_NAME = "news"
_FOLDERS = ("orders", "handover", "failures")


def announce_change(run: Path) -> None:
    """Announce a change in a run directory, after it has become readable.

    Takes no space, and errors are ignored: supervisors also poll without it.
    """
    path = run / _NAME
    with contextlib.suppress(OSError):
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def write_with_news(run: Path, name: str, record: "BaseModel") -> None:
    """Replace one of a run's records and announce the change.

    Args:
        run: the run directory.
        name: the record's path in the run directory.
        record: the new content.

    Raises:
        TulaError: the disk is full or the folder cannot be written; the old record is unchanged.
    """
    write_record(run / name, record)
    announce_change(run)


def read_news_state(run: Path) -> tuple[int, int] | None:
    """Return a value that changes with each announcement (one stat call); None if there has been none."""
    return read_file_identity(run / _NAME)


def prepare_folders(run: Path, *others: str) -> None:
    """Create the folders that supervisors and ranks poll: file systems that cache missing names would hide them.

    Args:
        run: the run directory.
        others: further folders in it.

    Raises:
        OSError: the run directory cannot be written.
    """
    for name in (*_FOLDERS, *others):
        make_folder(run / name)
    announce_change(run)
