"""How much memory this machine has, its own and what processes share."""

import os
from pathlib import Path

SHARED = Path("/dev/shm")
MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def machine_memory(limit: Path = MEMORY_MAX) -> int:
    """Return the bytes of this machine's memory, or of the control group that holds this process if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = limit.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def shared_memory(folder: Path = SHARED) -> int | None:
    """Return the free bytes of /dev/shm, where processes hand batches over; None where there is none.

    Half of the memory on most machines, 64 MiB in a container that was started without more.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
