"""Runs a command and leaves none of its processes behind: python -m tula_cli.host.guard COMMAND [ARGUMENT ...].

A user's code may start threads that never end, processes in separate sessions, or daemons, and tula may be killed by
SIGKILL while it waits. This process adopts all descendants, and kills them when the command or tula has exited.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from tula_cli.host.processes import adopt_orphans

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_KILL_SECONDS = 10.0
"""Seconds after which processes that cannot be killed (waiting for a dead file server) are left behind."""


def main(command: Sequence[str]) -> int:
    """Run a command; return its exit code, 128 + N if signal N killed it."""
    for number in STOP_SIGNALS:
        signal.signal(number, _exit_on_first_signal)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # other systems than Linux: only the process group is killed
            stack.enter_context(adopt_orphans())
        try:
            code = subprocess.Popen(command).wait()
        finally:
            _ignore_stop_signals()
            kill_descendants()
    return code if code >= 0 else 128 - code


def _exit_on_first_signal(number: int, _: object) -> None:
    """Exit once: when tula exits, the kernel sends one signal per thread, and a second exit would spare descendants."""
    _ignore_stop_signals()
    sys.exit(128 + number)


def _ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_descendants() -> None:
    """Kill all descendants of this process; descendants that lose their parent become its children."""
    this_process, deadline = psutil.Process(), time.monotonic() + MAX_KILL_SECONDS
    while (children := this_process.children()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                child.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
