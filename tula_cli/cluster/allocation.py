"""The allocation that a supervisor runs in: its rank there, SIGTERM, the time limit, and why the scheduler ended it."""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tula_cli.cluster.exit_reason import ExitReason
from tula_cli.cluster.scheduling.local_scheduler import LocalScheduler
from tula_cli.cluster.scheduling.protocol import ENDS, WARNS, Scheduler
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.errors import SchedulerError
from tula_cli.run.records.base import OutcomeClass

POLL = 0.2  # seconds
POLL_MOST = 2.0
"""Seconds between two looks at a script's ranks, at most."""
ACCOUNTING_LAG = 1.0
"""Seconds that the scheduler gets to know why it has ended an allocation."""
TIME_LIMIT_MARGIN = (0.05, 10.0, 60.0)
"""How long before its time limit an allocation should be empty: a share of what is left of it, and its bounds (s)."""


@dataclass
class TerminationSignal:
    """Whether the scheduler has asked this job to end: a time limit, a preemption, a cancel, a lost node."""

    received: bool = False

    def listen(self) -> None:
        """Take the signals from submitit, which would end this process over the one that warns of the time limit."""
        for number in ENDS:
            signal.signal(number, self._receive)
        for number in WARNS:
            signal.signal(number, _ignore)

    def _receive(self, *_: object) -> None:
        self.received = True


def _ignore(*_: object) -> None:
    """The clock says the same as the signal that warns of a time limit, and SIGCONT comes before each SIGTERM."""


@dataclass
class Allocation:
    """What the scheduler gave the job, as one of its supervisors sees it.

    There is a supervisor a rank or one a node where a scheduler starts them, and one for all ranks where the job runs on this
    machine.
    """

    index: int  # of this supervisor, from 0
    count: int  # supervisors
    local_index: int = 0  # on its node
    job_id: str = ""  # the scheduler's; empty on this machine
    restarts: int = 0  # how often the scheduler itself has requeued it
    hosts: str = ""  # as the scheduler writes them
    nodes: int | None = None  # None on this machine
    environ: Mapping[str, str] = field(default_factory=dict)  # what the ranks inherit
    ends_at: float | None = None  # Unix time of the time limit, where there is one
    termination: TerminationSignal = field(default_factory=TerminationSignal)

    cpus: int | None = None  # of a supervisor; None where nobody tells
    node: str = ""  # tells the supervisors of this node from those of others
    neighbours: tuple[int, ...] = ()  # supervisors of this node, itself too; () where nobody tells
    scheduler: Scheduler = field(default_factory=SlurmScheduler)  # that a job with an id is one of

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], scheduler: Scheduler | None = None) -> "Allocation":
        """Return what a process sees of its job.

        Args:
            environ: its environment.
            scheduler: whose job it is; None: SLURM's where the environment says so, else this machine's.

        Raises:
            SchedulerError: a scheduler of the user's own does not know the process.
        """
        asked = scheduler or SlurmScheduler()
        place = asked.place(environ)
        if place is None:
            if not isinstance(asked, LocalScheduler | SlurmScheduler):
                raise SchedulerError(f"{asked.name} does not know this process as one of its jobs' (place)")
            return cls(0, 1, environ=environ, scheduler=LocalScheduler())
        return cls(
            index=place.index,
            count=place.count,
            local_index=place.local_index,
            job_id=place.job_id,
            restarts=place.restarts,
            hosts=place.hosts,
            nodes=place.nodes or None,
            environ=environ,
            cpus=place.cpus,
            node=place.node,
            neighbours=place.neighbours,
            scheduler=asked,
        )

    @property
    def local(self) -> bool:
        """Whether the job runs on this machine, without a scheduler."""
        return not self.job_id

    @property
    def leader(self) -> bool:
        """Whether this supervisor decides what the others, its followers, do."""
        return self.index == 0

    @property
    def alone(self) -> bool:
        """Whether no other supervisor is on its node, as far as the scheduler tells."""
        return self.nodes is None or self.count <= self.nodes

    @property
    def id(self) -> str:
        return "" if self.local else f"{self.job_id}.{self.restarts}"

    def holds(self, nodes: int) -> bool:
        """Return whether it has so many nodes; this machine has as many as are asked for."""
        return self.nodes is None or nodes <= self.nodes

    @property
    def pace(self) -> float:
        """Seconds between two looks at what a script's ranks tell, where many supervisors share the file system."""
        return min(POLL_MOST, max(POLL, self.count / 50))

    def time_limit(self) -> dict[str, str]:
        """Return the variable that tells the ranks when to save and leave: some time before the allocation ends."""
        return {} if self.ends_at is None else {"TULA_LEAVE_AT": f"{self.leave_at(self.ends_at):.1f}"}

    def termination_reason(self, allocation_id: str = "") -> ExitReason:
        """Tell how the scheduler ended an allocation, given as `id`; this one where none is given."""
        job_id, _, restarts = (allocation_id or self.id).rpartition(".")
        deadline = time.monotonic() + ACCOUNTING_LAG
        while True:
            how = self.scheduler.ended_how(job_id, restart=int(restarts))
            if how is not None or time.monotonic() >= deadline:
                break
            time.sleep(POLL)
        if how in TERMINATED_MESSAGES:
            by = f" ({self.scheduler.cancel_command})" if self.scheduler.cancel_command else ""
            return ExitReason(how, TERMINATED_MESSAGES[how].format(job_id, by))
        return ExitReason("signal", f"job {job_id} was ended from outside, or its supervisor was killed")

    def leave_at(self, ends_at: float) -> float:
        """Return when an allocation that began now would have to be left, before its end (Unix times)."""
        share, least, most = TIME_LIMIT_MARGIN
        return ends_at - min(most, max(least, share * (ends_at - time.time())))


TERMINATED_MESSAGES: dict[OutcomeClass, str] = {
    "time_limit": "time limit of job {0} reached",
    "preempted": "job {0} was preempted",
    "node_failure": "a node of job {0} failed",
    "cancelled": "job {0} was cancelled{1}",
    "host_oom": "job {0} was out of memory",
    "storage": "the file system failed under the supervisor of job {0}",
}
