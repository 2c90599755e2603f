"""A rank's device, and what is told where it has none."""

import mmap
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from worker_jobs import make_probe_task, make_spec, make_train_task

from tula_cli.errors import JobFailed, NoGpu
from tula_cli.host.failure_texts import classify_failure, find_device_fault
from tula_cli.host.failures import describe_advice
from tula_cli.run.directory import RunDir
from tula_cli.run.records.failures import Failure
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Cluster
from tula_cli.spec.sections import Train
from tula_cli.worker import device, ranks
from tula_cli.worker.__main__ import run_task
from tula_cli.worker.build import data
from tula_cli.worker.device import Clock, choose_device, count_gpus
from tula_cli.worker.ranks import Ranks

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
        choose_device(Cluster(device="cuda"), 0, world=1)
    assert raised.value.message.endswith(str(error).splitlines()[0])
    assert classify_failure("".join(traceback.format_exception(raised.value)), exit_code=1) == "device_fault"
    assert told in describe_advice(
        Failure(outcome="device_fault", fault=find_device_fault(f"NoGpu: {raised.value.message}"))
    )


def test_auto_takes_the_processor_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert choose_device(Cluster(device="auto"), 0, world=1).type == "cpu"


def accelerators(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_a_rank_takes_the_gpu_of_its_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, "cuda", 4)
    assert count_gpus() == 4
    assert choose_device(Cluster(kind="slurm"), 3, world=8) == torch.device("cuda", 3)
    accelerators(monkeypatch, "cuda", 1)
    assert choose_device(Cluster(kind="slurm"), 3, world=8) == torch.device("cuda", 0), "each task sees its own"
    with pytest.raises(JobFailed, match="2 ranks need 2 GPUs, but this machine has 1"):
        choose_device(Cluster(), 1, world=2)
    assert choose_device(Cluster(device="cpu"), 1, world=2).type == "cpu"


def test_another_kind_of_device_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, "mps", 1)
    assert count_gpus() == 0
    assert choose_device(Cluster(device="auto"), 0, world=1).type == "cpu"


def test_what_knows_no_accelerator_is_not_asked_for_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.6 that raises."""

    def raises() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert count_gpus() == 0


def test_waiting_is_for_the_device_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    Clock(torch.device("cpu")).wait_for_device()
    Clock(torch.device("cuda", 1)).wait_for_device()
    assert waited == [torch.device("cuda", 1)]


# --- how it computes


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is set is as it was afterwards."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    tf32, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(tf32)
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = before


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def in_force() -> tuple[bool, ...]:
    """Return (TF32 in products, in convolutions, cuDNN's benchmarks, its deterministic algorithms, torch's)."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (True, True, True, False, False)),
        ({"deterministic": True}, (True, True, False, True, True)),
    ],
)
def test_a_gpu_computes_as_the_job_says(
    settings: None, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    device.configure_device(Train(epochs=1, **asked), GPU)
    assert in_force() == expected
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if asked.get("deterministic") else None)


def test_the_users_own_cublas_workspace_holds(settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    device.configure_device(Train(epochs=1, deterministic=True), GPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_on_amd_algorithms_are_not_timed(settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    device.configure_device(Train(epochs=1), GPU)
    assert not torch.backends.cudnn.benchmark


def test_on_the_processor_only_determinism_changes_anything(settings: None) -> None:
    before = in_force()
    device.configure_device(Train(epochs=1), CPU)
    assert in_force() == before
    device.configure_device(Train(epochs=1, deterministic=True), CPU)
    assert in_force() == (*before[:-1], True)


def test_tf32_is_set_without_a_warning_and_both_of_torchs_names_tell_the_same(
    settings: None, recwarn: pytest.WarningsRecorder
) -> None:
    device.configure_device(Train(epochs=1), GPU)
    assert not recwarn.list
    assert torch.backends.cuda.matmul.allow_tf32, "torch.compile reads it; it raises where only the newer is set"
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_a_rank_is_configured_before_anything_of_the_users_is_built(
    settings: None, monkeypatch: pytest.MonkeyPatch, run: RunDir
) -> None:
    @contextmanager
    def joined(*_: object, **__: object) -> Iterator[Ranks]:
        yield Ranks(rank=0, world=1, local_rank=0, device=CPU)

    def built(_: JobSpec) -> None:
        raise Built(torch.are_deterministic_algorithms_enabled())

    monkeypatch.setattr(ranks, "join_process_group", joined)
    monkeypatch.setattr(data, "build_datasets", built)
    job = make_spec(train={"deterministic": True})
    for task in (make_train_task(job), make_probe_task(job, 8)):
        torch.use_deterministic_algorithms(False)
        with pytest.raises(Built) as raised:
            run_task(task, run, 1)
        assert raised.value.args == (True,)


class Built(Exception):
    """Tells what was in force when datasets were built."""


def test_the_peak_on_a_gpu_is_that_of_the_steps_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 900  # of the warm-up, in which cuDNN tries algorithms

    def reset(_: torch.device) -> None:
        nonlocal peak
        peak = 300

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 2})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 2 * peak)
    meter = device.MemoryMeter(GPU, base=100, base_reserved=200)
    assert meter.read_peak() == (800, 1600)
    meter.restart_counts_after_warmup()
    assert meter.read_peak() == (200, 400)
    assert meter.count_allocator_retries() == 0


def test_what_was_held_while_a_model_was_built_on_the_cpu_is_no_peak_of_its_steps() -> None:
    meter = device.MemoryMeter(torch.device("cpu"))
    meter.reset()
    _write(256 * 2**20)  # and given back at once
    before = meter.read_peak()[0]
    meter.restart_counts_after_warmup()
    assert before - meter.read_peak()[0] > 192 * 2**20, "what was given back is no longer part of the peak"
    _write(64 * 2**20)
    assert 48 * 2**20 < meter.read_peak()[0] < 128 * 2**20, "what comes then is"


def _write(size: int) -> None:
    """Hold bytes that the kernel takes back: those of a tensor may come from a hole of the heap and stay there."""
    with mmap.mmap(-1, size) as kept:
        for page in range(0, size, mmap.PAGESIZE):
            kept[page] = 1


# --- what is brought to it: streams that know what must have happened before what


class Stream:
    """Does nothing, and knows how much of each stream has to be done before its own next work."""

    def __init__(self, _: torch.device | None = None) -> None:
        self.seen: dict[Stream, int] = {}

    def work(self) -> int:
        """Give it something to do; return how much it has been given by then."""
        self.seen[self] = self.seen.get(self, 0) + 1
        return self.seen[self]

    def record_event(self) -> dict["Stream", int]:
        return dict(self.seen)

    def wait_event(self, event: dict["Stream", int]) -> None:
        self.seen = {stream: max(self.seen.get(stream, 0), event.get(stream, 0)) for stream in {*self.seen, *event}}

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.seen)

    def waits_for(self, other: "Stream") -> int:
        """Return how much of the other's work is done before this one's next."""
        return self.seen.get(other, 0)


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    main, entered = Stream(), []

    @contextmanager
    def stream(inner: Stream) -> Iterator[None]:
        entered.append(inner)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: entered[-1] if entered else main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    yield main


def test_a_batch_is_copied_while_the_one_before_it_is_trained(computing: Stream) -> None:
    uploads, trained = device.UploadStream(GPU), [0]

    def move(pair: Any) -> Any:
        copying = torch.cuda.current_stream(GPU)
        assert copying is uploads.stream and copying is not computing
        copying.work()
        return pair

    for count in range(1, 6):
        computing.work()  # more of the step before: an optimizer's update
        uploads.upload_batch((count, count), move)
        copied, waited = uploads.stream.seen[uploads.stream], uploads.stream.waits_for(computing)
        assert computing.waits_for(uploads.stream) == copied == count, "nothing is computed on half a batch"
        if count > 2:
            assert waited >= trained[count - 2], "it takes the memory of that batch"
            assert waited < trained[count - 1], "it would wait for the step that it is to run beside"
        assert uploads.pending == (count, count), "its memory is nobody's before the next batch has its own"
        trained.append(computing.work())  # the last that is done with this batch


def test_after_a_batch_is_let_go_the_next_copy_waits_for_all(computing: Stream) -> None:
    uploads = device.UploadStream(GPU)
    for _ in range(3):
        uploads.upload_batch((1, 1), lambda pair: pair)
        computing.work()
    uploads.release_batch()
    assert uploads.pending is None
    given = computing.work()
    uploads.upload_batch((2, 2), lambda pair: pair)
    assert uploads.stream.waits_for(computing) == given


def test_on_the_processor_a_batch_is_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(device, "UploadStream")
    pair = torch.rand(2, 3, 4, 4), torch.zeros(2)
    brought = device.move_to_device(pair, CPU, channels_last=False)
    assert all(first is other for first, other in zip(brought, pair, strict=True))


def test_a_gpu_has_one_stream_for_all_its_loaders(computing: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    device._get_upload_stream.cache_clear()
    monkeypatch.setattr(device, "_move_batch_tensors", lambda pair, **_: pair)
    device.move_to_device((1, 1), GPU, channels_last=False)
    first = device._get_upload_stream(GPU)
    device.move_to_device((2, 2), GPU, channels_last=True)
    assert device._get_upload_stream(GPU) is first and first.pending == (2, 2)
    device._get_upload_stream.cache_clear()
