"""At which clocks and under what limits GPUs ran, as NVML tells (package nvidia-ml-py, the extra `nvml`)."""

import json
from collections.abc import Iterable
from typing import Any

from tula_cli.run.records.probes import GpuState
from tula_cli.worker.device import gpu_uuid
from tula_cli.worker.energy import nvml_device
from tula_cli.worker.ranks import Ranks

REASONS = {0x04: "power cap", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
"""What holds a clock down, by NVML's bits of the reasons; an idle GPU, or a clock that is set lower, is not held down."""


class GpuStateRecorder:
    """The state of this rank's GPU at the first and at the last look; those of all ranks are put together afterwards."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        on_gpu = ranks.device.type == "cuda"
        self._device = nvml_device(gpu_uuid()) if on_gpu else None
        self._looks: list[GpuState] = []

    def sample(self) -> None:
        """Read the state now: an idle GPU tells nothing of the clocks it had at work, so before it is waited for."""
        if self._device is not None and (state := _read(*self._device)) is not None:
            self._looks = [*self._looks[:1], state]

    def first_and_last(self) -> tuple[GpuState, GpuState] | None:
        """Return what all GPUs were like at the first look and at the last; every rank takes part. None: none told."""
        samples_here = [state.model_dump() for state in self._looks]
        ranks_samples = [
            samples for text in self._ranks.gather(json.dumps(samples_here)) if (samples := json.loads(text))
        ]
        if not ranks_samples:
            return None
        return _join_states(samples[0] for samples in ranks_samples), _join_states(
            samples[-1] for samples in ranks_samples
        )


def _join_states(told: Iterable[dict[str, Any]]) -> GpuState:
    states = [GpuState.model_validate(state) for state in told]
    return GpuState(
        sm_mhz=min(state.sm_mhz for state in states),
        watts=max(state.watts for state in states),
        held_down=tuple(sorted({reason for state in states for reason in state.held_down})),
    )


def _read(nvml: Any, handle: Any) -> GpuState | None:
    """Return the state of a GPU; None where it does not tell it (any more)."""
    try:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return GpuState(
            sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # mW
            held_down=tuple(sorted({reason for bit, reason in REASONS.items() if bits & bit})),
        )
    except (nvml.NVMLError, AttributeError):  # the latter of a package that is too old
        return None
