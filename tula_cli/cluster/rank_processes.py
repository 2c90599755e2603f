"""The processes of the ranks that a supervisor starts: command, environment, fork server and process group."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Union

from tula_cli.cluster.allocation import Allocation
from tula_cli.host import network
from tula_cli.host.processes import adopt_orphans, prepare_supervised_child
from tula_cli.run.directory import RunDir
from tula_cli.run.records.jobs import LeaderCommand
from tula_cli.run.records.tasks import Task

# --- The fork server
#
# Importing torch takes seconds, more on a shared file system; a fork takes milliseconds, for every rank and for every
# relaunch. The server is `tula_cli.worker.preloaded`. Requests (command and environment of a rank) and answers (its
# process id) are lines of JSON. A forked rank becomes a child of this process (which adopts orphans meanwhile), so the
# kernel reports its exit code, and the rank no longer depends on the server.

SOCKET_POLL = 0.2  # seconds
PROGRAM = "import sys; del sys.path[0]; from tula_cli.worker.preloaded import main; main()"
"""Program of the fork server; removes the working folder from sys.path, as its modules are for the ranks to import."""
MAX_MESSAGE_BYTES = 4096
"""Bytes reserved in the command line of the server, which a forked rank overwrites with its own for ps and pgrep."""
FORKED_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TULA_LEAVE_AT")
"""Environment variables that may differ between forked ranks; libraries may have read any other one when imported."""
WORKER_ARGUMENTS = ("-u", "-m", "tula_cli.worker")


@dataclass(frozen=True)
class RankCommand:
    """The command, environment and folder of one rank."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    log: str  # absolute path of the log

    @property
    def is_forkable(self) -> bool:
        """Whether the command is the worker itself and can be forked; a wrapper or torchrun has to be executed."""
        return self.command[:4] == (sys.executable, *WORKER_ARGUMENTS)

    @property
    def shared_environment(self) -> dict[str, str]:
        """The environment without the variables that differ between ranks (`FORKED_RANK_VARIABLES`)."""
        return {name: value for name, value in self.environment.items() if name not in FORKED_RANK_VARIABLES}


class ForkUnavailable(Exception):
    """Ranks cannot be forked, for the reason in the message."""


@dataclass
class ForkedRank:
    """A forked rank, with the methods of subprocess.Popen that are used here."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the rank runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait until the rank exits; return its exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """A process that has imported the modules of ranks, from which ranks are forked.

    Args:
        start: command of a rank, whose folder and environment (without FORKED_RANK_VARIABLES) the server gets.
        output: output of the server; messages of libraries during their import belong in the ranks' log.
    """

    def __init__(self, start: RankCommand, output: IO[bytes], *, program: str = PROGRAM) -> None:
        self.folder, self.environment = start.folder, start.shared_environment
        self._socket, far = socket.socketpair()
        # torch then detects GPUs through NVML, without initialising CUDA, which does not survive a fork.
        environment = {**self.environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with far:
            command = (start.command[0], "-u", "-c", program, str(far.fileno()), " " * MAX_MESSAGE_BYTES)
            self.process = _spawn_subprocess(command, output, environment, start.folder, pass_fds=[far.fileno()])
        self._socket.settimeout(SOCKET_POLL)
        self._received = b""

    def can_fork(self, start: RankCommand) -> bool:
        """Return whether a rank can be forked from this server, i.e. has its folder and environment."""
        return (self.folder, self.environment) == (start.folder, start.shared_environment)

    def fork_rank(self, start: RankCommand, *, give_up: Callable[[], bool]) -> ForkedRank:
        """Fork a rank; the first fork waits until all modules are imported.

        Args:
            give_up: called while waiting; stops the wait if it returns True.

        Raises:
            ForkUnavailable: the import failed, the server died, or `give_up` returned True.
        """
        try:
            with adopt_orphans():
                self._send({**asdict(start), "parent": os.getpid()})
                answer = self._read_answer(give_up)
        except ConnectionError:
            raise ForkUnavailable(self._describe_server_exit()) from None
        except OSError as error:
            raise ForkUnavailable(str(error)) from error
        if "error" in answer:
            raise ForkUnavailable(str(answer["error"]))
        return ForkedRank(int(answer["pid"]))

    def _send(self, request: Mapping[str, Any]) -> None:
        self._socket.settimeout(None)  # blocking, as a line may exceed the socket buffer while the server imports
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self._socket.settimeout(SOCKET_POLL)

    def _read_answer(self, give_up: Callable[[], bool]) -> dict[str, Any]:
        while b"\n" not in self._received:
            try:
                received = self._socket.recv(4096)
            except TimeoutError:
                if give_up():
                    raise ForkUnavailable("given up") from None
                continue
            if not received:
                raise ForkUnavailable(self._describe_server_exit())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _describe_server_exit(self) -> str:
        return f"the process that imports torch ended with exit code {self.process.wait()}"

    def close(self) -> None:
        """Kill the server; forked ranks keep running."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


# --- Command, environment and folder of each rank


def get_first_rank(allocation: Allocation, task: Task) -> int:
    """Return the lowest rank that a supervisor starts."""
    return allocation.index * task.ranks_per_supervisor


def find_rendezvous_address(task: Task) -> str:
    """Return an address (host:port) of this node at which the ranks of a task can meet.

    A port that is taken in the meantime is a separate exit reason.

    Raises:
        JobFailed: the configured network interface does not exist.
    """
    return f"{network.find_node_address(task.spec.cluster.network_interface)}:{network.find_free_port()}"


def uses_torchrun(task: Task) -> bool:
    """Return whether torchrun starts the ranks of a node; otherwise supervisors start them directly."""
    slurm = task.spec.cluster.slurm
    return slurm is not None and slurm.launcher == "torchrun"


def list_visible_gpus(starts: Sequence[RankCommand]) -> list[str]:
    """Return the GPUs of ranks, named as in CUDA_VISIBLE_DEVICES; empty for all visible ones."""
    environment = starts[0].environment
    names = environment.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in names.split(",") if name.strip()]
    ranks = [int(start.environment["LOCAL_RANK"]) for start in starts if "LOCAL_RANK" in start.environment]
    if not ranks:
        return visible
    return [visible[rank % len(visible)] for rank in ranks] if visible else [str(rank) for rank in ranks]


@dataclass(frozen=True)
class RankLaunchPlan:
    """Makes the commands and environments with which one supervisor starts its ranks of one attempt."""

    run: RunDir
    allocation: Allocation
    task: Task
    command: LeaderCommand

    def make_rank_commands(self, log: Path) -> list[RankCommand]:
        """Return the processes that this supervisor starts, which write to `log`: torchrun, its single rank, or all ranks
        of this machine."""
        argv, folder = tuple(self.make_command_line()), self._find_python_folder()
        return [RankCommand(argv, environment, folder, str(log)) for environment in self.make_environments()]

    def make_command_line(self) -> list[str]:
        """Return the command line of a rank, or of torchrun, which starts the ranks of a node."""
        task, spec = self.task, self.task.spec
        worker = ["-m", "tula_cli.worker", str(self.run.path.resolve()), task.id, str(self.command.attempt)]
        wrapper = self.allocation.list_wrapper_arguments(spec)
        if not uses_torchrun(task):
            return [*wrapper, sys.executable, "-u", *worker]
        address, _, port = self.command.meeting.rpartition(":")
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts=0"),
            *(f"--nnodes={task.nodes}", f"--node-rank={self.allocation.index}"),
            *(f"--master-addr={address}", f"--master-port={port}"),
            f"--nproc-per-node={spec.cluster.gpus_per_node}",
        ]
        if not wrapper:
            return [*torchrun, *worker]
        return [*torchrun, "--no-python", *wrapper, sys.executable, "-u", *worker]

    def make_environments(self) -> list[dict[str, str]]:
        """Return the environment of each process that this supervisor starts."""
        allocation = self.allocation
        threads = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(allocation.count_cores_per_rank(self.task) or 1)}
        variables = {**allocation.environ, **threads, **allocation.make_time_limit_variable()}
        if uses_torchrun(self.task):
            return [variables]
        # Rendezvous variables inherited from set-up lines or a shell belong to another job.
        variables = {name: value for name, value in variables.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
        world = str(self.task.ranks)
        return [
            {**variables, "RANK": str(position.rank), "LOCAL_RANK": str(position.local_rank), "WORLD_SIZE": world}
            for position in allocation.list_ranks(self.task)
        ]

    def _find_python_folder(self) -> str:
        """Return the folder in which Python first finds the user's code: the submitted copy, or workdir without one."""
        task = self.task
        code = self.run.get_code_dir(task.code) if task.code else Path(task.workdir)
        return str(code) if code.is_dir() else task.workdir  # the ranks report a missing folder


# --- The processes of one supervisor

EXIT_POLL = 0.05  # seconds
Child = Union["subprocess.Popen[bytes]", ForkedRank]


@dataclass
class RankGroup:
    """Processes that are terminated together; each leads a process group that includes its data-loader processes."""

    children: list[Child]
    _first_failure: tuple[int, int] | None = None  # index and exit code of the first failed process, once killed

    def is_running(self) -> bool:
        return None in [child.poll() for child in self.children]

    def find_first_failure(self) -> tuple[int, int] | None:
        """Return index and exit code of the failed process that is most likely the root cause; None if none has failed.

        A killed process takes precedence over its peers, which have failed in consequence. SIGABRT does not count as a
        kill, as torch aborts its process after losing a peer. Ties are resolved by the index.
        """
        if self._first_failure is not None:
            return self._first_failure
        failed = [(index, code) for index, child in enumerate(self.children) if (code := child.poll())]
        return min(failed, key=lambda each: (each[1] > 0, each[1] == -signal.SIGABRT, each[0]), default=None)

    def end_ranks(self, grace: float) -> None:
        """Ask the ranks to save and exit (SIGTERM); kill those that remain after `grace` seconds.

        Only the ranks themselves get SIGTERM: their data-loader processes must live until the ranks have saved.
        """
        for child in self.children:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(EXIT_POLL)
        self.kill()

    def kill(self) -> None:
        """Kill every rank and its process group."""
        self._first_failure = self.find_first_failure()
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self.children:
            child.wait()


@dataclass
class RankSpawner:
    """Starts the ranks of a supervisor, and keeps their fork server for the next attempt.

    A supervisor that starts all ranks of a machine imports torch once for all of them. Under srun there is one
    supervisor per rank, because a rank must stay in the cgroup, CPU binding and GPUs of its task, which only a child of
    that task inherits; there only relaunches save the import. torchrun starts its ranks itself.
    """

    server: ForkServer | None = None
    executes: bool = False  # whether ranks are executed from now on, because a fork has failed

    def spawn_ranks(
        self, starts: Sequence[RankCommand], output: IO[bytes], *, give_up: Callable[[], bool]
    ) -> RankGroup:
        """Start ranks, forked if possible and otherwise executed.

        Args:
            output: their log, opened for appending.
            give_up: called while torch is imported; stops the wait if it returns True.

        Raises:
            OSError: a command or its folder does not exist; ranks that were already started are killed.
        """
        group = RankGroup([])
        try:
            for start in starts:
                child = self._fork_rank(start, output, give_up)
                group.children.append(
                    child or _spawn_subprocess(start.command, output, start.environment, start.folder)
                )
        except OSError:
            group.kill()
            raise
        return group

    def _fork_rank(self, start: RankCommand, output: IO[bytes], give_up: Callable[[], bool]) -> ForkedRank | None:
        if self.executes or not start.is_forkable:
            return None
        if self.server is not None and not self.server.can_fork(start):
            self.close()
        try:
            self.server = self.server or ForkServer(start, output)
            return self.server.fork_rank(start, give_up=give_up)
        except ForkUnavailable as error:  # an executed rank meets the same problem and reports it
            sys.stderr.write(
                f"tula: ranks cannot be forked, so each rank imports torch itself and starts more slowly: {error}\n"
            )
            self.executes = True
            self.close()
            return None

    def list_surviving_processes(self) -> list[int]:
        """Return the ids of processes that outlive an attempt on purpose: the fork server."""
        return [self.server.process.pid] if self.server is not None else []

    def close(self) -> None:
        """Stop the fork server."""
        if self.server is not None:
            self.server.close()
        self.server = None


def _spawn_subprocess(
    command: Sequence[str], output: IO[bytes], environment: dict[str, str], folder: str, *, pass_fds: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=folder,
        start_new_session=True,
        preexec_fn=prepare_supervised_child,
        pass_fds=pass_fds,
    )
