"""The progress of runs and their jobs, from the scheduler and their files; and the errors that exit reasons map to."""

import contextlib
import dataclasses
import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tula_cli.cluster.decisions import is_resumed_by_next_job
from tula_cli.cluster.launcher import Launcher
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import (
    DeviceFault,
    DiskFull,
    Diverged,
    JobFailed,
    OutOfMemoryAtMinimum,
    Pending,
    RunGone,
    SchedulerError,
    TulaError,
)
from tula_cli.host.failures import FAILURE_KINDS, describe_advice
from tula_cli.models import self_tuning
from tula_cli.models.choice.early_stopping import compute_remaining_share
from tula_cli.models.cost import compute_attempt_cost
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.files import list_names
from tula_cli.run.owner import require_ownership
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Recommendation, Stage
from tula_cli.run.records.results import (
    Branch,
    EvaluationRecord,
    StepChange,
    Summary,
    TrainResult,
    Tuning,
)
from tula_cli.run.records.scripts import ResumeTestResult
from tula_cli.run.records.tasks import (
    EvaluateTask,
    JobTask,
    ProbeTask,
    RateSearchTask,
    TrainTask,
    make_probe_id,
)
from tula_cli.run.snapshot import Snapshot
from tula_cli.run.training_run import COPIED_FILE_SECONDS, MAX_CLOCK_NOISE_SECONDS
from tula_cli.spec.backend import get_backend
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.script import count_requested_samples
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
class LinkStatus:
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
    links: tuple[LinkStatus, ...] = ()  # empty if all jobs of the chain have the same number of nodes
    hopeless: bool = False  # whether it is queued for a reason that waiting does not resolve
    compared: str = ""  # method, batch and seed, if it trains a row of a comparison


@dataclass(frozen=True)
class TuningStatus:
    """The progress of the branches of a self-tuning training."""

    arm: str | None  # setting whose branch is running or next; None after the choice
    number: int  # number of the branch, from 1
    count: int  # total number of branches
    chosen: str | None
    branches: tuple[Branch, ...]  # finished branches


@dataclass(frozen=True)
class StageStatus:
    """The current stage of a training with a batch-size ramp (`train.ramp`)."""

    batch: int  # current global batch
    number: int  # number of the stage, from 1
    count: int  # total number of stages
    noise: float | None = None  # gradient noise scale (samples) that determined the batch; None with another rule
    nodes: int = 1  # current number of nodes


@dataclass(frozen=True)
class TrainingStatus:
    """The progress of a training. Times in seconds; `batch` is global."""

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
    warnings: tuple[Diagnostic, ...]
    tuning: TuningStatus | None = None  # progress of method auto; None for other methods or before it starts
    kwh: float | None = None  # energy measured so far; None if the GPUs have no counter
    samples_asked: int | None = None  # requested samples of a script whose length is in samples or steps; else None
    # gradient scaling ("mean" factor, share of steps "scaled") in the last epoch; of a script, since its start
    ags: Mapping[str, Any] | None = None
    changes: tuple[StepChange, ...] = ()  # changes of the step time, oldest first
    perplexity: float | None = None  # of the last epoch's evaluation; None unless a language model
    tokens_per_second: float | None = None  # of all GPUs, without padding; None if batches are not text
    padding: float | None = None  # share of padding in the batches; None if batches are not text
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # train.metrics of the last epoch
    beta2: float | None = None  # Adam's beta2 at the current batch, if optimizer.beta2_half_life sets it
    noise: Mapping[str, Any] | None = (
        None  # the newest measurement of train.diagnostics: [gradient_noise]: epoch, scale, low, high
    )
    stage: StageStatus | None = None  # current stage; None without a batch-size ramp
    stages: tuple[Stage, ...] = ()  # all stages of the ramp, as planned at the start
    submitted: bool = True  # False if its job was rejected or never submitted
    # numbers of nodes that the next job may be granted; empty while a job runs, or if there is only one
    possible_nodes: tuple[int, ...] = ()

    spent: "SpentAndRest | None" = None  # for trainings on a range of nodes; else None


@dataclass(frozen=True)
class RestOfTraining:
    """Predicted remaining time and cost of a training on a number of nodes."""

    nodes: int
    hours: float
    cost: float


@dataclass(frozen=True)
class SpentAndRest:
    """Time and cost of a training so far, by the nodes of each attempt, and the remaining ones; costs are in `currency`."""

    hours: float
    node_hours: float
    cost: float
    rest: tuple[RestOfTraining, ...]  # on the nodes of the running job, otherwise on each possible number of nodes
    currency: str


Results = dict[str, Measured | OutOfMemory | Failed]


@dataclass(frozen=True)
class _JobProgress:
    """The tasks of a job and its results so far."""

    total: int
    done: int
    now: ProbeConfiguration | None
    measured_at: float | None = None  # Unix time of the last measurement
    failed: tuple[str, ...] = ()  # messages of failed probes, which the next call repeats
    may_grow: bool = False  # whether the job itself decides on further probes

    @property
    def complete(self) -> bool:
        return self.done + len(self.failed) == self.total


def get_job_status(
    snapshot: Snapshot,
    job: Job,
    results: Results,
    scheduler: SchedulerState,
    *,
    pace: float | None,
    training: TrainingStatus | None,
    now: float,
) -> JobStatus:
    tasks, attempts = (
        snapshot.list_tasks_of_job(job.id),
        adjust_to_file_clock(snapshot, snapshot.list_attempts_of_job(job.id)),
    )
    progress = get_job_progress(snapshot, tasks, results)
    recent = [attempt for attempt in attempts if _belongs_to_submission(attempt, job)]
    state, reason = _get_job_state(
        progress,
        recent,
        scheduler,
        tasks[-1].spec,
        cancelled=snapshot.read_cancelling_command(job.id),
        now=now,
        grace=get_backend(job.scheduler).grace,
    )
    if scheduler.released and state in ("failed", "diverged", "lost"):
        reason = f"{reason}; {scheduler.released}"
    end = now if state in ("running", "suspended") else progress.measured_at
    if state in ("lost", "failed"):
        attempts = [_end_at_last_sign_of_life(snapshot, attempt) for attempt in attempts]
    elapsed, nodes = _sum_elapsed_seconds(attempts, end=end), {task.id: task.nodes for task in tasks}
    newest = tasks[-1]
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
        elapsed=elapsed,
        left=remaining,
        node_hours=sum(
            (nodes.get(job_attempt.task, job.nodes) + job_attempt.idle_nodes) * job_attempt.count_seconds(end)
            for job_attempt in attempts
        )
        / 3600,
        node_hours_left=None if remaining is None else newest.nodes * remaining / 3600,
        links=_list_chain_job_statuses(job, newest),
        hopeless=state == "queued" and scheduler.hopeless,
        compared=_describe_compared_cell(snapshot, newest),
    )


def _describe_compared_cell(files_snapshot: Snapshot, task: JobTask) -> str:
    """Return method, batch and seed of a training of the run's comparison; empty for other tasks."""
    return files_snapshot.compared_cells.get(task.signature, "") if isinstance(task, TrainTask) else ""


def _list_chain_job_statuses(job: Job, task: JobTask) -> tuple[LinkStatus, ...]:
    """Return the scheduler jobs of a chain, with the batches of the stages that each one runs."""
    if not job.link_nodes or not isinstance(task, TrainTask):
        return ()
    batches = {nodes: tuple(s.batch for s in task.stages if s.nodes == nodes) for nodes in job.link_nodes}
    return tuple(
        LinkStatus(link, nodes, batches[nodes]) for link, nodes in zip(job.links, job.link_nodes, strict=False)
    )


def _list_planned_probes(tasks: Iterable[JobTask]) -> dict[str, ProbeConfiguration]:
    """Return the probes of a job by their ids, in the order in which it runs them."""
    ranks = {
        (task.nodes, local): task.ranks for task in tasks if isinstance(task, ProbeTask) for local in task.local_batches
    }
    return {
        make_probe_id(nodes, local): ProbeConfiguration(nodes, local, local * ranks[nodes, local])
        for nodes, local in sorted(ranks)
    }


def get_job_progress(snapshot: Snapshot, tasks: list[JobTask], results: Results) -> _JobProgress:
    newest = tasks[-1]
    if not isinstance(newest, ProbeTask):
        return _JobProgress(total=1, done=int(_has_result(snapshot, newest)), now=None)
    probes = _list_planned_probes(tasks)
    results_here = {id_: results[id_] for id_ in probes if id_ in results}
    failed = {id_: result.message for id_, result in results_here.items() if isinstance(result, Failed)}
    undone = [probe for id_, probe in probes.items() if id_ not in results_here or id_ in failed]
    return _JobProgress(
        total=len(probes),
        done=len(probes) - len(undone),
        now=undone[0] if undone else None,
        measured_at=max((r.measured_at for r in results_here.values() if isinstance(r, Measured)), default=None),
        failed=tuple(failed.values()),
        may_grow=newest.bounds is not None,
    )


def _has_result(snapshot: Snapshot, task: JobTask) -> bool:
    match task:
        case TrainTask():
            return snapshot.get_training(task.signature).read_summary() is not None
        case EvaluateTask():
            return snapshot.get_training(task.signature).read_evaluation(task.key) is not None
        case RateSearchTask():
            search = snapshot.read_rate_search(task.key)
            return search is not None and search.finished
    return any(test.task == task.id and test.over_at is not None for test in snapshot.resume_test_results)


def _get_job_state(
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
    if progress.complete and not ((progress.failed or progress.may_grow) and live):
        return ("failed", progress.failed[0]) if progress.failed else ("done", "")
    if cancelled:
        return "cancelled", f"by {cancelled}"
    if scheduler.on_hold and attempts and attempts[-1].outcome == "disk":
        return "held", f"{attempts[-1].message}; {describe_advice('disk')}"
    if scheduler.state == "pending":
        return "queued", scheduler.reason
    if scheduler.state == "running":
        return "suspended" if scheduler.suspended else "running", scheduler.reason
    return _get_state_from_attempts(progress, attempts, scheduler, spec, now=now, grace=grace)


def _get_state_from_attempts(
    progress: _JobProgress,
    attempts: list[Attempt],
    scheduler: SchedulerState,
    spec: JobSpec,
    *,
    now: float,
    grace: float,
) -> tuple[JobState, str]:
    last_attempt = attempts[-1] if attempts else None
    if last_attempt is not None and last_attempt.ended_at is not None:
        if scheduler.state == "unknown" and is_resumed_by_next_job(last_attempt, spec.cluster):
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


def adjust_to_file_clock(snapshot: Snapshot, attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts, with the start of open ones by the clock of the file system, as their host's clock may be wrong."""
    adjusted = []
    for attempt in attempts:
        written = None if attempt.ended_at is not None else snapshot.get_attempt_write_time(attempt)
        if written is not None and MAX_CLOCK_NOISE_SECONDS < abs(written - attempt.started_at) < COPIED_FILE_SECONDS:
            attempt = attempt.model_copy(update={"started_at": written})
        adjusted.append(attempt)
    return adjusted


def _end_at_last_sign_of_life(snapshot: Snapshot, attempt: Attempt) -> Attempt:
    """Return an attempt; one that its killed supervisor left open ends when its log was last written, as on resuming."""
    last_sign = None if attempt.ended_at is not None else snapshot.get_last_log_time(attempt)
    return attempt if last_sign is None else attempt.model_copy(update={"ended_at": last_sign})


def _belongs_to_submission(attempt: Attempt, job: Job) -> bool:
    """Return whether an attempt belongs to a job's last submission, by its allocation or else by its time."""
    return attempt.job_id in job.ids or attempt.started_at >= job.submitted_at - MAX_CLOCK_DIFFERENCE


def _sum_elapsed_seconds(attempts: list[Attempt], *, end: float | None) -> float | None:
    """Return the total seconds of attempts; an open one lasts until `end`, or is not counted."""
    if not attempts:
        return None
    return sum(attempt.count_seconds(end) for attempt in attempts)


def _estimate_remaining_seconds(
    progress: _JobProgress, training: TrainingStatus | None, *, pace: float | None
) -> float | None:
    if progress.now is None:
        return training.eta if training is not None else None
    return None if pace is None else pace * (progress.total - progress.done)


def compute_mean_probe_seconds(
    results: Iterable[Measured | OutOfMemory | Failed], attempts: list[Attempt]
) -> float | None:
    """Return the mean seconds per probe so far, including the start of its workers; None before the first probe."""
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


# --- The status of a run

FILE_POLL_SECONDS = 2.0
"""Seconds between two polls of the results, which show the end of a job before the scheduler does."""


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
    # evaluations of the training's weights (tula evaluate), oldest first
    evaluations: tuple[EvaluationRecord, ...] = ()
    between_rounds: bool = False  # whether an adaptive search may have a further round to submit

    def has_active_jobs(self, job_ids: Iterable[str] | None = None) -> bool:
        """Return whether one of these jobs is queued or running; None considers all jobs."""
        requested = None if job_ids is None else set(job_ids)
        return any(job.state in ACTIVE_STATES for job in self.jobs if requested is None or job.id in requested)


# --- The status at one moment


def get_run_status(run: RunDir, launcher: Launcher, *, now: float, only: Set[str] | None = None) -> RunStatus:
    """Return the status of a run at `now`. Damaged records and rows are reported as warnings; all others are shown.

    Args:
        now: Unix time.
        only: include only these jobs and their training; None for all.

    Raises:
        BadMeasurements: a record of one of the jobs in `only` is damaged.
    """
    files_snapshot = run.read_snapshot()
    if only is not None:
        files_snapshot.require_readable(only)
    results = {result.id: result for result in files_snapshot.results}
    pace = compute_mean_probe_seconds(files_snapshot.results, files_snapshot.attempts)
    tasks = [task for task in files_snapshot.tasks if only is None or task.job in only]
    tasked = [
        job
        for job in files_snapshot.jobs
        if (only is None or job.id in only) and files_snapshot.list_tasks_of_job(job.id)
    ]
    states = launcher.query_states(files_snapshot, tasked)
    training = _get_training_status(files_snapshot, tasks, states, now=now)
    jobs = [
        get_job_status(files_snapshot, job, results, states[job.id], pace=pace, training=training, now=now)
        for job in tasked
    ]
    moving = {status.id for status in jobs if status.state in ACTIVE_STATES}
    if training is not None and not training.finished and training.job not in moving:
        training = dataclasses.replace(training, eta=None)
    return RunStatus(
        id=run.id,
        path=run.path,
        at=now,
        measured=sum(isinstance(result, Measured) for result in files_snapshot.results),
        out_of_memory=sum(isinstance(result, OutOfMemory) for result in files_snapshot.results),
        failed=sum(isinstance(result, Failed) for result in files_snapshot.results),
        jobs=tuple(jobs),
        training=training,
        attempts=_list_attempt_statuses(tasks, adjust_to_file_clock(files_snapshot, files_snapshot.attempts)),
        recommendation=files_snapshot.recommendation,
        warnings=(
            *files_snapshot.job_warnings,
            *files_snapshot.record_warnings,
            *(files_snapshot.training_warnings if only is None else ()),
        ),
        notes=(*summarize_notes(result for result in files_snapshot.results if isinstance(result, Measured)),),
        rehearsal=files_snapshot.resume_test_results[-1]
        if files_snapshot.resume_test_results and only is None
        else None,
        evaluations=tuple(files_snapshot.get_training(training.signature).read_evaluations())
        if training is not None
        else (),
        between_rounds=not moving and _is_between_rounds(files_snapshot),
    )


def _is_between_rounds(files_snapshot: Snapshot) -> bool:
    """Return whether an adaptive search has results, and neither a training nor a recommendation has followed yet."""
    adaptive_tasks = [task for task in files_snapshot.probe_tasks if task.spec.search.strategy == "adaptive"]
    has_begun = bool(files_snapshot.train_tasks) or files_snapshot.recommendation is not None
    return bool(adaptive_tasks and files_snapshot.results) and not has_begun


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


# --- The status of a training


def _get_training_status(
    files_snapshot: Snapshot, tasks: Iterable[JobTask], states: Mapping[str, SchedulerState], *, now: float
) -> TrainingStatus | None:
    """Return the status of the newest training among these tasks, if possible of the job itself; None without any."""
    newest = _find_newest_train_task(files_snapshot, tasks)
    if newest is None:
        return None
    files, scheduler = files_snapshot.get_training(newest.signature), states.get(newest.job)
    rows, result = files.read_sampled_metrics(), files.read_result()
    steps = [row for row in rows if row["kind"] == "step"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    progress_rows = [row for row in rows if row["kind"] in ("start", "step", "epoch")]
    last_step, last_epoch = steps[-1] if steps else {}, epochs[-1] if epochs else {}
    latest = max((row for row in (last_step, last_epoch) if row), key=lambda row: row["samples"], default={})
    row = _find_newest_row_with_eta(rows)
    script, stage = newest.spec.script, _get_stage_status(rows, result, nodes=newest.nodes)
    prediction = newest.prediction and newest.prediction.get_prediction_at_batch(stage.batch if stage else newest.batch)
    summary = files.read_summary() if result is not None else None
    is_running = scheduler is not None and scheduler.state == "running"
    status = TrainingStatus(
        signature=newest.signature,
        job=newest.job,
        finished=result is not None,
        nodes=newest.nodes,
        batch=newest.batch if result is None else result.batch,
        attempt=newest.attempt,
        epoch=float(progress_rows[-1]["epoch"] or 0.0) if progress_rows else 0.0,
        epochs=_count_epochs_of_training(newest.spec, progress_rows),
        samples=int(progress_rows[-1]["samples"]) if progress_rows else 0,
        loss=latest.get("loss"),
        top1=last_epoch.get("top1"),
        perplexity=last_epoch.get("perplexity"),
        tokens_per_second=last_step.get("tokens_per_second"),
        padding=last_step.get("padding"),
        metrics=last_epoch.get("metrics") or {},
        lr=latest.get("lr"),
        beta2=next((row.get("beta2") for row in reversed(rows) if row["kind"] in ("start", "stage")), None),
        step_time=latest.get("step_time") or None
        if summary is None or summary.actual_step is None
        else summary.actual_step,
        predicted_step=None if prediction is None else prediction.step_time,
        eta=_estimate_remaining_training_seconds(
            row,
            finished=result is not None,
            now=now - files.compute_clock_lead(rows)
            if _is_training(files_snapshot, newest.job, scheduler, row)
            else None,
        ),
        noise=next((row for row in reversed(rows) if row["kind"] == "noise"), None),
        tuning=_get_tuning_status(files.read_tuning()),
        kwh=energy.kwh if (energy := files.read_energy()) is not None else None,
        samples_asked=None if script is None else count_requested_samples(script),
        ags=_find_newest_scaling(rows),
        warnings=_list_training_warnings(rows),
        changes=files.read_step_changes(),
        stage=stage,
        stages=newest.stages,
        submitted=newest.job in {job.id for job in files_snapshot.jobs} or bool(progress_rows or result),
        possible_nodes=() if len(newest.node_counts) == 1 or result is not None or is_running else newest.node_counts,
    )
    if not newest.sizes:
        return status
    return dataclasses.replace(status, spent=_compute_spent_and_rest(files_snapshot, newest, status, now=now))


def _compute_spent_and_rest(
    files_snapshot: Snapshot, newest: TrainTask, status: TrainingStatus, *, now: float
) -> SpentAndRest:
    """Return time and cost so far, and the remaining ones by the pace of the running job, else as predicted for each size."""
    tasks = {task.id: task for task in files_snapshot.list_tasks_of_job(newest.job) if isinstance(task, TrainTask)}
    attempts = [
        attempt
        for attempt in adjust_to_file_clock(files_snapshot, files_snapshot.list_attempts_of_job(newest.job))
        if attempt.task in tasks
    ]
    end = None if status.finished or status.possible_nodes else now
    seconds = [(tasks[attempt.task], attempt, attempt.count_seconds(end)) for attempt in attempts]
    return SpentAndRest(
        hours=sum(took for _, _, took in seconds) / 3600,
        node_hours=sum((task.nodes + attempt.idle_nodes) * took for task, attempt, took in seconds) / 3600,
        cost=sum(compute_attempt_cost(task, attempt, task.prediction, end) for task, attempt, _ in seconds),
        rest=() if status.finished else tuple(_list_remaining_costs(newest, status)),
        currency=newest.spec.pricing.currency,
    )


def _list_remaining_costs(task: TrainTask, status: TrainingStatus) -> Iterator[RestOfTraining]:
    whole = status.epochs or status.samples_asked
    done = status.epoch if status.epochs else status.samples
    share = None if not whole else max(0.0, 1 - done / whole)
    for size in task.sizes:
        prediction = size.prediction
        if size.nodes not in (status.possible_nodes or (task.nodes,)) or prediction is None or not prediction.hours:
            continue
        hours = None if share is None else compute_remaining_share(prediction, share) * prediction.hours
        if status.eta is not None and not status.possible_nodes:
            hours = status.eta / 3600
        if hours is not None:
            yield RestOfTraining(size.nodes, hours, hours / prediction.hours * prediction.cost)


def _list_training_warnings(rows: Sequence[Mapping[str, Any]]) -> tuple[Diagnostic, ...]:
    """Return the distinct warnings of a training; those of a script, and of older versions, have no code of their own."""
    by_text = {
        row["message"]: Diagnostic(row.get("code") or "training-warning", row.get("values") or {}, row["message"])
        for row in rows
        if row["kind"] == "warning"
    }
    return tuple(by_text.values())


def _find_newest_scaling(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the gradient scaling of the last epoch (of a script, in total); None if the training does not scale."""
    ags_rows = (row["ags"] for row in reversed(rows) if isinstance(row.get("ags"), Mapping))
    return next((values.get("so_far", values) for values in ags_rows), None)


def _get_stage_status(
    rows: Sequence[Mapping[str, Any]], result: TrainResult | None, *, nodes: int
) -> StageStatus | None:
    """Return the current ramp stage of a training; None if it has finished or its batch does not grow."""
    newest = next((row for row in reversed(rows) if row["kind"] == "stage"), None)
    if newest is None or result is not None:
        return None
    return StageStatus(newest["batch"], newest["stage"], newest["stages"], newest.get("noise"), nodes)


def _count_epochs_of_training(spec: JobSpec, progress_rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of epochs of a training; None for a script if its samples per epoch are unknown."""
    if spec.script is None:
        return spec.train.max_epochs
    return None if progress_rows and progress_rows[-1]["epoch"] is None else spec.script.length.epochs


def _find_newest_train_task(files_snapshot: Snapshot, tasks: Iterable[JobTask]) -> TrainTask | None:
    all_trainings = [task for task in tasks if isinstance(task, TrainTask)]
    comparison = files_snapshot.comparison
    compared = frozenset[str]() if comparison is None else comparison.signatures
    trainings = [task for task in all_trainings if task.signature not in compared] or all_trainings
    submitted = {job.id: job.submitted_at for job in files_snapshot.jobs}
    return max(trainings, key=lambda task: (submitted.get(task.job, 0.0), task.attempt), default=None)


def _find_newest_row_with_eta(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest row with a remaining time; empty if the newest start has not made a step yet."""
    newest = [row for row in rows if row["kind"] in ("step", "branch", "start")][-1:]
    return newest[0] if newest and newest[0]["kind"] != "start" else {}


def _get_tuning_status(tuning: Tuning | None) -> TuningStatus | None:
    if tuning is None:
        return None
    names = [arm.name for arm in tuning.arms]
    arm = self_tuning.find_next_arm(names, tuning.branches)
    if arm is None or tuning.chosen is not None:
        chosen = tuning.chosen.name if tuning.chosen is not None else None
        return TuningStatus(None, 0, 0, chosen, tuning.branches)
    return TuningStatus(arm, names.index(arm) + 1, len(names), None, tuning.branches)


def _is_training(files_snapshot: Snapshot, job: str, scheduler: SchedulerState | None, row: Mapping[str, Any]) -> bool:
    """Return whether the attempt that wrote a row is still training: it has not ended, and its job is not waiting."""
    if scheduler is not None and (scheduler.state == "pending" or scheduler.suspended):
        return False
    attempts = files_snapshot.list_attempts_of_job(job)
    return not attempts or (attempts[-1].ended_at is None and row.get("time", 0.0) >= attempts[-1].started_at)


def _estimate_remaining_training_seconds(
    last_row: Mapping[str, Any], *, finished: bool, now: float | None
) -> float | None:
    """Return the remaining seconds: those of the last row, less the time since then if it is training (`now` given)."""
    if finished:
        return 0.0
    if not last_row.get("eta"):  # it is 0 before the first step
        return None
    since = 0.0 if now is None else now - last_row["time"]
    return max(0.0, float(last_row["eta"]) - since)


# --- Waiting for jobs


def watch_jobs(
    run: RunDir,
    launcher: Launcher,
    job_ids: Iterable[str],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    timeout: float | None = None,
) -> Iterator[RunStatus]:
    """Yield the status of these jobs until all have ended; other jobs of the run are left out.

    A job whose results are complete, or whose last attempt has ended, is over at once. A job that the scheduler reports
    as ended without either is waited for during the grace period of its file system.

    Args:
        clock: Unix time.
        timeout: seconds after which to stop, whether the jobs have ended or not; None waits forever.

    Raises:
        RunGone: the run directory was moved or removed in the meantime.
        SchedulerError: none of the remaining jobs will ever start.
    """
    waiting_for, started, lost_since = set(job_ids), clock(), dict[str, float]()
    pause, longest = max(
        (get_backend(job.scheduler).poll for job in run.read_jobs() if job.id in waiting_for),
        default=get_backend("local").poll,
    )
    hopeless = 0  # polls in sequence: a busy controller may give such a reason for a moment
    while True:
        now, folders = clock(), _list_result_folders(run)
        written = _find_last_write_time(folders)
        status = get_run_status(run, launcher, now=now, only=waiting_for)
        if not run.path.is_dir():
            raise RunGone(run.path)
        yield status
        waiting = [job for job in status.jobs if _is_waiting(job, lost_since, now=now)]
        if not waiting:
            return
        hopeless = hopeless + 1 if all(job.hopeless for job in waiting) else 0
        if hopeless > 1:
            raise _make_never_starts_error(waiting)
        if timeout is not None and now - started >= timeout:
            return
        remaining = pause if timeout is None else min(pause, max(0.0, started + timeout - now))
        while remaining > 0:
            last_written, written = written, _find_last_write_time(folders)
            if written != last_written and _are_jobs_finished(run, waiting_for):
                break
            sleep(min(FILE_POLL_SECONDS, remaining))
            remaining -= FILE_POLL_SECONDS
        pause = min(longest, pause * 1.5)


def _make_never_starts_error(jobs: Sequence[JobStatus]) -> SchedulerError:
    reasons = dict.fromkeys(job.reason for job in jobs)
    names = ", ".join(job.id for job in jobs)
    return SchedulerError(
        f"{names} will not start: {'; '.join(reasons)}",
        "remove queued jobs with tula cancel, correct section cluster, and run the same command again",
    )


def _list_result_folders(run: RunDir) -> list[Path]:
    trainings = [run.path / "train" / name for name in list_names(run.path / "train")]
    evaluations = [folder / "evaluations" for folder in trainings]
    return [*(run.path / name for name in ("tasks", "results", "script", "train")), *trainings, *evaluations]


def _find_last_write_time(folders: Iterable[Path]) -> list[int]:
    """Return the modification times (ns) of the folders that exist; much cheaper than reading the files in them."""
    times = []
    for folder in folders:
        with contextlib.suppress(OSError):
            times.append(folder.stat().st_mtime_ns)
    return times


def _are_jobs_finished(run: RunDir, job_ids: set[str]) -> bool:
    """Return whether the files show that these jobs are over; reading them is cheaper than querying the scheduler."""
    files_snapshot = run.read_snapshot()
    results = {result.id: result for result in files_snapshot.results}
    tasks_by_job = [files_snapshot.list_tasks_of_job(id_) for id_ in job_ids]
    return all(
        tasks and (progress := get_job_progress(files_snapshot, tasks, results)).done == progress.total
        for tasks in tasks_by_job
    )


def _is_waiting(job: JobStatus, lost_since: dict[str, float], *, now: float) -> bool:
    if job.state != "lost":
        lost_since.pop(job.id, None)
        return job.state in ACTIVE_STATES
    return now - lost_since.setdefault(job.id, now) < get_backend(job.scheduler).grace


# --- Results of ended jobs


def cancel_jobs(runs: Sequence[Run], launcher_for: Callable[[Run], Launcher]) -> list[str]:
    """Cancel the queued and running jobs of the runs, and return their names; unreadable job records are left out.

    Each job is marked as cancelled first, so that nothing (a supervisor, the next job of a chain) restarts it. A job or
    part that cannot be cancelled does not prevent the cancellation of the others.

    Raises:
        NotYours: the run belongs to another user.
        TulaError: some jobs could not be cancelled; the message names them, and those that were.
    """
    for run in runs:
        require_ownership(run.path)
    cancelled: list[str] = []
    failures: dict[str, TulaError] = {}
    for run in runs:
        try:
            launcher, files_snapshot = launcher_for(run), run.read_snapshot(strict=True)
            states = launcher.query_states(files_snapshot, files_snapshot.jobs)
        except TulaError as error:
            failures[f"all jobs of {run.type}" if run.type else "all jobs"] = error
            continue
        for job in files_snapshot.jobs:
            if states[job.id].state == "ended":
                continue
            (name,) = run.prefix_job_names([job.id])
            try:
                run.cancel(job.id)
                launcher.cancel(run, job)
                cancelled.append(name)
            except TulaError as error:
                failures[name] = error
    if len(failures) == 1 and not cancelled:
        raise next(iter(failures.values()))
    if failures:
        raise SchedulerError(
            f"not cancelled: {'; '.join(f'{name} ({error.message})' for name, error in failures.items())}",
            f"cancelled: {', '.join(cancelled) or 'none'}; run tula cancel again for the others, or end them with the"
            " scheduler's own command",
        )
    return cancelled


# --- The end of a training

MIN_FREE_BYTES = 2**16  # bytes free; below, the small files of a run cannot be written
RESUME_HINT = "run the same command again to resume from the newest checkpoint"


def compute_micro_batch(task: TrainTask) -> int:
    """Return the number of samples that a GPU processes at a time."""
    world = task.ranks
    return task.batch // (world * task.spec.train.accumulate * task.splits)


def make_error_of_training(task: TrainTask, attempts: Sequence[Attempt], *, saved_samples: int) -> TulaError:
    """Return the error that describes how a training ended.

    Args:
        task: the newest task of the training.
        attempts: all attempts, oldest first; the last one determines the error.
    """
    attempt = attempts[-1]
    if attempt.failure is None:
        return Pending(f"training {task.signature} has not ended", "tula status shows its progress")
    where = f" (rank {attempt.rank}, {attempt.host})" if attempt.rank is not None else ""
    hint = describe_advice(attempt.failure, task.spec)
    message = f"Training failed on attempt {task.attempt}{where}: {attempt.message}"
    if attempt.outcome == "cancelled":
        return JobFailed(f"Training was cancelled on attempt {task.attempt}{where}: {attempt.message}", RESUME_HINT)
    if attempt.outcome == "device_oom":
        cut = f" with micro-batches of {compute_micro_batch(task)}" if task.splits > 1 else ""
        return OutOfMemoryAtMinimum(
            f"out of memory at the smallest batch, {task.batch}{cut}: {attempt.message}",
            hint,
        )
    if attempt.outcome == "diverged":
        advice_start = f"; the checkpoint at {saved_samples} samples is finite and is kept" if saved_samples else ""
        limit = task.max_lr_factor
        restart_note = (
            "" if limit is None else f"; the training had already been restarted with train.max_lr_factor {limit:g}"
        )
        return Diverged(f"{message}{restart_note}{advice_start}", hint)
    if attempt.outcome == "device_fault":
        faulty = dict.fromkeys(earlier.host for earlier in attempts if earlier.outcome == "device_fault")
        return DeviceFault(f"{message}; faulty nodes: {', '.join(faulty)}", hint)
    return FAILURE_KINDS[attempt.failure.outcome].error(message, hint)


def require_known_job(run_status: RunStatus, job_id: str) -> None:
    """Raise an error if a job is lost, rather than report it as pending.

    Raises:
        DiskFull: the job is lost, and the disk of the run is full.
        JobFailed: the job is lost, and no log has the reason.
    """
    for job in run_status.jobs:
        if job.id == job_id and job.state == "lost":
            if shutil.disk_usage(run_status.path).free < MIN_FREE_BYTES:
                raise DiskFull(
                    f"{job.id} ended because the disk that holds {run_status.path} is full",
                    "free some space and run the same command again; it resumes from the newest checkpoint",
                )
            raise JobFailed(f"{job.id} is lost: {job.reason}", RESUME_HINT)


def load_summary(run: RunDir, signature: str) -> Summary:
    """Return the summary of a finished training, which compares predicted and actual values.

    Raises:
        OutOfMemoryAtMinimum: the smallest batch did not fit.
        Diverged: the loss or the weights were not finite.
        DeviceFault: nodes or their devices were faulty in each attempt.
        JobFailed: the training ended for another reason.
        Pending: the training has not ended.
    """
    summary = run.get_training(signature).read_summary()
    if summary is not None:
        return summary
    task = run.get_training(signature).read_newest_task()
    if task is not None and run.is_cancelled(task.job):  # its ranks may still be running
        raise JobFailed(f"training {signature} was cancelled", RESUME_HINT)
    attempts = run.get_training(signature).read_attempts()
    if task is None or not attempts:
        raise Pending(f"training {signature} has not started", "tula status shows why")
    raise make_error_of_training(task, attempts, saved_samples=run.get_training(signature).find_newest_samples())


# --- Probes


def summarize_notes(measured: Iterable[Measured]) -> tuple[str, ...]:
    """Return the distinct notes of scripts on missing measurements, each with the number of probes that recorded it."""
    notes_by_probe = [probe.script.notes for probe in measured if probe.script is not None]
    counts = Counter(note for probe_notes in notes_by_probe for note in dict.fromkeys(probe_notes))
    return tuple(f"{note} ({count} of {format_count(len(notes_by_probe), 'probe')})" for note, count in counts.items())
