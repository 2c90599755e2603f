"""Map how a training ended to the error, exit code and hint that the user gets."""

import shutil
from collections.abc import Sequence

from tula_cli.errors import DeviceFault, DiskFull, Diverged, JobFailed, OutOfMemoryAtMinimum, Pending, TulaError
from tula_cli.host.failures import FAILURE_KINDS, advice
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.results import Summary
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services.status import RunStatus

DISK_IS_FULL = 2**16  # bytes free; below, the small files of a run cannot be written
CANCELLED = "the same command resumes from the newest checkpoint"


def micro_batch(task: TrainTask) -> int:
    """Return the samples that a GPU takes at a time."""
    world = task.nodes * task.spec.cluster.gpus_per_node
    return task.batch // (world * task.spec.train.accumulate * task.splits)


def error_of_training(task: TrainTask, attempts: Sequence[Attempt], *, saved_samples: int) -> TulaError:
    """Return the error for how a training ended.

    Args:
        task: its newest task.
        attempts: all of them, oldest first; the last one counts.
        kept: samples of the newest checkpoint.
    """
    attempt = attempts[-1]
    if attempt.outcome is None or attempt.outcome == "done":
        return Pending(f"training {task.signature} has not ended", "tula status shows how far it is")
    where = f" (rank {attempt.rank}, {attempt.host})" if attempt.rank is not None else ""
    hint = advice(attempt.outcome, attempt.message, spec=task.spec)
    message = f"Training failed on attempt {task.attempt}{where}: {attempt.message}"
    if attempt.outcome == "cancelled":
        return JobFailed(f"Training was cancelled on attempt {task.attempt}{where}: {attempt.message}", CANCELLED)
    if attempt.outcome == "device_oom":
        cut = f" with micro-batches of {micro_batch(task)}" if task.splits > 1 else ""
        return OutOfMemoryAtMinimum(
            f"out of memory at the smallest batch, {task.batch}{cut}: {attempt.message}",
            hint,
        )
    if attempt.outcome == "diverged":
        stays = f"; the checkpoint at {saved_samples} samples is finite and is kept" if saved_samples else ""
        limit = task.max_lr_factor
        restart_note = "" if limit is None else f"; it had been restarted with train.max_lr_factor {limit:g}"
        return Diverged(f"{message}{restart_note}{stays}", hint)
    if attempt.outcome == "device_fault":
        faulty = dict.fromkeys(earlier.host for earlier in attempts if earlier.outcome == "device_fault")
        return DeviceFault(f"{message}; faulty: {', '.join(faulty)}", hint)
    return FAILURE_KINDS[attempt.outcome].error(message, hint)


def require_known_job(run_status: RunStatus, job_id: str) -> None:
    """Refuse to call a lost job pending.

    Raises:
        JobFailed: the job is gone and no log says why.
    """
    for job in run_status.jobs:
        if job.id == job_id and job.state == "lost":
            if shutil.disk_usage(run_status.path).free < DISK_IS_FULL:
                raise DiskFull(
                    f"{job.id} ended because the disk that holds {run_status.path} is full",
                    "free some space and run the same command again; it resumes from the newest checkpoint",
                )
            raise JobFailed(f"{job.id} is gone: {job.reason}", CANCELLED)


def load_summary(run: RunDir, signature: str) -> Summary:
    """Return predicted against actual of a finished training run.

    Raises:
        OutOfMemoryAtMinimum: the smallest batch did not fit.
        Diverged: its loss or its weights were not finite.
        DeviceFault: nodes or their devices were faulty, each time that it was tried.
        JobFailed: it ended for another reason.
        Pending: it has not ended.
    """
    summary = run.training(signature).summary()
    if summary is not None:
        return summary
    task = run.training(signature).newest_task()
    if task is not None and run.is_cancelled(task.job):  # its ranks may not have ended yet
        raise JobFailed(f"training {signature} was cancelled", CANCELLED)
    attempts = run.training(signature).attempts()
    if task is None or not attempts:
        raise Pending(f"training {signature} has not started", "tula status shows what it waits for")
    raise error_of_training(task, attempts, saved_samples=run.training(signature).newest_samples())
