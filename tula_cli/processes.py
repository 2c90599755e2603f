"""What the kernel tells of processes, and asks of them."""

import ctypes
import os
import platform
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends.

    A worker that outlives its supervisor would be a second writer of one run.
    """
    if platform.system() != "Linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def started(pid: int) -> float | None:
    """Return when a process started, in clock ticks since boot; None where it has ended (a zombie has ended too)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else float(fields[19])
