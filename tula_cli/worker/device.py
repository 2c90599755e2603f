"""The device: its memory, clock and versions. The one module of device code."""

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from tula_cli.errors import JobFailed, NoGpu
from tula_cli.optim.sharding import local_shard
from tula_cli.spec.resources import Cluster
from tula_cli.spec.sections import Train


def choose_device(cluster: Cluster, local_rank: int, *, world: int) -> torch.device:
    """Return this rank's device.

    Raises:
        NoGpu: cuda was asked for and there is none.
        JobFailed: a local job has more ranks than GPUs (NCCL refuses two ranks on one).
    """
    count = 0 if cluster.device == "cpu" else count_gpus()
    if cluster.device == "cpu" or (cluster.device == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise NoGpu(
            f"cluster.device is cuda, but torch sees no GPU on {socket.gethostname()}: {_describe_why_no_gpu()}",
            "check the driver, or set cluster.device: cpu",
        )
    if cluster.kind == "local" and world > count:
        raise JobFailed(f"{world} ranks need {world} GPUs, this machine has {count}", "search fewer nodes")
    # A site may give each task one visible GPU or all of the node's: the modulus is right for both.
    return torch.device("cuda", local_rank % count)


def _describe_why_no_gpu() -> str:
    """Return the words in which the driver, or torch, says why no GPU is to be seen: they tell a fault of the node."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter of a torch that was built without CUDA
        return str(error).partition("\n")[0]
    return "none is available"


def count_gpus() -> int:
    """Return how many GPUs torch sees, NVIDIA's or AMD's: both are `cuda` to it. Devices of another kind do not count."""
    if not torch.accelerator.is_available():  # before anything else: torch 2.6 knows no accelerator then, and raises
        return 0
    kind = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if kind is not None and kind.type == "cuda" else 0


def set_current_gpu(device: torch.device) -> None:
    """Make a GPU the one that this process works on."""
    torch.accelerator.set_device_index(device)


def get_gpu_uuid(index: int | None = None) -> str:
    """Return what names a GPU alike in every process that sees it, whatever number it has there; None is this process's."""
    index = torch.accelerator.current_device_index() if index is None else index
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def get_gpu_name(device: torch.device | int = 0) -> str:
    """Return the name of a GPU's kind."""
    return torch.cuda.get_device_name(device)


def get_gpu_memory(device: torch.device | int = 0) -> int:
    """Return the bytes of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def is_gpu_initialized() -> bool:
    """Return whether this process has begun to use a GPU: no fork of it could."""
    return bool(torch.cuda.is_initialized())


def seed_gpu(device: torch.device, seed: int) -> None:
    """Seed the generator of one GPU, and of no other."""
    torch.cuda.init()  # makes the list of generators
    torch.cuda.default_generators[device.index].manual_seed(seed)


# --- how it computes


def configure_device(train: Train, device: torch.device) -> None:
    """Have this process compute as the job says; to be called before it computes anything on the device."""
    if train.deterministic:
        # cuBLAS reads it when its first handle is made, and torch asks for it at the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(train.deterministic)
    if device.type != "cuda":
        return
    torch.backends.cudnn.deterministic = train.deterministic
    # MIOpen would search for minutes.
    torch.backends.cudnn.benchmark = not train.deterministic and torch.version.hip is None
    _set_tf32(enabled=train.tf32)


def _set_tf32(*, enabled: bool) -> None:
    """Allow or forbid TF32 in products and convolutions.

    By the older names: where the newer `fp32_precision` is set, reading an older one raises RuntimeError, and
    torch.compile reads one (pytorch#166387). Both tell the same after these; that torch 2.9 warns of them is no news.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*TF32")
        torch.set_float32_matmul_precision("high" if enabled else "highest")
        torch.backends.cudnn.allow_tf32 = enabled


def should_use_channels_last(train: Train, model: nn.Module, device: torch.device) -> bool:
    """Whether images and the weights of convolutions are to lie in memory pixel by pixel.

    Tensor cores take them so, and would have them turned around each time. Elsewhere it is slower as often as faster, and
    MIOpen does not take them by default.
    """
    if train.channels_last != "auto":
        return train.channels_last
    if train.sharded:  # shares are cut from weights that lie as usual
        return False
    if device.type != "cuda" or torch.version.hip is not None or not has_convolutions(model):
        return False
    if train.precision == "fp32" and not train.tf32:
        return False
    since = (7, 0) if train.precision == "fp16" else (8, 0)
    return torch.cuda.get_device_capability(device) >= since


def to_channels_last(model: nn.Module) -> None:
    """Order the memory of all that has four dimensions in a model by pixels; nothing else changes."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def has_convolutions(model: nn.Module) -> bool:
    """Whether there are weights that channels_last means something to."""
    return any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())


# --- what is brought to it


Batch: TypeAlias = Any
"""A micro-batch: a tree of tensors, mostly (input, target)."""


def move_to_device(batch: Batch, device: torch.device, *, channels_last: bool) -> Batch:
    """Return a micro-batch on the device, with images pixel by pixel where that is wanted; on a GPU nothing waits.

    A GPU may still be at all that was given to it before: there the copy runs beside it. The batch before this one may be
    let go from now on.
    """
    move = partial(_move_batch, device=device, channels_last=channels_last)
    return _get_upload_stream(device).upload(batch, move) if device.type == "cuda" else move(batch)


def _move_batch(batch: Batch, *, device: torch.device, channels_last: bool) -> Batch:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def move_image(tensor: torch.Tensor) -> torch.Tensor:
        moved, image = move(tensor), channels_last and tensor.ndim == 4 and tensor.is_floating_point()
        return moved.contiguous(memory_format=torch.channels_last) if image else moved

    if type(batch) in (list, tuple) and len(batch) == 2:
        return tree_map_only(torch.Tensor, move_image, batch[0]), tree_map_only(torch.Tensor, move, batch[1])
    return tree_map_only(torch.Tensor, move_image, batch)


class UploadStream:
    """The stream in which batches come to a GPU, beside the one that computes: at most two are there at a time.

    A batch takes the memory of the last but one, in which the computing must be done: its copy waits for what was given
    to the GPU before the last batch was asked for, and for no more. So the newest batch is held until the next is there,
    and the allocator need not be told who else uses it (`record_stream`), which would hand memory back late and by chance.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.release()

    def release(self) -> None:
        """Let go of the newest batch; the next one waits for all that the GPU has been given by then."""
        self.held: Batch | None = None
        self.before: torch.cuda.Event | None = None

    def upload(self, batch: Batch, move: Callable[[Batch], Batch]) -> Batch:
        """Return the batch; what the GPU is given from now on waits for it."""
        computing = torch.cuda.current_stream(self.device)
        computed = computing.record_event()
        self.stream.wait_event(self.before or computed)
        with torch.cuda.stream(self.stream):
            moved = move(batch)
        computing.wait_stream(self.stream)
        self.held, self.before = moved, computed
        return moved


@functools.cache
def _get_upload_stream(device: torch.device) -> UploadStream:
    """One for all loaders: what one has let go another may take."""
    return UploadStream(device)


# --- how much it may hold


def limit_memory(capacity: int) -> None:
    """Let this process allocate at most `capacity` bytes more than it holds now; beyond, torch's CPU allocator fails."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = read_process_memory("VmData") + capacity
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def limit_gpu_memory(capacity: int, device: torch.device) -> None:
    """Let this process use at most `capacity` bytes of its GPU; beyond, torch's allocator is out of memory.

    torch bounds its allocator alone, so what else is in use (the context, libraries, other processes) is taken off first.
    """
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, (capacity - used_by_others) / total)), device)


def lift_memory_limit() -> None:
    """Make room again, so that a failure can be reported."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def read_process_memory(field: str) -> int:
    """Return a field of /proc/self/status (VmHWM, VmRSS, VmData) in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


Mark = float | torch.cuda.Event
"""A moment: seconds on the CPU, an event in the stream on a GPU (where the host runs ahead of the device)."""


@dataclass(frozen=True)
class Clock:
    """Moments on a device, and the seconds between them; on a GPU nothing waits until the seconds are asked for."""

    device: torch.device

    def mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def wait(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.accelerator.synchronize(self.device)


@dataclass
class MemoryMeter:
    """The peak memory of one rank since `reset`, beyond what the process held then."""

    device: torch.device
    base: int = 0  # bytes in use at the reset; on a GPU cuBLAS's workspaces, which the first steps have made
    base_reserved: int = 0  # what the allocator held for that; on the CPU what counts against a limit
    retries: int = 0

    def reset(self) -> None:
        """Drop what earlier work left behind and start a new peak."""
        gc.collect()
        if self.device.type == "cuda":
            _get_upload_stream(self.device).release()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.base = torch.cuda.memory_allocated(self.device)
            self.base_reserved = torch.cuda.memory_reserved(self.device)
            self.retries = self._retries()
        else:
            # glibc keeps freed tensors of the last batch for itself; give them back, or they hide this batch's peak.
            ctypes.CDLL(None).malloc_trim(0)
            _reset_peak()
            self.base, self.base_reserved = read_process_memory("VmRSS"), read_process_memory("VmData")

    def peak(self) -> tuple[int, int]:
        """Return (peak, reserved) in bytes."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self.base
            return peak, torch.cuda.max_memory_reserved(self.device) - self.base_reserved
        peak = max(0, read_process_memory("VmHWM") - self.base)
        return peak, peak

    def library_bytes(self, capacity: int | None) -> int:
        """Return the bytes of the capacity that are taken beside all that: context, workspaces, communication buffers.

        On a GPU what the driver calls used, less what the allocator has taken since the reset: with another process on
        the same GPU its memory too, which is as little to be had. On the CPU what the process held at the reset; where it
        is limited, only what has come since then, for the limit counts no more.

        Args:
            capacity: bytes that `limit_memory` was given; None where nothing limits the process.
        """
        if self.device.type != "cuda":
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            return self.base if capacity is None else max(0, self.base_reserved - (limit - capacity))
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - (torch.cuda.memory_reserved(self.device) - self.base_reserved)

    def restart_after_warmup(self) -> None:
        """Begin to count retries and the peak anew: the first steps are not like those that follow.

        In them the allocator may flush its cache once or twice near the limit, and cuDNN tries algorithms with all the
        memory that is left, of which it takes none where there is none. On the CPU the model is built where it is trained,
        and one may hold more while it is built (layers that are replaced) than in any step.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _reset_peak()
        self.retries = self._retries() if self.device.type == "cuda" else 0

    def allocator_retries(self) -> int:
        """Return how often the CUDA allocator had to flush its cache to go on: the batch fits, but crawls."""
        return self._retries() - self.retries if self.device.type == "cuda" else 0

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def _reset_peak() -> None:
    """Set VmHWM to what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def count_tensor_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of all tensors among the objects, of this rank's shares of divided ones; other objects count nothing."""
    local_tensors = [local_shard(t) for t in tensors if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in local_tensors)


def get_nccl_version() -> str:
    """Return the version of torch's NCCL; empty where it has none."""
    if not dist.is_nccl_available():
        return ""
    return ".".join(str(number) for number in torch.cuda.nccl.version())


def read_driver_version(
    nvidia: Path = Path("/proc/driver/nvidia/version"), amd: Path = Path("/sys/module/amdgpu/version")
) -> str:
    """Return the version of the kernel's GPU driver, or nothing where it does not tell."""
    if nvidia.is_file():
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", nvidia.read_text(errors="replace"))
        return match[1] if match else ""
    return amd.read_text(errors="replace").strip() if amd.is_file() else ""
