"""How far each job is: its state by the scheduler and by its files."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tula_cli.cluster.relaunch import needs_new_allocation
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.host.failures import advice
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.results import Branch, StageDecision, StepChange
from tula_cli.run.records.tasks import EvaluateTask, JobTask, ProbeTask, RehearsalTask, TrainTask, probe_id
from tula_cli.run.snapshot import Snapshot
from tula_cli.run.training_run import A_COPY, CLOCKS_AGREE
from tula_cli.spec.job import JobSpec

JobState = Literal["queued", "running", "suspended", "held", "done", "failed", "diverged", "cancelled", "lost"]
ACTIVE: tuple[JobState, ...] = ("queued", "running", "suspended")

GRACE = {"local": 2.0, "slurm": 60.0}
"""Seconds for which the files of an ended job may still be on their way (NFS, Lustre)."""

MAX_CLOCK_DIFFERENCE = 60.0
"""Seconds by which the clocks of two machines may differ."""


def grace(scheduler: str) -> float:
    """Return the seconds for which files of an ended job may still be on their way, by what it ran on."""
    return GRACE["local" if scheduler == "local" else "slurm"]


@dataclass(frozen=True)
class ProbeConfiguration:
    """A configuration that a job measures; `batch` is global."""

    nodes: int
    local_batch: int
    batch: int


@dataclass(frozen=True)
class LinkStatus:
    """An allocation of a chain whose links differ in their nodes (`train.ramp`)."""

    scheduler_id: str
    nodes: int
    batches: tuple[int, ...]  # of the stages that have so many nodes; global


@dataclass(frozen=True)
class JobStatus:
    """One job. `total` and `done` count its probes; a training, a rehearsal or an evaluation has one thing to do."""

    id: str
    kind: Literal["probe", "train", "rehearse", "evaluate"]
    scheduler: str  # "local", "slurm", or the import string of another
    scheduler_id: str
    nodes: int
    state: JobState
    reason: str
    starts_at: float | None  # Unix time at which a queued job is expected to start; None where nobody tells
    total: int
    done: int
    now: ProbeConfiguration | None  # what runs, or comes next
    elapsed: float | None  # seconds; None before it starts
    left: float | None  # seconds, estimated; None where nothing tells
    node_hours: float
    node_hours_left: float | None
    links: tuple[LinkStatus, ...] = ()  # empty where all have the job's nodes
    hopeless: bool = False  # it is queued for what waiting does not bring


@dataclass(frozen=True)
class TuningStatus:
    """How far a self-tuning training is with its branches."""

    arm: str | None  # whose branch is next or under way; None once one is chosen
    number: int  # of the branch among those of its rung, from 1
    count: int  # branches of the rung
    rung: int  # from 1
    chosen: str | None
    branches: tuple[Branch, ...]  # those that have ended


@dataclass(frozen=True)
class StageStatus:
    """Where a training whose batch grows has come to (`train.ramp`)."""

    batch: int  # in use, global
    number: int  # of the stage, from 1
    count: int  # stages
    noise: float | None = None  # the scale (samples) by which it was planned; None where another rule was asked
    coming: StageDecision | None = None  # the newest one of a stage that is to come
    nodes: int = 1  # that it has now


@dataclass(frozen=True)
class TrainingStatus:
    """How far a training run is. Seconds; `batch` is global."""

    signature: str
    job: str
    finished: bool
    nodes: int
    batch: int
    attempt: int
    epoch: float
    epochs: int | None  # None for a script whose length is not in epochs
    samples: int
    loss: float | None
    top1: float | None
    lr: float | None
    step_time: float | None
    predicted_step: float | None
    eta: float | None
    warnings: tuple[str, ...]
    tuning: TuningStatus | None = None  # of method auto
    kwh: float | None = None  # counted so far; None where the GPUs have no counter
    samples_asked: int | None = None  # of a script whose length is in samples or steps
    # what gradient scaling did ("mean" factor, share of steps "scaled"): in the last epoch, a script's since it was started
    ags: Mapping[str, Any] | None = None
    changes: tuple[StepChange, ...] = ()  # of the step time, oldest first
    perplexity: float | None = None  # of the last epoch's evaluation; None where it is no language model
    tokens_per_second: float | None = None  # of all GPUs, without padding; None where batches are no text
    padding: float | None = None  # share of the batches' places
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # train.metrics of the last epoch
    beta2: float | None = None  # at the batch in use, where optimizer.beta2_half_life sets it
    noise: Mapping[str, Any] | None = None  # the newest measurement of train.gradient_noise: epoch, scale, low, high
    stage: StageStatus | None = None  # None where the batch does not grow
    stages: tuple[Stage, ...] = ()  # of all of it, as was decided before it began


Results = dict[str, Measured | OutOfMemory | Failed]


@dataclass(frozen=True)
class _Progress:
    """The tasks of a job, and the results there are."""

    total: int
    done: int
    now: ProbeConfiguration | None
    measured_at: float | None = None  # Unix time of the last measurement
    failed: tuple[str, ...] = ()  # messages of what failed; the next call runs it again

    @property
    def complete(self) -> bool:
        return self.done + len(self.failed) == self.total


def job_status(
    snapshot: Snapshot,
    job: Job,
    results: Results,
    scheduler: SchedulerState,
    *,
    pace: float | None,
    training: TrainingStatus | None,
    now: float,
) -> JobStatus:
    tasks, attempts = snapshot.tasks_of(job.id), with_file_clock(snapshot, snapshot.attempts_of(job.id))
    progress = job_progress(snapshot, tasks, results)
    recent = [attempt for attempt in attempts if _is_of_submission(attempt, job)]
    state, reason = _job_state(progress, recent, scheduler, tasks[-1].spec, cancelled=snapshot.cancelled_by(job.id))
    if state == "lost" and recent and _has_just_ended(recent[-1], progress, now, grace=grace(job.scheduler)):
        state, reason = "running", "it has ended well: its results are on their way here"
    if scheduler.released and state in ("failed", "diverged", "lost"):
        reason = f"{reason}; {scheduler.released}"
    end = now if state in ("running", "suspended") else progress.measured_at
    elapsed, nodes = _elapsed_seconds(attempts, end=end), {task.id: task.nodes for task in tasks}
    newest = tasks[-1]
    remaining = _remaining_seconds(progress, training, pace=pace) if state in ACTIVE else None
    return JobStatus(
        id=job.id,
        kind=tasks[0].kind,
        scheduler=job.scheduler,
        scheduler_id=job.scheduler_id,
        nodes=newest.nodes if isinstance(newest, TrainTask) else job.nodes,
        state=state,
        reason=reason,
        starts_at=scheduler.starts_at if state == "queued" else None,
        total=progress.total,
        done=progress.done,
        now=progress.now if state in ACTIVE else None,
        elapsed=elapsed,
        left=remaining,
        node_hours=sum(nodes.get(one.task, job.nodes) * attempt_seconds(one, end) for one in attempts) / 3600,
        node_hours_left=None if remaining is None else newest.nodes * remaining / 3600,
        links=_link_statuses(job, newest),
        hopeless=state == "queued" and scheduler.hopeless,
    )


def _link_statuses(job: Job, task: JobTask) -> tuple[LinkStatus, ...]:
    """Return the links of a chain with the stages that each is for."""
    if not job.link_nodes or not isinstance(task, TrainTask):
        return ()
    batches = {nodes: tuple(s.batch for s in task.stages if s.nodes == nodes) for nodes in job.link_nodes}
    return tuple(
        LinkStatus(link, nodes, batches[nodes]) for link, nodes in zip(job.links, job.link_nodes, strict=False)
    )


@dataclass(frozen=True)
class _PlannedProbe:
    id: str
    probe: ProbeConfiguration


def _planned_probes(tasks: Iterable[JobTask]) -> list[_PlannedProbe]:
    """Return the probes of a job, ascending as it runs them."""
    probes_by_id = {}
    for task in tasks:
        if isinstance(task, ProbeTask):
            for local in task.local_batches:
                batch = local * task.nodes * task.spec.cluster.gpus_per_node
                probes_by_id[task.nodes, local] = _PlannedProbe(
                    probe_id(task.nodes, local), ProbeConfiguration(task.nodes, local, batch)
                )
    # A packed job has several numbers of nodes, and begins with the largest.
    return [probes_by_id[key] for key in sorted(probes_by_id, key=lambda key: (-key[0], key[1]))]


def job_progress(snapshot: Snapshot, tasks: list[JobTask], results: Results) -> _Progress:
    newest = tasks[-1]
    if isinstance(newest, TrainTask):
        return _Progress(total=1, done=int(snapshot.training(newest.signature).summary() is not None), now=None)
    if isinstance(newest, EvaluateTask):
        resume_test = snapshot.training(newest.signature).evaluation(newest.key)
        return _Progress(total=1, done=int(resume_test is not None), now=None)
    if isinstance(newest, RehearsalTask):
        over = any(
            resume_test.task == newest.id and resume_test.over_at is not None for resume_test in snapshot.rehearsals
        )
        return _Progress(total=1, done=int(over), now=None)
    probes = _planned_probes(tasks)
    results_here = {planned.id: results[planned.id] for planned in probes if planned.id in results}
    failed = {id_: result.message for id_, result in results_here.items() if isinstance(result, Failed)}
    undone = [planned.probe for planned in probes if planned.id not in results_here or planned.id in failed]
    return _Progress(
        total=len(probes),
        done=len(probes) - len(undone),
        now=undone[0] if undone else None,
        measured_at=max((r.measured_at for r in results_here.values() if isinstance(r, Measured)), default=None),
        failed=tuple(failed.values()),
    )


def _job_state(
    progress: _Progress, attempts: list[Attempt], scheduler: SchedulerState, spec: JobSpec, *, cancelled: str
) -> tuple[JobState, str]:
    """Return a job's state: results first, then the user's cancel, then the scheduler, then the attempts."""
    live = scheduler.state in ("pending", "running")
    if progress.complete and not (progress.failed and live):
        return ("failed", progress.failed[0]) if progress.failed else ("done", "")
    if cancelled:
        return "cancelled", f"by {cancelled}"
    if scheduler.held and attempts and attempts[-1].outcome == "disk":
        return "held", f"{attempts[-1].message}; {advice('disk')}"
    if scheduler.state == "pending":
        return "queued", scheduler.reason
    if scheduler.state == "running":
        return "suspended" if scheduler.suspended else "running", scheduler.reason
    return _state_from_attempts(progress, attempts, scheduler, spec)


def _state_from_attempts(
    progress: _Progress, attempts: list[Attempt], scheduler: SchedulerState, spec: JobSpec
) -> tuple[JobState, str]:
    last_attempt = attempts[-1] if attempts else None
    if last_attempt is not None and last_attempt.ended_at is not None:
        if scheduler.state == "unknown" and needs_new_allocation(last_attempt.outcome, spec.cluster):
            return "queued", scheduler.reason  # the next link of its chain goes on
        measured = last_attempt.outcome == "done" or (last_attempt.outcome == "device_oom" and progress.now is not None)
        if measured:  # its supervisor saw all results: they are on their way here (NFS, Lustre)
            return "lost", f"ended well, but {progress.done} of {progress.total} results are to be seen here"
        if last_attempt.outcome == "diverged":
            return "diverged", f"{last_attempt.message}; {advice(last_attempt.outcome, spec=spec)}"
        if last_attempt.outcome == "device_fault":
            return (
                "failed",
                f"{last_attempt.message} on {last_attempt.host}; {advice(last_attempt.outcome, last_attempt.message, spec=spec)}",
            )
        message = last_attempt.message or f"ended with {progress.done} of {progress.total} probes"
        who = "SLURM" if spec.cluster.kind == "slurm" else "its scheduler"
        verdict = (
            "" if scheduler.reason.startswith("FAILED") or not scheduler.reason else f" ({who}: {scheduler.reason})"
        )
        return "failed", f"{message}{verdict}"
    if scheduler.state == "ended":
        return "lost", scheduler.reason or "ended without saying why (killed from outside?)"
    if last_attempt is not None:
        return "running", scheduler.reason or "the scheduler does not know the job"
    return "queued", scheduler.reason or "the scheduler does not know the job"


def with_file_clock(snapshot: Snapshot, attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return attempts of which those that are open began by the clock of the file system: their host's may be off."""
    return [_with_file_clock(snapshot, attempt) for attempt in attempts]


def _with_file_clock(snapshot: Snapshot, attempt: Attempt) -> Attempt:
    written = None if attempt.ended_at is not None else snapshot.attempt_written(attempt)
    if written is None or not CLOCKS_AGREE < abs(written - attempt.started_at) < A_COPY:
        return attempt
    return attempt.model_copy(update={"started_at": written})


def _is_of_submission(attempt: Attempt, job: Job) -> bool:
    """Return whether an attempt is of a job's last submission: by its allocation, else by the time."""
    return attempt.job_id in job.ids or attempt.started_at >= job.submitted_at - MAX_CLOCK_DIFFERENCE


def _has_just_ended(last_attempt: Attempt, progress: _Progress, now: float, *, grace: float) -> bool:
    """Return whether an attempt has seen all results so lately that their files may not be here yet."""
    saw_all = last_attempt.outcome == "done" or (last_attempt.outcome == "device_oom" and progress.now is not None)
    return saw_all and last_attempt.ended_at is not None and abs(now - last_attempt.ended_at) < grace


def _elapsed_seconds(attempts: list[Attempt], *, end: float | None) -> float | None:
    """Return the seconds that attempts took; an open one lasts until `until`, or is not counted."""
    if not attempts:
        return None
    return sum(attempt_seconds(attempt, end) for attempt in attempts)


def attempt_seconds(attempt: Attempt, end: float | None) -> float:
    """Return the seconds that an attempt took; an open one lasts until `until`, or is not counted."""
    return max(0.0, (attempt.ended_at or end or attempt.started_at) - attempt.started_at)


def _remaining_seconds(progress: _Progress, training: TrainingStatus | None, *, pace: float | None) -> float | None:
    if progress.now is None:
        return training.eta if training is not None else None
    return None if pace is None else pace * (progress.total - progress.done)


def mean_probe_seconds(results: Iterable[Measured | OutOfMemory | Failed], attempts: list[Attempt]) -> float | None:
    """Return the mean seconds of a probe so far, start-up of its workers included; None before the first."""
    moments: dict[int, list[float]] = {}
    for result in results:
        if isinstance(result, Measured):
            moments.setdefault(result.nodes, []).append(result.measured_at)
    starts = sorted(attempt.started_at for attempt in attempts)
    spans = []
    for times in moments.values():
        starts_before = [start for start in starts if start <= min(times)]
        marks = sorted([*starts_before[-1:], *times])
        spans += [late - early for early, late in itertools.pairwise(marks)]
    return sum(spans) / len(spans) if spans else None
