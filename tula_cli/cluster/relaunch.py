"""What remains of a task, and what follows from the outcome of an attempt: result, relaunch, or end of the job."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from tula_cli.cluster.exit_reason import ExitReason
from tula_cli.cluster.rank_programs import make_rank_program
from tula_cli.host.failures import FAILURE_KINDS, advise, is_missing_gpu
from tula_cli.models.choice.early_stopping import shorten_prediction
from tula_cli.models.cost import compute_cost
from tula_cli.models.out_of_memory import Fallback, cannot_accumulate, find_next_fallback
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, TimeParts
from tula_cli.run.records.results import Summary, TrainResult
from tula_cli.run.records.tasks import (
    CheckTask,
    EvaluateTask,
    ProbeTask,
    RehearsalTask,
    Task,
    TrainTask,
    make_probe_id,
    make_probe_identity,
)
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.resources import Cluster
from tula_cli.spec.sections import FEWEST_WORKERS
from tula_cli.words import format_count

MAX_RESTARTS = 2
"""Maximum restarts of a job other than a training after lost processes (not after out-of-memory or a user error)."""
PROCESS_LOST = tuple(
    outcome for outcome, ending in FAILURE_KINDS.items() if ending.follows in ("processes", "paused", "outwaited")
)
"""Outcomes after which processes are started again in the same allocation, a limited number of times."""
COUNTED_OUTCOMES: tuple[OutcomeClass, ...] = (*PROCESS_LOST, "device_fault", "device_error")
"""Outcomes limited to `MAX_RESTARTS` per job, or in a training to `train.max_attempts` without a newer checkpoint."""
ALLOCATION_LOST = tuple(outcome for outcome, ending in FAILURE_KINDS.items() if ending.follows == "next job")
"""Outcomes that end the allocation: training resumes in the next one as long as checkpoints advance."""
UNRECORDED_OUTCOMES: tuple[OutcomeClass, ...] = (
    *PROCESS_LOST,
    *ALLOCATION_LOST,
    "host_oom",
    "device_oom",
    "stage_end",
    "diverged",
)
"""Outcomes whose relaunch may not have been recorded yet."""


def needs_new_allocation(outcome: OutcomeClass | Literal["done"] | None, cluster: Cluster) -> bool:
    """Return whether a relaunch after this outcome needs another allocation: this one is lost or has a faulty node."""
    return outcome in ALLOCATION_LOST or (outcome == "device_fault" and cluster.kind != "local")


def count_lost(attempts: Sequence[Attempt], outcome: OutcomeClass | Literal["done"] | None, allocation: str) -> int:
    """Return how many attempts count towards the limit of restarts after an attempt with `outcome`.

    Failures of the file system are not the program's fault: they count only among themselves and in their allocation.
    """
    if outcome == "storage":
        return sum(attempt.outcome == "storage" and attempt.allocation == allocation for attempt in attempts)
    return sum(attempt.outcome in COUNTED_OUTCOMES and attempt.outcome != "storage" for attempt in attempts)


def find_newest_task(run: RunDir, task_id: str) -> Task:
    """Return the task to start; for a training, its newest relaunch."""
    task = run.task(task_id)
    assert task is not None, f"{run.path} has no task {task_id}"
    if isinstance(task, TrainTask):
        return run.training(task.signature).newest_task() or task
    return task


def is_over(run: RunDir, task: Task) -> bool:
    """Return whether a task is cancelled or finished, so that nothing is left to do."""
    return run.is_cancelled(task.job) or run.is_finished(task)


def make_next_task(run: RunDir, task: Task, reason: ExitReason, lost: int) -> Task | None:
    """Record the results that follow from the outcome of an attempt; return the task to start now, or None.

    Args:
        run: the run.
        task: the attempted task.
        reason: why the attempt ended.
        lost: number of attempts of this job with `COUNTED_OUTCOMES` so far, including this one.
    """
    match task:
        case ProbeTask():
            return _make_next_probe(run, task, reason, lost)
        case TrainTask():
            return _make_next_training(run, task, reason, lost)
        case RehearsalTask():
            is_over = run.is_finished(task) or run.is_cancelled(task.job) or lost > MAX_RESTARTS
            return None if is_over or reason.outcome in ALLOCATION_LOST else task
        case EvaluateTask():
            may_relaunch = reason.outcome in COUNTED_OUTCOMES and lost <= MAX_RESTARTS
            return task if may_relaunch and not needs_new_allocation(reason.outcome, task.spec.cluster) else None
        case CheckTask():
            return task if reason.outcome == "port" and lost <= MAX_RESTARTS else None


def _make_next_probe(run: RunDir, task: ProbeTask, reason: ExitReason, lost: int) -> ProbeTask | None:
    current = run.current_probe(task)
    if current is None:
        return None
    if reason.outcome is None:
        return task  # a script is started once for each batch
    if reason.outcome == "device_oom":
        _write_out_of_memory(run, task, current, reason.message)
    elif (
        reason.outcome in COUNTED_OUTCOMES
        and lost <= MAX_RESTARTS
        and not needs_new_allocation(reason.outcome, task.spec.cluster)
    ):
        return task
    elif reason.outcome != "cancelled" or not run.is_cancelled(task.job):
        outcome = reason.outcome or "unknown"
        run.write_result(Failed(**make_probe_identity(task, current), outcome=outcome, message=reason.description))
        may_continue = outcome == "diverged" or (
            outcome == "user" and not is_missing_gpu(reason.message)
        )  # may go well
        return _skip_failed_batch(run, task, current) if may_continue else None
    return None


def _skip_failed_batch(run: RunDir, task: ProbeTask, failed: int) -> ProbeTask | None:
    """Return a probe without a batch that failed in the user's code (e.g. batch 1 with BatchNorm) or diverged.

    None after a second failure, which shows that the batch is not the cause.
    """
    if task.skip:
        return None
    remaining = task.model_copy(update={"skip": (failed,)})
    run.write_task(remaining)
    return remaining


def _write_out_of_memory(run: RunDir, task: ProbeTask, current: int, message: str) -> None:
    """Record an out-of-memory result for the current batch, and an assumed one for all larger batches."""
    for local_batch in task.local_batches:
        if local_batch < current:
            continue
        assumed = local_batch > current
        text = f"a local batch of {current} did not fit" if assumed else message
        run.write_result(OutOfMemory(**make_probe_identity(task, local_batch), assumed=assumed, message=text))


def _make_next_training(run: RunDir, task: TrainTask, reason: ExitReason, lost: int) -> TrainTask | None:
    if reason.outcome is None:
        write_summary(run, task)
        return None
    relaunch = _relaunch(run, task, reason, lost)
    if relaunch is not None:
        run.write_task(relaunch)
    return relaunch


def _relaunch(run: RunDir, task: TrainTask, reason: ExitReason, lost: int) -> TrainTask | None:
    """Return the next attempt of a training, or None if it must not be relaunched.

    It uses less memory after a device OOM, fewer loader processes after a host OOM, a lower learning rate after a
    growing batch diverged, the nodes of the next stage at the end of a stage, and otherwise the same settings.
    """
    update: dict[str, object] = {}
    following = task.next_stage
    if following is not None and reason.outcome in ("stage_end", "device_oom"):
        cause = f"batch {following.batch} has {format_count(following.nodes or task.own_nodes)}"
        if reason.outcome == "device_oom":  # the local batch becomes smaller, the global one stays
            cause = f"out of memory on {format_count(task.nodes)}, so it goes on with {following.nodes}"
        update = {"nodes": following.nodes}
    elif reason.outcome == "device_oom":
        fallback = _choose_fallback(run, task)
        if fallback is None:
            return None
        cause = fallback.words
        update = {"ladder": task.ladder[fallback.rung :], "splits": fallback.splits}
    elif reason.outcome == "host_oom":
        fewer = _halve_workers(task)
        if fewer is None:
            return None
        cause = f"host out of memory with {task.workers} loader processes a rank"
        update = {"workers": fewer}
    elif reason.outcome == "diverged":
        limit = _lower_lr_limit(run, task)
        if limit is None:
            return None
        cause = f"{reason.message}; restarted from before with train.max_lr_factor {limit:g}"
        update = {"max_lr_factor": limit}
    elif reason.outcome in COUNTED_OUTCOMES and lost < task.spec.train.max_attempts:
        cause = f"{reason.outcome}: {reason.description}"
    elif reason.outcome in ALLOCATION_LOST or reason.once_more:
        cause = reason.description
    else:
        return None
    return relaunch_task(task, cause, **update)


def relaunch_task(task: TrainTask, cause: str, **update: object) -> TrainTask:
    """Return the next attempt of a training, with its cause recorded."""
    attempt = task.attempt + 1
    return task.model_copy(update={**update, "id": f"{task.job}-{attempt}", "attempt": attempt, "cause": cause})


def _lower_lr_limit(run: RunDir, task: TrainTask) -> float | None:
    """Return half the learning-rate factor at which a growing batch diverged; None the second time, or at factor 1."""
    if task.max_lr_factor is not None or task.script is not None:
        return None
    rows = (row for row in reversed(run.training(task.signature).metrics()) if row["kind"] == "diverged")
    factor = next((row.get("lr_factor") for row in rows), None) or 1.0
    return max(1.0, factor / 2) if factor > 1 else None


def _choose_fallback(run: RunDir, task: TrainTask) -> Fallback | None:
    """Return the fallback after an out-of-memory of a training; None if no configuration would use less memory."""
    why_not = cannot_accumulate(task.spec)
    micro_batches = None if why_not else make_rank_program(run, task).possible_micro_batches()
    batches = [rung.batch for rung in task.ladder]
    return find_next_fallback(
        batches, task.splits, micro_batches, why_not=why_not, stage=_find_batch_of_stage(run, task)
    )


def _find_batch_of_stage(run: RunDir, task: TrainTask) -> int | None:
    """Return the current batch of a growing batch if it is still below the final one; None otherwise or if unknown."""
    if task.spec.train.stages is None or task.script is not None:
        return None
    rows = run.training(task.signature).metrics()
    batch = next((int(row["batch"]) for row in reversed(rows) if row["kind"] == "stage"), task.batch)
    return batch if batch < task.batch else None


def _halve_workers(task: TrainTask) -> int | None:
    """Return fewer loader processes, or None: half, once; for `auto` FEWEST_WORKERS, then half each time."""
    if task.workers == "auto":
        return FEWEST_WORKERS
    workers = task.spec.train.workers
    if workers == "auto":
        return task.workers // 2 or None
    return task.workers // 2 if task.workers and task.workers >= workers else None


def reconsider_reason(
    run: RunDir, task: Task, attempt: Attempt, reason: ExitReason, earlier: Sequence[Attempt]
) -> ExitReason:
    """Return the exit reason of an attempt, with an apparent device fault changed to a likelier user error.

    A repeated device error is attributed to the program. A missing GPU is a fault of the node only if others have GPUs.

    Args:
        run: the run.
        task: the attempted task.
        attempt: the attempt that ended.
        reason: why the attempt ended.
        earlier: earlier attempts of this job; of a training, those without a newer checkpoint since.
    """
    if reason.outcome == "device_fault" and is_missing_gpu(reason.message) and not _has_gpus_elsewhere(run, attempt):
        message = f"{reason.description}; {advise(reason.outcome, reason.message)}"
        return dataclasses.replace(reason, outcome="user", message=message, final=isinstance(task, TrainTask))
    if reason.outcome == "device_error" and any(
        a.outcome == "device_error" for a in _list_similar_failures(run, task, earlier)
    ):
        return dataclasses.replace(
            reason,
            outcome="user",
            message=f"{reason.description}, as in the attempt before",
            final=isinstance(task, TrainTask),
        )
    return reason


def _list_similar_failures(run: RunDir, task: Task, earlier: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the earlier attempts at the same work as the newest one: of a probe job, at the same batch."""
    if not isinstance(task, ProbeTask):
        return earlier
    results = [run.result(make_probe_id(task.nodes, local_batch)) for local_batch in task.local_batches]
    over = [result.measured_at for result in results if isinstance(result, Measured)]
    over += [attempt.ended_at or 0.0 for attempt in earlier if attempt.outcome == "user"]  # that batch is left out now
    return [attempt for attempt in earlier if (attempt.ended_at or 0.0) > max(over, default=0.0)]


def _has_gpus_elsewhere(run: RunDir, attempt: Attempt) -> bool:
    """Return whether jobs with the same cluster section have seen GPUs, in this attempt or earlier ones.

    Always False on this machine, which is the only node.
    """
    alike = [other_attempt for other_attempt in run.attempts() if other_attempt.cluster == attempt.cluster]
    return bool(attempt.allocation) and any(run.has_seen_gpus(other_attempt) for other_attempt in alike)


def describe_no_progress(
    attempts: Sequence[Attempt], progress: int, limit: int, setting: str = "cluster.slurm.minutes"
) -> str:
    """Return why a training that lost its allocation must not resume; empty if it may.

    Preemptions and lost nodes are limited only by the number of jobs in the chain.

    Args:
        attempts: attempts of the training, oldest first.
        progress: samples trained and saved so far.
        limit: `train.max_attempts`.
        setting: name of the setting for the time limit of its jobs.
    """
    if not attempts or attempts[-1].outcome not in ALLOCATION_LOST:
        return ""
    # The allocation counts, not its last attempt: an earlier one in it may have saved something.
    began = next(attempt for attempt in attempts if attempt.allocation == attempts[-1].allocation)
    if began.progress != progress:
        return ""
    if attempts[-1].outcome == "time_limit":
        waited = count_lost(attempts, "storage", attempts[-1].allocation)
        return "" if waited else f"the time limit was reached before anything could be saved: raise {setting}"
    stalled = [attempt for attempt in attempts if attempt.outcome == "supervisor" and attempt.progress == progress]
    return f"{len(stalled)} supervisors failed without a newer checkpoint" if len(stalled) >= limit else ""


def write_summary(run: RunDir, task: TrainTask) -> None:
    """Record predicted and actual duration and cost; actual includes the wall-clock time of failed attempts."""
    training = run.training(task.signature)
    result, tasks, attempts = training.result(), training.tasks(), training.attempts()
    assert result is not None
    assert tasks
    took = {a.task: 0.0 for a in attempts}
    for a in attempts:
        took[a.task] += ((a.ended_at or time.time()) - a.started_at) / 3600
    hours = sum(took.values())
    prediction, energy = _predict_epochs(tasks[0], result), training.energy()
    newest = tasks[-1].prediction  # of the batch and the nodes that the training ended with, as is result.step_time
    run.write_summary(
        Summary(
            signature=task.signature,
            nodes=task.nodes,
            start_batch=tasks[0].batch,
            batch=result.batch,
            attempts=len(attempts),
            predicted_hours=prediction.hours if prediction else None,
            actual_hours=hours,
            predicted_cost=prediction.cost if prediction else None,
            actual_cost=sum(
                _compute_cost_of_hours(other_task, took[other_task.id], prediction)
                for other_task in tasks
                if other_task.id in took
            ),
            predicted_step=newest.step_time if newest else None,
            actual_step=result.step_time,
            predicted_parts=prediction.parts if prediction else None,
            actual_parts=None if task.spec.script else _measure_time_parts(training, 3600 * hours),
            predicted_kwh=prediction.kwh if prediction else None,
            actual_kwh=None if energy is None else energy.kwh,
            counted=None if energy is None else min(1.0, energy.seconds / (3600 * hours)),
            metrics=result.metrics,
            best_top1=result.best_top1,
            best_loss=result.best_loss,
            best_epoch=result.best_epoch,
            best=result.best,
            ended=f"at epoch {result.epochs} of {task.spec.train.epochs}: {result.ended}" if result.ended else "",
            currency=task.spec.pricing.currency,
            causes=tuple(t.cause for t in tasks[1:]),
            lost=None if task.spec.script is None else training.script_saves().lost,
            tuning=result.tuning,
            scaled=result.scaled,
            changes=training.changes(),
            warnings=_list_warnings_of_training(training) if task.spec.script is not None else (),
        )
    )


def _predict_epochs(first_task: TrainTask, result: TrainResult) -> Prediction | None:
    """Return the prediction for the epochs that were trained: all, or those up to early stopping."""
    prediction = first_task.ladder[0].prediction
    if prediction is None or not result.ended:
        return prediction
    return shorten_prediction(prediction, epochs=result.epochs, of=first_task.spec.train.epochs_at_most)


def _measure_time_parts(training: TrainingRun, seconds: float) -> TimeParts:
    """Return the breakdown of the seconds of a training, from metric rows up to its newest checkpoint."""
    rows, tuning = list(training.metrics()), training.tuning()
    steps = [row for row in rows if row["kind"] == "step"]
    stepping = sum(row["count"] * row["step_time"] for row in steps)
    evaluation = sum(row["eval_seconds"] for row in rows if row["kind"] == "epoch")
    saving = sum(row["seconds"] for row in rows if row["kind"] == "save")
    branches = sum(branch.seconds for branch in tuning.branches) if tuning else 0.0
    return TimeParts(
        steps=stepping,
        data=sum(row["count"] * row["data_wait"] for row in steps),
        evaluation=evaluation,
        checkpoints=saving,
        branches=branches,
        rest=max(0.0, seconds - stepping - evaluation - saving - branches),
    )


def _list_warnings_of_training(training: TrainingRun) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row["message"] for row in training.metrics() if row["kind"] == "warning"))


def _compute_cost_of_hours(task: TrainTask, hours: float, prediction: Prediction | None) -> float:
    cluster = task.spec.cluster
    reserved = (prediction.peak_memory if prediction else None) or 0
    return compute_cost(
        task.spec.pricing,
        hours=hours,
        nodes=task.nodes,
        gpus_per_node=cluster.gpus_per_node,
        reserved=reserved,
        market=prediction.market if prediction else "on_demand",
    )
