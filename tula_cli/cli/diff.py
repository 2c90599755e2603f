"""`tula diff`."""

from pathlib import Path
from typing import Annotated

import typer

from tula_cli.cli.runs import find_runs
from tula_cli.options import DEFAULT_RUNS_FOLDER, Root
from tula_cli.show.screen import Screen


def diff(
    screen: Screen,
    a: Annotated[
        Path, typer.Argument(metavar="RUN_A", readable=False, help="Name, folder or job file of the first run.")
    ],
    b: Annotated[
        Path, typer.Argument(metavar="RUN_B", readable=False, help="Name, folder or job file of the second run.")
    ],
    root: Root = DEFAULT_RUNS_FOLDER,
) -> None:
    """Show the differences between two runs.

    Compares job, code, environment and step times. Differences of step times within the measurement noise are not
    shown. The exit code is 0 even if the runs differ.
    """
    from tula_cli.services.diff import choose_run, compare_runs
    from tula_cli.show.diff import render_difference

    before, after = (choose_run(find_runs(screen, [named], root)) for named in (a, b))
    screen.run_id = before.id
    run_difference = compare_runs(before, after)
    screen.print_answer(run_difference, render_difference(run_difference))
    screen.print_warnings(run_difference.warnings)
