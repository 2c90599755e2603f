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
from tula_cli.run.training_run import TrainingRun


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
    """Return the status of the newest training among `tasks`, preferring one outside comparisons; None if there is none."""
    task = _find_newest_train_task(snapshot, tasks)
    if task is None:
        return None
    files, scheduler = snapshot.get_training(task.signature), states.get(task.job)
    rows, result, energy = files.read_sampled_metrics(), files.read_result(), files.read_energy()
    last_step, last_epoch = _find_last_row(rows, "step"), _find_last_row(rows, "epoch")
    last_trained = max(last_step, last_epoch, key=lambda row: row.get("samples", -1))
    position = _find_last_row(rows, "start", "step", "epoch")
    stage = _find_stage_status(rows, result, nodes=task.nodes)
    is_running = scheduler is not None and scheduler.state == "running"
    status = TrainingStatus(
        signature=task.signature,
        job=task.job,
        finished=result is not None,
        nodes=task.nodes,
        batch=task.batch if result is None else result.batch,
        attempt=task.attempt,
        epoch=float(position.get("epoch") or 0.0),
        # A script of unknown length in epochs has none in its rows.
        epochs=task.spec.workload.max_epochs if position.get("epoch", 0.0) is not None else None,
        samples=int(position.get("samples", 0)),
        loss=last_trained.get("loss"),
        top1=last_epoch.get("top1"),
        perplexity=last_epoch.get("perplexity"),
        tokens_per_second=last_step.get("tokens_per_second"),
        padding=last_step.get("padding"),
        metrics=last_epoch.get("metrics") or {},
        lr=last_trained.get("lr"),
        beta2=_find_last_row(rows, "start", "stage").get("beta2"),
        step_time=_find_step_time(files, last_trained, finished=result is not None),
        predicted_step=_find_predicted_step_time(task, task.batch if stage is None else stage.batch),
        eta=0.0 if result is not None else _estimate_remaining_seconds(snapshot, task, scheduler, rows, now),
        noise=_find_last_row(rows, "noise") or None,
        tuning=_make_tuning_status(files.read_tuning()),
        kwh=None if energy is None else energy.kwh,
        samples_asked=task.spec.workload.requested_samples,
        ags=_find_newest_scaling(rows),
        warnings=_list_training_warnings(rows),
        changes=files.read_step_changes(),
        stage=stage,
        stages=task.stages,
        submitted=task.job in {job.id for job in snapshot.jobs} or bool(position or result),
        possible_nodes=task.node_counts if len(task.node_counts) > 1 and result is None and not is_running else (),
    )
    if not task.sizes:
        return status
    until = now if is_running and result is None else None
    return dataclasses.replace(status, spent=_compute_spent_and_remaining_cost(snapshot, task, status, until=until))


def _find_last_row(rows: Sequence[Mapping[str, Any]], *kinds: str) -> Mapping[str, Any]:
    """Return the last row of one of these kinds; empty if there is none."""
    return next((row for row in reversed(rows) if row["kind"] in kinds), {})


def _find_step_time(files: TrainingRun, last_trained: Mapping[str, Any], *, finished: bool) -> float | None:
    """Return the step time (s) of a finished training, or else the newest one; None if it is unknown."""
    summary = files.read_summary() if finished else None
    if summary is not None and summary.actual_step is not None:
        return summary.actual_step
    return last_trained.get("step_time") or None


def _find_predicted_step_time(task: TrainTask, batch: int) -> float | None:
    """Return the predicted step time (s) of a training at a batch; None if there is no prediction."""
    prediction = task.prediction and task.prediction.get_prediction_at_batch(batch)
    return None if prediction is None else prediction.step_time


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
    newest = _find_last_row(rows, "stage")
    if not newest or result is not None:
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


def _estimate_remaining_seconds(
    snapshot: Snapshot, task: TrainTask, scheduler: SchedulerState | None, rows: Sequence[Mapping[str, Any]], now: float
) -> float | None:
    """Return the remaining seconds by the last row, less the time since then if the training runs; None if unknown."""
    last_row = _find_last_row(rows, "step", "branch", "start")
    if last_row.get("kind") == "start" or not last_row.get("eta"):  # the newest start has made no step
        return None
    since = 0.0
    if _is_training(snapshot, task.job, scheduler, last_row):
        since = now - snapshot.get_training(task.signature).compute_clock_offset(rows) - last_row["time"]
    return max(0.0, float(last_row["eta"]) - since)
