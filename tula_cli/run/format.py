"""The format of a run directory: one that this tula does not know is told, and left as it is."""

import re
from pathlib import Path

from tula_cli.errors import OtherFormat
from tula_cli.run import files
from tula_cli.version import __version__

FORMAT = 1
"""Of the runs that this tula makes. A change that an older tula would trip over, or damage, makes it one more."""
OLDEST = 1
"""The oldest format that this tula goes on with."""
_NAME = "format"


def write_format(run: Path) -> None:
    """Write down the format of a new run, and which tula made it.

    Raises:
        TulaError: it cannot be written.
    """
    files.write_atomic(run / _NAME, f"{FORMAT} tula {__version__}\n")


def require_known_format(run: Path) -> None:
    """See that a run is in a format that this tula reads. One that does not say is of the first, or is yet to be made.

    Raises:
        OtherFormat: it is not.
        BadMeasurements: the file that tells is damaged.
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
