"""Full disks and exceeded quotas: how they are recognised, and the reserve that a supervisor keeps for its last records."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tula_cli import words
from tula_cli.errors import DiskFull
from tula_cli.run.disk_space import count_free_bytes, make_missing_bytes_error, read_disk_statistics
from tula_cli.run.files import write_atomic
from tula_cli.run.records.jobs import Shortage

# --- The reserve

RESERVE_NAME = ".reserve"
RESERVE_BYTES = 2**14
"""Bytes: blocks for the few records that tell an end."""


def keep_reserve(run: Path) -> None:
    """Keep some space back, where that has not been done.

    Raises:
        DiskFull: there is none.
    """
    if not (run / RESERVE_NAME).exists():
        write_atomic(
            run / RESERVE_NAME, os.urandom(RESERVE_BYTES)
        )  # a file of zeros takes no block where the file system compresses


def release_reserve(run: Path) -> None:
    """Give it back, for what has to be written now."""
    with contextlib.suppress(OSError):
        (run / RESERVE_NAME).unlink()


# --- Shortages

_NAMED = re.compile(r"(?:No space left on device|Disk quota exceeded): '(/[^'\n]+)'|cannot write (/[^:\n]+): ")
"""A path in what was said of a full disk: Python's words, and tula's."""


def measure_shortage(folder: Path, *, needed: int | None = None, quota: bool = False) -> Shortage:
    """Return what the file system of a folder has now, as statvfs tells it."""
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
    """Return what an error of a full disk knows of it; None of any other."""
    if not isinstance(error, DiskFull):
        return None
    return measure_shortage(Path(error.folder or "."), needed=error.needed, quota=error.quota)


def parse_shortage(text: str, folders: Iterable[Path]) -> Shortage:
    """Return what is known of a full disk by what a process said: where it names no file, of the fullest folder.

    Args:
        text: what was said.
        folders: that it may have written to.
    """
    quota = "quota" in text.lower()
    if named := _NAMED.search(text):
        return measure_shortage(Path(named[1] or named[2]).parent, quota=quota)
    return min((measure_shortage(folder, quota=quota) for folder in folders), key=lambda shortage: shortage.free)


def describe_shortage(shortage: Shortage) -> str:
    """Return the folder and what is missing there."""
    if shortage.files_free == 0:
        return f"no more files can be made on the file system of {shortage.folder}"
    takes = "" if shortage.needed is None else f", {words.format_bytes(shortage.needed)} are needed"
    if shortage.quota:
        return f"the quota is used up where {shortage.folder} is{takes}"
    missing = f", so {words.format_bytes(shortage.missing)} are missing" if shortage.missing else ""
    return f"{words.format_bytes(shortage.free)} of {words.format_bytes(shortage.total)} are free where {shortage.folder} is{takes}{missing}"


def find_remaining_shortage(shortage: Shortage) -> Shortage | None:
    """Return what is missing now where the disk was full before; None where there is room again."""
    folder = Path(shortage.folder)
    place = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), folder)
    needed = max(shortage.needed or 0, 0) + 2**16
    return (
        measure_shortage(folder, needed=shortage.needed, quota=shortage.quota)
        if make_missing_bytes_error(place, needed)
        else None
    )
