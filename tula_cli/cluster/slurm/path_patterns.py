"""What SLURM and submitit put something else for in the path of a job's files: %j is the job's id."""

import re
from pathlib import Path

from tula_cli.errors import SpecError

_OF_SUBMITIT = re.compile(r"%[jtAa]")
_OF_SLURM = re.compile(r"[%\\]")


def require_plain(run: Path, *, slurm: bool) -> None:
    """See that the files of a run's jobs would be where tula looks for them.

    Args:
        run: the run directory.
        slurm: whether SLURM opens them, which knows many more patterns, by its version, and takes `\\` for the end of them.

    Raises:
        SpecError: something in the path would be replaced.
    """
    path = str(run.resolve())
    found = (_OF_SLURM if slurm else _OF_SUBMITIT).search(path)
    if found is None:
        return
    who, what = "SLURM" if slurm else "submitit", path[found.start() : found.start() + 2]
    raise SpecError(
        f"the run directory {path} has {what} in its path, for which {who} would put something else (as it puts a job's id for"
        " %j)",
        "choose another folder with --run-dir, or rename that one",
    )
