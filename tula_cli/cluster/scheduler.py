"""The protocol of schedulers: required methods, and optional ones that some schedulers have in addition.

A scheduler reports only the state of jobs; whether a job succeeded is read from the files that it wrote. If a scheduler
does not answer, the state is unknown; only `submit` and `list_queued_jobs` raise an error, to avoid submitting a second job.
"""

import contextlib
import importlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from tula_cli import plugins
from tula_cli.errors import SchedulerError, SpecError
from tula_cli.host.processes import is_process_running, read_start_time
from tula_cli.run.records.base import OutcomeClass
from tula_cli.spec.backend import BACKENDS
from tula_cli.spec.resources import Cluster

# --- The log of a job
#
# If a scheduler opened the log itself, it would fail a job at once while the folder is unavailable, and then every
# later job of the chain: a file system that is unavailable for seconds would end the whole chain.

MAX_RETRY_PAUSE_SECONDS = 30
"""Maximum seconds between two attempts to open the log; the first pause is 1 s, and each further one twice as long."""


def make_lines_to_open_log(
    log: str,
    *,
    folder: str,
    timeout: int,
    python: str = "",
    on_wait: Sequence[str] = (),
    on_give_up: Sequence[str] = (),
    on_resume: Sequence[str] = (),
) -> list[str]:
    """Return POSIX sh lines that open `<log>.out` and `<log>.err` and enter the folder, or exit after `timeout`.

    The caller's lines may use `$tula_why`, the reason for waiting, and `$tula_waited`, the seconds waited so far.

    Args:
        log: path of the log without suffix, as a shell word.
        folder: working folder of the job, as a shell word.
        timeout: seconds to wait for log, folder and interpreter.
        python: path of the interpreter that must exist; empty if set-up lines provide it.
        on_wait: lines that report why the job waits.
        on_give_up: lines run before the job exits without having started.
        on_resume: lines run after a wait that succeeded.
    """
    python_word = shlex.quote(python)
    interpreter = (
        f" && {{ [ -x {python_word} ] || {{ echo {python_word}: not executable; exit 1; }}; }}" if python else ""
    )
    return [
        "# Wait for the log, the folder and the Python; if the scheduler opened the log, the job would fail instead.",
        f"tula_log={log}",
        f'tula_try() {{ (cd {folder} && : >>"$tula_log.out" && : >>"$tula_log.err"{interpreter}) 2>&1; }}',
        "tula_waited=0 tula_pause=1 tula_first=",
        "until tula_why=$(tula_try); do",
        """  tula_why="$(printf '%s on %s' "${tula_why#*: line *: }" "$(uname -n)" | tr '|\\n' '  ')\"""",
        f'  if [ "$tula_waited" -ge {timeout} ]; then',
        *(f"    {line}" for line in on_give_up),
        "    exit 1",
        "  fi",
        '  if [ "$tula_waited" -eq 0 ]; then',
        '    tula_first="$tula_why"',
        *(f"    {line}" for line in on_wait),
        "  fi",
        '  sleep "$tula_pause"',
        "  tula_waited=$((tula_waited + tula_pause))",
        f"  tula_pause=$((2 * tula_pause < {MAX_RETRY_PAUSE_SECONDS} ? 2 * tula_pause : {MAX_RETRY_PAUSE_SECONDS}))",
        "done",
        f"cd {folder}",
        'exec >>"$tula_log.out" 2>>"$tula_log.err"',
        'if [ "$tula_waited" -gt 0 ]; then',
        *(f"  {line}" for line in on_resume),
        '  echo "tula: the job waited $tula_waited s: $tula_first" >&2',
        "fi",
    ]


def quote_log_path(folder: Path, id_: str, name: str) -> str:
    """Return the path of a job's log without suffix, as a shell word.

    Args:
        id_: shell expression of the job's id inside the job, e.g. "$PBS_JOBID".
    """
    return f'{shlex.quote(str(folder))}/"{id_}"_{name}'


# --- The protocol

END_SIGNALS = (signal.SIGTERM,)
"""Signals by which a scheduler asks a job to exit."""
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that announce the time limit, which is known from the clock, or precede END_SIGNALS; they are ignored."""


@dataclass(frozen=True)
class SchedulerState:
    """The state of a job as its scheduler reports it; never used to decide whether results are complete."""

    state: Literal["pending", "running", "ended", "unknown"]
    reason: str = ""  # reason of the state for the user; empty after a success; "Dependency" if it waits for other jobs
    starts_at: float | None = None  # Unix time at which a waiting job is expected to start
    on_hold: bool = False  # whether the job is held until its user releases it
    hopeless: bool = False  # whether the job can never start, however long it waits
    without_nodes: bool = False  # whether the job waits for nodes that are down or drained
    without_log: bool = False  # whether this job or an earlier one of the chain could not open its log
    suspended: bool = False  # whether the job is suspended on its nodes
    released: str = ""  # jobs of the chain that tula itself cancelled, with the reason; empty if none
    silent: bool = False  # state "unknown" because the scheduler did not answer: no job may be submitted now
    failed: bool = False  # whether the job's script exited with an error
    forgotten: bool = False  # whether the scheduler no longer knows the job
    young: bool = False  # whether the job was just submitted, so that the scheduler may not know it yet


@dataclass(frozen=True)
class QueuedJob:
    """A pending or running job."""

    id: str
    name: str
    script: str = ""  # path of the submitted script; empty if unknown


@dataclass(frozen=True)
class PartitionLimits:
    """The limits of one job in a partition (a queue, a class); None if unknown or unlimited."""

    name: str
    default: bool = False
    usable: int | None = None  # maximum number of nodes per job
    minutes: int | None = None  # maximum time limit of a job


@dataclass(frozen=True)
class JobRequest:
    """A job to submit: its command is started once per task, on all of its nodes at the same time."""

    name: str  # name of the job, by which it is found in the queue
    command: str  # shell command that every task starts
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    minutes: int | None = None  # time limit; None on this machine
    after: tuple[str, ...] = ()  # ids of jobs that must have ended, successfully or not, before it starts
    folder: Path = Path()  # working folder
    logs: Path = Path()  # folder of <id>_<anything>_log.out and .err, which `tula logs` shows
    setup: tuple[str, ...] = ()  # shell lines before the command
    patience: int = 0  # seconds to wait for an unavailable folder

    def make_preamble(self, id_: str) -> list[str]:
        """Return the shell lines before the command, which open the log, enter the folder and run the set-up.

        They wait up to `patience` seconds for an unavailable folder; then the job exits.

        Args:
            id_: shell expression of the job's id inside the job, e.g. "$PBS_JOBID".
        """
        log, folder = quote_log_path(self.logs, id_, "script_log"), shlex.quote(str(self.folder))
        return [*make_lines_to_open_log(log, folder=folder, timeout=self.patience), *self.setup]


@dataclass(frozen=True)
class ProcessPosition:
    """The position of a process in its job."""

    job_id: str
    index: int = 0  # index of this task in the job, from 0; tasks of a node have consecutive indices
    count: int = 1  # number of tasks of the job
    local_index: int = 0  # index of this task on its node
    nodes: int = 1
    hosts: str = ""  # host list in the format of the scheduler
    restarts: int = 0  # number of times that the scheduler itself has restarted the job
    cpus: int | None = None  # CPUs per task; None if unknown


class Scheduler(Protocol):
    """Submits jobs, reports their states, and returns the position of a process in its job.

    `name` is the name of the scheduler in messages; `cancel_command` and `release_command` are the commands that a user
    types before the ids, empty if there is no such command.
    """

    name: str
    cancel_command: str
    release_command: str

    # --- where jobs are submitted

    def describe_why_absent(self) -> str:
        """Return why jobs cannot be submitted from this machine; empty if they can."""

    def render_script(self, job: JobRequest) -> str:
        """Return the text of a job's script, without side effects."""

    def submit(self, script: Path, job: JobRequest) -> str:
        """Submit a script that was made for `job`; return the job's id, without "/", "_" and white space.

        Raises:
            SchedulerError: the job was refused, with the scheduler's message.
        """

    def list_queued_jobs(self, names: Sequence[str]) -> list[QueuedJob]:
        """Return this user's pending or running jobs with these names, without jobs that are being cancelled.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def query_states(self, ids: Sequence[str]) -> Mapping[str, SchedulerState]:
        """Return the states of jobs, queried at once; jobs unknown to the scheduler are missing from the result."""

    def cancel(self, ids: Sequence[str]) -> str:
        """Cancel pending or running jobs; return an error message, or empty. Finished jobs are not an error."""

    def hold(self, ids: Sequence[str]) -> str:
        """Hold pending jobs until they are released; return an error message, or empty."""

    def release(self, ids: Sequence[str]) -> str:
        """Release held jobs; return an error message, or empty."""

    def list_partitions(self) -> Sequence[PartitionLimits]:
        """Return the limits of jobs per partition; empty if unknown."""

    # --- inside a job

    def find_position(self, environ: Mapping[str, str]) -> ProcessPosition | None:
        """Return the position of a process in its job, from its environment; None outside jobs of this scheduler."""

    def find_end_time(self, job_id: str, environ: Mapping[str, str]) -> float | None:
        """Return the Unix time of a running job's time limit; None if there is none or it is unknown."""

    def find_end_reason(self, job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
        """Return why a job was ended from outside; None if it still runs, is unknown, or exited by itself.

        Args:
            restart: index of the start, if the scheduler itself requeued the job; None: the last start.
        """


@runtime_checkable
class SupportsNodeExclusion(Protocol):
    """A scheduler that can exclude nodes for pending jobs."""

    def exclude(self, ids: Sequence[str], nodes: str) -> str:
        """Exclude exactly these nodes for pending jobs; return an error message, or empty."""


@runtime_checkable
class SupportsStartDelay(Protocol):
    """A scheduler on which a job of a chain starts minutes after the previous one, unless that one has started tula."""

    def end_delay(self, id_: str, after: str) -> str:
        """Allow a pending job to start as soon as job `after` has finished; return an error message, or empty."""

    def delay(self, id_: str, minutes: int) -> str:
        """Delay the start of a pending job until at least `minutes` from now; return an error message, or empty."""


def exclude_nodes(scheduler: Scheduler, ids: Sequence[str], nodes: str) -> str:
    """Exclude nodes for pending jobs, if the scheduler can; return an error message, or empty."""
    if isinstance(scheduler, SupportsNodeExclusion):
        return scheduler.exclude(ids, nodes)
    return f"{scheduler.name} cannot exclude nodes from waiting jobs"


# --- This machine as a scheduler

_children: "list[subprocess.Popen[bytes]]" = []
"""Child processes of this process, polled from time to time so that none remains a zombie."""


class LocalScheduler:
    """Jobs on this machine. An id has the process id and its start time, "4711-123456", as process ids are reused."""

    name = "this machine"
    cancel_command = "kill"
    release_command = ""

    # --- where jobs are submitted

    def describe_why_absent(self) -> str:
        return ""

    def render_script(self, job: JobRequest) -> str:
        """Return a script that execs the command, so that its process is the job; it runs as one task."""
        return "\n".join(("#!/bin/sh", *job.make_preamble("$$"), f"exec {job.command}", ""))

    def submit(self, script: Path, job: JobRequest) -> str:
        """Start a process that outlives this one, its terminal and Ctrl-C."""
        if job.after:
            raise SchedulerError(
                "jobs on this machine cannot wait for each other", "submit each job after the previous job has finished"
            )
        _reap_children()
        try:
            child = subprocess.Popen(
                ["/bin/sh", str(script)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SchedulerError(f"the job could not be started: {error.strerror}") from error
        _children.append(child)
        return f"{child.pid}-{read_start_time(child.pid) or 0:.0f}"

    def list_queued_jobs(self, names: Sequence[str]) -> list[QueuedJob]:
        """Return an empty list: local jobs have no names, and their ids are known as soon as they start."""
        return []

    def query_states(self, ids: Sequence[str]) -> Mapping[str, SchedulerState]:
        _reap_children()
        return {id_: SchedulerState("running" if _is_running(id_) else "ended") for id_ in ids}

    def cancel(self, ids: Sequence[str]) -> str:
        for id_ in ids:
            if _is_running(id_):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(id_.partition("-")[0]), signal.SIGKILL)
        return ""

    def hold(self, ids: Sequence[str]) -> str:
        return "no job is queued on this machine" if ids else ""

    def release(self, ids: Sequence[str]) -> str:
        return "no job is queued on this machine" if ids else ""

    def list_partitions(self) -> Sequence[PartitionLimits]:
        return []

    # --- inside a job

    def find_position(self, environ: Mapping[str, str]) -> ProcessPosition | None:
        """Return None: the environment of a local process does not show whether it belongs to a job."""
        return None

    def find_end_time(self, job_id: str, environ: Mapping[str, str]) -> float | None:
        return None

    def find_end_reason(self, job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
        return None


def _is_running(id_: str) -> bool:
    pid, _, started = id_.partition("-")
    return pid.isdigit() and started.isdigit() and is_process_running(int(pid), float(started))


def _reap_children() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


# --- The scheduler of a job

PROTOCOL_MEMBERS = (*sorted(name for name in vars(Scheduler) if not name.startswith("_")), *Scheduler.__annotations__)
"""Members that a user-defined scheduler must have."""


def load_scheduler(kind: str, options: Mapping[str, Any] | None = None) -> Scheduler:
    """Return the scheduler of a backend, or an instance of the user's class after a check of its members.

    Raises:
        SpecError: the name is unknown, its import fails, it rejects the options, or it lacks a member of the protocol.
    """
    if kind in BACKENDS:
        module, _, name = BACKENDS[kind].scheduler.partition(":")
        cls = getattr(importlib.import_module(module), name)
    else:
        cls = plugins.load_named_object(kind, {}, kind="scheduler")
    try:
        scheduler = cls(**(options or {}))
    except TypeError as error:
        raise SpecError(f"scheduler {kind!r}: {error}", "set cluster.options to the arguments of the class") from error
    if missing := [name for name in PROTOCOL_MEMBERS if not hasattr(scheduler, name)]:
        raise SpecError(
            f"scheduler {kind!r} has no {', '.join(missing)}",
            "add what is missing; the page 'Use another scheduler' of the documentation lists what the class needs",
        )
    return scheduler  # type: ignore[no-any-return]


def make_scheduler(cluster: Cluster) -> Scheduler:
    """Return the scheduler of a job.

    Raises:
        SpecError: as in `load_scheduler`.
    """
    return load_scheduler(cluster.kind, cluster.options)
