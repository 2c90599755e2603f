"""Applies the decision after an attempt: writes results, and makes the task that starts next."""

import time
from collections.abc import Sequence
from dataclasses import replace

from tula_cli.cluster.decisions import History
from tula_cli.cluster.rank_programs import make_rank_program
from tula_cli.models.cost import compute_attempt_cost, shorten_prediction
from tula_cli.models.out_of_memory import describe_why_not_splittable, find_next_fallback
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure, Fallback, Recovery, Relaunch, Requeue, Resize, Stop
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import Summary, TrainResult
from tula_cli.run.records.tasks import ProbeTask, Task, TrainTask, make_probe_id, make_probe_identity
from tula_cli.run.training_run import TrainingRun


def find_newest_task(run: RunDir, task_id: str) -> Task:
    """Return the task to start; for a training, its newest relaunch."""
    task = run.read_task(task_id)
    assert task is not None, f"{run.path} has no task {task_id}"
    training = run.find_training(task)
    return (None if training is None else training.read_newest_task()) or task


def is_finished_or_cancelled(run: RunDir, task: Task) -> bool:
    """Return whether a task is cancelled or finished, so that nothing is left to do."""
    return run.is_cancelled(task.job) or run.is_finished(task)


# --- The input of decide_next_action()


def read_history(
    run: RunDir,
    task: Task,
    failure: Failure | None,
    attempt: Attempt,
    *,
    attempts: Sequence[Attempt] = (),
    earlier: Sequence[Attempt] = (),
    reached: int | None = None,
    allocation: str = "",
    later_jobs: int = 0,
    allocation_ended: bool = False,
) -> History:
    """Return the history that `decide_next_action` needs when an attempt has ended.

    Args:
        attempts: all attempts of the submission, oldest first; the other arguments as of `History`.
    """
    outcome = None if failure is None else failure.outcome
    ended = attempt if attempt.ended_at is not None else attempt.model_copy(update={"ended_at": time.time()})
    history = History(
        attempt=ended,
        earlier=[other for other in earlier if other.ended_at is not None],
        allocation=allocation,
        of_allocation=[other for other in attempts if other.allocation == attempt.allocation],
        later_jobs=later_jobs,
        allocation_ended=allocation_ended,
        cancelled=run.is_cancelled(task.job),
        finished=run.is_finished(task),
        reached=reached,
        similar=earlier if outcome == "device_error" else (),
        has_seen_gpus=outcome == "device_fault" and _has_gpus_elsewhere(run, attempt),
    )
    match task:
        case TrainTask():
            training = run.get_training(task.signature)
            return replace(
                history,
                progress=training.count_trained_samples(),
                fallback=_choose_fallback(run, task) if outcome == "device_oom" else None,
                lr_factor=_find_diverged_lr_factor(training) if outcome == "diverged" else None,
            )
        case ProbeTask():
            current_batch = run.find_current_probe(task)
            return replace(
                history,
                current_batch=current_batch,
                similar=_list_attempts_at_same_batch(run, task, history.similar),
                next_trial=_find_next_trial(run, task, failed=current_batch if outcome == "device_oom" else None),
            )
    return history


def _find_next_trial(run: RunDir, task: ProbeTask, *, failed: int | None = None) -> int | None:
    """Return the local batch that a search for the largest one tries next.

    Args:
        task: the task; None is returned unless it searches for the largest batch and every other trial has a result.
        failed: the trial that was out of memory, which is not recorded yet.
    """
    if task.bounds is None or run.find_current_probe(task) != failed:
        return None
    from tula_cli.models.largest_batch import BatchBracket  # imported here because it needs numpy

    results = run.read_results()
    if failed is not None:
        results = [*results, OutOfMemory(**make_probe_identity(task, failed), assumed=False, message="")]
    return BatchBracket.from_results(task.spec, task.nodes, task.bounds, results).choose_next_trial()


def _find_diverged_lr_factor(training: TrainingRun) -> float | None:
    """Return the learning-rate factor at which the loss of a growing batch diverged; None if it was not recorded."""
    rows = (row for row in reversed(training.read_metrics()) if row["kind"] == "diverged")
    return next((row.get("lr_factor") for row in rows), None)


def _choose_fallback(run: RunDir, task: TrainTask) -> Fallback | None:
    """Return the fallback after an out-of-memory of a training; None if no configuration would use less memory."""
    why_not = describe_why_not_splittable(task.spec)
    micro_batches = None if why_not else make_rank_program(run, task).list_micro_batch_splits()
    batches = [fallback.batch for fallback in task.ladder]
    return find_next_fallback(
        batches, task.splits, micro_batches, why_not=why_not, stage=_find_batch_of_stage(run, task)
    )


def _find_batch_of_stage(run: RunDir, task: TrainTask) -> int | None:
    """Return the current batch of a growing batch if it is still below the final one; None otherwise or if unknown."""
    if task.spec.train.stages is None:
        return None
    rows = run.get_training(task.signature).read_metrics()
    batch = next((int(row["batch"]) for row in reversed(rows) if row["kind"] == "stage"), task.batch)
    return batch if batch < task.batch else None


def _list_attempts_at_same_batch(run: RunDir, task: ProbeTask, earlier: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the earlier attempts of a probe job at the batch of the newest one."""
    results = [run.read_result(make_probe_id(task.nodes, local_batch)) for local_batch in task.local_batches]
    end_times = [result.measured_at for result in results if isinstance(result, Measured)]
    end_times += [attempt.ended_at or 0.0 for attempt in earlier if attempt.outcome == "user"]  # skipped now
    return [attempt for attempt in earlier if (attempt.ended_at or 0.0) > max(end_times, default=0.0)]


def _has_gpus_elsewhere(run: RunDir, attempt: Attempt) -> bool:
    """Return whether jobs with the same cluster section have seen GPUs, in this attempt or earlier ones.

    Always False on this machine, which is the only node.
    """
    if not attempt.allocation:
        return False
    return any(run.has_seen_gpus(other) for other in run.read_attempts() if other.cluster == attempt.cluster)


# --- Application of a decision


def apply_decision(
    run: RunDir,
    task: Task,
    failure: Failure | None,
    decision: Relaunch | Requeue | Stop,
    *,
    granted: int | None = None,
) -> Task | None:
    """Record the results that follow from an attempt; return the task to start next, here or in the next job, or None.

    Args:
        granted: the nodes of the job that starts it; None if they are those of the attempt, or unknown.
    """
    match task:
        case ProbeTask():
            return _apply_probe_decision(run, task, failure, decision)
        case TrainTask():
            if failure is None:
                write_summary(run, task)
            if failure is None or isinstance(decision, Stop):
                return None
            relaunch = make_next_attempt(task, failure, decision)
            relaunch = relaunch if granted is None else relaunch.with_granted_nodes(granted)
            run.write_task(relaunch)
            return relaunch
    return task if isinstance(decision, Relaunch) else None


def make_next_attempt(task: TrainTask, failure: Failure, decision: Relaunch | Requeue) -> TrainTask:
    """Return the next attempt of a training, with its cause and the settings that change."""
    recovery = Recovery(failure=failure.model_copy(update={"detail": ""}), decision=decision)
    update: dict[str, object] = {"id": task.next_attempt_id, "attempt": task.attempt + 1, "recovery": recovery}
    if isinstance(decision, Relaunch):
        changes = {name: getattr(decision, name) for name in ("nodes", "workers", "max_lr_factor")}
        update |= {name: value for name, value in changes.items() if value is not None}
        if decision.fallback is not None:
            update |= {"ladder": task.ladder[decision.fallback.rung :], "splits": decision.fallback.splits}
            smaller = task.model_copy(update=update)
            update["max_micro_batch"] = smaller.micro_batch // smaller.splits if task.sizes else None
    return task.model_copy(update=update)


def resize_task_to_allocation(run: RunDir, task: Task, granted: int | None) -> Task:
    """Return a training on the nodes granted to its job, as a new attempt if their number differs; others as they are."""
    if granted is None or not isinstance(task, TrainTask):
        return task
    resized = task.with_granted_nodes(granted)
    if resized.nodes == task.nodes:
        return task
    resize = Resize(nodes=resized.nodes, nodes_before=task.nodes, granted=granted)
    update = {"id": task.next_attempt_id, "attempt": task.attempt + 1, "recovery": Recovery(decision=resize)}
    resized = resized.model_copy(update=update)
    run.write_task(resized)
    return resized


def _apply_probe_decision(
    run: RunDir, task: ProbeTask, failure: Failure | None, decision: Relaunch | Requeue | Stop
) -> ProbeTask | None:
    """Record the result of the current batch if the attempt gives one; return the task to start now, or None."""
    skip = decision.skip if isinstance(decision, Relaunch) else None
    current = run.find_current_probe(task)
    is_result = skip is not None or (isinstance(decision, Stop) and decision.why == "batch_failed")
    if failure is not None and current is not None and is_result:
        if failure.outcome == "device_oom":
            _write_out_of_memory(run, task, current, failure.summary)
        else:
            failure_without_detail = failure.model_copy(update={"detail": ""})
            run.write_result(Failed(**make_probe_identity(task, current), failure=failure_without_detail))
    trial = _find_next_trial(run, task) if isinstance(decision, Relaunch) else None
    if trial is not None:
        task = task.model_copy(update={"local_batches": (*task.local_batches, trial)})
        run.write_task(task)
    elif skip is not None:
        # Skip a batch that failed in the user's code (e.g. batch 1 with BatchNorm) or diverged; other batches may work.
        task = task.model_copy(update={"skip": (skip,)})
        run.write_task(task)
    return task if isinstance(decision, Relaunch) else None


def _write_out_of_memory(run: RunDir, task: ProbeTask, current: int, message: str) -> None:
    """Record an out-of-memory result for the current batch, and an assumed one for all larger batches to be measured."""
    larger = () if task.bounds is not None else [size for size in task.local_batches if size > current]
    for local_batch in (current, *larger):
        assumed = local_batch > current
        text = f"a local batch of {current} did not fit" if assumed else message
        run.write_result(OutOfMemory(**make_probe_identity(task, local_batch), assumed=assumed, message=text))


# --- The summary of a training


def write_summary(run: RunDir, task: Task) -> None:
    """Record predicted and actual duration and cost; actual includes the wall-clock time of failed attempts."""
    training = run.get_training(task.trained_signature)
    result, tasks, attempts = training.read_result(), training.read_tasks(), training.read_attempts()
    assert result is not None
    assert tasks
    tasks_by_id = {each.id: each for each in tasks}
    now = time.time()  # end of the newest attempt, in which this process still runs
    hours = sum(attempt.compute_duration_seconds(now) for attempt in attempts) / 3600
    prediction, energy = _predict_trained_epochs(tasks[0], result), training.read_energy()
    newest = tasks[-1].prediction  # for the final batch and nodes, like result.step_time
    run.write_summary(
        Summary(
            signature=task.trained_signature,
            nodes=task.nodes,
            start_batch=tasks[0].batch,
            batch=result.batch,
            attempts=len(attempts),
            predicted_hours=prediction.hours if prediction else None,
            actual_hours=hours,
            predicted_cost=prediction.cost if prediction else None,
            actual_cost=sum(
                compute_attempt_cost(tasks_by_id[attempt.task], attempt, prediction, now)
                for attempt in attempts
                if attempt.task in tasks_by_id
            ),
            predicted_step=newest.step_time if newest else None,
            actual_step=result.step_time,
            predicted_parts=prediction.parts if prediction else None,
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
            recoveries=tuple(later_task.recovery or Recovery() for later_task in tasks[1:]),
            tuning=result.tuning,
            scaled=result.scaled,
            changes=training.read_step_changes(),
            **make_rank_program(run, task).make_summary_fields(attempts, 3600 * hours),
        )
    )


def _predict_trained_epochs(first_task: TrainTask, result: TrainResult) -> Prediction | None:
    """Return the prediction for the epochs that were trained: all, or those up to early stopping."""
    prediction = first_task.ladder[0].prediction
    if prediction is None or not result.ended:
        return prediction
    return shorten_prediction(prediction, epochs=result.epochs, all_epochs=first_task.spec.train.max_epochs)
