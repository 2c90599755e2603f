"""What the kernel tells of this node's processor."""

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Return the processor's name as the kernel tells it; its architecture where it tells none, as on ARM."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
