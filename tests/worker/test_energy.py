"""The energy of GPUs, with a fake NVML; and the real package, which needs no GPU to be asked."""

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from worker_jobs import make_spec, make_train_task

from tula_cli.run.directory import RunDir
from tula_cli.worker import energy
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.device import Clock
from tula_cli.worker.energy import EnergyMeter, TrainingEnergy
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks

pytestmark = pytest.mark.torch

UUID = "8c2e1a5f-0000-1111-2222-333344445555"


class FakeNvml(ModuleType):
    """One GPU whose counter says one number after another, in mJ; an exception is raised."""

    class NVMLError(Exception):
        pass

    def __init__(self, *readings: int | Exception) -> None:
        super().__init__("pynvml")
        self.readings = [0, *readings]  # one is asked for to see whether there is a counter

    def nvmlInit(self) -> None:
        if not self.readings[1:]:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle"
        reading = self.readings.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading


class OldNvml(FakeNvml):
    """From before there was the counter."""

    @property
    def nvmlDeviceGetTotalEnergyConsumption(self) -> None:  # type: ignore[override]
        raise AttributeError


class Group(Ranks):
    """This rank on a GPU, and others that have said what they have said."""

    others: tuple[tuple[str, float | None], ...] = ()

    def gather(self, text: str) -> list[str]:
        return [text, *map(json.dumps, self.others)]


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EnergyMeter]:
    """Makes a meter of a rank on a GPU: `meter(nvml, *others, uuid=...)`."""

    def made(nvml: ModuleType | None, *others: tuple[str, float | None], uuid: str = UUID) -> EnergyMeter:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: an import fails
        monkeypatch.setattr(energy, "get_gpu_uuid", lambda: uuid)
        monkeypatch.setattr(Clock, "wait_for_device", lambda clock: None)
        monkeypatch.setattr(Group, "others", others)
        return EnergyMeter(Group(rank=0, world=1 + len(others), local_rank=0, device=torch.device("cuda", 0)))

    return made


def test_joules_are_what_the_counters_of_all_gpus_rose_by(meter: Callable[..., EnergyMeter]) -> None:
    assert meter(FakeNvml(5_000, 17_500)).read_joules() == 12.5
    assert meter(FakeNvml(5_000, 17_500), ("b", 7.5), ("c", 10.0)).read_joules() == 30
    assert meter(FakeNvml(5_000, 7_000, 9_000)).read_joules() == 2


def test_the_counter_is_found_by_the_name_of_the_gpu_however_it_begins(meter: Callable[..., EnergyMeter]) -> None:
    assert meter(FakeNvml(5_000, 17_500), uuid=f"GPU-{UUID}").read_joules() == 12.5


def test_a_gpu_that_ranks_share_counts_once(meter: Callable[..., EnergyMeter]) -> None:
    assert meter(FakeNvml(5_000, 17_500), (UUID, 12.5), ("b", 1.0)).read_joules() == 13.5


FAILS = FakeNvml.NVMLError("GPU is lost")


@pytest.mark.parametrize(
    "nvml",
    [None, OldNvml(1_000, 2_000), FakeNvml(), FakeNvml(FAILS), FakeNvml(1_000, FAILS), FakeNvml(1_000, 1_000),
     FakeNvml(2_000, 1_000)],
    ids=["no package", "old package", "no library", "fails at once", "fails midway", "does not rise", "falls"],
)  # fmt: skip
def test_what_cannot_be_counted_is_none_and_never_0(meter: Callable[..., EnergyMeter], nvml: ModuleType | None) -> None:
    assert meter(nvml).read_joules() is None


def test_a_device_without_a_counter_has_none(meter: Callable[..., EnergyMeter]) -> None:
    no_counter = FakeNvml(1, 2)
    no_counter.readings[0] = FakeNvml.NVMLError("Not Supported")
    assert meter(no_counter).read_joules() is None
    assert meter(FakeNvml(1_000, 2_000), uuid="a part of a GPU (MIG)").read_joules() is None


def test_one_rank_without_a_counter_leaves_no_sum(meter: Callable[..., EnergyMeter]) -> None:
    assert meter(FakeNvml(5_000, 17_500), ("b", None)).read_joules() is None


def test_ranks_on_a_cpu_count_nothing(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(1_000, 2_000))
    assert EnergyMeter(alone).read_joules() is None


# --- of a training


class Meters:
    """In the place of EnergyMeter: one for each attempt, whose counters tell one reading after another."""

    def __init__(self, *attempts: list[float | None]) -> None:
        self.attempts = list(attempts)

    def __call__(self, ranks: Ranks) -> "Meters":
        self.readings = self.attempts.pop(0)
        return self

    @property
    def has_counter(self) -> bool:
        return bool(self.readings)

    def read_joules(self) -> float | None:
        return self.readings.pop(0)


def test_the_energy_of_a_training_is_that_of_all_its_attempts(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "EnergyMeter", Meters([2.0, 5.0], [3.0, None]))
    first = TrainingEnergy(run, "ab12cd34", alone)
    assert run.get_training("ab12cd34").read_energy() is None
    first.save_energy()
    first.save_energy()
    before = run.get_training("ab12cd34").read_energy()
    assert before is not None and before.joules == 5 and before.seconds > 0
    second = TrainingEnergy(run, "ab12cd34", alone)
    second.save_energy()
    second.save_energy()  # the counter can be read no more: what was told before stays
    result = run.get_training("ab12cd34").read_energy()
    assert result is not None and result.joules == 8 and result.seconds > before.seconds


def test_without_a_counter_a_training_writes_nothing_and_asks_nobody(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "EnergyMeter", Meters([]))
    counted = TrainingEnergy(run, "ab12cd34", alone)
    counted.save_energy()
    assert run.get_training("ab12cd34").read_energy() is None


def test_a_training_counts_to_the_end_of_each_epoch_and_to_its_own(
    alone: Ranks, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "EnergyMeter", Meters([1.0, 2.0, 4.0]))
    job = make_spec(train={"epochs": 2})
    task = make_train_task(job)
    run_training(task, run, alone, build_datasets(job))
    result = run.get_training(task.signature).read_energy()
    assert result is not None and result.joules == 4


def test_the_package_has_what_is_asked_of_it() -> None:
    nvml: Any = pytest.importorskip("pynvml", reason="needs nvidia-ml-py (the extra nvml)")
    for name in ("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"):
        assert callable(getattr(nvml, name))
    assert issubclass(nvml.NVMLError, Exception)
    if not torch.cuda.is_available():
        assert energy._open_energy_counter(UUID) is None
