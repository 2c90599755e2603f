"""Launchers: submit jobs and query their states, on this machine or on a scheduler."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Protocol

from tula_cli.cluster.batch_launcher import BatchLauncher
from tula_cli.cluster.local import LocalLauncher
from tula_cli.cluster.scheduler import SchedulerState, make_scheduler
from tula_cli.cluster.slurm.submit import SlurmLauncher
from tula_cli.errors import SchedulerError
from tula_cli.run.code import take_snapshot
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import Source
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Task
from tula_cli.run.snapshot import Snapshot
from tula_cli.spec.job import JobSpec

LOCK_POLL, LOCK_PATIENCE = 0.5, 600.0
"""Seconds between two checks whether another command has submitted its jobs, and the maximum wait."""


class Launcher(Protocol):
    """Submits jobs; tests pass a launcher that runs nothing."""

    def render_script(self, run: RunDir, task: Task) -> str:
        """Return the text that would be submitted, without side effects."""

    def submit(self, run: RunDir, task: Task) -> Job:
        """Submit a job whose task has already been written.

        Raises:
            SchedulerError: the job was refused.
        """

    def query_states(self, snapshot: Snapshot, jobs: Sequence[Job]) -> dict[str, SchedulerState]:
        """Return the states of jobs by their ids in one query; `snapshot` is a snapshot of their run."""

    def cancel(self, run: RunDir, job: Job) -> None:
        """Cancel a job and everything that it started."""


def make_launcher(spec: JobSpec, *, submits: bool = True) -> Launcher:
    """Return the launcher of the spec's cluster.

    Args:
        submits: whether jobs will be submitted; their states can be read from files without a scheduler.

    Raises:
        SchedulerError: jobs cannot be submitted from this machine.
        SpecError: a user-defined scheduler cannot be created.
    """
    if spec.cluster.kind == "local":
        return LocalLauncher()
    kind = spec.cluster.kind
    launcher = SlurmLauncher() if kind == "slurm" else BatchLauncher(make_scheduler(spec.cluster), kind)
    if submits and (why := launcher.scheduler.describe_why_absent()):
        raise SchedulerError(
            f"cluster.kind is {kind}, but {why}", "run tula on a login node, or set cluster.kind: local"
        )
    return launcher


@contextlib.contextmanager
def lock_submission(run: RunDir, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Lock a run against submissions by other commands while this one checks for existing jobs and submits.

    Ctrl-C is delayed until the end, so that no job is started without being recorded.

    Raises:
        SchedulerError: another command still holds the lock after LOCK_PATIENCE seconds.
        KeyboardInterrupt: at the end, if Ctrl-C was pressed.
    """
    waited = 0.0
    while owner := run.lock.acquire():
        if waited >= LOCK_PATIENCE:
            raise SchedulerError(
                f"another tula command ({owner}) is submitting jobs of {run.id}",
                f"wait until that command has finished; if it no longer runs, remove {run.path / 'lock'}",
            )
        sleep(LOCK_POLL)
        waited += LOCK_POLL
    try:
        with delay_interrupts():
            yield
    finally:
        run.lock.release()


def list_unfinished_jobs(run: RunDir, launcher: Launcher, job_ids: Iterable[str]) -> list[str]:
    """Return those of the jobs that are pending or running.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    jobs = [job for id_ in job_ids if (job := run.find_job(id_)) is not None]
    states = launcher.query_states(run.read_snapshot(strict=True), jobs)
    for state in states.values():
        if state.silent:
            raise SchedulerError(state.reason, "nothing was submitted; run the same command again later")
    return [job.id for job in jobs if states[job.id].state in ("pending", "running")]


def list_jobs_to_wait_for(run: RunDir, launcher: Launcher, job_ids: Iterable[str]) -> list[str]:
    """Return the given jobs that are pending or running, to wait for them. Call under `lock_submission`.

    Raises:
        SchedulerError: the scheduler does not answer, or a job is still being cancelled and will have no result.
    """
    unfinished = list_unfinished_jobs(run, launcher, job_ids)
    for id_ in unfinished:
        if run.is_cancelled(id_):
            raise SchedulerError(f"{id_} is still being cancelled", "run the same command again in a minute")
    return unfinished


def submit_task(run: RunDir, launcher: Launcher, task: Task) -> None:
    """Store a task and submit its job, under `lock_submission`; an earlier cancellation of the job no longer applies.

    The task remains if the submission fails, because a scheduler that does not answer may have accepted the job.

    Raises:
        SchedulerError: the scheduler refused the job.
    """
    run.remove_cancellation(task.job)
    run.write_task(task)
    run.write_job(launcher.submit(run, task))


def submit_missing_tasks(run: RunDir, launcher: Launcher, tasks: Sequence[Task], code: Source) -> list[str]:
    """Submit the jobs of tasks that are not pending or running, with a copy of the user's code, under `lock_submission`.

    The code is copied first, so that later edits do not affect submitted jobs.

    Returns:
        The ids of the jobs that were pending or running, which are left alone.

    Raises:
        SchedulerError: the scheduler refused a job, or one of them is still being cancelled.
    """
    unfinished = list_jobs_to_wait_for(run, launcher, [task.job for task in tasks])
    missing = [task for task in tasks if task.job not in unfinished]
    digest = take_snapshot(run, missing[0].spec, code) if missing else ""
    for task in missing:
        submit_task(run, launcher, task.model_copy(update={"code": digest}))
    return unfinished


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; a second Ctrl-C takes effect at once.

    Has no effect outside the main thread, where Python raises no KeyboardInterrupt, or if the program has another
    handler of SIGINT.

    Raises:
        KeyboardInterrupt: at the end, if Ctrl-C was pressed in the block.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler is not signal.default_int_handler:
        yield
        return
    pressed = False

    def handle_interrupt(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if pressed:
        raise KeyboardInterrupt
