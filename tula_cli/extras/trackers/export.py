"""Send a run to trackers: once, while its jobs run, or while a command waits for them."""

import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tula_cli.cli.runs import ExistingRun
from tula_cli.cli.waiting import follow_work
from tula_cli.cluster.decisions import is_resumed_by_next_job
from tula_cli.entry_points import load_extra_if_installed
from tula_cli.errors import Interruption, SpecError, TrackerError, TulaError
from tula_cli.extras.trackers.destination import Destination, Exporter, TrackedRun, resolve_destination
from tula_cli.extras.trackers.payload import RunPayload, make_run_payload, make_training_payload
from tula_cli.options import ExportRequest, Trackers
from tula_cli.run.directory import Run
from tula_cli.run.files import read_record, write_file_atomically, write_record
from tula_cli.run.job_runs import list_runs_with_data
from tula_cli.run.lock import FolderLock
from tula_cli.run.owner import require_ownership
from tula_cli.run.records.base import Record
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.snapshot import Snapshot
from tula_cli.services.document import ReportPackage
from tula_cli.services.events import Event, Note, WarningEvent, Work
from tula_cli.services.status import query_run_status
from tula_cli.services.tracking import FOLDER, ExportResult
from tula_cli.show.screen import Screen
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Export
from tula_cli.words import compute_seconds_to_next_progress_line, format_count

# --- Files to send

SENT_FILES = ("recommended.yaml", "results.csv")
"""Files of a run that are sent unchanged."""
_REPORTED_FILES = (
    "recommendation.json",
    "results/*.json",
    "train/*/result.json",
    "train/*/summary.json",
    "comparison.json",
)


def write_report_file(run: Run) -> tuple[Path, ...]:
    """Write the report as Markdown if results of the run are newer than it, and return its file.

    There is none for a run without results, and without the optional package that builds reports.

    Raises:
        TulaError: a record of the run cannot be read, or the report cannot be written.
    """
    path = run.path / FOLDER / "report.md"
    newest = max((file.stat().st_mtime for pattern in _REPORTED_FILES for file in run.path.glob(pattern)), default=None)
    package: ReportPackage | None = load_extra_if_installed("report")
    if newest is None or package is None:
        return ()
    if not path.is_file() or path.stat().st_mtime < newest:
        write_file_atomically(path, package.render_text(package.build([run], now=time.time()), "markdown"))
    return (path,)


# --- Export of one run to one tracker


class SentRun(Record):
    """The data of a run or a training that a tracker has received, as one run of its own."""

    id: str  # id at the tracker
    digest: str = ""  # digest of its settings, tags, single numbers, files and state
    samples: int = -1  # samples of the newest point sent; -1: none


class ExportRecord(Record):
    """The destination of a run, and what was sent there."""

    to: str
    uri: str
    project: str
    runs: dict[str, SentRun] = {}  # by key within tula's run


_RECORD = TypeAdapter(ExportRecord)


LOCK_POLL_SECONDS = 0.5
"""Seconds between two attempts to lock the record of a destination."""


class Session:
    """A run of one hardware that is sent to a tracker, one update after another.

    Several commands may send the same run: each update locks the record and starts from what the others have sent.

    Args:
        reports: writes the report and returns its files, to send in addition to those of the run; called in updates
            while no job is running.

    Raises:
        NotYours: the run belongs to another user.
    """

    def __init__(self, run: Run, destination: Destination, reports: Callable[[Run], tuple[Path, ...]]) -> None:
        require_ownership(run.path)
        self.run, self.destination, self.reports = run, destination, reports
        self.path = run.path / FOLDER / destination.record_path.name
        self.sent = self._read_sent_runs()
        self.problem = self.hint = ""  # why the newest update failed, and what to do; empty if it did not
        self.new_runs = self.new_points = self.files = 0
        self._exporter: Exporter | None = None
        self._open: dict[str, TrackedRun] = {}
        self._lock = FolderLock(self.path.with_suffix(".lock"))

    @property
    def result(self) -> ExportResult:
        return ExportResult(
            to=self.destination.to,
            uri=self.destination.uri,
            project=self.destination.project,
            runs=len(self.sent),
            new_runs=self.new_runs,
            new_points=self.new_points,
            files=self.files,
            problem=self.problem,
            hint=self.hint,
            offline=self.destination.is_offline,
        )

    def send_updates(self, *, active: bool) -> Iterator[WarningEvent]:
        """Send new values. If the tracker fails, values sent until then are recorded, and the error is reported once.

        If another command is sending the run, wait for it at the end; before the end, leave this update to it.

        Args:
            active: whether a job of the run is queued or running; if not, everything is sent, including final states.

        Raises:
            TulaError: the run cannot be read or written.
        """
        while self._lock.acquire():
            if active:
                return
            time.sleep(LOCK_POLL_SECONDS)
        problem = hint = ""
        try:
            self.sent = self._read_sent_runs()
            self._send_snapshot(self.run.read_snapshot(), active=active)
        except TrackerError as error:
            self._open, self._exporter = {}, None  # their connection may be lost
            problem, hint = error.message, error.hint
            if problem != self.problem:
                yield WarningEvent(f"{error.message}; {error.hint or _SEND_AGAIN_HINT}")
        finally:
            self._lock.release()
        self.problem, self.hint = problem, hint

    def _read_sent_runs(self) -> dict[str, SentRun]:
        record = read_record(self.path, _RECORD)
        return {} if record is None else record.runs

    def _send_snapshot(self, snapshot: Snapshot, *, active: bool) -> None:
        files = tuple(path for name in SENT_FILES if (path := snapshot.path / name).is_file())
        if not active:  # while jobs run, the report would change with each update
            files += self.reports(self.run)
        self._send_run(make_run_payload(self.run, snapshot, active=active, artifacts=files))
        parent = self.sent["run"].id
        for tasks in _list_trainings(snapshot):
            moving = active and _may_continue(snapshot, tasks)
            payload = make_training_payload(snapshot, tasks, self.run.id, parent, active=moving)
            if payload.run.started:  # a training that has not started has no values
                self._send_run(payload)

    def _send_run(self, payload: RunPayload) -> None:
        """Send new points, and all other values if one of them has changed; close the run if it has ended."""
        key, digest = payload.run.key, payload.compute_digest()
        known = self.sent.get(key, SentRun(id=""))
        points = [point for point in payload.points if point.samples > known.samples]
        changed = digest != known.digest
        if not changed and not points:
            return
        if key not in self._open:
            self._exporter = self._exporter or self.destination.make_exporter()
            with self.destination.convert_errors():
                self._open[key] = self._exporter.open(payload.run, known=known.id or None)
            self._record_run(key, known := known.model_copy(update={"id": self._open[key].id}))
        run, newest = self._open[key], points[-1].samples if points else known.samples
        with self.destination.convert_errors():
            run.points(points)
            # recorded at once, because the next calls may fail
            self._record_run(key, known := known.model_copy(update={"samples": newest}))
            if changed:
                run.params(payload.params)
                run.tags(payload.tags)
                run.summary(payload.numbers, samples=max(newest, 0))
                for path in payload.artifacts:
                    run.artifact(path)
            if payload.state != "running":  # close the run at the tracker
                self._open.pop(key).close(payload.state, at=payload.ended)
        self._record_run(key, known.model_copy(update={"digest": digest, "samples": newest}))
        self.new_runs += not known.digest
        self.new_points += len(points)
        self.files += len(payload.artifacts) if changed else 0

    def close(self) -> Iterator[WarningEvent]:
        """Close the runs at the tracker that continue later."""
        try:
            with self.destination.convert_errors():
                while self._open:
                    self._open.popitem()[1].close("running", at=time.time())
        except TrackerError as error:
            if not self.problem:
                self.problem, self.hint = error.message, error.hint
                yield WarningEvent(error.message)

    def _record_run(self, key: str, sent: SentRun) -> None:
        self.sent = {**self.sent, key: sent}
        tracker = self.destination
        record = ExportRecord(to=tracker.to, uri=tracker.uri, project=tracker.project, runs=self.sent)
        write_record(self.path, record)
        self._lock.renew()


def _list_trainings(snapshot: Snapshot) -> list[list[TrainTask]]:
    """Return the tasks of each training, first attempt first."""
    tasks_by_signature = defaultdict[str, list[TrainTask]](list)
    for task in snapshot.train_tasks:
        tasks_by_signature[task.signature].append(task)
    return [sorted(tasks, key=lambda task: task.attempt) for tasks in tasks_by_signature.values()]


def _may_continue(snapshot: Snapshot, tasks: Sequence[TrainTask]) -> bool:
    """Return whether a training may continue while jobs of its run are active: it has no outcome that is final.

    A relaunch is recorded before the end of the attempt that it follows.
    """
    newest = tasks[-1]
    attempts = snapshot.get_training(newest.signature).read_attempts()
    if not attempts or attempts[-1].outcome is None or attempts[-1].task != newest.id:
        return True
    last_attempt = attempts[-1]
    undecided = last_attempt.decision is None and last_attempt.outcome in ("signal", "disk")
    return (undecided or is_resumed_by_next_job(last_attempt)) and not snapshot.read_cancel_command(newest.job)


# --- Export of all runs to all trackers

_SEND_AGAIN_HINT = "run tula export to send the missing values"
POLL_INTERVAL = 30.0
"""Seconds between two updates, unless `tula export --every` sets another interval."""


def require_all_sent(results: Iterable[ExportResult]) -> None:
    """Raise TrackerError if something could not be sent to a tracker."""
    if failed := [result for result in results if result.problem]:
        raise TrackerError(
            f"some values were not sent to {', '.join(result.to for result in failed)}: {failed[0].problem}",
            failed[0].hint or "run the same command again to send the missing values",
        )


def export_to_requested_trackers(
    runs: Sequence[Run], to: Sequence[str], request: ExportRequest
) -> Work[tuple[ExportResult, ...]]:
    """Send new values of the runs of a job to the requested trackers; errors as of the functions that it calls."""
    trackers = list_requested_trackers(runs[0].spec, to, request)
    return export_runs(runs, trackers, follow=request.follow, every=request.every)


def list_requested_trackers(spec: JobSpec, to: Sequence[str], request: ExportRequest) -> tuple[Export, ...]:
    """Return the requested trackers: those named on the command line (`to`), or else those of the job file.

    Raises:
        SpecError: no tracker is named and the job has none, or the arguments are not compatible.
    """
    uri, project = request.uri, request.project
    if not to:
        if uri is not None or project is not None:
            raise SpecError(
                "[[--uri]] and [[--project]] are settings of one tracker, but no tracker is named",
                "name one with [[--to]], for example mlflow",
            )
        if not spec.export:
            raise SpecError(
                "no tracker was given",
                "name one with [[--to]] (mlflow, wandb or tensorboard), or add section export to job.yaml",
            )
        return tuple(spec.export)
    if len(to) > 1 and (uri is not None or project is not None):
        raise SpecError(
            "[[--uri]] and [[--project]] are settings of one tracker, but several are named",
            "name one tracker with [[--to]]",
        )
    try:
        return tuple(Export(to=section, uri=uri, project=project) for section in to)
    except ValidationError as error:
        first_error = error.errors()[0]
        reason = first_error["msg"].removeprefix("Value error, ")
        option = next(iter(first_error["loc"]), "to" if reason.startswith("to: ") else "uri")
        raise SpecError(f"[[--{option}]]: {reason.removeprefix(f'{option}: ')}") from None


def export_runs(
    runs: Sequence[Run],
    trackers: Iterable[Export],
    *,
    follow: bool = False,
    every: float | None = None,
    active: Callable[[Run], bool] | None = None,
    reports: Callable[[Run], tuple[Path, ...]] = write_report_file,
    sleep: Callable[[float], None] = time.sleep,
) -> Work[tuple[ExportResult, ...]]:
    """Send new values of the runs of a job to trackers.

    Args:
        follow: continue while jobs of the run are queued or running.
        every: seconds between two updates; None for `POLL_INTERVAL`, and at least as long as the scheduler's interval.
        active: whether a job of a run is queued or running; None queries the scheduler.
        reports: writes a report on a run and returns its files, which are sent if they have changed; called once no
            job is running.

    Raises:
        TulaError: the run cannot be read or written.
        Interruption: Ctrl-C while following.
    """
    runs = list_runs_with_data(runs)
    is_active = active or _has_active_jobs
    interval = max(every or POLL_INTERVAL, *(run.spec.cluster.backend.poll[0] for run in runs))
    sessions = [Session(run, resolve_destination(to, run), reports) for to in trackers for run in runs]
    began, last_note = time.monotonic(), float("-inf")
    try:
        while True:
            active_runs = {run.path for run in runs if is_active(run)}
            for session in sessions:
                yield from session.send_updates(active=session.run.path in active_runs)
            if not follow or not active_runs:
                break
            if (now := time.monotonic()) - last_note >= compute_seconds_to_next_progress_line(now - began):
                last_note = now
                yield Note("; ".join(map(_describe_sent_count, sessions)))
            sleep(interval)
        yield from (WarningEvent(damage) for run in runs for damage in run.read_snapshot().damage_warnings)
    except KeyboardInterrupt:
        raise Interruption("interrupted; the next export sends the missing values") from None
    finally:
        for session in sessions:
            yield from session.close()
    return tuple(session.result for session in sessions)


def export_while_waiting(run: Run, jobs: Sequence[str] | None, waiting: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of waiting for jobs, and send the run to the trackers of its job file between them.

    Probes on this machine are timed: their values are sent after the jobs are over, so that they share no cores.

    Args:
        jobs: ids of these jobs; None for trainings, of which some may not be submitted yet.
    """
    trains = jobs is None or any(task.job in jobs for task in run.read_snapshot().train_tasks)
    next_update = time.monotonic() if run.spec.cluster.backend.has_queue or trains else float("inf")
    try:
        sessions = [Session(run, resolve_destination(to, run), write_report_file) for to in run.spec.export]
    except TulaError as error:
        yield _make_warning(error)
        sessions = []
    for event in waiting:
        yield event
        if time.monotonic() >= next_update:
            yield from _send_updates_with_warnings(sessions, lambda _: True)
            next_update = time.monotonic() + POLL_INTERVAL
    yield from _send_updates_with_warnings(sessions, _has_active_jobs)
    for session in sessions:
        yield from session.close()


def _send_updates_with_warnings(sessions: Sequence[Session], active: Callable[[Run], bool]) -> Iterator[WarningEvent]:
    """Send new values; all errors are warnings, since the jobs of the command do not depend on it."""
    for session in sessions:
        try:
            for event in session.send_updates(active=active(session.run)):
                yield WarningEvent(f"export: {event.text}")
        except TulaError as error:
            yield _make_warning(error)


def _make_warning(error: TulaError) -> WarningEvent:
    return WarningEvent(f"export: {error.message}; {error.hint or _SEND_AGAIN_HINT}")


def _describe_sent_count(session: Session) -> str:
    verb = "written for" if session.destination.is_offline else "sent to"
    return f"{format_count(session.new_points, 'point')} {verb} {session.destination.to}"


def _has_active_jobs(run: Run) -> bool:
    return query_run_status(run).has_active_jobs()


def export(screen: Screen, chosen: ExistingRun, to: Trackers = (), *, request: ExportRequest) -> None:
    """Send results to MLflow, Weights & Biases or TensorBoard.

    Sends parameters, probes, the recommendation and trainings. Data that were sent before are not sent again.
    """
    results = follow_work(screen, export_to_requested_trackers(chosen.find_runs(screen), to, request))
    screen.print_answer(results, describe_exports(results))
    require_all_sent(results)


def describe_exports(results: Sequence[ExportResult]) -> Iterator[str]:
    """Yield two lines per tracker: what was sent, and where it can be viewed."""
    for result in results:
        counts = ((result.new_runs, "run"), (result.new_points, "point"), (result.files, "file"))
        new = ", ".join(format_count(count, noun) for count, noun in counts if count) or "nothing new"
        runs = format_count(result.runs, "run")
        if result.offline:
            failed = "; incomplete, because of a write error" if result.problem else ""
            yield f"{result.to} (offline): wrote {new}; {runs} in the folder{failed}; to send them, run"
        else:
            failed = "; incomplete, because of an error" if result.problem else ""
            yield f"{result.to}: sent {new}; {runs} stored there{failed}"
        yield f"  {_describe_destination(result)}"


def _describe_destination(result: ExportResult) -> str:
    """Return the command or address for viewing the exported data."""
    if result.to == "tensorboard":
        return f"tensorboard --logdir {shlex.quote(result.uri)}"
    if result.offline:
        return f"wandb sync {shlex.quote(result.uri)}/wandb/offline-run-*   (project {result.project})"
    if result.to == "mlflow" and result.uri.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {shlex.quote(result.uri)}   (experiment {result.project})"
    return f"{result.uri or result.to}   (project {result.project})"
