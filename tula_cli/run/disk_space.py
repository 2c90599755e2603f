"""Free disk space of a folder. Bytes."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from tula_cli import words

FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full file system and of an exhausted quota."""
IO_ERRNOS = (
    *(errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN),
    *(errno.ENXIO, errno.ENOLINK, errno.ECOMM, errno.EROFS, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN),
    *(errno.ENOKEY, errno.EKEYEXPIRED, errno.EKEYREVOKED),  # a Kerberos ticket has expired
)
"""Error numbers of a file system that did not answer, lost a file or accepts no writes: NFS, Lustre, FUSE, a failing
disk."""
MIN_FREE_BYTES = 2**16
"""Bytes needed for the small files of a run."""


def read_disk_statistics(folder: Path) -> os.statvfs_result | None:
    """Return the statistics of the file system of a folder, which need not exist yet; None if unavailable."""
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), None)
    with contextlib.suppress(OSError):
        return None if existing is None else os.statvfs(existing)
    return None


def count_free_bytes(statistics: os.statvfs_result) -> int:
    """Return the bytes that this user may still write."""
    return statistics.f_bavail * statistics.f_frsize


def describe_free_space(folder: Path) -> str:
    """Describe the free space of a folder's file system; empty if unknown."""
    statistics = read_disk_statistics(folder)
    if statistics is None:
        return ""
    if statistics.f_files and not statistics.f_favail:
        return f"the file system of {folder} already has the maximum of {statistics.f_files} files"
    total = words.format_bytes(statistics.f_blocks * statistics.f_frsize)
    return f"{words.format_bytes(count_free_bytes(statistics))} of {total} are free on the file system of {folder}"


def measure_file_size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 if it does not exist."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    size = 0
    for file in files:
        with contextlib.suppress(OSError):  # already removed
            size += 0 if file.is_dir() else file.stat().st_size
    return size


def find_full_disk_errno(folder: Path, needed: int = MIN_FREE_BYTES) -> int:
    """Return the error number of `FULL_DISK_ERRNOS` with which writing `needed` bytes would fail now, else 0.

    The write is tried, because no call reports a quota: blocks are allocated for a temporary file, which is then
    removed; nothing is written to it if the file system supports that.
    """
    statistics = read_disk_statistics(folder)
    if statistics is not None and count_free_bytes(statistics) < needed:
        return errno.ENOSPC
    try:
        handle, name = tempfile.mkstemp(prefix=".room.", dir=folder)
    except OSError as error:
        return error.errno if error.errno in FULL_DISK_ERRNOS else 0
    try:
        os.posix_fallocate(handle, 0, max(1, needed))
        os.fsync(handle)
    except OSError as error:
        return error.errno if error.errno in FULL_DISK_ERRNOS else 0
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            Path(name).unlink()
    return 0
