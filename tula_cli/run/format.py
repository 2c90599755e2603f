"""The format of a run directory: an unknown format is reported, and the directory is not changed."""

import re
from pathlib import Path

from tula_cli.errors import OtherFormat
from tula_cli.run import files
from tula_cli.version import __version__

FORMAT = 1
"""Format of the runs that this version of tula creates; increased by a change that an older version would fail on or
damage."""
OLDEST = 1
"""The oldest format that this version of tula can continue with."""
_NAME = "format"


def write_format(run: Path) -> None:
    """Record the format of a new run and the version of tula that created it.

    Raises:
        TulaError: it cannot be written.
    """
    files.write_atomic(run / _NAME, f"{FORMAT} tula {__version__}\n")


def require_known_format(run: Path) -> None:
    """Check that a run is in a format that this version reads.

    A run without a format file is of the first format, or does not exist yet.

    Raises:
        OtherFormat: the format is not supported.
        BadMeasurements: the format file is damaged.
        TulaError: it cannot be read.
    """
    text = files.read_text(run / _NAME)
    match = re.fullmatch(r"([0-9]{1,9})(?: (tula [\w.+-]{1,40}))?", text)
    if text and match is None:
        raise files.make_damaged_error(run / _NAME, "it tells no format")
    number = int(match[1]) if match is not None else 1
    if OLDEST <= number <= FORMAT:
        return
    made = f", made by {match[2]}," if match is not None and match[2] else ""
    known = str(FORMAT) if OLDEST == FORMAT else f"{OLDEST} to {FORMAT}"
    raise OtherFormat(
        f"the run {run}{made} is in format {number}, and tula {__version__} reads format {known}; it was left as it is",
        f"use {'a newer' if number > FORMAT else 'the older'} tula, in the environment of the jobs too",
    )
