"""Synchronise one run with one tracker: send what is new since the last update, and record what was sent."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli.cluster.decisions import resumes_elsewhere
from tula_cli.errors import TrackerError
from tula_cli.extras.trackers import destination as state
from tula_cli.extras.trackers.destination import (
    Destination,
    Exporter,
    ExportRecord,
    Point,
    RunExportRecord,
    State,
    TrackedRun,
)
from tula_cli.extras.trackers.payload import (
    RunPayload,
    collect_points,
    make_probe_payload,
    make_run_payload,
    make_training_payload,
    read_environment,
    with_steps,
)
from tula_cli.run.directory import Run
from tula_cli.run.files import make_folder, write_error
from tula_cli.run.lock import SubmissionLock
from tula_cli.run.owner import require_own
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.snapshot import Snapshot

_AT_ONCE = 2000
"""Number of points that are sent before this is recorded."""
FILES = ("recommended.yaml", "results.csv")
"""Files of a run that are sent unchanged."""


@dataclass
class SentCounts:
    """The number of values sent in one update."""

    runs: int = 0  # that are new at the tracker
    points: int = 0
    files: int = 0

    def __add__(self, other: "SentCounts") -> "SentCounts":
        return SentCounts(self.runs + other.runs, self.points + other.points, self.files + other.files)


@dataclass
class Session:
    """A run that is sent to a tracker, one update after another.

    Args:
        run: the run of one hardware.
        name: name of the run at the tracker.
        destination: the tracker.
        reports: writes the report and returns its files, to send in addition to those of the run; called in updates
            while no job is running.
    """

    run: Run
    name: str
    destination: Destination
    reports: Callable[[Run], tuple[Path, ...]] = lambda _: ()
    _exporter: Exporter | None = None
    _open: dict[str, TrackedRun] = field(default_factory=dict)
    _sent: ExportRecord = field(init=False)
    _ended: dict[str, tuple[State, float]] = field(default_factory=dict)
    _lock: SubmissionLock = field(init=False)

    def __post_init__(self) -> None:
        self._sent = self._read()
        self._lock = SubmissionLock(self.record.with_suffix(".lock"))

    @property
    def record(self) -> Path:
        return self.destination.record(self.run.path)

    @property
    def runs(self) -> dict[str, RunExportRecord]:
        """Return the sent values, by the keys of the runs at the tracker."""
        return dict(self._sent.runs)

    def _read(self) -> ExportRecord:
        place = self.destination
        parts = (
            None if place.gone else state.read(self.record)
        )  # what was sent to a place that is gone is to be sent again
        new = ExportRecord(to=place.to, uri=place.uri, project=place.project)
        return new if parts is None else parts.model_copy(update={"uri": place.uri})

    @contextlib.contextmanager
    def held(self) -> Iterator[str]:
        """Lock the export of this run to the tracker; yield the owner if another process has the lock, else ""."""
        require_own(self.run.path)
        try:
            make_folder(self.record.parent)
        except OSError as error:
            raise write_error(self.record.parent, error) from error
        owner = (
            self._lock.acquire() and self._lock.acquire()
        )  # the first takes over what a process that ended left behind
        try:
            if not owner:
                self._sent = self._read()
            yield owner
        finally:
            if not owner:
                self._lock.release()

    # --- one look

    def look(self, *, active: bool) -> SentCounts:
        """Send what is new.

        Args:
            active: whether a job of the run is queued or running; if not, everything is sent, including final states.

        Raises:
            TrackerError: the tracker does not respond or refuses; values sent until then are recorded.
            TulaError: the run cannot be read or written.
        """
        try:
            return self._look(self.run.read(), active=active)
        except TrackerError as error:
            self._open, self._exporter = {}, None  # what is open there may be of no use any more
            self._sent = self._sent.model_copy(update={"problem": error.message})
            state.write(self.record, self._sent)
            raise

    def _look(self, look: Snapshot, *, active: bool) -> SentCounts:
        files = tuple(path for name in FILES if (path := look.path / name).is_file())
        if not active:  # a report on what goes on would be another one at each look
            files += self.reports(self.run)
        whole = make_run_payload(self.run, look, self.name, active=active, artifacts=files)
        if self._exporter is None:
            self._exporter = self.destination.exporter()
        self._lock.heartbeat()
        counted = self._settle(whole)
        parent = self._sent.runs["run"].id
        for result in look.results:
            counted += self._settle(make_probe_payload(result, self.name, parent, at=whole.ended))
            self._close_ended()
        for tasks in _list_trainings(look):
            facts = make_training_payload(look, tasks, self.name, parent, active=active and _is_moving(look, tasks))
            if facts.run.started:  # else it waits for its nodes
                counted += self._curves(look, facts, tasks[-1])  # first: what goes back takes away what comes after it
                counted += self._settle(facts)
                self._close_ended()
        self._close_ended()
        if self._sent.problem:
            self._keep(problem="")
        return counted

    def close(self) -> None:
        """Close every open run at the tracker in its current state."""
        for key in list(self._open):
            how, at = self._ended[key]
            self._open.pop(key).close(how, at=at)

    # --- one run at the tracker

    def _opened(self, facts: RunPayload) -> TrackedRun:
        key = facts.run.key
        if key not in self._open:
            assert self._exporter is not None
            known = self._sent.runs.get(key)
            newest = -1 if known is None else known.samples
            self._open[key] = self._exporter.open(
                facts.run,
                known=None if known is None else known.id,
                after=None if newest < 0 else newest,
            )
            if known is None:
                self._keep(key, RunExportRecord(id=self._open[key].id))
        return self._open[key]

    def _settle(self, facts: RunPayload) -> SentCounts:
        """Send parameters, tags, summary numbers and files, if any of them has changed."""
        key = facts.run.key
        known, settled = self._sent.runs.get(key), facts.digests()
        files = {path.name: state.compute_digest(path.read_bytes()) for path in facts.artifacts}
        self._ended[key] = (facts.state, facts.ended)
        if known is not None and known.settled == settled and known.artifacts == files:
            return SentCounts()
        run = self._opened(facts)
        before = self._sent.runs[key]
        changed = {name for name, value in settled.items() if before.settled.get(name) != value}
        if "params" in changed:
            run.params(facts.params)
        if "tags" in changed:
            run.tags(facts.tags)
        if "numbers" in changed:
            run.summary(facts.numbers, at=Point(before.samples, facts.ended, {}) if before.samples >= 0 else None)
        new = [path for path in facts.artifacts if before.artifacts.get(path.name) != files[path.name]]
        for path in new:
            run.artifact(path)
        self._keep(key, before.model_copy(update={"settled": settled, "artifacts": files}))
        return SentCounts(runs=int(known is None or not known.settled), files=len(new))

    def _close_ended(self) -> None:
        """Close the runs that have ended, so that the tracker need not keep them open."""
        for key in [key for key in self._open if self._ended[key][0] != "running"]:
            how, at = self._ended[key]
            self._open.pop(key).close(how, at=at)

    def _curves(self, look: Snapshot, facts: RunPayload, task: TrainTask) -> SentCounts:
        """Send the new points of a training."""
        key, files = facts.run.key, look.training(task.signature)
        known, whole = self._sent.runs.get(key) or RunExportRecord(id=""), facts.state != "running"
        self._ended[key] = (facts.state, facts.ended)
        rows = state.list_rows_to_send(files.metrics_path, whole=whole)
        starts = {float(row["time"]): int(row["samples"]) for row in rows if row["kind"] == "start"}
        went_back = min((samples for at, samples in starts.items() if at not in known.starts), default=known.samples)
        points = [item for item in collect_points(rows, batch=task.batch) if isinstance(item, Point)]
        if went_back >= known.samples and not any(point.samples > known.samples for point in points):
            return SentCounts()
        run, newest = self._opened(facts), known.samples
        for row in rows:
            if row["kind"] == "environment":
                run.params(read_environment(row))
        if went_back < newest and run.rewind(went_back):
            newest = went_back
        # a tracker that keeps what it has is sent what goes beyond that; steps are read after the rows, which come after them
        points = with_steps([point for point in points if point.samples > newest], files.steps(), after=newest)
        update = {"starts": tuple(sorted({*known.starts, *starts})), "samples": newest}
        self._keep(key, self._sent.runs[key].model_copy(update=update))
        for begin in range(0, len(points), _AT_ONCE):
            some = points[begin : begin + _AT_ONCE]
            run.points(some)
            self._keep(key, self._sent.runs[key].model_copy(update={"samples": some[-1].samples}))
            self._lock.heartbeat()
        return SentCounts(points=len(points))

    def _keep(self, key: str = "", known: RunExportRecord | None = None, **update: str) -> None:
        """Record what was sent."""
        runs = {**self._sent.runs, key: known} if known is not None else self._sent.runs
        self._sent = self._sent.model_copy(update={"runs": runs, **update})
        state.write(self.record, self._sent)


def _list_trainings(look: Snapshot) -> list[list[TrainTask]]:
    """Return the tasks of each training, first attempt first."""
    tasks_by_signature = defaultdict[str, list[TrainTask]](list)
    for task in look.train_tasks:
        tasks_by_signature[task.signature].append(task)
    return [sorted(tasks, key=lambda task: task.attempt) for tasks in tasks_by_signature.values()]


def _is_moving(look: Snapshot, tasks: Sequence[TrainTask]) -> bool:
    """Return whether a training may continue while jobs of its run are active: it has no outcome that is final.

    A relaunch is recorded before the end of the attempt that it follows.
    """
    newest = tasks[-1]
    attempts = look.training(newest.signature).attempts()
    if not attempts or attempts[-1].outcome is None or attempts[-1].task != newest.id:
        return True
    last_attempt = attempts[-1]
    undecided = last_attempt.decision is None and last_attempt.outcome in ("signal", "disk")
    return (undecided or resumes_elsewhere(last_attempt, newest.spec.cluster)) and not look.cancelled_by(newest.job)
