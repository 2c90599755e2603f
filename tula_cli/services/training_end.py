"""How a training ended: its summary, or the error with the reason and the advice."""

import shutil
from collections.abc import Sequence

from tula_cli.errors import DeviceFault, DiskFull, Diverged, JobFailed, OutOfMemoryAtMinimum, Pending, TulaError
from tula_cli.host.failures import FAILURE_KINDS, describe_advice
from tula_cli.run.directory import RunDir
from tula_cli.run.disk_space import MIN_FREE_BYTES
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.results import Summary
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services.status import RunStatus

MAX_FIRST_FAILURES = 3
"""Number of failures without any success after which no further training of a comparison or plan is started."""
RESUME_HINT = "run the same command again to resume from the newest checkpoint"


def make_training_error(task: TrainTask, attempts: Sequence[Attempt], *, saved_samples: int) -> TulaError:
    """Return the error that describes how a training ended.

    Args:
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
        cut = f" with micro-batches of {task.micro_batch // task.splits}" if task.splits > 1 else ""
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
    training = run.get_training(signature)
    summary = training.read_summary()
    if summary is not None:
        return summary
    task = training.read_newest_task()
    if task is not None and run.is_cancelled(task.job):  # its ranks may still be running
        raise JobFailed(f"training {signature} was cancelled", RESUME_HINT)
    attempts = training.read_attempts()
    if task is None or not attempts:
        raise Pending(f"training {signature} has not started", "tula status shows why")
    raise make_training_error(task, attempts, saved_samples=training.find_newest_checkpoint_samples())
