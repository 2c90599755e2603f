"""`tula export`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tula_cli.cli.options import RUNS, MaybeRun, Root, RunArgument
from tula_cli.cli.runs import find_run
from tula_cli.cli.waiting import follow_work
from tula_cli.errors import SpecError
from tula_cli.show import export as show_export
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.services.reporting.document import Document


def export(
    screen: Screen,
    target: RunArgument = None,
    named: MaybeRun = None,
    root: Root = RUNS,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="mlflow, wandb, tensorboard, or package.module:callable; else those of section export. May be repeated.",
        ),
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE", help="A tracking URI, an address, or a folder; else the tracker's own, or the run."
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="MLflow's experiment, W&B's project; else the job's name.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while jobs run.")] = False,
    every: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Between two looks (default: 30).")
    ] = None,
) -> None:
    """Send a run's parameters, probes, recommendation and trainings to MLflow, Weights & Biases or TensorBoard.

    What was sent before is not sent again.
    """
    from tula_cli.services.exporting import export as service
    from tula_cli.services.exporting.export import write_report_files

    run = find_run(screen, target or named, root)
    trackers = service.list_requested_trackers(run.spec(), to or [], uri=uri, project=project)
    reports = partial(write_report_files, page=_load_page_renderer())
    results = follow_work(screen, service.export_run(run, trackers, follow=follow, every=every, reports=reports))
    screen.answer(results, show_export.describe_exports(results))
    service.require_sent(results)


def _load_page_renderer() -> "Callable[[Document], str] | None":
    """Return the renderer of a report's page; None if matplotlib is unusable, so that only Markdown is sent."""
    from tula_cli.show.html.figures import require_matplotlib
    from tula_cli.show.html.page import render_page

    try:
        require_matplotlib()
    except SpecError:
        return None

    return render_page
