"""What a scheduler has to tell and to do: a small protocol, and what some can do beyond it.

A scheduler says what it says and nothing else: whether a job succeeded is told by the files that it left. One that does not
answer has told nothing; only `submit` and `queued` raise an error, for there it would cost a second job.
"""

import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from tula_cli.cluster.scheduling.job_log import lines_to_open_log, log_word
from tula_cli.run.records.base import OutcomeClass

END_SIGNALS = (signal.SIGTERM,)
"""Signals by which a scheduler asks a job to end."""
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that tell what the clock tells as well, or that go before the others; nothing follows from them."""


@dataclass(frozen=True)
class SchedulerState:
    """What the scheduler says of a job; a hint, never the truth about results."""

    state: Literal["pending", "running", "ended", "unknown"]
    # In words for the user: "Dependency" of a job that waits for others to end; begins with FAILED where the job's own script
    # ended with an error, and is empty where it ended well
    reason: str = ""
    starts_at: float | None = None  # Unix time at which a waiting job is expected to start
    held: bool = False  # it waits for its user to release it
    hopeless: bool = False  # it waits for what waiting does not bring
    without_nodes: bool = False  # it waits for nodes that are down or drained
    without_log: bool = False  # it cannot open its log, or one before it could not
    suspended: bool = False  # it has its nodes and stands still
    released: str = ""  # which jobs of the chain tula itself has cancelled, and why
    silent: bool = False  # with "unknown": nobody answered, so that nothing must be submitted now


@dataclass(frozen=True)
class Queued:
    """A job that waits or runs."""

    id: str
    name: str
    script: str = ""  # the file that was submitted; empty where the scheduler does not tell


@dataclass(frozen=True)
class Limits:
    """What one job can have in a partition (a queue, a class); None where the scheduler does not tell or does not bound it."""

    name: str
    default: bool = False
    usable: int | None = None  # nodes of one job
    minutes: int | None = None  # its time limit


@dataclass(frozen=True)
class JobRequest:
    """A job that is to be submitted: its command is started once a task, on all of its nodes at the same time."""

    name: str  # finds it again in the queue
    command: str  # that every task starts, as a shell reads it
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    minutes: int | None = None  # its time limit; None on this machine
    after: tuple[str, ...] = ()  # ids of the jobs that have to be over before it starts, however they ended
    folder: Path = Path()  # that it starts in
    logs: Path = Path()  # where its script writes: files named <id>_<anything>_log.out and .err, which tula logs shows
    setup: tuple[str, ...] = ()  # lines of the shell before the command
    patience: int = 0  # seconds for which it waits for a folder that is away

    def lines(self, id_: str) -> list[str]:
        """Return the shell lines that come before the command: they open the log, enter the folder, and set up.

        They wait `patience` seconds for a folder that is away; then the job ends.

        Args:
            id_: the job's id as a shell reads it in the job: "$PBS_JOBID".
        """
        log, folder = log_word(self.logs, id_, "script_log"), shlex.quote(str(self.folder))
        return [*lines_to_open_log(log, folder=folder, patience=self.patience), *self.setup]


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job."""

    job_id: str
    index: int = 0  # of this task among all of the job, from 0; those of one node follow each other
    count: int = 1  # tasks
    local_index: int = 0  # on its node
    nodes: int = 1
    hosts: str = ""  # as the scheduler writes them
    restarts: int = 0  # how often the scheduler itself has started the job again
    cpus: int | None = None  # of a task; None where nobody tells
    node: str = ""  # what tells this node's tasks from those of others, where several jobs share a node
    neighbours: tuple[int, ...] = ()  # tasks of its node, itself too; () where they follow each other, or nobody tells


class Scheduler(Protocol):
    """What submits jobs, tells how they stand, and tells a process of a job where it is.

    `name` is the scheduler in messages; `cancel_command` and `release_command` are what a user would type, before the ids;
    empty where there is no such command.
    """

    name: str
    cancel_command: str
    release_command: str

    # --- where jobs are submitted

    def absent(self) -> str:
        """Return why nothing can be submitted from here; empty where it can."""
        ...

    def script(self, job: JobRequest) -> str:
        """Return the text of a job's script; touches nothing."""
        ...

    def submit(self, script: Path, job: JobRequest) -> str:
        """Submit a script that was made of `job`; return the job's id, without "/", "_" and white space.

        Raises:
            SchedulerError: it was refused, in the scheduler's own words.
        """
        ...

    def queued(self, names: Sequence[str]) -> list[Queued]:
        """Return this user's jobs of these names that wait or run; one that is being ended does not count.

        Raises:
            SchedulerError: nobody answers.
        """
        ...

    def ask(self, ids: Sequence[str]) -> Mapping[str, SchedulerState]:
        """Return how jobs stand, asked for all at once; one that nobody knows any more is not in the answer."""
        ...

    def cancel(self, ids: Sequence[str]) -> str:
        """End jobs that wait or run, and no others; return what went wrong. One that is over is no complaint."""
        ...

    def hold(self, ids: Sequence[str]) -> str:
        """Keep waiting jobs from starting until they are released; return what went wrong."""
        ...

    def release(self, ids: Sequence[str]) -> str:
        """Let held jobs start; return what went wrong."""
        ...

    def partitions(self) -> Sequence[Limits]:
        """Return what jobs can have; nothing where nobody tells."""
        ...

    # --- inside a job

    def place(self, environ: Mapping[str, str]) -> Place | None:
        """Return where a process of this environment stands in its job; None where it is in none of this scheduler's."""
        ...

    def ends_at(self, job_id: str, environ: Mapping[str, str]) -> float | None:
        """Return the Unix time of a running job's time limit; None where there is none, or nobody tells."""
        ...

    def ended_how(self, job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
        """Return what ended a job from outside; None where it lives, is not known, or ended by itself.

        Args:
            job_id: the job.
            restart: which of its starts, where the scheduler itself has started it again; None is the last one.
        """
        ...


@runtime_checkable
class AvoidsNodes(Protocol):
    """A scheduler that can keep waiting jobs off nodes."""

    def exclude(self, ids: Sequence[str], nodes: str) -> str:
        """Keep waiting jobs off these nodes and no others; return what went wrong."""
        ...


@runtime_checkable
class DelaysJobs(Protocol):
    """A scheduler whose jobs of a chain start minutes after the one before them, unless that one has started tula."""

    def end_delay(self, id_: str, after: str) -> str:
        """Let a waiting job start as soon as the one before it is over; return what went wrong."""
        ...

    def delay(self, id_: str, minutes: int) -> str:
        """Let a waiting job start so many minutes from now at the earliest; return what went wrong."""
        ...


def exclude_nodes(scheduler: Scheduler, ids: Sequence[str], nodes: str) -> str:
    """Keep waiting jobs off nodes, where the scheduler can; return what went wrong."""
    if isinstance(scheduler, AvoidsNodes):
        return scheduler.exclude(ids, nodes)
    return f"{scheduler.name} cannot keep waiting jobs off nodes"
