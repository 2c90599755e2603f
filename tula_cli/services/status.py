"""The progress of runs and their jobs, from the scheduler and their files; and the errors that exit reasons map to."""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tula_cli.cluster.decisions import is_resumed_by_next_job
from tula_cli.cluster.launcher import Launcher
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.diagnostics import Diagnostic
from tula_cli.host.failures import describe_advice
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory, Result
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.results import EvaluationRecord
from tula_cli.run.records.scripts import ResumeTestResult
from tula_cli.run.records.tasks import JobTask, ProbeTask, TrainTask, make_probe_id
from tula_cli.run.snapshot import Snapshot
from tula_cli.services.training_status import TrainingStatus, read_training_status
from tula_cli.spec.backend import get_backend
from tula_cli.spec.job import JobSpec
from tula_cli.words import format_count

JobState = Literal["queued", "running", "suspended", "held", "done", "failed", "diverged", "cancelled", "lost"]
ACTIVE_STATES: tuple[JobState, ...] = ("queued", "running", "suspended")

MAX_CLOCK_DIFFERENCE = 60.0
"""Seconds by which the clocks of two machines may differ."""


@dataclass(frozen=True)
class ProbeConfiguration:
    """A configuration that a job measures; `batch` is global."""

    nodes: int
    local_batch: int
    batch: int


@dataclass(frozen=True)
class ChainJobStatus:
    """One scheduler job of a chain whose jobs have different numbers of nodes (`train.ramp`)."""

    scheduler_id: str
    nodes: int
    batches: tuple[int, ...]  # global batches of the stages on this number of nodes


@dataclass(frozen=True)
class JobStatus:
    """The status of one job.

    `total` and `done` count its probes; for a training, a resume test or an evaluation, `total` is 1.
    """

    id: str
    kind: Literal["probe", "train", "rehearse", "evaluate", "rates"]
    scheduler: str  # "local", "slurm", or the import string of another
    scheduler_id: str
    nodes: int
    state: JobState
    reason: str
    starts_at: float | None  # Unix time at which a queued job is expected to start; None if unknown
    total: int
    done: int
    now: ProbeConfiguration | None  # the running or next probe; None if there is none
    elapsed: float | None  # seconds; None before it starts
    left: float | None  # estimated seconds; None if unknown
    node_hours: float
    node_hours_left: float | None
    links: tuple[ChainJobStatus, ...] = ()  # empty if all jobs of the chain have the same number of nodes
    hopeless: bool = False  # whether it is queued for a reason that waiting does not resolve
    compared: str = ""  # method, batch and seed, if it trains a row of a comparison


@dataclass(frozen=True)
class _JobProgress:
    total: int
    done: int
    now: ProbeConfiguration | None
    measured_at: float | None = None  # Unix time of the last measurement
    failed: tuple[str, ...] = ()  # messages of failed probes, which the next call repeats
    may_grow: bool = False  # whether the job itself decides on further probes

    @property
    def is_complete(self) -> bool:
        return self.done + len(self.failed) == self.total


def make_job_status(
    snapshot: Snapshot,
    job: Job,
    results: Mapping[str, Result],
    scheduler: SchedulerState,
    *,
    pace: float | None,
    training: TrainingStatus | None,
    now: float,
) -> JobStatus:
    """Return the status of a job from its files and the state that the scheduler reports.

    Args:
        results: results of the run's probes by id.
        pace: mean seconds per probe so far; None before the first probe.
        now: Unix time.
    """
    tasks = snapshot.list_tasks_of_job(job.id)
    attempts = snapshot.adjust_starts_to_file_clock(snapshot.list_attempts_of_job(job.id))
    progress = read_job_progress(snapshot, tasks, results)
    recent = [attempt for attempt in attempts if _belongs_to_submission(attempt, job)]
    state, reason = _determine_job_state(
        progress,
        recent,
        scheduler,
        tasks[-1].spec,
        cancelled=snapshot.read_cancel_command(job.id),
        now=now,
        grace=get_backend(job.scheduler).grace,
    )
    if scheduler.released and state in ("failed", "diverged", "lost"):
        reason = f"{reason}; {scheduler.released}"
    end = now if state in ("running", "suspended") else progress.measured_at
    if state not in ("running", "suspended"):
        attempts = snapshot.estimate_lost_attempt_ends(attempts)
    newest, nodes = tasks[-1], {task.id: task.nodes for task in tasks}
    remaining = _estimate_remaining_seconds(progress, training, pace=pace) if state in ACTIVE_STATES else None
    return JobStatus(
        id=job.id,
        kind=tasks[0].kind,
        scheduler=job.scheduler,
        scheduler_id=job.scheduler_id,
        nodes=newest.nodes,
        state=state,
        reason=reason,
        starts_at=scheduler.starts_at if state == "queued" else None,
        total=progress.total,
        done=progress.done,
        now=progress.now if state in ACTIVE_STATES else None,
        elapsed=sum(attempt.compute_duration_seconds(end) for attempt in attempts) if attempts else None,
        left=remaining,
        node_hours=sum(
            (nodes.get(job_attempt.task, job.nodes) + job_attempt.idle_nodes)
            * job_attempt.compute_duration_seconds(end)
            for job_attempt in attempts
        )
        / 3600,
        node_hours_left=None if remaining is None else newest.nodes * remaining / 3600,
        links=_list_chain_job_statuses(job, newest),
        hopeless=state == "queued" and scheduler.hopeless,
        compared=snapshot.cell_descriptions.get(newest.trained_signature, ""),
    )


def _list_chain_job_statuses(job: Job, task: JobTask) -> tuple[ChainJobStatus, ...]:
    """Return the scheduler jobs of a chain, with the batches of the stages that each one runs."""
    return tuple(
        ChainJobStatus(chain_job, nodes, tuple(stage.batch for stage in task.ramp_stages if stage.nodes == nodes))
        for chain_job, nodes in zip(job.links, job.link_nodes, strict=False)
    )


def _list_planned_probes(tasks: Iterable[ProbeTask]) -> dict[str, ProbeConfiguration]:
    """Return the probes of a job by their ids, in the order in which it runs them."""
    ranks = {(task.nodes, local): task.ranks for task in tasks for local in task.local_batches}
    return {
        make_probe_id(nodes, local): ProbeConfiguration(nodes, local, local * ranks[nodes, local])
        for nodes, local in sorted(ranks)
    }


def read_job_progress(snapshot: Snapshot, tasks: list[JobTask], results: Mapping[str, Result]) -> _JobProgress:
    newest = tasks[-1]
    probe_tasks = [task for task in snapshot.probe_tasks if task.job == newest.job]
    if not probe_tasks:
        return _JobProgress(total=1, done=int(_has_result(snapshot, newest)), now=None)
    probes = _list_planned_probes(probe_tasks)
    results_here = {id_: results[id_] for id_ in probes if id_ in results}
    failed = {id_: result.message for id_, result in results_here.items() if isinstance(result, Failed)}
    undone = [probe for id_, probe in probes.items() if id_ not in results_here or id_ in failed]
    return _JobProgress(
        total=len(probes),
        done=len(probes) - len(undone),
        now=undone[0] if undone else None,
        measured_at=max((r.measured_at for r in results_here.values() if isinstance(r, Measured)), default=None),
        failed=tuple(failed.values()),
        may_grow=probe_tasks[-1].bounds is not None,
    )


def _has_result(snapshot: Snapshot, task: JobTask) -> bool:
    if task.trained_signature:
        return snapshot.get_training(task.trained_signature).read_summary() is not None
    return RunDir(snapshot.path).is_finished(task, read=snapshot.read_record)


def _determine_job_state(
    progress: _JobProgress,
    attempts: list[Attempt],
    scheduler: SchedulerState,
    spec: JobSpec,
    *,
    cancelled: str,
    now: float,
    grace: float,
) -> tuple[JobState, str]:
    """Return a job's state and reason, by results, then cancellation, then the scheduler, then attempts."""
    live = scheduler.state in ("pending", "running")
    if progress.is_complete and not ((progress.failed or progress.may_grow) and live):
        return ("failed", progress.failed[0]) if progress.failed else ("done", "")
    if cancelled:
        return "cancelled", f"by {cancelled}"
    if scheduler.on_hold and attempts and attempts[-1].outcome == "disk":
        return "held", f"{attempts[-1].message}; {describe_advice('disk')}"
    if scheduler.state == "pending":
        return "queued", scheduler.reason
    if scheduler.state == "running":
        return "suspended" if scheduler.suspended else "running", scheduler.reason
    return _determine_state_from_attempts(progress, attempts, scheduler, spec, now=now, grace=grace)


def _determine_state_from_attempts(
    progress: _JobProgress,
    attempts: list[Attempt],
    scheduler: SchedulerState,
    spec: JobSpec,
    *,
    now: float,
    grace: float,
) -> tuple[JobState, str]:
    """Return the state and reason of a job with results missing that is not known to wait or run in the queue.

    Args:
        now: Unix time.
        grace: seconds until files written on another node are visible here.
    """
    last_attempt = attempts[-1] if attempts else None
    if last_attempt is not None and last_attempt.ended_at is not None:
        if scheduler.state == "unknown" and is_resumed_by_next_job(last_attempt):
            return "queued", scheduler.reason  # the next job of the chain resumes it
        measured = last_attempt.outcome == "done" or (last_attempt.outcome == "device_oom" and progress.now is not None)
        if measured and abs(now - last_attempt.ended_at) < grace:
            return "running", "the job has finished, but its results are not visible here yet"
        if measured:  # the supervisor has seen all results; network file systems may show them here later
            return "lost", f"finished, but only {progress.done} of {progress.total} results are visible here"
        if last_attempt.outcome == "diverged":
            return "diverged", f"{last_attempt.message}; {describe_advice('diverged', spec)}"
        if last_attempt.failure is not None and last_attempt.outcome == "device_fault":
            advice = describe_advice(last_attempt.failure, spec)
            return "failed", f"{last_attempt.message} on {last_attempt.failure.host or last_attempt.host}; {advice}"
        message = last_attempt.message or f"ended with {progress.done} of {progress.total} probes"
        who = spec.cluster.backend.title
        verdict = "" if scheduler.failed or not scheduler.reason else f" ({who}: {scheduler.reason})"
        return "failed", f"{message}{verdict}"
    if scheduler.state == "ended":
        return "lost", scheduler.reason or "ended without a message (possibly killed from outside)"
    if last_attempt is not None:
        return "running", scheduler.reason or "the scheduler does not know the job"
    return "queued", scheduler.reason or "the scheduler does not know the job"


def _belongs_to_submission(attempt: Attempt, job: Job) -> bool:
    """Return whether an attempt belongs to a job's last submission, by its allocation or else by its time."""
    return attempt.scheduler_id in job.scheduler_ids or attempt.started_at >= job.submitted_at - MAX_CLOCK_DIFFERENCE


def _estimate_remaining_seconds(
    progress: _JobProgress, training: TrainingStatus | None, *, pace: float | None
) -> float | None:
    if progress.now is None:
        return training.eta if training is not None else None
    return None if pace is None else pace * (progress.total - progress.done)


def compute_mean_probe_seconds(
    results: Iterable[Result], tasks: Iterable[ProbeTask], attempts: Iterable[Attempt]
) -> float | None:
    """Return the mean seconds per probe so far, including the start of its workers; None before the first probe.

    A probe begins with the previous one on the same number of nodes, or with a later start of a job: pauses do not count.
    """
    nodes = {task.id: task.nodes for task in tasks}
    starts: defaultdict[int, list[float]] = defaultdict(list)
    ends: defaultdict[int, list[float]] = defaultdict(list)
    for attempt in attempts:
        if attempt.task in nodes:
            starts[nodes[attempt.task]].append(attempt.started_at)
    for result in results:
        if isinstance(result, Measured):
            ends[result.nodes].append(result.measured_at)
    spans = [
        end - max(earlier)
        for node_count, times in ends.items()
        for end in times
        if (earlier := [begin for begin in (*starts[node_count], *times) if begin < end])
    ]
    return sum(spans) / len(spans) if spans else None


# --- The status of a run


@dataclass(frozen=True)
class AttemptStatus:
    """One start of a job's ranks, with its configuration and the cause of the relaunch."""

    job: str
    attempt: Attempt
    batch: int | None  # global; None for probes, which have several
    nodes: int
    cause: str  # why a training was relaunched; empty for the first


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at one moment."""

    id: str
    path: Path
    at: float  # Unix time
    measured: int
    out_of_memory: int
    failed: int
    jobs: tuple[JobStatus, ...]
    training: TrainingStatus | None
    attempts: tuple[AttemptStatus, ...]  # oldest first
    recommendation: Recommendation | None
    warnings: tuple[Diagnostic, ...] = ()
    # notes on upgrades during a job, and on quantities that a script's probes could not measure
    notes: tuple[str, ...] = ()
    rehearsal: ResumeTestResult | None = None  # newest resume test of a script
    # evaluations of the weights of all trainings (tula evaluate), oldest first
    evaluations: tuple[EvaluationRecord, ...] = ()
    between_rounds: bool = False  # whether an adaptive search may have a further round to submit

    def has_active_jobs(self, job_ids: Iterable[str] | None = None) -> bool:
        """Return whether one of these jobs is queued or running; None considers all jobs."""
        requested = None if job_ids is None else set(job_ids)
        return any(job.state in ACTIVE_STATES for job in self.jobs if requested is None or job.id in requested)


# --- The status at one moment


def query_run_status(run: Run) -> RunStatus:
    """Return the current status of a run; queries the scheduler, but cannot submit jobs."""
    from tula_cli.cluster import launcher

    return read_run_status(run, launcher.make_launcher(run.spec, submits=False), now=time.time())


def read_run_status(run: RunDir, launcher: Launcher, *, now: float, only: Set[str] | None = None) -> RunStatus:
    """Return the status of a run at `now`. Damaged records and rows are reported as warnings; all others are shown.

    Args:
        now: Unix time.
        only: include only these jobs and their training; None for all.

    Raises:
        BadMeasurements: a record of one of the jobs in `only` is damaged.
    """
    snapshot = run.read_snapshot()
    if only is not None:
        snapshot.require_readable(only)
    results = {result.id: result for result in snapshot.results}
    pace = compute_mean_probe_seconds(snapshot.results, snapshot.probe_tasks, snapshot.attempts)
    tasks = [task for task in snapshot.tasks if only is None or task.job in only]
    jobs_with_tasks = [
        job for job in snapshot.jobs if (only is None or job.id in only) and snapshot.list_tasks_of_job(job.id)
    ]
    states = launcher.query_states(snapshot, jobs_with_tasks)
    training = read_training_status(snapshot, tasks, states, now=now)
    jobs = [
        make_job_status(snapshot, job, results, states[job.id], pace=pace, training=training, now=now)
        for job in jobs_with_tasks
    ]
    active_ids = {status.id for status in jobs if status.state in ACTIVE_STATES}
    if training is not None and not training.finished and training.job not in active_ids:
        training = dataclasses.replace(training, eta=None)
    return RunStatus(
        id=run.id,
        path=run.path,
        at=now,
        measured=len(snapshot.measured),
        out_of_memory=sum(isinstance(result, OutOfMemory) for result in snapshot.results),
        failed=sum(isinstance(result, Failed) for result in snapshot.results),
        jobs=tuple(jobs),
        training=training,
        attempts=_list_attempt_statuses(tasks, snapshot.adjust_starts_to_file_clock(snapshot.attempts)),
        recommendation=snapshot.recommendation,
        warnings=(
            *snapshot.job_warnings,
            *snapshot.record_warnings,
            *(snapshot.training_warnings if only is None else ()),
        ),
        notes=summarize_probe_notes(snapshot.measured),
        rehearsal=next(reversed(snapshot.resume_test_results), None) if only is None else None,
        evaluations=_list_evaluations(snapshot, tasks),
        between_rounds=not active_ids and _is_between_rounds(snapshot),
    )


def _list_evaluations(snapshot: Snapshot, tasks: Iterable[JobTask]) -> tuple[EvaluationRecord, ...]:
    """Return the evaluations of the weights of these trainings, oldest first."""
    signatures = dict.fromkeys(task.trained_signature for task in tasks if task.trained_signature)
    evaluations = [record for name in signatures for record in snapshot.get_training(name).read_evaluations()]
    return tuple(sorted(evaluations, key=lambda record: record.evaluated_at))


def _is_between_rounds(snapshot: Snapshot) -> bool:
    """Return whether an adaptive search has results, and neither a training nor a recommendation has followed yet."""
    adaptive_tasks = [task for task in snapshot.probe_tasks if task.spec.search.strategy == "adaptive"]
    has_begun = bool(snapshot.train_tasks) or snapshot.recommendation is not None
    return bool(adaptive_tasks and snapshot.results) and not has_begun


def _list_attempt_statuses(tasks: Sequence[JobTask], attempts: Sequence[Attempt]) -> tuple[AttemptStatus, ...]:
    by_id = {task.id: task for task in tasks}
    return tuple(
        AttemptStatus(
            job=task.job,
            attempt=attempt,
            batch=task.batch if isinstance(task, TrainTask) else None,
            nodes=task.nodes,
            cause=task.cause if attempt.number == 1 else "",
        )
        for attempt in attempts
        if (task := by_id.get(attempt.task)) is not None
    )


# --- Probes


def summarize_probe_notes(measured: Iterable[Measured]) -> tuple[str, ...]:
    """Return the distinct notes of scripts on missing measurements, each with the number of probes that recorded it."""
    notes_by_probe = [probe.script.notes for probe in measured if probe.script is not None]
    counts = Counter(note for probe_notes in notes_by_probe for note in dict.fromkeys(probe_notes))
    return tuple(f"{note} ({count} of {format_count(len(notes_by_probe), 'probe')})" for note, count in counts.items())
