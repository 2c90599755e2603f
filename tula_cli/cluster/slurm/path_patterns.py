"""What SLURM puts something else for in the path of a job's files: %j is the job's id."""

import re
from pathlib import Path

from tula_cli.errors import SpecError

_OF_SLURM = re.compile(r"[%\\]")


def require_plain_path(run: Path) -> None:
    """See that the files of a run's jobs would be where tula looks for them.

    Args:
        run: the run directory. SLURM knows many patterns, by its version, and takes `\\` for the end of them.

    Raises:
        SpecError: something in the path would be replaced.
    """
    path = str(run.resolve())
    match = _OF_SLURM.search(path)
    if match is None:
        return
    pattern = path[match.start() : match.start() + 2]
    raise SpecError(
        f"the run directory {path} has {pattern} in its path, for which SLURM would put something else (as it puts a job's id for"
        " %j)",
        "choose another folder with --run-dir, or rename that one",
    )
