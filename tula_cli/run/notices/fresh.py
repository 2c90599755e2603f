"""Asking a shared file system itself, and not what this machine has kept of an earlier answer.

NFS and FUSE keep for up to a minute what a file's attributes are, where a name leads, and that a name leads nowhere. One call
(Linux's statx with AT_STATX_FORCE_SYNC) has them ask the server; what has changed then makes what was kept of a folder's
content void as well. Where there is no such call, or the file system keeps nothing, it is a stat like any other.
"""

import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tula_cli.run.files import list_names

MAX_ATTRIBUTE_LAG = 60.0
"""Seconds after which a file that another machine has written shows up at the latest."""
_HERE = -100  # AT_FDCWD
_ASK = 0x2000  # AT_STATX_FORCE_SYNC
_BASIC = 0x7FF  # STATX_BASIC_STATS
_SIZE = 256  # bytes of a struct statx
_INODE, _MODIFIED = 32, 112  # bytes before these fields
_REFUSED = (errno.ENOSYS, errno.EPERM, errno.EINVAL)  # by kernels before 4.11, and by containers that do not know it


def identity(path: Path) -> tuple[int, int] | None:
    """Return inode and time of the last change (ns) of a file or folder, by one call; None where there is none to see."""
    call = _statx()
    if call is not None:
        buffer = ctypes.create_string_buffer(_SIZE)
        if call(_HERE, os.fsencode(path), _ASK, _BASIC, buffer) == 0:
            (inode,) = struct.unpack_from("Q", buffer, _INODE)
            seconds, nanoseconds = struct.unpack_from("qI", buffer, _MODIFIED)
            return inode, seconds * 10**9 + nanoseconds
        if ctypes.get_errno() not in _REFUSED:
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
    identity(path.parent)
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
def _statx() -> Callable[..., int] | None:
    """Return the C library's call; None where it has none (before glibc 2.28, and elsewhere than on Linux)."""
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    return function
