"""`tula export`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tula_cli.cli.runs import ExistingRun
from tula_cli.cli.waiting import follow_work
from tula_cli.errors import SpecError
from tula_cli.options import ExportRequest, Trackers
from tula_cli.show import export as show_export
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.services.reporting.document import Document


def export(
    screen: Screen,
    chosen: ExistingRun,
    to: Trackers = (),
    *,
    request: ExportRequest,
) -> None:
    """Send a run's parameters, probes, recommendation and trainings to MLflow, Weights & Biases or TensorBoard.

    What was sent before is not sent again.
    """
    from tula_cli.services.exporting import export as service
    from tula_cli.services.exporting.export import write_report_files

    run = chosen.find(screen)
    trackers = service.list_requested_trackers(run.spec(), list(to), uri=request.uri, project=request.project)
    reports = partial(write_report_files, page=_load_page_renderer())
    results = follow_work(
        screen, service.export_run(run, trackers, follow=request.follow, every=request.every, reports=reports)
    )
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
