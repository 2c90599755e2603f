"""A rank's device, and what is told where it has none."""

import traceback

import pytest
import torch

from tula_cli.errors import NoGpu
from tula_cli.host.outcome import advice, classify
from tula_cli.spec.resources import Cluster
from tula_cli.worker.device import pick_device

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

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(NoGpu) as raised:
        pick_device(Cluster(device="cuda"), 0, world=1)
    assert raised.value.message.endswith(str(error).splitlines()[0])
    assert classify("".join(traceback.format_exception(raised.value)), exit_code=1) == "device_fault"
    assert told in advice("device_fault", f"NoGpu: {raised.value.message}")


def test_auto_takes_the_processor_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(Cluster(device="auto"), 0, world=1).type == "cpu"
