"""Memory and processor of this machine, as the kernel reports them."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CPU_INFO_FILE = Path("/proc/cpuinfo")
CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
SHARED_MEMORY_FOLDER = Path("/dev/shm")
CONTROL_GROUPS_FOLDER = Path("/sys/fs/cgroup")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")


def read_processor_name() -> str:
    """Return the processor's name as reported by the kernel, or its architecture if there is none, as on ARM."""
    try:
        lines = CPU_INFO_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def read_cpu_quota(path: Path = CPU_QUOTA_FILE) -> float | None:
    """Return the CPU quota of this process's container in cores; None if unlimited."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # the file does not exist or contains "max"
        return None


def read_machine_memory(groups: Path = CONTROL_GROUPS_FOLDER, membership: Path = MEMBERSHIP_FILE) -> int:
    """Return the bytes of this machine's memory, or of the control group that holds this process if that is less.

    Args:
        groups: where control groups are mounted.
        membership: file with one line per group of this process: "0::/path", or "number:controllers:/path" in version
            1.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_read_cgroup_limits(groups, membership)])


def _read_cgroup_limits(groups: Path, membership: Path) -> Iterator[int]:
    """Yield the memory limit of each group of the process, and of its parent groups."""
    limit_files = [groups / "memory.max", groups / "memory/memory.limit_in_bytes"]  # paths inside a container
    for line in (_read_text(membership) or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            limit_files += [groups / inner / "memory.max" for inner in _list_parents(path)]
        elif "memory" in controllers.split(","):
            limit_files += [groups / "memory" / inner / "memory.limit_in_bytes" for inner in _list_parents(path)]
    for file in dict.fromkeys(limit_files):
        text = _read_text(file)
        if text is not None and text.isdigit():
            yield int(text)


def _list_parents(path: str) -> list[PurePosixPath]:
    inner = PurePosixPath(path.lstrip("/"))
    return [inner, *inner.parents]


def _read_text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def read_shared_memory(folder: Path = SHARED_MEMORY_FOLDER) -> int | None:
    """Return the free bytes of /dev/shm, through which processes exchange batches; None if it does not exist.

    Its size is half of the memory on most machines, and 64 MiB by default in containers.
    """
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
