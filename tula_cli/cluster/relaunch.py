"""What comes after an attempt: a result that follows from its end, the next attempt, or nothing more."""

import time
from collections.abc import Sequence
from typing import Any

from tula_cli.cluster.ending import Ending
from tula_cli.models.cost import cost
from tula_cli.run.directory import RunDir, probe_id
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Failed, OutOfMemory
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.results import Summary
from tula_cli.run.records.tasks import CheckTask, ProbeTask, Task, TrainTask

RESTARTS = 2
"""How often a probe job starts again after a lost process (not after an out-of-memory or the user's own error)."""
LOST: tuple[OutcomeClass, ...] = ("signal", "peer", "port", "unknown")
"""Endings of a process that say nothing against starting it again, a bounded number of times."""
TAKEN: tuple[OutcomeClass, ...] = ("time_limit", "preempted", "node_failure")
"""Endings of an allocation: training goes on in the next one for as long as checkpoints advance."""


def after(run: RunDir, task: Task, ending: Ending, lost: int) -> Task | None:
    """Write the results that follow from an ending; return the task to start now, None where the job is over.

    Args:
        run: the run.
        task: what ended.
        ending: how.
        lost: attempts of this job that ended as `LOST` so far, this one counted.
    """
    match task:
        case ProbeTask():
            return _after_probe(run, task, ending, lost)
        case TrainTask():
            return _after_training(run, task, ending, lost)
        case CheckTask():
            return task if ending.outcome == "port" and lost <= RESTARTS else None


def _after_probe(run: RunDir, task: ProbeTask, ending: Ending, lost: int) -> ProbeTask | None:
    current = run.current_probe(task)
    if current is None:
        return None
    if ending.outcome == "device_oom":
        _write_out_of_memory(run, task, current, ending.message)
    elif ending.outcome in LOST and lost <= RESTARTS:
        return task
    elif ending.outcome != "cancelled" or not run.cancelled(task.job):
        outcome = ending.outcome or "unknown"
        run.write_result(Failed(**_where(task, current), outcome=outcome, message=ending.message))
        return _without(run, task, current) if outcome == "user" else None
    return None


def _without(run: RunDir, task: ProbeTask, failed: int) -> ProbeTask | None:
    """Go on with the other batches once one has failed in the user's code (a batch of one under BatchNorm, say).

    Two failures say that it is not the batch.
    """
    if task.skip:
        return None
    rest = task.model_copy(update={"skip": (failed,)})
    run.write_task(rest)
    return rest


def _where(task: ProbeTask, local_batch: int) -> dict[str, Any]:
    return {
        "id": probe_id(task.nodes, local_batch),
        "nodes": task.nodes,
        "gpus_per_node": task.spec.cluster.gpus_per_node,
        "local_batch": local_batch,
    }


def _write_out_of_memory(run: RunDir, task: ProbeTask, current: int, message: str) -> None:
    """A batch that does not fit is a result; larger ones are taken not to fit either."""
    for local_batch in task.local_batches:
        if local_batch < current:
            continue
        assumed = local_batch > current
        text = f"a local batch of {current} did not fit" if assumed else message
        run.write_result(OutOfMemory(**_where(task, local_batch), assumed=assumed, message=text))


def _after_training(run: RunDir, task: TrainTask, ending: Ending, lost: int) -> TrainTask | None:
    if ending.outcome is None:
        write_summary(run, task)
        return None
    relaunch = _relaunch(task, ending, lost)
    if relaunch is not None:
        run.write_task(relaunch)
    return relaunch


def _relaunch(task: TrainTask, ending: Ending, lost: int) -> TrainTask | None:
    """Return the next attempt: a smaller batch after an OOM, fewer loader processes after the host's, else the same."""
    update: dict[str, object] = {}
    if ending.outcome == "device_oom":
        if len(task.ladder) < 2:
            return None
        cause = f"out of memory at batch {task.batch}"
        update = {"ladder": task.ladder[1:]}
    elif ending.outcome == "host_oom":
        if not task.workers or task.workers < task.spec.train.workers:
            return None
        cause = f"host out of memory with {task.workers} loader processes a rank"
        update = {"workers": task.workers // 2}
    elif ending.outcome in LOST and lost < task.spec.train.max_attempts:
        cause = f"{ending.outcome}: {ending.message}"
    elif ending.outcome in TAKEN:
        cause = ending.message
    else:
        return None
    attempt = task.attempt + 1
    return task.model_copy(update={**update, "id": f"{task.job}-{attempt}", "attempt": attempt, "cause": cause})


def no_progress(attempts: Sequence[Attempt], progress: int, limit: int) -> str:
    """Say why a training whose allocations were taken away must not go on; empty where it may.

    Args:
        attempts: its attempts, oldest first.
        progress: samples that have been trained for good by now.
        limit: `train.max_attempts`.
    """
    if not attempts or attempts[-1].outcome not in TAKEN:
        return ""
    # The allocation counts, not its last attempt: an earlier one in it may have saved something.
    began = next(attempt for attempt in attempts if attempt.allocation == attempts[-1].allocation)
    if began.progress != progress:
        return ""
    if attempts[-1].outcome == "time_limit":
        return "the time limit was reached before anything could be saved: raise cluster.slurm.minutes"
    stalled = [attempt for attempt in attempts if attempt.outcome in TAKEN and attempt.progress == progress]
    return f"{len(stalled)} allocations were lost without a newer checkpoint" if len(stalled) >= limit else ""


def write_summary(run: RunDir, task: TrainTask) -> None:
    """Keep predicted against actual; actual is every attempt's wall-clock time, the failed ones too."""
    training = run.training(task.signature)
    result, tasks, attempts = training.result(), training.tasks(), training.attempts()
    assert result is not None
    assert tasks
    hours = sum((a.ended_at or time.time()) - a.started_at for a in attempts) / 3600
    prediction = tasks[0].ladder[0].prediction
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
            actual_cost=_cost(task, hours, prediction),
            predicted_step=prediction.step_time if prediction else None,
            actual_step=result.step_time,
            metrics=result.metrics,
            best_top1=result.best_top1,
            currency=task.spec.pricing.currency,
            causes=tuple(t.cause for t in tasks[1:]),
            tuning=result.tuning,
        )
    )


def _cost(task: TrainTask, hours: float, prediction: Prediction | None) -> float:
    cluster = task.spec.cluster
    reserved = (prediction.peak_memory if prediction else None) or 0
    return cost(
        task.spec.pricing,
        hours=hours,
        nodes=task.nodes,
        gpus_per_node=cluster.gpus_per_node,
        reserved=reserved,
        market=prediction.market if prediction else "on_demand",
    )
