"""A little space that is kept back in a run, so that how it ended can be written down where the disk is full."""

import contextlib
import os
from pathlib import Path

from tula_cli.run.files import write_atomic

NAME = ".reserve"
SIZE = 2**14
"""Bytes: blocks for the few records that tell an end."""


def keep(run: Path) -> None:
    """Keep some space back, where that has not been done.

    Raises:
        DiskFull: there is none.
    """
    if not (run / NAME).exists():
        write_atomic(run / NAME, os.urandom(SIZE))  # a file of zeros takes no block where the file system compresses


def give_up(run: Path) -> None:
    """Give it back, for what has to be written now."""
    with contextlib.suppress(OSError):
        (run / NAME).unlink()
