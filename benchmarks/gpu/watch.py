"""How much of the device is taken, five times a second; and a process that takes all but a rest of it."""

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

from gpu.stage import MARK
from tula_cli.host.leftovers import find_processes_with_variable

if TYPE_CHECKING:
    import torch

EVERY = 0.2  # seconds
MIB = 2**20
RAN = "it ran, with"
"""What a process says that has found a full card full enough."""


def taken(device: str) -> int:
    """Return the bytes in use: of the card, by whoever; on the CPU by this stage's ranks and their loaders."""
    return card_taken() if device == "cuda" else sum(resident(pid) for pid in ranks())


def card_taken() -> int:
    """Return the bytes of the first card that are in use, as the driver says; through NVML where Python has it.

    Raises:
        SystemExit: the driver cannot be asked.
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


def ranks() -> list[int]:
    """Return the processes of ranks, and of their loaders, that this stage has started."""
    value = os.environ.get(MARK)
    return [pid for pid, mark in find_processes_with_variable(MARK).items() if mark == value and _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    try:
        return b"tula_cli.worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@dataclass
class Watch:
    """Samples the memory in use from a thread while it is entered."""

    device: str
    samples: list[tuple[float, int]] = field(default_factory=list)  # Unix time, bytes

    def __enter__(self) -> "Watch":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            self.samples.append((time.time(), taken(self.device)))

    def back_after(self, moment: float, base: int, *, until: float) -> float | None:
        """Return the seconds after a moment until no more than `base` bytes were taken; None where that was not seen."""
        below = (when for when, kept in self.samples if moment <= when <= until and kept <= base)
        first = next(below, None)
        return None if first is None else first - moment

    def most(self, since: float, until: float) -> int:
        """Return the most bytes in use in a while."""
        return max((kept for when, kept in self.samples if since <= when <= until), default=0)


class Hog:
    """A process that holds the card but for `left` bytes; on the CPU nothing, for there a limit stands for it."""

    def __init__(self, device: str, left: int) -> None:
        self.process: subprocess.Popen[str] | None = None
        if device == "cuda":
            command = [sys.executable, "-m", "gpu.watch", str(left)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
            assert self.process.stdout is not None
            if not self.process.stdout.readline():
                raise SystemExit("the card could not be filled")

    def __enter__(self) -> "Hog":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.communicate()


def fill(left: int = 0) -> "list[torch.Tensor]":
    """Take the card's memory until less than 2 MiB, or `left` bytes, can be had; it is held as long as what is returned."""
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


def hold(left: int) -> None:
    """Take plain memory of the card until so many bytes are left, and hold it until stdin ends."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    kept = fill(left)
    print(f"full: {len(kept)} blocks", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
