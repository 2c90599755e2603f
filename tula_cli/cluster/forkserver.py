"""The supervisor's end of the process that has imported torch and forks the ranks of every attempt (a fork server).

Importing torch takes seconds, more on a shared file system; a fork takes milliseconds, for every rank and for every
relaunch. The far end is `tula_cli.worker.preloaded`; between them go lines of JSON: what a rank is started with, and its
process id. A forked rank is this process's own child (orphans are adopted for that moment): its exit code and its
signals are told by the kernel, and it needs the server no longer.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

from tula_cli.host.processes import adopt_orphans, become_child

POLL = 0.2  # seconds
PROGRAM = "import sys; del sys.path[0]; from tula_cli.worker.preloaded import main; main()"
"""Without the folder it is started in: what lies there is the user's, and is for the ranks to import."""
MAX_MESSAGE = 4096
"""Bytes of its command line that a rank writes its own over, for ps and pgrep."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TULA_LEAVE_AT")
"""Environment variables that differ between ranks or attempts; a library may have read any other at its import."""
WORKER = ("-u", "-m", "tula_cli.worker")


@dataclass(frozen=True)
class RankCommand:
    """What one rank is started with."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    log: str  # absolute; empty where a rank goes on writing where the process that it is forked from does

    @property
    def is_forkable(self) -> bool:
        """Whether it is the worker itself: a wrapper or torchrun has to be executed."""
        return self.command[:4] == (sys.executable, *WORKER)

    @property
    def shared_environment(self) -> dict[str, str]:
        """The environment that all ranks have in common."""
        return {name: value for name, value in self.environment.items() if name not in RANK_VARIABLES}


class ForkUnavailable(Exception):
    """No rank can be forked; the words say why."""


@dataclass
class ForkedRank:
    """A forked rank, with what is used of subprocess.Popen."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """A process that has imported what ranks need.

    Args:
        start: of a rank: the server gets its folder, and its environment less what is one rank's alone.
        output: where the server writes; what libraries say while they are imported belongs into the ranks' log.
        program: what it runs.
    """

    def __init__(self, start: RankCommand, output: IO[bytes], *, program: str = PROGRAM) -> None:
        self.folder, self.environment = start.folder, start.shared_environment
        self._socket, far = socket.socketpair()
        # The driver is asked through NVML whether there is a GPU: CUDA itself does not survive a fork.
        environment = {**self.environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with far:
            self.process = subprocess.Popen(
                [start.command[0], "-u", "-c", program, str(far.fileno()), " " * MAX_MESSAGE],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=start.folder,
                start_new_session=True,
                preexec_fn=become_child,
                pass_fds=[far.fileno()],
            )
        self._socket.settimeout(POLL)
        self._received = b""

    def can_fork(self, start: RankCommand) -> bool:
        """Return whether a rank forked from here is what it would be if it were executed."""
        return (self.folder, self.environment) == (start.folder, start.shared_environment)

    def fork(self, start: RankCommand, *, give_up: Callable[[], bool]) -> ForkedRank:
        """Start a rank; the first one waits until everything is imported.

        Args:
            start: of the rank.
            give_up: asked while waiting.

        Raises:
            ForkUnavailable: the import has failed, the server has died, or it was given up.
        """
        try:
            with adopt_orphans():
                self._send({**asdict(start), "parent": os.getpid()})
                answer = self._read_answer(give_up)
        except ConnectionError:
            raise ForkUnavailable(self._end_of_server()) from None
        except OSError as error:
            raise ForkUnavailable(str(error)) from error
        if "error" in answer:
            raise ForkUnavailable(str(answer["error"]))
        return ForkedRank(int(answer["pid"]))

    def _send(self, request: Mapping[str, Any]) -> None:
        self._socket.settimeout(None)  # a line may be longer than the buffer while the server still imports
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self._socket.settimeout(POLL)

    def _read_answer(self, give_up: Callable[[], bool]) -> dict[str, Any]:
        while b"\n" not in self._received:
            try:
                received = self._socket.recv(4096)
            except TimeoutError:
                if give_up():
                    raise ForkUnavailable("given up") from None
                continue
            if not received:
                raise ForkUnavailable(self._end_of_server())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end_of_server(self) -> str:
        return f"the process that imports it ended with exit code {self.process.wait()}"

    def close(self) -> None:
        """End the server; ranks live on."""
        self._socket.close()
        self.process.kill()
        self.process.wait()
