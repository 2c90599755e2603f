"""How much memory this machine has, its own and what processes share."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SHARED = Path("/dev/shm")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def machine_memory(groups: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the bytes of this machine's memory, or of the control group that holds this process if that is less.

    Args:
        groups: where control groups are mounted.
        membership: the groups of this process, a line each: "0::/path", of version 1 "number:controllers:/path".
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_limits(groups, membership)])


def _limits(groups: Path, membership: Path) -> Iterator[int]:
    """Yield the limit of each group that the process is in, and of those around it."""
    own = [groups / "memory.max", groups / "memory/memory.limit_in_bytes"]  # what a container sees of its own
    for line in (_text(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own += [groups / inner / "memory.max" for inner in _upwards(path)]
        elif "memory" in controllers.split(","):
            own += [groups / "memory" / inner / "memory.limit_in_bytes" for inner in _upwards(path)]
    for file in dict.fromkeys(own):
        text = _text(file)
        if text is not None and text.isdigit():
            yield int(text)


def _upwards(path: str) -> list[PurePosixPath]:
    inner = PurePosixPath(path.lstrip("/"))
    return [inner, *inner.parents]


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def shared_memory(folder: Path = SHARED) -> int | None:
    """Return the free bytes of /dev/shm, where processes hand batches over; None where there is none.

    Half of the memory on most machines, 64 MiB in a container that was started without more.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
