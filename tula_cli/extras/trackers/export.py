"""Send a run to trackers, once or while its jobs run."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from tula_cli import words
from tula_cli.cluster import launcher
from tula_cli.entry_points import find_extra
from tula_cli.errors import Interruption, SpecError, TrackerError
from tula_cli.extras.trackers.destination import Destination, resolve_destination
from tula_cli.extras.trackers.tracker_sync import SentCounts, Session
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import write_atomic
from tula_cli.run.jobfile import list_variants_with_data
from tula_cli.services import status
from tula_cli.services.document import Document, ReportPackage
from tula_cli.services.events import Event, Note, WarningEvent, Work
from tula_cli.services.tracking import FOLDER, ExportResult
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Export

# --- The report as files

_TOLD_FROM = ("recommendation.json", "results/*.json", "train/*/result.json", "train/*/summary.json", "comparison.json")


def write_report_files(run: Run, *, page: Callable[[Document], str] | None = None) -> tuple[Path, ...]:
    """Write the report if results of the run are newer than it, and return its files.

    There are none for a run without results, and without the optional package that builds reports.

    Args:
        run: the run of one hardware.
        page: renders the HTML page; None for Markdown only.

    Raises:
        TulaError: a record of the run cannot be read, or the report cannot be written.
    """
    folder = run.path / FOLDER
    wanted = [folder / "report.md", *([folder / "report.html"] if page else [])]
    newest = max(_list_source_times(run.path), default=None)
    package: ReportPackage | None = find_extra("report")
    if newest is None or package is None:
        return ()
    if any(not path.is_file() or path.stat().st_mtime < newest for path in wanted):
        document = package.build(run, run.spec, now=time.time())
        render_markdown = partial(package.render_text, form="markdown")
        for path, form in zip(wanted, (render_markdown, page), strict=False):
            if form is not None:
                write_atomic(path, form(document))
    return tuple(wanted)


def _list_source_times(run: Path) -> Iterator[float]:
    for pattern in _TOLD_FROM:
        yield from (path.stat().st_mtime for path in run.glob(pattern))


# --- Export

POLL_INTERVAL = 30.0
"""Seconds between two polls of the run, unless `tula export --every` sets another interval."""

LONGEST_PAUSE = 600.0
"""Maximum seconds between two attempts to reach a tracker that does not respond."""


@dataclass
class _TrackerTarget:
    """A tracker and the parts of the run that are sent there."""

    place: Destination
    sessions: list[Session]
    every: float
    counted: SentCounts
    problem: str = ""
    again: float = 0.0  # moment of the next look
    pause: float = 0.0

    def look(self, active: Callable[[Run], bool]) -> Iterator[Event]:
        """Send what is new; an error is reported only once."""
        try:
            for session in self.sessions:
                seen_now = session.look(active=active(session.run))
                self.counted = self.counted + seen_now
            self.problem, self.pause = "", self.every
        except TrackerError as error:
            if error.message != self.problem:
                yield WarningEvent(f"{error.message}; {error.hint}" if error.hint else error.message)
            self.problem, self.pause = error.message, min(LONGEST_PAUSE, 2 * max(self.pause, self.every))

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    @property
    def exported(self) -> ExportResult:
        runs = sum(len(session.runs) for session in self.sessions)
        place, counted = self.place, self.counted
        return ExportResult(
            to=place.to,
            uri=place.uri,
            project=place.project,
            runs=runs,
            new_runs=counted.runs,
            new_points=counted.points,
            files=counted.files,
            problem=self.problem,
            offline=place.offline,
        )


def require_sent(exporteds: Iterable[ExportResult]) -> None:
    """Raise TrackerError if something could not be sent to a tracker."""
    if failed := [exported for exported in exporteds if exported.problem]:
        raise TrackerError(
            f"not all was sent to {', '.join(result.to for result in failed)}: {failed[0].problem}",
            "the same command sends what was missed",
        )


def list_requested_trackers(
    spec: JobSpec, to: Sequence[str], *, uri: str | None, project: str | None, by: str | None = None
) -> tuple[Export, ...]:
    """Return the requested trackers: those of the command line, or else those of the job file.

    Args:
        spec: the job.
        to: trackers or import strings, as named on the command line.
        uri: address of the named tracker.
        project: project at the named tracker.
        by: only trackers that are sent to by commands, or only those sent to by jobs.

    Raises:
        SpecError: no tracker is named and the job has none, or the arguments are not compatible.
    """
    if not to:
        if uri is not None or project is not None:
            raise SpecError("--uri and --project need --to, the tracker that they are of")
        sections = tuple(section for section in spec.export if by in (None, section.by))
        if not sections and by is None:
            raise SpecError(
                "nothing says where to", "add --to mlflow, wandb or tensorboard, or a section export to job.yaml"
            )
        return sections
    if len(to) > 1 and (uri is not None or project is not None):
        raise SpecError("--uri and --project are of one tracker, and --to names several")
    try:
        return tuple(Export(to=section, uri=uri, project=project) for section in to)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"--to or --uri: {reason.removeprefix('to: ')}") from None


def export_run(
    run: RunDir,
    trackers: Iterable[Export],
    *,
    follow: bool = False,
    every: float | None = None,
    active: Callable[[Run], bool] | None = None,
    stop: Callable[[], bool] = lambda: False,
    reports: Callable[[Run], tuple[Path, ...]] = write_report_files,
    sleep: Callable[[float], None] = time.sleep,
) -> Work[tuple[ExportResult, ...]]:
    """Send new values of a run and its parts to trackers.

    Args:
        run: the run.
        trackers: the trackers to send to.
        follow: continue while jobs of the run are queued or running.
        every: seconds between two polls; None for `POLL_INTERVAL`.
        active: whether a job of a run is queued or running; None queries the scheduler.
        stop: whether to send once more and stop.
        reports: writes a report on a run and returns its files, which are sent if they have changed; called once no
            job is running.
        sleep: waits for some seconds.

    Raises:
        TulaError: the run cannot be read or written, or another process sends it to the same trackers.
        Interruption: Ctrl-C while following.
    """
    spec = run.read_spec()
    variants = list_variants_with_data(run, spec)
    asks = active or _ask_seldom(get_status)
    targets = [_open_target(run, spec, variants, tracker, every, reports) for tracker in trackers]
    with ExitStack() as stack:
        for target in targets:
            owners = [stack.enter_context(session.held()) for session in target.sessions]
            target.problem = next((_describe_other_process(target.place, owner) for owner in owners if owner), "")
        busy = [target for target in targets if target.problem]
        targets = [target for target in targets if not target.problem]
        if busy and not targets:
            raise TrackerError(busy[0].problem, "nothing is missed: the next export sends what is new")
        for target in busy:
            yield WarningEvent(target.problem)
        try:
            yield from _follow_looks(targets, variants, asks, follow=follow, stop=stop, sleep=sleep)
        except KeyboardInterrupt:
            raise Interruption("interrupted; what was sent is written down, and the next export goes on") from None
        finally:
            yield from _close_targets(targets)
    return tuple(target.exported for target in (*targets, *busy))


def _describe_other_process(place: Destination, owner: str) -> str:
    return f"{place.words}: another process sends this run there ({owner})"


def _follow_looks(
    targets: Sequence[_TrackerTarget],
    runs: Sequence[Run],
    asks: Callable[[Run], bool],
    *,
    follow: bool,
    stop: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Iterator[Event]:
    began, last_word = time.monotonic(), float("-inf")
    while True:
        last = stop() or not follow or not any(asks(run) for run in runs)
        now = time.monotonic()
        for target in targets:
            if last or now >= target.again:
                yield from target.look(asks)
                target.again = now + target.pause
        if last:
            yield from (WarningEvent(damage) for run in runs for damage in run.read().training_warnings)
            return
        if now - last_word >= words.compute_log_pause(now - began):
            last_word = now
            yield Note(_describe_counts(targets))
        _sleep_until(min(target.again for target in targets), stop, sleep)


def _sleep_until(moment: float, stop: Callable[[], bool], sleep: Callable[[float], None]) -> None:
    while not stop() and (remaining := moment - time.monotonic()) > 0:
        sleep(min(1.0, remaining))


def _close_targets(targets: Sequence[_TrackerTarget]) -> Iterator[Event]:
    for target in targets:
        try:
            target.close()
        except TrackerError as error:
            if not target.problem:
                target.problem = error.message
                yield WarningEvent(error.message)


def _describe_counts(targets: Sequence[_TrackerTarget]) -> str:
    return "; ".join(
        f"{words.format_count(target.counted.points, 'point')} {'written for' if target.place.offline else 'sent to'} {target.place.to}"
        for target in targets
    )


def _open_target(
    run: RunDir,
    spec: JobSpec,
    variants: Sequence[Run],
    export: Export,
    every: float | None,
    reports: Callable[[Run], tuple[Path, ...]],
) -> _TrackerTarget:
    place = resolve_destination(
        export.to, uri=export.uri, project=export.project, run=run.path.absolute(), job=spec.name
    )
    sessions = [Session(variant, _make_name(run, variant), place, reports) for variant in variants]
    return _TrackerTarget(place, sessions, every or POLL_INTERVAL, SentCounts())


def _make_name(run: RunDir, variant: Run) -> str:
    return run.id if variant.name is None else f"{run.id}-{variant.name}"


def get_status(run: Run) -> bool:
    """Return whether a job of a run is queued or running, as the scheduler reports it."""
    own_launcher = launcher.make_launcher(run.spec, submits=False)
    return status.run_status(run, own_launcher, now=time.time()).active()


def _ask_seldom(ask: Callable[[Run], bool]) -> Callable[[Run], bool]:
    """Return the same check, which queries the scheduler no more often than `tula status --watch`."""
    known: dict[Path, tuple[float, bool]] = {}

    def asked_of(run: Run) -> bool:
        at, answer = known.get(run.path, (float("-inf"), False))
        pause = run.spec.cluster.backend.poll[0]
        if time.monotonic() - at >= pause:
            at, answer = time.monotonic(), ask(run)
            known[run.path] = at, answer
        return answer

    return asked_of
