"""The allocation of a supervisor: its index, SIGTERM, the time limit, and why the scheduler ended the allocation."""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tula_cli.cluster.scheduler import END_SIGNALS, WARNING_SIGNALS, LocalScheduler, Scheduler
from tula_cli.cluster.slurm import sbatch
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.errors import SchedulerError
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.tasks import Task
from tula_cli.spec.job import JobSpec

POLL_SECONDS = 0.2  # seconds
MAX_POLL_SECONDS = 2.0
"""Maximum interval in seconds between two polls of a script's ranks."""
ACCOUNTING_LAG = 1.0
"""Seconds to wait until the scheduler reports why an allocation ended."""
TIME_LIMIT_MARGIN = (0.05, 10.0, 60.0)
"""How long before its time limit an allocation should be empty: fraction of the remaining time, and bounds (s)."""


@dataclass
class TerminationSignal:
    """Whether the scheduler has asked this job to exit: time limit, preemption, cancellation or lost node."""

    is_received: bool = False

    def install_handlers(self) -> None:
        """Install signal handlers; those of submitit would end this process on the time-limit warning."""
        for number in END_SIGNALS:
            signal.signal(number, self._handle_signal)
        for number in WARNING_SIGNALS:
            signal.signal(number, _ignore_signal)

    def _handle_signal(self, *_: object) -> None:
        self.is_received = True


def _ignore_signal(*_: object) -> None:
    """Ignore warning signals: the time limit is known from the clock, and SIGCONT precedes each SIGTERM."""


@dataclass(frozen=True)
class RankPosition:
    """The position of a rank in its job."""

    rank: int
    local_rank: int
    node: int


@dataclass
class Allocation:
    """The allocation of a job, as seen by one of its supervisors.

    A scheduler starts one supervisor per rank or per node; a job on this machine has one supervisor for all ranks.
    """

    index: int  # index of this supervisor in the job, from 0
    count: int  # number of supervisors of the job
    local_index: int = 0  # index of this supervisor on its node
    job_id: str = ""  # job id of the scheduler; empty on this machine
    restarts: int = 0  # number of times that the scheduler itself has requeued the job
    hosts: str = ""  # host list in the format of the scheduler
    nodes: int | None = None  # number of nodes; None on this machine
    environ: Mapping[str, str] = field(default_factory=dict)  # environment inherited by the ranks
    ends_at: float | None = None  # Unix time of the time limit; None without one
    termination: TerminationSignal = field(default_factory=TerminationSignal)
    cpus: int | None = None  # CPUs per supervisor; None if unknown
    scheduler: Scheduler = field(default_factory=SlurmScheduler)  # scheduler of the job, if it has a job_id

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], scheduler: Scheduler | None = None) -> "Allocation":
        """Return the allocation of a process, read from its environment.

        Args:
            scheduler: scheduler of the job; None: SLURM if the environment is that of a SLURM job, else this machine.

        Raises:
            SchedulerError: a user-defined scheduler does not recognise the process as part of one of its jobs.
        """
        job_scheduler = scheduler or SlurmScheduler()
        position = job_scheduler.find_position(environ)
        if position is None:
            if not isinstance(job_scheduler, LocalScheduler | SlurmScheduler):
                message = f"method find_position() of scheduler {job_scheduler.name} returned None for this process"
                raise SchedulerError(message)
            return cls(0, 1, environ=environ, scheduler=LocalScheduler())
        return cls(
            index=position.index,
            count=position.count,
            local_index=position.local_index,
            job_id=position.job_id,
            restarts=position.restarts,
            hosts=position.hosts,
            nodes=position.nodes or None,
            environ=environ,
            cpus=position.cpus,
            scheduler=job_scheduler,
        )

    @property
    def is_local(self) -> bool:
        """Whether the job runs on this machine, without a scheduler."""
        return not self.job_id

    @property
    def is_leader(self) -> bool:
        """Whether this supervisor is the leader, which decides what the other supervisors (followers) do."""
        return self.index == 0

    @property
    def id(self) -> str:
        return f"{self.job_id}.{self.restarts}" if self.job_id else ""

    def list_ranks(self, task: Task) -> list[RankPosition]:
        """Return the ranks that this supervisor starts: one, those of its node, or all on this machine."""
        gpus, count = task.spec.cluster.gpus_per_node, task.ranks_per_supervisor
        first, local_first = self.index * count, self.local_index if count == 1 else 0
        return [RankPosition(first + i, local_first + i, (first + i) // gpus) for i in range(count)]

    def count_cores_per_rank(self, task: Task) -> int | None:
        """Return the cores that the scheduler allocates per rank; None if unknown, and on this machine, which is shared."""
        return None if self.cpus is None else max(1, self.cpus // task.ranks_per_supervisor)

    def list_wrapper_arguments(self, spec: JobSpec) -> list[str]:
        """Return the configured words before the command of a rank."""
        return sbatch.get_wrapper_arguments(spec, environ=self.environ)

    def has_enough_nodes(self, nodes: int) -> bool:
        """Return whether the allocation has at least `nodes` nodes; always true on this machine."""
        return self.nodes is None or nodes <= self.nodes

    @property
    def poll_interval(self) -> float:
        """Seconds between two polls of a script's ranks; longer if many supervisors share the file system."""
        return min(MAX_POLL_SECONDS, max(POLL_SECONDS, self.count / 50))

    def make_time_limit_variable(self) -> dict[str, str]:
        """Return TULA_LEAVE_AT, the Unix time at which ranks save and exit; empty without a time limit."""
        return {} if self.ends_at is None else {"TULA_LEAVE_AT": f"{self.compute_exit_deadline(self.ends_at):.1f}"}

    def find_termination_reason(self, allocation_id: str = "") -> Failure:
        """Return why the scheduler ended an allocation (`allocation_id`; default: this allocation)."""
        job_id, _, restarts = (allocation_id or self.id).rpartition(".")
        deadline = time.monotonic() + ACCOUNTING_LAG
        while True:
            outcome = self.scheduler.find_end_reason(job_id, restart=int(restarts))
            if outcome is not None or time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        if outcome in TERMINATED_MESSAGES:
            cancel_hint = f" ({self.scheduler.cancel_command})" if self.scheduler.cancel_command else ""
            return Failure(outcome=outcome, message=TERMINATED_MESSAGES[outcome].format(job_id, cancel_hint))
        message = f"job {job_id} was stopped by something other than tula, or its supervisor was killed"
        return Failure(outcome="signal", message=message)

    def compute_exit_deadline(self, ends_at: float) -> float:
        """Return when the ranks of an allocation that starts now and ends at `ends_at` must exit (Unix times)."""
        share, least, most = TIME_LIMIT_MARGIN
        return ends_at - min(most, max(least, share * (ends_at - time.time())))


TERMINATED_MESSAGES: dict[OutcomeClass, str] = {
    "time_limit": "time limit of job {0} reached",
    "preempted": "job {0} was preempted",
    "node_failure": "a node of job {0} failed",
    "cancelled": "job {0} was cancelled{1}",
    "host_oom": "job {0} ran out of memory",
    "storage": "a file-system error stopped the supervisor of job {0}",
}
