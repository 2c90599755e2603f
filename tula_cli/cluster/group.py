"""The ranks that one supervisor has started: a process each, forked from a preloaded one where that can be, else executed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Union

from tula_cli.cluster.forkserver import ForkedRank, ForkServer, ForkUnavailable, RankCommand
from tula_cli.cluster.watching.node_log import RankOutput
from tula_cli.host.processes import become_child

POLL = 0.05  # seconds
Child = Union["subprocess.Popen[bytes]", ForkedRank]


@dataclass
class RankGroup:
    """Processes that end together; each leads a process group, with its data-loader processes in it."""

    children: list[Child]
    _first_failure: tuple[int, int] | None = None  # what had failed when the others were killed

    def is_running(self) -> bool:
        return None in [child.poll() for child in self.children]

    def first_failure(self) -> tuple[int, int] | None:
        """Return place and exit code of the process that failed first, of those that have ended so far.

        One that was killed tells more than those that lost it, and have ended meanwhile. SIGABRT is no kill: torch ends
        its own process by it over a lost peer.
        """
        if self._first_failure is not None:
            return self._first_failure
        codes = [(at, code) for at, child in enumerate(self.children) if (code := child.poll())]
        return min(codes, key=lambda found: (found[1] > 0, found[1] == -signal.SIGABRT, found[0]), default=None)

    def end(self, grace: float) -> None:
        """Ask the ranks to save and leave; kill what is left after `grace` seconds.

        Only the ranks themselves are asked: their data-loader processes have to live until they have saved.
        """
        for child in self.children:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(POLL)
        self.kill()

    def kill(self) -> None:
        """Kill every rank and what it has started."""
        self._first_failure = self.first_failure()
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self.children:
            child.wait()


@dataclass
class RankSpawner:
    """Starts ranks, and keeps for the next attempt where they write and the process that they are forked from.

    Each supervisor has its own. The one that starts all ranks of a machine imports torch once for all of them. Under
    srun there is a supervisor a rank, and a rank must stay in its own task's cgroup, CPU binding and GPUs, which only a
    child of that task has: there the relaunches gain. torchrun starts its ranks itself.
    """

    output: RankOutput = field(default_factory=RankOutput)
    server: ForkServer | None = None
    executes: bool = False  # for good: forking has failed once

    def spawn(self, starts: Sequence[RankCommand], output: IO[bytes], *, give_up: Callable[[], bool]) -> RankGroup:
        """Start ranks.

        Args:
            starts: what each is started with.
            output: their log, opened to add to it.
            give_up: asked while torch is imported, whether not to wait for that any longer.

        Raises:
            OSError: a command or its folder is not there. None of the others runs.
        """
        group = RankGroup([])
        try:
            for start in starts:
                group.children.append(self._fork(start, output, give_up) or _execute(start, output))
        except OSError:
            group.kill()
            raise
        return group

    def _fork(self, start: RankCommand, output: IO[bytes], give_up: Callable[[], bool]) -> ForkedRank | None:
        if self.executes or not start.is_forkable:
            return None
        if self.server is not None and not self.server.can_fork(start):
            self._stop_server()
        try:
            self.server = self.server or ForkServer(start, output)
            return self.server.fork(start, give_up=give_up)
        except ForkUnavailable as error:  # whatever is wrong, a rank that imports everything itself meets and tells it
            sys.stderr.write(f"tula: ranks are not forked but executed, each with its own import of torch: {error}\n")
            self.executes = True
            self._stop_server()
            return None

    def surviving_processes(self) -> list[int]:
        """Return the processes that outlive an attempt on purpose: what ranks are forked from."""
        return [self.server.process.pid] if self.server is not None else []

    def close(self) -> None:
        """End the process that ranks are forked from, and let nothing more be written."""
        self._stop_server()
        self.output.close()

    def _stop_server(self) -> None:
        if self.server is not None:
            self.server.close()
        self.server = None


def _execute(start: RankCommand, output: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        start.command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=start.environment,
        cwd=start.folder,
        start_new_session=True,
        preexec_fn=become_child,
    )
