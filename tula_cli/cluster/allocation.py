"""Where a supervisor is: its place among the job's supervisors, the notice that it is to end, and when its time is over."""

import itertools
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tula_cli.cluster.ending import Ending
from tula_cli.cluster.group import Starter
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.tasks import CheckTask, ProbeTask, Task, TrainTask

POLL = 0.2  # seconds
POLL_MOST = 2.0
"""Seconds between two looks at the run directory where many supervisors share it: a few dozen looks a second in all."""
NOTICE_GRACE = 25.0
"""The same when the scheduler ends the allocation: it kills everything itself after its KillWait, 30 s by default."""
VERDICT = 1.0
"""Seconds that the scheduler gets to know why it has ended an allocation: its accounting lags."""
SLACK = (0.05, 10.0, 60.0)
"""How long before its time limit an allocation should be empty: a share of what is left of it, and its bounds (s)."""


@dataclass(frozen=True)
class Place:
    """Which of a job's supervisors this is: one a rank or one a node on SLURM, one for all ranks on this machine."""

    index: int
    count: int
    local_index: int = 0  # on its node
    job_id: str = ""  # SLURM's
    restarts: int = 0  # how often SLURM has requeued it
    hosts: str = ""  # as SLURM writes them

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Place":
        if "SLURM_PROCID" not in environ:
            return cls(0, 1)
        return cls(
            index=int(environ["SLURM_PROCID"]),
            count=int(environ["SLURM_NTASKS"]),
            local_index=int(environ["SLURM_LOCALID"]),
            job_id=environ["SLURM_JOB_ID"],
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
            hosts=environ.get("SLURM_JOB_NODELIST", ""),
        )

    @property
    def poll(self) -> float:
        return min(POLL_MOST, max(POLL, self.count / 50))

    @property
    def alone(self) -> bool:
        return not self.job_id

    @property
    def allocation(self) -> str:
        return "" if self.alone else f"{self.job_id}.{self.restarts}"


@dataclass
class Notice:
    """Whether the scheduler has asked this job to end: a time limit, a preemption, a cancel, a lost node."""

    given: bool = False

    def listen(self) -> None:
        """Take the signals from submitit, which would end this process over the one that warns of the time limit."""
        signal.signal(signal.SIGTERM, self._take)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            signal.signal(number, _ignore)

    def _take(self, *_: object) -> None:
        self.given = True


def _ignore(*_: object) -> None:
    """The clock says the same as the signal that warns of a time limit, and SIGCONT comes before each SIGTERM."""


@dataclass
class Supervisor:
    """This process: its run, its place among the job's supervisors, and what it has been told."""

    run: RunDir
    place: Place
    environ: Mapping[str, str]
    notice: Notice = field(default_factory=Notice)
    since: float = field(default_factory=time.time)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    ends_at: float | None = None  # Unix time of the allocation's end, where it has one
    starter: Starter = field(default_factory=Starter)


def deadline_of(task: Task) -> float:
    """Return when a job that starts now has to end, however often its ranks are started: its cost is bounded."""
    match task:
        case TrainTask():
            return float("inf")
        case ProbeTask():
            return time.monotonic() + 60 * task.spec.search.max_minutes
        case CheckTask():
            return time.monotonic() + 60 * CheckTask.MINUTES


def overdue(task: Task) -> str:
    if isinstance(task, CheckTask):
        return f"stopped after {CheckTask.MINUTES:g} minutes"
    return f"stopped after search.max_minutes: {task.spec.search.max_minutes:g}"


def newest(run: RunDir, task_id: str) -> Task:
    task = run.task(task_id)
    assert task is not None, f"{run.path} has no task {task_id}"
    if isinstance(task, TrainTask):
        return run.training(task.signature).newest_task() or task
    return task


def over(run: RunDir, task: Task) -> bool:
    """Return whether nothing is left to do: start is resume."""
    return run.cancelled(task.job) or finished(run, task)


def finished(run: RunDir, task: Task) -> bool:
    """Return whether every result of a task is there: success is a valid result file."""
    match task:
        case TrainTask():
            return run.training(task.signature).result() is not None
        case ProbeTask():
            return run.current_probe(task) is None
        case CheckTask():
            return run.checks.report(task.id) is not None


TAKEN_WORDS: dict[OutcomeClass, str] = {
    "time_limit": "time limit of job {0} reached",
    "preempted": "job {0} was preempted",
    "node_failure": "a node of job {0} failed",
    "cancelled": "job {0} was cancelled (scancel)",
    "host_oom": "job {0} was out of memory",
}


def taken(allocation: str) -> Ending:
    """Tell how the scheduler ended an allocation."""
    job_id, _, restarts = allocation.partition(".")
    deadline = time.monotonic() + VERDICT
    while (how := scheduler.ended_how(job_id, restart=int(restarts))) is None and time.monotonic() < deadline:
        time.sleep(POLL)
    if how in TAKEN_WORDS:
        return Ending(how, TAKEN_WORDS[how].format(job_id))
    return Ending("signal", f"job {job_id} was ended from outside, or its supervisor was killed")


def time_limit(me: Supervisor) -> dict[str, str]:
    """Tell the ranks when to save and leave: some time before the allocation ends."""
    if me.ends_at is None:
        return {}
    share, least, most = SLACK
    slack = min(most, max(least, share * (me.ends_at - time.time())))
    return {"TULA_LEAVE_AT": f"{me.ends_at - slack:.1f}"}
