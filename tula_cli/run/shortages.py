"""Recognise full disks and exhausted quotas, and keep the space that a supervisor reserves for its last records."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tula_cli.errors import DiskFull
from tula_cli.run.disk_space import MIN_FREE_BYTES, count_free_bytes, find_full_disk_errno, read_disk_statistics
from tula_cli.run.files import write_file_atomically
from tula_cli.run.records.failures import Shortage

RESERVE_NAME = ".reserve"
RESERVE_BYTES = 2**14
"""Bytes reserved for the few records that are written at the end."""


def create_reserve_file(run: Path) -> None:
    """Reserve some disk space unless it is already reserved.

    Raises:
        DiskFull: there is none.
    """
    if not (run / RESERVE_NAME).exists():
        # Random bytes, because a compressing file system would store zeros without using space.
        write_file_atomically(run / RESERVE_NAME, os.urandom(RESERVE_BYTES))


def release_reserve(run: Path) -> None:
    """Release the reserved space for records that have to be written now."""
    with contextlib.suppress(OSError):
        (run / RESERVE_NAME).unlink()


_NAMED_PATH_PATTERN = re.compile(r"(?:No space left on device|Disk quota exceeded): '(/[^'\n]+)'")
"""A path in Python's message of a full disk."""


def measure_shortage(folder: Path, *, needed: int | None = None, quota: bool = False) -> Shortage:
    """Return the current free and total space of a folder's file system, as reported by statvfs."""
    statistics = read_disk_statistics(folder)
    return Shortage(
        folder=str(folder),
        free=0 if statistics is None else count_free_bytes(statistics),
        total=0 if statistics is None else statistics.f_blocks * statistics.f_frsize,
        files_free=None if statistics is None or not statistics.f_files else statistics.f_favail,
        needed=needed,
        quota=quota,
    )


def get_shortage(error: BaseException) -> Shortage | None:
    """Return the shortage that a disk-full error describes, or None for other errors."""
    if not isinstance(error, DiskFull):
        return None
    return measure_shortage(Path(error.folder or "."), needed=error.needed, quota=error.quota)


def parse_shortage(text: str, folders: Sequence[Path]) -> Shortage:
    """Return the shortage described by a process's message; if it names no file, that of the fullest disk.

    Args:
        folders: folders that the process may have written to; of those on one disk, the first one counts.
    """
    quota = "quota" in text.lower()
    if named := _NAMED_PATH_PATTERN.search(text):
        return measure_shortage(Path(named[1]).parent, quota=quota)
    first_folders = {_find_device(folder): folder for folder in reversed(folders)}.values()
    return min((measure_shortage(folder, quota=quota) for folder in first_folders), key=lambda shortage: shortage.free)


def _find_device(folder: Path) -> int | None:
    try:
        return folder.stat().st_dev
    except OSError:
        return None


def find_remaining_shortage(shortage: Shortage) -> Shortage | None:
    """Return the current shortage on a disk that was full before, or None if there is space again."""
    folder = Path(shortage.folder)
    existing = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), folder)
    needed = max(shortage.needed or 0, 0) + MIN_FREE_BYTES
    if not find_full_disk_errno(existing, needed):
        return None
    return measure_shortage(folder, needed=shortage.needed, quota=shortage.quota)
