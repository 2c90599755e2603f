"""Whether a full disk has space again, and the release of the jobs that were held meanwhile."""

from pathlib import Path

from tula_cli.cluster.scheduler import make_scheduler
from tula_cli.errors import DiskFull, SchedulerError
from tula_cli.host.failures import describe_advice
from tula_cli.run.directory import RunDir
from tula_cli.run.disk_space import measure_file_size
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import ModelStates
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.shortages import find_remaining_shortage, measure_shortage


def require_disk_space(run: RunDir, last_attempt: Attempt | None) -> None:
    """Check that the disk has enough space again, if the last attempt failed on a full disk.

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
            f"there is still too little space: {missing.description}",
            describe_advice("disk"),
            folder=missing.folder,
            quota=missing.quota,
            needed=missing.needed,
        )


def _estimate_checkpoint_bytes(run: RunDir, last_attempt: Attempt) -> int | None:
    """Return the bytes of a checkpoint of an attempt's training: the largest existing one, else as probes measured.

    An error of a full disk does not always report the size of the write, and a checkpoint is the largest file.
    """
    task = run.read_task(last_attempt.task)
    training = None if task is None else run.find_training(task)
    if training is None:
        return None
    script_progress = training.read_script_progress()
    saved = training.list_checkpoints() if script_progress is None else [Path(script_progress.checkpoint)]
    sizes = [measure_file_size(path) for path in saved]
    if not any(sizes):
        probes = [probe.memory for probe in run.read_measurements()]
        sizes = [states.parameters + states.optimizer for states in probes if isinstance(states, ModelStates)]
    return max(sizes, default=0) or None


def release_held_jobs(run: RunDir, task: TrainTask) -> None:
    """Release the held jobs of a training's chain if its last attempt failed on a full disk that has space again.

    Raises:
        DiskFull: space is still missing.
        SchedulerError: the scheduler did not release the jobs.
    """
    attempts, job = run.get_training(task.signature).read_attempts(), run.find_job(task.job)
    if not attempts or attempts[-1].outcome != "disk":
        return
    require_disk_space(run, attempts[-1])
    scheduler = make_scheduler(task.spec.cluster)
    states = scheduler.query_states(job.links) if job is not None else {}
    held_now = [id_ for id_, state in states.items() if state.on_hold]
    if error_message := scheduler.release(held_now):
        release_command = scheduler.release_command
        raise SchedulerError(
            f"{release_command}: {error_message}", f"release the jobs by hand: {release_command} {','.join(held_now)}"
        )
