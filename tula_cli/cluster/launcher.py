"""Starting jobs and asking what became of them, wherever they run."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from tula_cli.cluster.batch_launcher import BatchLauncher
from tula_cli.cluster.local import LocalLauncher
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.cluster.schedulers import make_scheduler
from tula_cli.cluster.slurm.submit import SlurmLauncher
from tula_cli.errors import SchedulerError
from tula_cli.host import interrupts
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Task
from tula_cli.run.snapshot import Snapshot
from tula_cli.spec.job import JobSpec

LOCK_POLL, LOCK_PATIENCE = 0.5, 600.0
"""Seconds between two looks whether another command line has submitted its jobs, and how long to look at most."""


class Launcher(Protocol):
    """Submits jobs; the tests pass one that runs nothing."""

    def script(self, run: RunDir, task: Task) -> str:
        """Return what would be submitted, as text; touches nothing."""
        ...

    def submit(self, run: RunDir, task: Task) -> Job:
        """Submit a job whose task is written already.

        Raises:
            SchedulerError: the job was refused.
        """
        ...

    def states(self, look: Snapshot, jobs: Sequence[Job]) -> dict[str, SchedulerState]:
        """Ask what became of jobs, all at once; by the job's own id. `look` is what their run holds."""
        ...

    def patient(self) -> "Launcher":
        """Return a launcher for a command that waits: it bothers the scheduler less, and hears of jobs up to a minute later."""
        ...

    def cancel(self, run: RunDir, job: Job) -> None:
        """End a job and everything it started."""
        ...


def make_launcher(spec: JobSpec, *, submits: bool = True) -> Launcher:
    """Return the launcher of the spec's cluster.

    Args:
        spec: the job.
        submits: whether jobs are to be submitted; what became of them can be told from the files alone.

    Raises:
        SchedulerError: nothing can be submitted from here.
        SpecError: a scheduler of the user's own cannot be made.
    """
    if spec.cluster.kind == "local":
        return LocalLauncher()
    kind = spec.cluster.kind
    launcher = SlurmLauncher() if kind == "slurm" else BatchLauncher(make_scheduler(spec.cluster), kind)
    if submits and (why := launcher.scheduler.absent()):
        raise SchedulerError(
            f"cluster.kind is {kind}, but {why}", "run tula on a login node, or set cluster.kind: local"
        )
    return launcher


@contextlib.contextmanager
def lock_submission(run: RunDir, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Keep other command lines from submitting jobs of a run while this one looks what is there and submits.

    Ctrl-C is held back meanwhile: of a job that was started and not written down nobody would know.

    Raises:
        SchedulerError: another one does not come to an end.
        KeyboardInterrupt: at the end, where Ctrl-C was pressed.
    """
    waited = 0.0
    while owner := run.lock.acquire():
        if waited >= LOCK_PATIENCE:
            raise SchedulerError(
                f"another tula command ({owner}) is submitting jobs of {run.id}",
                f"wait for its end, or remove {run.path / 'lock'} if there is none",
            )
        sleep(LOCK_POLL)
        waited += LOCK_POLL
    try:
        with interrupts.hold_interrupts():
            yield
    finally:
        run.lock.release()


def list_unfinished_jobs(run: RunDir, launcher: Launcher, job_ids: Iterable[str]) -> list[str]:
    """Return which of these jobs wait or run."""
    jobs = [job for id_ in job_ids if (job := run.job(id_)) is not None]
    states = launcher.states(run.read(), jobs)
    for state in states.values():
        if state.silent:
            raise SchedulerError(state.reason, "nothing was submitted; run the same command again later")
    return [job.id for job in jobs if states[job.id].state in ("pending", "running")]
