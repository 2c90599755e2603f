"""The progress of a training, from its files: position, pace, remaining time and cost."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.diagnostics import Diagnostic
from tula_cli.models import self_tuning
from tula_cli.models.cost import compute_attempt_cost, compute_remaining_time_share
from tula_cli.run.records.recommendations import Stage
from tula_cli.run.records.results import Branch, StepChange, TrainResult, Tuning
from tula_cli.run.records.tasks import JobTask, TrainTask
from tula_cli.run.snapshot import Snapshot


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
    # the newest measurement of train.diagnostics: [gradient_noise]: epoch, scale, low, high
    noise: Mapping[str, Any] | None = None
    stage: StageStatus | None = None  # current stage; None without a batch-size ramp
    stages: tuple[Stage, ...] = ()  # all stages of the ramp, as planned at the start
    submitted: bool = True  # False if its job was rejected or never submitted
    # numbers of nodes that the next job may be granted; empty while a job runs, or if there is only one
    possible_nodes: tuple[int, ...] = ()

    spent: "SpentAndRemainingCost | None" = None  # for trainings on a range of nodes; else None


@dataclass(frozen=True)
class RemainingCost:
    """Predicted remaining time and cost of a training on a number of nodes."""

    nodes: int
    hours: float
    cost: float


@dataclass(frozen=True)
class SpentAndRemainingCost:
    """Time and cost of a training so far, by the nodes of each attempt, and the remaining ones; costs are in `currency`."""

    hours: float
    node_hours: float
    cost: float
    rest: tuple[RemainingCost, ...]  # on the nodes of the running job, otherwise on each possible number of nodes
    currency: str


def read_training_status(
    snapshot: Snapshot, tasks: Iterable[JobTask], states: Mapping[str, SchedulerState], *, now: float
) -> TrainingStatus | None:
    """Return the status of the newest of these trainings, if possible of one that belongs to no comparison, or None."""
    newest = _find_newest_train_task(snapshot, tasks)
    if newest is None:
        return None
    files, scheduler = snapshot.get_training(newest.signature), states.get(newest.job)
    rows, result = files.read_sampled_metrics(), files.read_result()
    steps = [row for row in rows if row["kind"] == "step"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    progress_rows = [row for row in rows if row["kind"] in ("start", "step", "epoch")]
    last_step, last_epoch = steps[-1] if steps else {}, epochs[-1] if epochs else {}
    latest = max((row for row in (last_step, last_epoch) if row), key=lambda row: row["samples"], default={})
    row = _find_newest_row_with_eta(rows)
    workload, stage = newest.spec.workload, _find_stage_status(rows, result, nodes=newest.nodes)
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
        # of a script only if its samples per epoch are known
        epochs=None if progress_rows and progress_rows[-1]["epoch"] is None else workload.max_epochs,
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
            now=now - files.compute_clock_offset(rows) if _is_training(snapshot, newest.job, scheduler, row) else None,
        ),
        noise=next((row for row in reversed(rows) if row["kind"] == "noise"), None),
        tuning=_make_tuning_status(files.read_tuning()),
        kwh=energy.kwh if (energy := files.read_energy()) is not None else None,
        samples_asked=workload.requested_samples,
        ags=_find_newest_scaling(rows),
        warnings=_list_training_warnings(rows),
        changes=files.read_step_changes(),
        stage=stage,
        stages=newest.stages,
        submitted=newest.job in {job.id for job in snapshot.jobs} or bool(progress_rows or result),
        possible_nodes=() if len(newest.node_counts) == 1 or result is not None or is_running else newest.node_counts,
    )
    if not newest.sizes:
        return status
    until = now if is_running and result is None else None
    return dataclasses.replace(status, spent=_compute_spent_and_remaining_cost(snapshot, newest, status, until=until))


def _compute_spent_and_remaining_cost(
    snapshot: Snapshot, newest: TrainTask, status: TrainingStatus, *, until: float | None
) -> SpentAndRemainingCost:
    """Return time and cost so far, and the remaining ones by the pace of the running job, else as predicted for each size.

    Args:
        until: time to which a running attempt is counted; None if the job does not run.
    """
    tasks = {task.id: task for task in snapshot.train_tasks if task.job == newest.job}
    attempts = [
        attempt
        for attempt in snapshot.adjust_starts_to_file_clock(snapshot.list_attempts_of_job(newest.job))
        if attempt.task in tasks
    ]
    if until is None:
        attempts = snapshot.estimate_lost_attempt_ends(attempts)
    seconds = [(tasks[attempt.task], attempt, attempt.compute_duration_seconds(until)) for attempt in attempts]
    return SpentAndRemainingCost(
        hours=sum(elapsed for _, _, elapsed in seconds) / 3600,
        node_hours=sum((task.nodes + attempt.idle_nodes) * elapsed for task, attempt, elapsed in seconds) / 3600,
        cost=sum(compute_attempt_cost(task, attempt, task.prediction, until) for task, attempt, _ in seconds),
        rest=() if status.finished else tuple(_list_remaining_costs(newest, status)),
        currency=newest.spec.pricing.currency,
    )


def _list_remaining_costs(task: TrainTask, status: TrainingStatus) -> Iterator[RemainingCost]:
    whole = status.epochs or status.samples_asked
    done = status.epoch if status.epochs else status.samples
    share = None if not whole else max(0.0, 1 - done / whole)
    for size in task.sizes:
        prediction = size.prediction
        if size.nodes not in (status.possible_nodes or (task.nodes,)) or prediction is None or not prediction.hours:
            continue
        hours = None if share is None else compute_remaining_time_share(prediction, share) * prediction.hours
        if status.eta is not None and not status.possible_nodes:
            hours = status.eta / 3600
        if hours is not None:
            yield RemainingCost(size.nodes, hours, hours / prediction.hours * prediction.cost)


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


def _find_stage_status(
    rows: Sequence[Mapping[str, Any]], result: TrainResult | None, *, nodes: int
) -> StageStatus | None:
    """Return the current ramp stage of a training; None if it has finished or its batch does not grow."""
    newest = next((row for row in reversed(rows) if row["kind"] == "stage"), None)
    if newest is None or result is not None:
        return None
    return StageStatus(newest["batch"], newest["stage"], newest["stages"], newest.get("noise"), nodes)


def _find_newest_train_task(snapshot: Snapshot, tasks: Iterable[JobTask]) -> TrainTask | None:
    jobs = {task.job for task in tasks}
    all_trainings = [task for task in snapshot.train_tasks if task.job in jobs]
    comparison = snapshot.comparison
    compared = frozenset[str]() if comparison is None else comparison.signatures
    trainings = [task for task in all_trainings if task.signature not in compared] or all_trainings
    submitted = {job.id: job.submitted_at for job in snapshot.jobs}
    return max(trainings, key=lambda task: (submitted.get(task.job, 0.0), task.attempt), default=None)


def _find_newest_row_with_eta(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest row with a remaining time; empty if the newest start has not made a step yet."""
    newest = [row for row in rows if row["kind"] in ("step", "branch", "start")][-1:]
    return newest[0] if newest and newest[0]["kind"] != "start" else {}


def _make_tuning_status(tuning: Tuning | None) -> TuningStatus | None:
    if tuning is None:
        return None
    names = [arm.name for arm in tuning.arms]
    arm = self_tuning.find_next_arm(names, tuning.branches)
    if arm is None or tuning.chosen is not None:
        chosen = tuning.chosen.name if tuning.chosen is not None else None
        return TuningStatus(None, 0, 0, chosen, tuning.branches)
    return TuningStatus(arm, names.index(arm) + 1, len(names), None, tuning.branches)


def _is_training(snapshot: Snapshot, job: str, scheduler: SchedulerState | None, row: Mapping[str, Any]) -> bool:
    """Return whether the attempt that wrote a row is still training: it has not ended, and its job is not waiting."""
    if scheduler is not None and (scheduler.state == "pending" or scheduler.suspended):
        return False
    attempts = snapshot.list_attempts_of_job(job)
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
