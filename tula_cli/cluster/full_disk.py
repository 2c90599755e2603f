"""Holding and releasing a chain whose disk is full, as otherwise all of its jobs would fail within half a minute."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tula_cli.cluster.exit_reason import ExitReason
from tula_cli.cluster.relaunch import relaunch_task
from tula_cli.cluster.scheduler import Scheduler
from tula_cli.cluster.schedulers import make_scheduler
from tula_cli.errors import DiskFull, SchedulerError
from tula_cli.host.failures import advise
from tula_cli.run.directory import RunDir
from tula_cli.run.disk_space import measure_file_size
from tula_cli.run.records.base import ModelStates
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.shortages import describe_shortage, find_remaining_shortage, measure_shortage


def hold_chain(reason: ExitReason, waiting: Sequence[str], scheduler: Scheduler) -> ExitReason:
    """Hold the waiting jobs of a chain if the disk is full; return the reason with the action added to its message.

    Args:
        reason: why an attempt ended.
        waiting: ids of the later jobs of its chain.
        scheduler: scheduler of these jobs.
    """
    if reason.outcome != "disk" or not waiting:
        return reason
    complaint = scheduler.hold(waiting)
    ids = waiting[0] if len(waiting) == 1 else f"{waiting[0]} to {waiting[-1]}"
    result = f"held: {ids}" if not complaint else f"{ids} could not be held: {complaint}"
    return dataclasses.replace(reason, message=f"{reason.message}; {result}")


def require_disk_space(run: RunDir, last_attempt: Attempt | None) -> None:
    """Check that the disk has enough space again, if the last attempt failed on a full disk.

    Args:
        run: the run.
        last_attempt: the newest attempt of a training.

    Raises:
        DiskFull: space is still missing.
    """
    if last_attempt is None or last_attempt.outcome != "disk":
        return
    before = last_attempt.shortage or measure_shortage(run.path)
    if before.needed is None and Path(before.folder).resolve().is_relative_to(run.path.resolve()):
        before = before.model_copy(update={"needed": _estimate_checkpoint_bytes(run, last_attempt)})
    missing = find_remaining_shortage(before)
    if missing is not None:
        raise DiskFull(
            f"there is still no room: {describe_shortage(missing)}",
            advise("disk"),
            folder=missing.folder,
            quota=missing.quota,
            needed=missing.needed,
        )


def resume_with_space(run: RunDir, task: TrainTask, last_attempt: Attempt) -> TrainTask:
    """Return the relaunch of a training after a full disk, in a job that was released, and record it.

    Raises:
        DiskFull: space is still missing.
    """
    require_disk_space(run, last_attempt)
    relaunch = relaunch_task(task, f"there is room again: {last_attempt.message}")
    run.write_task(relaunch)
    return relaunch


def _estimate_checkpoint_bytes(run: RunDir, last_attempt: Attempt) -> int | None:
    """Return the bytes of a checkpoint of an attempt's training: the largest existing one, else as probes measured.

    An error of a full disk does not always report the size of the write, and a checkpoint is the largest file.
    """
    task = run.task(last_attempt.task)
    if not isinstance(task, TrainTask):
        return None
    training = run.training(task.signature)
    of_script = training.script_progress()
    saved = training.checkpoints() if of_script is None else [Path(of_script.checkpoint)]
    sizes = [measure_file_size(path) for path in saved]
    if not any(sizes):
        probes = [states.memory for states in run.read().results if isinstance(states, Measured)]
        sizes = [states.parameters + states.optimizer for states in probes if isinstance(states, ModelStates)]
    return max(sizes, default=0) or None


def release_held_jobs(run: RunDir, task: TrainTask) -> None:
    """Release the held jobs of a training's chain if its last attempt failed on a full disk that has space again.

    Raises:
        DiskFull: space is still missing.
        SchedulerError: the scheduler did not release the jobs.
    """
    attempts, job = run.training(task.signature).attempts(), run.job(task.job)
    if not attempts or attempts[-1].outcome != "disk":
        return
    require_disk_space(run, attempts[-1])
    scheduler = make_scheduler(task.spec.cluster)
    states = scheduler.ask(job.links) if job is not None else {}
    held_now = [id_ for id_, state in states.items() if state.held]
    if complaint := scheduler.release(held_now):
        by_hand = scheduler.release_command
        raise SchedulerError(f"{by_hand}: {complaint}", f"by hand: {by_hand} {','.join(held_now)}")
