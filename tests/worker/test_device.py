"""A rank's device, and what is told where it has none."""

import traceback

import pytest
import torch

from tula_cli.errors import JobFailed, NoGpu
from tula_cli.host.outcome import advice, classify
from tula_cli.spec.resources import Cluster
from tula_cli.worker.device import Clock, gpu_count, pick_device

pytestmark = pytest.mark.torch

DRIVERS = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before? Error 802: system not yet initialized"  # fmt: skip


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(DRIVERS), "fabric manager"),
        (RuntimeError("No CUDA GPUs are available"), "cluster.slurm.gpus"),
        (RuntimeError("Found no NVIDIA driver on your system.\nPlease check"), "cluster.slurm.gpus"),
        (AssertionError("Torch not compiled with CUDA enabled"), "cluster.slurm.gpus"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_a_rank_without_gpu_says_why_and_is_of_the_class_of_faults(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def init() -> None:
        raise error

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(NoGpu) as raised:
        pick_device(Cluster(device="cuda"), 0, world=1)
    assert raised.value.message.endswith(str(error).splitlines()[0])
    assert classify("".join(traceback.format_exception(raised.value)), exit_code=1) == "device_fault"
    assert told in advice("device_fault", f"NoGpu: {raised.value.message}")


def test_auto_takes_the_processor_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert pick_device(Cluster(device="auto"), 0, world=1).type == "cpu"


def accelerators(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_a_rank_takes_the_gpu_of_its_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, "cuda", 4)
    assert gpu_count() == 4
    assert pick_device(Cluster(kind="slurm"), 3, world=8) == torch.device("cuda", 3)
    accelerators(monkeypatch, "cuda", 1)
    assert pick_device(Cluster(kind="slurm"), 3, world=8) == torch.device("cuda", 0), "each task sees its own"
    with pytest.raises(JobFailed, match="2 ranks need 2 GPUs, this machine has 1"):
        pick_device(Cluster(), 1, world=2)
    assert pick_device(Cluster(device="cpu"), 1, world=2).type == "cpu"


def test_another_kind_of_device_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, "mps", 1)
    assert gpu_count() == 0
    assert pick_device(Cluster(device="auto"), 0, world=1).type == "cpu"


def test_what_knows_no_accelerator_is_not_asked_for_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.6 that raises."""

    def raises() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert gpu_count() == 0


def test_waiting_is_for_the_device_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    Clock(torch.device("cpu")).wait()
    Clock(torch.device("cuda", 1)).wait()
    assert waited == [torch.device("cuda", 1)]
