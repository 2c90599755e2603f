"""`tula diff` from Python."""

from pathlib import Path

from tula_cli.run.directory import RunDir
from tula_cli.services.api.calls import ROOT
from tula_cli.services.api.handles import Run
from tula_cli.services.diff import RunDifference, compare_runs


def diff(before: str | Path | Run, after: str | Path | Run, *, root: str | Path = ROOT) -> RunDifference:
    """Tell what is different between two runs: `tula diff`. Nothing is written.

    Args:
        before: A: a run, the path of its folder, or its name under `root`.
        after: B, alike.
        root: where runs are kept.

    Returns:
        `.headline` is the answer in a line or two, `.same` whether nothing differs, `.frame()` a table of step times.

    Raises:
        SpecError: there is no such run, or both are the same one.
        BadMeasurements: a record of theirs is damaged.

    Example:
        >>> print(*tula.diff("digits-1f0c5b7e", "digits-9a4e02cd").headline, sep="\\n")
    """
    return compare_runs(_as_run_directory(before, Path(root)), _as_run_directory(after, Path(root)))


def _as_run_directory(named: str | Path | Run, root: Path) -> RunDir:
    if isinstance(named, Run):
        return named.directory
    path = Path(named)
    inside = root / path
    return RunDir.open((path if path.exists() or not inside.is_dir() else inside).absolute())
