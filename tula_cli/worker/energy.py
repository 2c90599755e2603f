"""The energy that GPUs consume, as NVML counts it (package nvidia-ml-py, the extra `nvml`)."""

import json
import time
from collections.abc import Callable
from typing import Any

from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import CountedEnergy
from tula_cli.worker.device import Clock, get_gpu_uuid
from tula_cli.worker.ranks import Ranks

Counter = Callable[[], float | None]
"""Returns the joules since the driver was loaded, or None if the counter can no longer be read."""


class EnergyMeter:
    """The energy of the GPUs of all ranks since the meter was created.

    A GPU's counter covers the whole GPU, including other processes on it. It is updated about ten times a second, so a
    window of one second is accurate to about 10 %. Host, network and cooling are not included.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._clock = ranks, Clock(ranks.device)
        self._gpu = get_gpu_uuid() if ranks.device.type == "cuda" else ""
        self._counter = _open_energy_counter(self._gpu) if self._gpu else None
        self._start = self._read_counter()

    def read_joules(self) -> float | None:
        """Return the energy of all GPUs in joules since the start; every rank must call this.

        None if any GPU has no counter, or a counter that does not rise: an energy that is not measured is never
        reported as 0.
        """
        energy = None
        if self._start is not None and (counter := self._read_counter()) is not None and counter > self._start:
            energy = counter - self._start
        # By GPU, so that a GPU shared by several ranks counts once.
        by_gpu: dict[str, float | None] = dict(map(json.loads, self._ranks.gather(json.dumps([self._gpu, energy]))))
        measured = [joules for joules in by_gpu.values() if joules is not None]
        return sum(measured) if len(measured) == len(by_gpu) else None

    @property
    def has_counter(self) -> bool:
        """Return whether this rank's GPU has an energy counter."""
        return self._start is not None

    def _read_counter(self) -> float | None:
        """Return the counter once the device has completed all queued work."""
        if self._counter is None:
            return None
        self._clock.wait_for_device()
        return self._counter()


class TrainingEnergy:
    """The energy of a training, over this attempt and those before it; every rank must call every method."""

    def __init__(self, run: RunDir, signature: str, ranks: Ranks) -> None:
        self._run, self._signature, self._ranks = run, signature, ranks
        self._meter, self._began = EnergyMeter(ranks), time.monotonic()
        self._counts = not ranks.max(float(not self._meter.has_counter))  # else no communication later
        self._before = run.get_training(signature).read_energy() if ranks.is_first else None

    def save_energy(self) -> None:
        """Write the energy counted so far, so that it is kept if the training fails."""
        joules, seconds = self._meter.read_joules() if self._counts else None, time.monotonic() - self._began
        if joules is None or not self._ranks.is_first:
            return
        if self._before is not None:
            joules, seconds = joules + self._before.joules, seconds + self._before.seconds
        self._run.write_energy(self._signature, CountedEnergy(joules=joules, seconds=seconds))


def open_nvml_device(gpu: str) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a GPU; None if the package, its library or the device is missing.

    Args:
        gpu: its UUID as torch reports it. NVML's indices cannot be used: CUDA_VISIBLE_DEVICES does not change them.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.removeprefix('GPU-')}")
    except pynvml.NVMLError:
        return None


def _open_energy_counter(gpu: str) -> Counter | None:
    """Return a function that reads a GPU's energy counter; None if NVML does not know the GPU or it has no counter."""
    if (device := open_nvml_device(gpu)) is None:
        return None
    nvml, handle = device

    def read_gpu_counter() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000  # mJ
        except (nvml.NVMLError, AttributeError):  # AttributeError: the package is too old for this counter
            return None

    if read_gpu_counter() is None:
        return None

    return read_gpu_counter
