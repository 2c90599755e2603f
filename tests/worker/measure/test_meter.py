"""Measuring: memory that is known beforehand, gradients, synchronisation, and the limit on the CPU."""

import dataclasses
import json
import os
import platform
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from worker_jobs import copy_gradient, make_spec, make_trainer
from worker_rank_cases import read_results

from tula_cli.host.failure_texts import classify_failure
from tula_cli.host.machine import read_processor_name
from tula_cli.worker import device, environment
from tula_cli.worker.device import read_process_memory
from tula_cli.worker.measure import meter as worker_measure_meter
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.step_watch import SynchronisationTimer

MB = 2**20


# --- memory


@pytest.mark.torch
def test_the_peak_is_what_was_allocated(two_ranks: Path) -> None:
    for fact in read_results(two_ranks, "measure_allocation_peaks"):
        assert fact["held"] == pytest.approx(64 * MB, rel=0.1)
        assert fact["freed"] == pytest.approx(64 * MB, rel=0.1)
        assert fact["small"] == pytest.approx(64 * MB, rel=0.1)


@pytest.mark.torch
def test_a_reset_begins_anew_though_the_allocator_keeps_what_was_freed(two_ranks: Path) -> None:
    for fact in read_results(two_ranks, "measure_allocation_peaks"):
        assert fact["nothing"] < MB
        assert fact["small again"] == pytest.approx(32 * MB, rel=0.1)


def test_the_cpu_never_flushes_a_cache() -> None:
    memory = device.MemoryMeter(torch.device("cpu"))
    memory.reset()
    assert memory.count_allocator_retries() == 0


def test_libraries_are_what_the_process_held_or_what_its_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = device.MemoryMeter(torch.device("cpu"))
    memory.reset()
    assert memory.count_library_bytes(None) == memory.base > 50 * MB
    process_memory, capacity = read_process_memory("VmData") - device.count_free_heap_bytes(), 100 * MB
    limited_at = process_memory - 30 * MB  # the libraries have taken 30 MB since the limit was set
    monkeypatch.setattr(device.resource, "getrlimit", lambda _: (limited_at + capacity, -1))
    assert memory.count_library_bytes(capacity) == pytest.approx(30 * MB, abs=5 * MB)


def test_memory_of_the_heap_that_is_freed_and_used_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold() -> list[bytes]:
        return [
            bytes([number % 256]) * 4096 for number in range(32768)
        ]  # 128 MiB, too small each to be mapped by itself

    limited_at, capacity, memory = read_process_memory("VmData"), 500 * MB, device.MemoryMeter(torch.device("cpu"))
    monkeypatch.setattr(device.resource, "getrlimit", lambda _: (limited_at + capacity, -1))
    while_built = hold()
    last = while_built[-1]  # keeps the heap as large as it is
    while_built.clear()
    memory.reset()
    in_a_step = hold()
    used = memory.read_peak()[0] + memory.count_library_bytes(capacity)
    assert used == pytest.approx(128 * MB, rel=0.25) and len(in_a_step[0]) == len(last)


def test_a_peak_is_split_into_tensors_and_the_rest() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    frozen = model[0].bias
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    batch = torch.ones(4, 10), torch.ones(4, dtype=torch.int64)
    model(batch[0]).sum().backward()
    optimizer.step()
    split = worker_measure_meter.split_memory(
        model, optimizer, batch=device.count_tensor_bytes(batch), factors=40, peak=10_000, reserved=12_000
    )
    assert split.parameters == 4 * (100 + 10 + 20) + 4 * 20 + 8  # running statistics and their counter
    assert split.gradients == split.optimizer == 4 * (100 + 20)
    assert split.batch == 4 * 40 + 8 * 4
    assert split.static_bytes + split.batch + split.activations == split.peak == 10_000


def test_capacity_is_what_is_stated_and_unbounded_else(alone: Ranks) -> None:
    assert worker_measure_meter.get_memory_capacity(alone, 5 * MB) == 5 * MB
    assert worker_measure_meter.get_memory_capacity(alone, None) is None


# --- the limit


@pytest.mark.torch
def test_beyond_the_limit_is_an_out_of_memory(two_ranks: Path) -> None:
    for fact in read_results(two_ranks, "allocate_under_limit"):
        assert "DefaultCPUAllocator: can't allocate memory" in fact["beyond"]
        assert classify_failure(fact["beyond"], exit_code=1, device="cpu") == "device_oom"


@pytest.mark.torch
def test_what_was_held_before_or_is_freed_does_not_count(two_ranks: Path) -> None:
    for fact in read_results(two_ranks, "allocate_under_limit"):
        assert fact["within, again and again"] == fact["lifted"] == ""


def test_an_unknown_field_of_the_process_is_reported() -> None:
    assert read_process_memory("VmRSS") > MB
    with pytest.raises(AssertionError, match="VmNone"):
        read_process_memory("VmNone")


# --- gradients, synchronisation, surroundings


def test_the_spy_times_each_backward_and_leaves_no_hook(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    with SynchronisationTimer(subject.clock, subject.parallel) as spy:
        subject.after_backward = spy.record_reduction
        steps = list(islice(worker_train_loop.run_steps(subject), 5))
    assert len(spy.exposed) == 5
    assert 0 < spy.compute_median() < max(subject.clock.measure_seconds(step.start, step.end) for step in steps)
    assert not any(p._backward_hooks for p in subject.parallel.parameters())


def test_a_look_at_the_gradient_leaves_the_weights(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    before = torch.cat([p.detach().flatten() for p in subject.parallel.parameters()])
    norms: list[float] = []
    subject.after_backward = lambda: norms.append(float(copy_gradient(subject).square().sum()))
    list(islice(worker_train_loop.run_steps(subject), 3))
    assert torch.equal(torch.cat([p.detach().flatten() for p in subject.parallel.parameters()]), before)
    assert len(norms) == 3
    assert all(norm > 0 for norm in norms)


def test_the_environment_names_host_and_processor(alone: Ranks) -> None:
    result = environment.collect_environment(alone)
    assert result.hosts == (os.uname().nodename,)
    assert (result.device, result.backend) == ("cpu", "gloo")
    assert result.hardware == read_processor_name() != ""
    assert result.torch == torch.__version__
    (node,) = result.nodes
    assert (node.name, node.ranks, node.hardware, node.driver) == (result.hosts[0], 1, (result.hardware,), "")
    assert not result.is_mixed
    assert platform.release() in result.system
    assert result.python == platform.python_version()
    assert result.nccl.count(".") >= 1 if torch.distributed.is_nccl_available() else not result.nccl


@dataclasses.dataclass(frozen=True)
class Told(Ranks):
    """Ranks of which the others say what they are told to say."""

    others: tuple[tuple[str, str, str], ...] = ()

    def gather(self, text: str) -> list[str]:
        return [text, *(json.dumps(other) for other in self.others)]


def test_every_rank_tells_its_hardware_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "n1")
    monkeypatch.setattr(environment, "read_processor_name", lambda: "A100")
    others = (("n1", "A100", ""), ("n2", "A100", "550"), ("n2", "V100", "550"))
    result = environment.collect_environment(Told(0, 4, 0, torch.device("cpu"), others=others))
    assert [(node.name, node.ranks, node.hardware, node.driver) for node in result.nodes] == [
        ("n1", 2, ("A100",), ""), ("n2", 2, ("A100", "V100"), "550"),
    ]  # fmt: skip
    assert result.is_mixed
    assert (result.hosts, result.hardware) == (("n1", "n2"), "A100 + V100")


def test_only_listed_variables_are_recorded_and_no_secret() -> None:
    kept = {
        "NCCL_ALGO": "Ring",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "SLURM_JOB_ID": "7",
    }
    secret = {
        "AWS_SECRET_ACCESS_KEY": "x", "PATH": "x", "HF_TOKEN": "x", "SLURM_JWT": "x", "SLURM_EXPORT_ENV": "ALL,TOKEN=x", "MY_NCCL_": "x",
        "WANDB_API_KEY": "x", "SLURM_DB_PASSWORD": "x", "NCCL_PROXY_TOKEN": "x", "OMP_TOOL_LIBRARIES": "https://me:x@example.org/a",
    }  # fmt: skip
    assert environment.select_recorded_variables({**secret, **kept}) == kept


def test_more_ranks_than_cores_are_reported(alone: Ranks) -> None:
    cores = len(os.sched_getaffinity(0))
    assert not environment.is_oversubscribed(alone, ranks_here=cores)
    assert environment.is_oversubscribed(alone, ranks_here=cores + 1)


@pytest.mark.parametrize(("capacity", "share"), [(16, 14 / 80), (2, 0.0), (1000, 1.0)])
def test_a_gpu_is_bounded_less_what_is_in_use_beside_the_allocator(
    monkeypatch: pytest.MonkeyPatch, capacity: int, share: float
) -> None:
    gpu, set_to = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (75, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: set_to.append(given))
    device.limit_gpu_memory(capacity, gpu)
    assert set_to == [(pytest.approx(share), gpu)]


@pytest.mark.parametrize(("others", "shared"), [(["b", "c", "d"], False), (["b", "a", "d"], True)])
def test_ranks_that_see_one_gpu_each_share_none(
    monkeypatch: pytest.MonkeyPatch, others: list[str], shared: bool
) -> None:
    """Where SLURM binds GPUs to tasks, each rank counts one, and it is another one."""
    node = platform.node()

    class Four(Ranks):
        def gather(self, text: str) -> list[str]:
            return [text, *(json.dumps([node, gpu]) for gpu in others)]

    monkeypatch.setattr(environment, "get_gpu_uuid", lambda: "a")
    ranks = Four(rank=0, world=4, local_rank=0, device=torch.device("cuda", 0))
    assert environment.is_oversubscribed(ranks, ranks_here=4) == shared
