"""What the commands that submit jobs have in common: what they work with, asking first, and waiting."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tula_cli import words
from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import Interruption, OverBudget, Pending
from tula_cli.run.directory import RunDir
from tula_cli.run.records.inspections import Inspection
from tula_cli.services import status
from tula_cli.services.events import Event, Planned, Warned, Watched, Work
from tula_cli.services.progress import job_status
from tula_cli.services.status import RunStatus
from tula_cli.spec.job import JobSpec

ENDED_BADLY = ("lost", "failed", "diverged", "cancelled")


@dataclass(frozen=True)
class Means:
    """What a command works with; tests give others."""

    launcher_for: Callable[[JobSpec], Launcher]
    inspect: Callable[[JobSpec], Inspection]  # tells the dataset's size and the memory
    confirm: Callable[[Planned], bool]  # whether what is planned may be submitted


@dataclass(frozen=True)
class Patience:
    """How long to wait for jobs, and what becomes of them on Ctrl-C."""

    wait: bool | None = None  # None: on this machine, not on a cluster
    timeout: float | None = None  # seconds
    cancel_on_interrupt: bool = False
    clock: Callable[[], float] = time.monotonic

    def waits(self, spec: JobSpec) -> bool:
        """Return whether to wait for jobs of this cluster."""
        return spec.cluster.kind == "local" if self.wait is None else self.wait

    def interruption(self, run: RunDir, launcher: Launcher, *, hint: str, message: str) -> Interruption:
        """Return what to raise on Ctrl-C: jobs go on unless they are to be cancelled, which is done here."""
        if self.cancel_on_interrupt:
            ended = status.cancel(run, launcher)
            return Interruption(f"interrupted; cancelled {', '.join(ended) or 'nothing'}")
        return Interruption(message, hint)


@dataclass(frozen=True)
class Detached:
    """Jobs that nobody waits for."""

    jobs: tuple[str, ...]
    under_way: tuple[str, ...]  # those of them that this call did not submit


def allow(confirm: Callable[[Planned], bool], planned: Planned) -> None:
    """Ask before money is spent.

    Raises:
        OverBudget: the answer is no.
    """
    if not confirm(planned):
        raise OverBudget("not confirmed; nothing was submitted")


def require_within_cap(node_hours: Sequence[float], cap: float | None) -> None:
    """Keep the cap on node-hours over all types of node.

    Raises:
        OverBudget: the probes may take more.
    """
    if cap is not None and sum(node_hours) > cap:
        types = f" on all {len(node_hours)} node types" if len(node_hours) > 1 else ""
        raise OverBudget(
            f"the probes{types} may take {words.number(sum(node_hours))} node-hours, search.max_node_hours is {cap:g}",
            "raise it with --set search.max_node_hours=..., or lower search.max_minutes, or search fewer nodes",
        )


def wait_for(run: RunDir, launcher: Launcher, jobs: Sequence[str], patience: Patience) -> Work[RunStatus]:
    """Wait until jobs have ended; return how.

    Raises:
        Pending: the time to wait is over, they are not.
        Interruption: Ctrl-C.
    """
    now = None
    try:
        for now in status.watch(run, launcher, jobs, timeout=patience.timeout):
            yield Watched(now)
    except KeyboardInterrupt:
        hint = f"the same command attaches to them again; tula cancel {words.near(run.path)} ends them"
        raise patience.interruption(run, launcher, hint=hint, message="interrupted; the jobs go on") from None
    assert now is not None
    own = [job for job in now.jobs if job.id in jobs]
    if left := [f"{job.id} ({job.state})" for job in own if job.state in job_status.ACTIVE]:
        raise Pending(
            f"not over after {patience.timeout:g} s: {', '.join(left)}", "the same command attaches to them again"
        )
    for job in own:
        if job.state in ENDED_BADLY:
            yield Warned(f"{job.id} {job.state}: {words.first_line(job.reason)}")
    return now


def doubts_of_new(
    run: RunDir, launcher: Launcher, jobs: Sequence[str], under_way: Sequence[str], spec: JobSpec
) -> Iterator[Event]:
    """Warn of jobs that will not start, and of those that were submitted with other settings of the cluster."""
    known = [found for found in run.jobs() if found.id in jobs]
    for id_, state in launcher.states(run.read(), known).items():
        if state.hopeless:
            yield Warned(f"{id_}: {state.reason}; tula cancel, correct the cluster section, and start again")
    tasks = {task.job: task for task in run.tasks()}
    for id_ in under_way:
        if id_ in tasks and tasks[id_].spec.cluster != spec.cluster:
            yield Warned(f"{id_} was submitted with another cluster section; tula cancel first, to have this one")
