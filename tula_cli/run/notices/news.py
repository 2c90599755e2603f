"""One file of a run whose time changes with whatever supervisors have to react to: one stat tells whether to look."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tula_cli.run.files import make_folder, write_record
from tula_cli.run.notices.fresh import identity

if TYPE_CHECKING:
    from pydantic import BaseModel

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


def news_state(run: Path) -> tuple[int, int] | None:
    """Return what changes when something is told (by one stat); None where there is nothing to see."""
    return identity(run / _NAME)


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
