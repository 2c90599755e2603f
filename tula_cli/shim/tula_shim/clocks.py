"""Time and memory of the script's device, without importing torch: CUDA events on a GPU, else the host's clock."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

Mark = Any
"""A point in time: seconds on the host, or an event in the stream of a GPU."""


def get_used_cuda() -> Any | None:
    """Return torch.cuda if this process has used it, else None."""
    torch = sys.modules.get("torch")
    module = getattr(torch, "cuda", None)
    return module if module is not None and module.is_available() and module.is_initialized() else None


class HostClock:
    device = "cpu"

    def mark(self) -> Mark:
        return time.perf_counter()

    def measure_seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin)


class CudaClock(HostClock):
    """Marks are events in the current stream: nothing blocks until `measure_seconds` is called."""

    device = "cuda"

    def __init__(self, torch_cuda: Any) -> None:
        self._event = torch_cuda.Event

    def mark(self) -> Mark:
        event = self._event(enable_timing=True)
        event.record()
        return event

    def measure_seconds(self, begin: Mark, end: Mark) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def make_clock() -> HostClock:
    """Return the clock of the device that this process computes on; to be called after its first step."""
    device = get_used_cuda()
    return CudaClock(device) if device is not None else HostClock()


def reset_peak_memory() -> None:
    """Reset the peak that `read_peak_memory` returns. Has no effect on the CPU in containers that do not allow it."""
    device = get_used_cuda()
    if device is not None:
        device.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_peak_memory() -> dict[str, int]:
    """Return the peak memory since `reset_peak_memory` in bytes: allocated and reserved on a GPU, resident on the CPU."""
    device = get_used_cuda()
    if device is not None:
        return {"allocated": int(device.max_memory_allocated()), "reserved": int(device.max_memory_reserved())}
    resident = _read_peak_resident_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"allocated": resident, "reserved": resident}


def _read_peak_resident_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def read_hardware_name() -> str:
    """Return the name of the GPU or the CPU; empty if unknown."""
    device = get_used_cuda()
    if device is not None:
        return str(device.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def read_device_capacity() -> int | None:
    """Return the memory of this process' GPU in bytes; None on the CPU."""
    device = get_used_cuda()
    return None if device is None else int(device.get_device_properties(device.current_device()).total_memory)


def compute_process_age() -> float | None:
    """Return the seconds since this process started; None if /proc/self/stat cannot be read."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    # Start times count from the boot of the kernel; /proc/uptime of a container may count from its own start.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
