"""Clocks, power and what holds GPUs back, with a fake NVML."""

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from tula_cli.run.records.probes import GpuState
from tula_cli.worker.measure import probe
from tula_cli.worker.measure.probe import GpuStateRecorder
from tula_cli.worker.ranks import Ranks

pytestmark = pytest.mark.torch

UUID = "8c2e1a5f-0000-1111-2222-333344445555"
IDLE, POWER, HEAT = 0x01, 0x04, 0x20


class FakeNvml(ModuleType):
    """One GPU in one state after another: (MHz, W, bits); an exception is raised."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, *states: tuple[int, float, int] | Exception) -> None:
        super().__init__("pynvml")
        self.states = list(states)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        self.now = self.states.pop(0)
        if isinstance(self.now, Exception):
            raise self.now
        return self.now[2]

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", self.NVML_CLOCK_SM) and not isinstance(self.now, Exception)
        return self.now[0]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        assert not isinstance(self.now, Exception)
        return round(1000 * self.now[1])


class Group(Ranks):
    """This rank on a GPU, and others that have said what they have said."""

    others: tuple[list[dict[str, Any]], ...] = ()

    def gather(self, text: str) -> list[str]:
        return [text, *map(json.dumps, self.others)]


def states(
    monkeypatch: pytest.MonkeyPatch, nvml: ModuleType | None, *others: list[dict[str, Any]], looks: int = 2
) -> tuple[GpuState, GpuState] | None:
    """Return what some looks tell on a rank with such an NVML."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: an import fails
    monkeypatch.setattr(probe, "get_gpu_uuid", lambda: UUID)
    monkeypatch.setattr(Group, "others", others)
    state_recorder = GpuStateRecorder(
        Group(rank=0, world=1 + len(others), local_rank=0, device=torch.device("cuda", 0))
    )
    for _ in range(looks):
        state_recorder.sample_state()
    return state_recorder.get_first_and_last()


def test_the_first_look_and_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml((1980, 350.5, IDLE), (1700, 600, 0), (1305, 698.2, POWER | HEAT))
    assert states(monkeypatch, nvml, looks=3) == (
        GpuState(sm_mhz=1980, watts=350.5, held_down=()),
        GpuState(sm_mhz=1305, watts=698.2, held_down=("heat", "power cap")),
    )


def test_of_all_gpus_the_slowest_and_the_thirstiest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [GpuState(sm_mhz=mhz, watts=400, held_down=why).model_dump() for mhz, why in ((1900, ()), (1600, ["heat"]))]
    result = states(monkeypatch, FakeNvml((1980, 350, 0), (1700, 690, POWER)), other, [])
    assert result is not None
    assert result[0] == GpuState(sm_mhz=1900, watts=400, held_down=())
    assert result[1] == GpuState(sm_mhz=1600, watts=690, held_down=("heat", "power cap"))


@pytest.mark.parametrize("nvml", [None, FakeNvml(*[FakeNvml.NVMLError("GPU is lost")] * 2)], ids=["none", "lost"])
def test_what_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch, nvml: ModuleType | None) -> None:
    assert states(monkeypatch, nvml) is None


def test_a_cpu_has_no_such_state(alone: Ranks) -> None:
    state_recorder = GpuStateRecorder(alone)
    state_recorder.sample_state()
    assert state_recorder.get_first_and_last() is None


def test_the_bits_are_those_of_the_package() -> None:
    nvml: Any = pytest.importorskip("pynvml", reason="needs nvidia-ml-py (the extra nvml)")
    reasons = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    assert [getattr(nvml, f"nvmlClocksThrottleReason{reason}") for reason in reasons] == list(probe.THROTTLE_REASONS)
    for name in ("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage"):
        assert callable(getattr(nvml, name))
