"""Sample the memory in use on the device five times per second, and a process that allocates all but a given amount."""

import contextlib
import importlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.stage import STAGE_VARIABLE
from tula_cli.host.leftovers import find_processes_with_variable

if TYPE_CHECKING:
    import torch

SAMPLE_SECONDS = 0.2  # seconds
MIB = 2**20
NO_ERROR_PREFIX = "it ran, with"
"""Prefix of the message of a process that did not run out of memory on a full GPU."""


def read_bytes_in_use(device: str) -> int:
    """Return the bytes in use: on a GPU by all processes; on the CPU by the ranks of this stage and their loaders."""
    return (
        read_gpu_bytes_in_use() if device == "cuda" else sum(read_resident_bytes(pid) for pid in list_rank_processes())
    )


def read_gpu_bytes_in_use() -> int:
    """Return the bytes in use on the first GPU, from NVML if installed, else from the driver's tool.

    Raises:
        SystemExit: the driver cannot be queried.
    """
    with contextlib.suppress(ImportError):
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout.split()[0]) * MIB
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise SystemExit(f"nvidia-smi does not tell the memory in use: {error}; pip install nvidia-ml-py") from error


def list_rank_processes() -> list[int]:
    """Return the processes of ranks and loaders that this stage has started."""
    value = os.environ.get(STAGE_VARIABLE)
    return [
        pid for pid, mark in find_processes_with_variable(STAGE_VARIABLE).items() if mark == value and _is_rank(pid)
    ]


def _is_rank(pid: int) -> bool:
    try:
        return b"tula_cli.worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has exited
        return False


def read_resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@dataclass
class MemorySampler:
    """Sample the memory in use in a thread, as a context manager."""

    device: str
    samples: list[tuple[float, int]] = field(default_factory=list)  # Unix time, bytes

    def __enter__(self) -> "MemorySampler":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.samples.append((time.time(), read_bytes_in_use(self.device)))

    def back_after(self, moment: float, base: int, *, until: float) -> float | None:
        """Return the seconds after a moment until at most `base` bytes were in use; None if this was not observed."""
        below = (when for when, kept in self.samples if moment <= when <= until and kept <= base)
        first = next(below, None)
        return None if first is None else first - moment

    def most(self, since: float, until: float) -> int:
        """Return the maximum of bytes in use in an interval."""
        return max((kept for when, kept in self.samples if since <= when <= until), default=0)


class MemoryHolder:
    """A process that allocates the GPU's memory except `left` bytes; on the CPU a memory limit replaces it."""

    def __init__(self, device: str, left: int) -> None:
        self.process: subprocess.Popen[str] | None = None
        if device == "cuda":
            command = [sys.executable, "-m", "gpu.watch", str(left)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
            assert self.process.stdout is not None
            if not self.process.stdout.readline():
                raise SystemExit("the card could not be filled")

    def __enter__(self) -> "MemoryHolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.communicate()


def allocate_until(left: int = 0) -> "list[torch.Tensor]":
    """Allocate the GPU's memory until less than 2 MiB, or `left` bytes, are free; it is released with the returned tensors."""
    import torch

    kept, piece = [], 2**30
    while piece >= 2 * MIB:
        free, _ = torch.cuda.mem_get_info()
        try:
            if free - piece < left:
                raise torch.OutOfMemoryError
            kept.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            piece //= 2
    return kept


def hold_memory(left: int) -> None:
    """Allocate the GPU's memory until `left` bytes are free, and keep it until stdin is closed."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    kept = allocate_until(left)
    print(f"full: {len(kept)} blocks", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold_memory(int(sys.argv[1]))
