"""`tula export`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tula_cli.cli.runs import ExistingRun
from tula_cli.cli.waiting import follow_work
from tula_cli.entry_points import find_extra
from tula_cli.errors import SpecError
from tula_cli.options import ExportRequest, Trackers
from tula_cli.show.screen import Screen

if TYPE_CHECKING:
    from tula_cli.services.document import Document, ReportPackage


def export(
    screen: Screen,
    chosen: ExistingRun,
    to: Trackers = (),
    *,
    request: ExportRequest,
) -> None:
    """Send results to MLflow, Weights & Biases or TensorBoard.

    Sends parameters, probes, the recommendation and trainings; results that were sent before are not sent again.
    """
    from tula_cli.extras.trackers import export as service
    from tula_cli.extras.trackers import view
    from tula_cli.extras.trackers.export import write_report_files

    run = chosen.find(screen)
    trackers = service.list_requested_trackers(run.read_spec(), list(to), uri=request.uri, project=request.project)
    reports = partial(write_report_files, page=_load_page_renderer())
    results = follow_work(
        screen, service.export_run(run, trackers, follow=request.follow, every=request.every, reports=reports)
    )
    screen.answer(results, view.describe_exports(results))
    service.require_sent(results)


def _load_page_renderer() -> "Callable[[Document], str] | None":
    """Return the renderer of a report's page; None if pages cannot be drawn, so that at most Markdown is sent."""
    package: ReportPackage | None = find_extra("report")
    if package is None:
        return None
    try:
        package.require_page_library()
    except SpecError:
        return None
    return package.render_page
