"""Memory, clock, versions and settings of the GPU or CPU. No other module contains device-specific code."""

import ctypes
import functools
import gc
import itertools
import os
import re
import resource
import socket
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from tula_cli.errors import JobFailed, NoGpu
from tula_cli.optim.sharding import get_local_shard
from tula_cli.spec.resources import Cluster
from tula_cli.spec.sections import Train


def choose_device(cluster: Cluster, local_rank: int, *, world: int) -> torch.device:
    """Return this rank's device.

    Raises:
        NoGpu: cuda was requested and torch sees no GPU.
        JobFailed: a local job has more ranks than GPUs (NCCL refuses two ranks on one GPU).
    """
    count = 0 if cluster.device == "cpu" else count_gpus()
    if cluster.device == "cpu" or (cluster.device == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise NoGpu(
            f"cluster.device is cuda, but torch sees no GPU on {socket.gethostname()}: {_describe_missing_gpu()}",
            "check the driver, or set cluster.device: cpu",
        )
    if cluster.kind == "local" and world > count:
        raise JobFailed(
            f"{world} ranks need {world} GPUs, but this machine has {count}",
            "lower the numbers in search.nodes, or lower cluster.gpus_per_node",
        )
    # A task may see one GPU or all of the node's; the modulus works for both.
    return torch.device("cuda", local_rank % count)


def _describe_missing_gpu() -> str:
    """Return the driver's or torch's message about why no GPU is visible, which identifies a fault of the node."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        return str(error).partition("\n")[0]
    return "the driver reports no error"


def count_gpus() -> int:
    """Return the number of GPUs that torch sees, NVIDIA or AMD (both `cuda` to torch); other accelerators do not
    count."""
    if not torch.accelerator.is_available():  # checked first: without one, torch 2.6 raises in the calls below
        return 0
    kind = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if kind is not None and kind.type == "cuda" else 0


def set_current_gpu(device: torch.device) -> None:
    """Make a GPU the current device of this process."""
    torch.accelerator.set_device_index(device)


def get_gpu_uuid(index: int | None = None) -> str:
    """Return an identifier of a GPU that is the same in every process; `index` None: this process's GPU."""
    index = torch.accelerator.current_device_index() if index is None else index
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def get_gpu_name(device: torch.device | int = 0) -> str:
    return torch.cuda.get_device_name(device)


def get_gpu_memory(device: torch.device | int = 0) -> int:
    """Return the total memory of a GPU in bytes."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def is_gpu_initialized() -> bool:
    """Return whether this process has initialised CUDA or ROCm; if so, a forked child could not use a GPU."""
    return bool(torch.cuda.is_initialized())


def seed_gpu(device: torch.device, seed: int) -> None:
    """Seed the random generator of one GPU and of no other."""
    torch.cuda.init()  # creates the generators
    torch.cuda.default_generators[device.index].manual_seed(seed)


# --- Settings of the device


def configure_device(train: Train, device: torch.device) -> None:
    """Apply the job's settings for determinism and cuDNN, and allow TF32; must be called before any computation."""
    if train.deterministic:
        # cuBLAS reads the variable when it creates its first handle; torch requires it at the first matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(train.deterministic)
    if device.type != "cuda":
        return
    torch.backends.cudnn.deterministic = train.deterministic
    # On ROCm, MIOpen would search for minutes.
    torch.backends.cudnn.benchmark = not train.deterministic and torch.version.hip is None
    _allow_tf32()


def _allow_tf32() -> None:
    """Allow TF32 in matrix products and convolutions; the variable NVIDIA_TF32_OVERRIDE=0 forbids it nevertheless.

    This uses the older settings: if the newer `fp32_precision` is set, reading an older setting raises RuntimeError,
    and torch.compile reads one (pytorch#166387). After these calls the older and newer settings agree. The warnings of
    torch 2.9 about the older settings are suppressed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*TF32")
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_autocast_context(train: Train, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that computes in the job's precision."""
    dtype = AUTOCAST_DTYPES.get(train.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def should_use_channels_last(train: Train, model: nn.Module, device: torch.device) -> bool:
    """Return whether images and convolution weights are to be stored in the channels-last memory format.

    Tensor cores use this format and would otherwise convert at each call. On other devices it is slower as often as
    faster, and MIOpen does not use it by default.
    """
    if train.is_sharded:  # shards are cut from contiguous weights
        return False
    if device.type != "cuda" or torch.version.hip is not None or not has_convolutions(model):
        return False
    since = (7, 0) if train.precision == "fp16" else (8, 0)
    return torch.cuda.get_device_capability(device) >= since


def convert_to_channels_last(model: nn.Module) -> None:
    """Store all four-dimensional parameters and buffers of a model in channels-last order; nothing else changes.

    The weights of 1x1 and depthwise convolutions get the strides of that order too, although their values do not move.
    `contiguous()` would keep the former strides, and their gradients would have others: DDP warns of that, and foreach
    optimizers fall back to one kernel for each tensor.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def has_convolutions(model: nn.Module) -> bool:
    """Return whether a model has layers that the channels-last format affects (2-d convolutions, also transposed)."""
    return any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())


# --- Transfers to the device


Batch: TypeAlias = Any
"""A micro-batch: a tree of tensors, in most cases (input, target)."""


def move_to_device(batch: Batch, device: torch.device, *, channels_last: bool) -> Batch:
    """Return a micro-batch on the device, with images in channels-last order if requested; never blocks on a GPU.

    A GPU may still be computing earlier work; the copy then runs concurrently. From this call on, the caller may
    release the batch before this one.
    """
    move = functools.partial(_move_batch_tensors, device=device, channels_last=channels_last)
    return _get_upload_stream(device).upload_batch(batch, move) if device.type == "cuda" else move(batch)


def _move_batch_tensors(batch: Batch, *, device: torch.device, channels_last: bool) -> Batch:
    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def move_image(tensor: torch.Tensor) -> torch.Tensor:
        moved, image = move_tensor(tensor), channels_last and tensor.ndim == 4 and tensor.is_floating_point()
        return moved.contiguous(memory_format=torch.channels_last) if image else moved

    if type(batch) in (list, tuple) and len(batch) == 2:
        return tree_map_only(torch.Tensor, move_image, batch[0]), tree_map_only(torch.Tensor, move_tensor, batch[1])
    return tree_map_only(torch.Tensor, move_image, batch)


class UploadStream:
    """The CUDA stream that copies batches to a GPU during computation; at most two batches are there at a time.

    A batch reuses the memory of the last but one, on which computation must have finished: its copy waits for the work
    that was queued on the GPU before the last batch was requested, and for no later work. The newest batch is therefore
    held until the next one has been copied. The allocator need not be told about the second stream (`record_stream`),
    which would return memory late and at unpredictable times.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.release_batch()

    def release_batch(self) -> None:
        """Release the newest batch; the next copy waits for all work queued on the GPU by then."""
        self.pending: Batch | None = None
        self.before: torch.cuda.Event | None = None

    def upload_batch(self, batch: Batch, move: Callable[[Batch], Batch]) -> Batch:
        """Return the moved batch; work queued on the current stream from now on waits for the copy."""
        computing = torch.cuda.current_stream(self.device)
        computed = computing.record_event()
        self.stream.wait_event(self.before or computed)
        with torch.cuda.stream(self.stream):
            moved = move(batch)
        computing.wait_stream(self.stream)
        self.pending, self.before = moved, computed
        return moved


@functools.cache
def _get_upload_stream(device: torch.device) -> UploadStream:
    """Return the upload stream that all loaders of a device share, so that one can reuse another's memory."""
    return UploadStream(device)


# --- Memory limits


def limit_memory(capacity: int) -> None:
    """Limit this process to `capacity` bytes more than it holds now; beyond that, torch's CPU allocator fails."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = read_process_memory("VmData") + capacity
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def limit_gpu_memory(capacity: int, device: torch.device) -> None:
    """Limit this process to `capacity` bytes of its GPU; beyond that, torch's allocator reports out of memory.

    torch limits its allocator alone, so all other memory in use (the context, libraries, other processes) is subtracted
    first.
    """
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, (capacity - used_by_others) / total)), device)


def lift_memory_limit() -> None:
    """Lift the limit that `limit_memory` set, so that there is memory to report a failure."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def read_process_memory(field: str) -> int:
    """Return a field of /proc/self/status (VmHWM, VmRSS, VmData) in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


Mark = float | torch.cuda.Event
"""A point in time: seconds on the CPU, an event in the stream on a GPU (where the host runs ahead of the device)."""


@dataclass(frozen=True)
class Clock:
    """Marks points in time on a device and measures the seconds between them; on a GPU only `measure_seconds` blocks."""

    device: torch.device

    def mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measure_seconds(self, start: Mark, end: Mark) -> float:
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def wait_for_device(self) -> None:
        """Wait until the device has completed all queued work."""
        if self.device.type == "cuda":
            torch.accelerator.synchronize(self.device)


@dataclass
class MemoryMeter:
    """The peak memory of one rank since `reset`, in addition to what the process held then."""

    device: torch.device
    base: int = 0  # bytes in use at the reset; on a GPU e.g. cuBLAS's workspaces, created by the first steps
    base_reserved: int = 0  # bytes reserved at the reset; on the CPU, bytes that count for the limit
    retries: int = 0

    def reset(self) -> None:
        """Free the memory that earlier work has cached, and start a new peak."""
        gc.collect()
        if self.device.type == "cuda":
            _get_upload_stream(self.device).release_batch()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.base = torch.cuda.memory_allocated(self.device)
            self.base_reserved = torch.cuda.memory_reserved(self.device)
            self.retries = self._count_retries()
        else:
            # glibc keeps the memory of freed tensors; return it to the system, or it would hide this batch's peak.
            ctypes.CDLL(None).malloc_trim(0)
            _reset_peak_memory()
            self.base = read_process_memory("VmRSS")
            # Free heap memory that tensors will use is part of their peak, so it must not count as held too.
            self.base_reserved = read_process_memory("VmData") - count_free_heap_bytes()

    def read_peak(self) -> tuple[int, int]:
        """Return (peak, reserved) since the reset in bytes."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self.base
            return peak, torch.cuda.max_memory_reserved(self.device) - self.base_reserved
        peak = max(0, read_process_memory("VmHWM") - self.base)
        return peak, peak

    def count_library_bytes(self, capacity: int | None) -> int:
        """Return the bytes of the capacity taken by everything else: context, workspaces, communication buffers.

        On a GPU: the memory that the driver reports as used, less what the allocator has taken since the reset. Memory
        of other processes on the same GPU is included, because it is not available either. On the CPU: what the process
        held at the reset; if the process is limited, only the part acquired since the limit was set, because the limit
        excludes the rest.

        Args:
            capacity: bytes passed to `limit_memory`; None if the process has no limit.
        """
        if self.device.type != "cuda":
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            return self.base if capacity is None else max(0, self.base_reserved - (limit - capacity))
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - (torch.cuda.memory_reserved(self.device) - self.base_reserved)

    def restart_counts_after_warmup(self) -> None:
        """Restart the counts of retries and the peak, because the first steps are not representative.

        In the first steps the allocator may flush its cache once or twice near the limit, and cuDNN tries algorithms
        with all remaining memory, but uses none if none is left. On the CPU the model is built in the process that
        trains it, and may hold more memory while it is built (layers that are replaced) than in any step.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.retries = self._count_retries()
        else:
            _reset_peak_memory()

    def count_allocator_retries(self) -> int:
        """Return how often the CUDA allocator flushed its cache to continue: the batch fits, but steps are slow."""
        return self._count_retries() - self.retries if self.device.type == "cuda" else 0

    def _count_retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


class _HeapState(ctypes.Structure):
    """glibc's `struct mallinfo2`, over all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )
    fordblks: int  # free bytes of the heap


def count_free_heap_bytes() -> int:
    """Return the bytes that the heap holds but nothing uses; 0 if the C library does not report them (glibc before 2.33)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _HeapState
    state: _HeapState = library.mallinfo2()
    return state.fordblks


def _reset_peak_memory() -> None:
    """Reset VmHWM to the memory that the process holds now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def count_tensor_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of all tensors among the objects (of sharded ones, this rank's shard); others count as 0."""
    local_tensors = [get_local_shard(t) for t in tensors if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in local_tensors)


def get_nccl_version() -> str:
    """Return the version of torch's NCCL; empty if torch has none."""
    if not dist.is_nccl_available():
        return ""
    return ".".join(str(number) for number in torch.cuda.nccl.version())


def read_driver_version(
    nvidia: Path = Path("/proc/driver/nvidia/version"), amd: Path = Path("/sys/module/amdgpu/version")
) -> str:
    """Return the version of the GPU's kernel driver; empty if it cannot be read."""
    if nvidia.is_file():
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", nvidia.read_text(errors="replace"))
        return match[1] if match else ""
    return amd.read_text(errors="replace").strip() if amd.is_file() else ""
