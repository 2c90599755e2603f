"""The format of a run directory.

An unknown format is reported, and the directory is not changed. Results of an older format are read, but nothing is
started or continued among them.
"""

import re
import shlex
from pathlib import Path

from tula_cli.errors import BadMeasurements, OtherFormat
from tula_cli.run import files
from tula_cli.version import RUN_FORMAT, __version__

OLDEST_READABLE_FORMAT = 1
"""The oldest format whose results this version of tula reads."""
_FORMAT_FILE = "format"


def write_format(run: Path) -> None:
    """Record the format of a new run and the version of tula that created it.

    Raises:
        TulaError: it cannot be written.
    """
    files.write_file_atomically(run / _FORMAT_FILE, f"{RUN_FORMAT} tula {__version__}\n")


def require_known_format(run: Path) -> tuple[int, str]:
    """Check that a run is in a format that this version reads, or does not exist yet; return as `_read_format` does.

    Raises:
        OtherFormat: the format is not supported.
        BadMeasurements: the format file is damaged.
        TulaError: it cannot be read.
    """
    number, creator = _read_format(run)
    if (run / "types").is_dir() or (run / "lengths").is_dir():
        raise OtherFormat(
            f"the run {run}{creator} contains the measurements of several node types or text lengths, for which"
            " this version of tula makes separate runs; the run was not changed",
            "measure the job again: tula profile job.yaml",
        )
    if OLDEST_READABLE_FORMAT <= number <= RUN_FORMAT:
        return number, creator
    known = f"{OLDEST_READABLE_FORMAT} to {RUN_FORMAT}"
    raise OtherFormat(
        f"the run {run}{creator} has format {number}, but tula {__version__} reads formats {known}; the run was not changed",
        f"use {'a newer' if number > RUN_FORMAT else 'the older'} tula, also in the environment of the jobs",
    )


def require_current_format(run: Path) -> None:
    """Check that this version may submit, run and continue jobs of a run: it has the current format, or does not exist yet.

    Raises:
        OtherFormat: the run has another format.
        BadMeasurements: the format file is damaged.
        TulaError: it cannot be read.
    """
    number, creator = require_known_format(run)
    if number < RUN_FORMAT and (run / "spec.yaml").exists():
        raise OtherFormat(
            f"the run {run}{creator} is in format {number}: tula {__version__} reads its results, but starts and continues"
            " no jobs in it",
            f"use the version of tula that made the run, or start a new run of format {RUN_FORMAT} with tula profile job.yaml or tula train job.yaml",
        )


def _read_format(run: Path) -> tuple[int, str]:
    """Return the format of a run (1 without a format file), and a phrase with the version that made it, or empty."""
    path = run / _FORMAT_FILE
    try:
        text = files.read_content(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return 1, ""
    match = re.fullmatch(r"([0-9]{1,9})(?: (tula [\w.+-]{1,40}))?", text)
    if match is None:
        raise BadMeasurements(
            f"{path} is damaged: it does not contain the number of a run format",
            "do not delete this file: a run without it counts as format 1. If this version of tula made the run, restore it:"
            f" echo {RUN_FORMAT} > {shlex.quote(str(path))}",
        )
    return int(match[1]), f", made by {match[2]}," if match[2] else ""
