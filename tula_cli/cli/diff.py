"""`tula diff`."""

from pathlib import Path
from typing import Annotated

import typer

from tula_cli.cli.runs import find_run
from tula_cli.cli.waiting import warn_all
from tula_cli.options import ROOT, Root
from tula_cli.show.screen import Screen


def diff(
    screen: Screen,
    a: Annotated[Path, typer.Argument(metavar="A", readable=False, help="A run: its folder, or its name.")],
    b: Annotated[Path, typer.Argument(metavar="B", readable=False, help="The run to hold against it.")],
    root: Root = ROOT,
) -> None:
    """Tell what is different between two runs: job, code, environment, step times beyond noise, trainings.

    Whatever differs, the exit code is 0; --json has it in `data`.
    """
    from tula_cli.services.diff import compare_runs
    from tula_cli.show.diff import render_difference

    before, after = find_run(screen, a, root), find_run(screen, b, root)
    screen.run_id = before.id
    run_difference = compare_runs(before, after)
    screen.answer(run_difference, render_difference(run_difference))
    warn_all(screen, run_difference.warnings)
