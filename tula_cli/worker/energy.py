"""The energy that GPUs take, as NVML counts it (package nvidia-ml-py, the extra `nvml`)."""

import json
import time
from collections.abc import Callable
from typing import Any

from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import CountedEnergy
from tula_cli.worker.device import Clock, get_gpu_uuid
from tula_cli.worker.ranks import Ranks

Counter = Callable[[], float | None]
"""Returns the joules since the driver was loaded; None where it cannot be read any more."""


class EnergyMeter:
    """The energy of the GPUs of all ranks since it was made.

    A GPU's counter is all of it: other processes on it are counted too. It is renewed some ten times a second, so a
    window of a second is right to some 10 %. Host, network and cooling are not in it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._clock = ranks, Clock(ranks.device)
        self._gpu = get_gpu_uuid() if ranks.device.type == "cuda" else ""
        self._counter = _open_energy_counter(self._gpu) if self._gpu else None
        self._start = self._read()

    def joules(self) -> float | None:
        """Return the energy of all GPUs since the start; every rank takes part.

        None where any of them has no counter, or one that does not rise: what is not measured is never 0.
        """
        energy = None
        if self._start is not None and (counter := self._read()) is not None and counter > self._start:
            energy = counter - self._start
        # By GPU: one that several ranks share counts once.
        by_gpu: dict[str, float | None] = dict(map(json.loads, self._ranks.gather(json.dumps([self._gpu, energy]))))
        measured = [joules for joules in by_gpu.values() if joules is not None]
        return sum(measured) if len(measured) == len(by_gpu) else None

    @property
    def has_counter(self) -> bool:
        """Whether this rank's GPU has a counter."""
        return self._start is not None

    def _read(self) -> float | None:
        """Return the counter when the device has done what it was given."""
        if self._counter is None:
            return None
        self._clock.wait()
        return self._counter()


class TrainingEnergy:
    """The energy of a training, over this attempt and those before it; every rank takes part in all of it.

    Args:
        run: where it is kept.
        signature: of the training.
        ranks: they start to be counted now.
    """

    def __init__(self, run: RunDir, signature: str, ranks: Ranks) -> None:
        self._run, self._signature, self._ranks = run, signature, ranks
        self._meter, self._began = EnergyMeter(ranks), time.monotonic()
        self._counts = not ranks.max(float(not self._meter.has_counter))  # else nobody needs to be asked again
        self._before = run.training(signature).energy() if ranks.is_first else None

    def save(self) -> None:
        """Write down what was counted so far: what a failure leaves."""
        joules, seconds = self._meter.joules() if self._counts else None, time.monotonic() - self._began
        if joules is None or not self._ranks.is_first:
            return
        if self._before is not None:
            joules, seconds = joules + self._before.joules, seconds + self._before.seconds
        self._run.write_energy(self._signature, CountedEnergy(joules=joules, seconds=seconds))


def open_nvml_device(gpu: str) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a GPU; None without the package, its library, or the device.

    Args:
        gpu: its UUID as torch tells it. NVML's numbers are of no use: CUDA_VISIBLE_DEVICES does not change them.
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
    """Return what reads the counter of a GPU; None where NVML does not know it, or it has none."""
    if (device := open_nvml_device(gpu)) is None:
        return None
    nvml, handle = device

    def read() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000  # mJ
        except (nvml.NVMLError, AttributeError):  # the latter of a package that is too old to know the counter
            return None

    if read() is None:
        return None

    return read
