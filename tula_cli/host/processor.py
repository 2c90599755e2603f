"""What the kernel tells of this node's processor."""

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def processor_name() -> str:
    """Return the processor's name as the kernel tells it; its architecture where it tells none, as on ARM."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def cpu_quota(path: Path = CPU_MAX) -> float | None:
    """Return how many cores' time this process's container may take; None where that is not bounded."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return None
