"""Sending runs to trackers (MLflow, Weights & Biases, TensorBoard): the interface of the optional package that does it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from tula_cli.entry_points import load_extra
from tula_cli.errors import SpecError
from tula_cli.options import ExportRequest
from tula_cli.run.directory import Run
from tula_cli.services.events import Event, WarningEvent, Work

FOLDER = "exports"
"""Folder of a run with the records of what was sent, and the files of trackers that need no server."""


@dataclass(frozen=True)
class ExportResult:
    """The values sent to one tracker."""

    to: str
    uri: str
    project: str
    runs: int  # runs on the tracker: one for the run and one per training
    new_runs: int
    new_points: int
    files: int  # files sent in this call
    problem: str = ""  # why the export stopped; empty if all was sent
    hint: str = ""  # what to do about it
    offline: bool = False  # W&B offline mode: the data is in a folder and needs `wandb sync`


class TrackersPackage(Protocol):
    """The optional package `trackers` (`extras/trackers`)."""

    @property
    def command(self) -> Callable[..., None]:
        """The function of `tula export`."""

    def export(
        self,
        runs: Sequence[Run],
        to: Sequence[str],
        request: ExportRequest,
    ) -> Work[tuple[ExportResult, ...]]:
        """Send new values of the runs of a job, with their reports as Markdown, to trackers.

        Args:
            to: trackers or import strings; empty for those of section export.
            request: the destination, and whether to follow.

        Raises:
            SpecError: no tracker is named and the job has none, or the arguments are not compatible.
            TrackerError: not all could be sent.
        """

    def export_while_waiting(self, run: Run, jobs: Sequence[str] | None, waiting: Iterable[Event]) -> Iterator[Event]:
        """Yield the events of waiting for jobs (None: trainings), and the warnings of exporting the run meanwhile."""


def load_trackers_package() -> TrackersPackage:
    """Return package `trackers`.

    Raises:
        SpecError: it is not installed.
    """
    return cast(TrackersPackage, load_extra("trackers"))


def export_while_waiting(run: Run, jobs: Sequence[str] | None, waiting: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of waiting for jobs, and export the run meanwhile if its job file has a section export.

    Args:
        jobs: ids of these jobs; None for trainings, of which some may not be submitted yet.
    """
    if not run.spec.export:
        yield from waiting
        return
    try:
        package = load_trackers_package()
    except SpecError as error:
        yield WarningEvent(f"export: {error.message}; {error.hint}")
        yield from waiting
        return
    yield from package.export_while_waiting(run, jobs, waiting)
