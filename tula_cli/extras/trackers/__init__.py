"""Sending runs to trackers: `tula export`, commands that wait for jobs, and trainings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tula_cli.options import ExportRequest
    from tula_cli.run.directory import Run
    from tula_cli.services.events import Event, Work
    from tula_cli.services.tracking import ExportResult


class Trackers:
    """This package as the core uses it: a `TrackersPackage`."""

    @property
    def command(self) -> Callable[..., None]:
        from tula_cli.extras.trackers.export import export

        return export

    def export(
        self, runs: "Sequence[Run]", to: Sequence[str], request: "ExportRequest"
    ) -> "Work[tuple[ExportResult, ...]]":
        from tula_cli.extras.trackers.export import export_to_requested_trackers, require_all_sent

        results = yield from export_to_requested_trackers(runs, to, request)
        require_all_sent(results)
        return results

    def export_while_waiting(
        self, run: "Run", jobs: Sequence[str] | None, waiting: "Iterable[Event]"
    ) -> "Iterator[Event]":
        from tula_cli.extras.trackers.export import export_while_waiting

        return export_while_waiting(run, jobs, waiting)


package = Trackers()
