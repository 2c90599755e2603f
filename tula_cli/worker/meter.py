"""Measuring steps: time, memory, gradients, and what it was measured on."""

import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torchvision
from torch import nn

import tula_cli
from tula_cli.records import Environment, Host, Memory
from tula_cli.worker.ranks import Ranks, process_memory
from tula_cli.worker.site import driver_version, nccl_version

RECORDED = ("NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE_DEVICES", "SLURM_")
"""How the names of environment variables begin that are kept; all others may hold secrets."""

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
            torch.cuda.synchronize(self.device)


@dataclass
class SyncSpy:
    """Times the exposed synchronisation of backward passes: last local gradient to the end of the reduction.

    A hook on each parameter fires when its local gradient is there, before DDP reduces it; the last one to fire ends the
    local work. Used on steps of its own, for the hooks cost time.
    """

    clock: Clock
    model: nn.Module
    last: Mark | None = None
    exposed: list[tuple[Mark, Mark]] = field(default_factory=list)

    def __enter__(self) -> "SyncSpy":
        self._handles = [p.register_hook(self._gradient_ready) for p in self.model.parameters() if p.requires_grad]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _gradient_ready(self, _: torch.Tensor) -> None:
        self.last = self.clock.mark()

    def reduced(self) -> None:
        """Call when backward has returned: on the CPU the reduction is over, on a GPU the stream waits for it."""
        assert self.last is not None
        self.exposed.append((self.last, self.clock.mark()))

    def median(self) -> float:
        """Return the median exposed synchronisation in seconds."""
        return statistics.median(self.clock.seconds(start, end) for start, end in self.exposed)


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
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.base = torch.cuda.memory_allocated(self.device)
            self.base_reserved = torch.cuda.memory_reserved(self.device)
            self.retries = self._retries()
        else:
            # glibc keeps freed tensors of the last batch for itself; give them back, or they hide this batch's peak.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
            self.base, self.base_reserved = process_memory("VmRSS"), process_memory("VmData")

    def peak(self) -> tuple[int, int]:
        """Return (peak, reserved) in bytes."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self.base
            return peak, torch.cuda.max_memory_reserved(self.device) - self.base_reserved
        peak = max(0, process_memory("VmHWM") - self.base)
        return peak, peak

    def libraries(self, capacity: int | None) -> int:
        """Return the bytes of the capacity that are taken beside all that: context, workspaces, communication buffers.

        On a GPU what the driver calls used, less what the allocator has taken since the reset: with another process on
        the same GPU its memory too, which is as little to be had. On the CPU what the process held at the reset; where it
        is limited, only what has come since then, for the limit counts no more.

        Args:
            capacity: bytes that `ranks.limit_memory` was given; None where nothing limits the process.
        """
        if self.device.type != "cuda":
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            return self.base if capacity is None else max(0, self.base_reserved - (limit - capacity))
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - (torch.cuda.memory_reserved(self.device) - self.base_reserved)

    def settled(self) -> None:
        """Begin to count retries: in the first steps the allocator may flush its cache once or twice near the limit."""
        self.retries = self._retries() if self.device.type == "cuda" else 0

    def allocator_retries(self) -> int:
        """Return how often the CUDA allocator had to flush its cache to go on: the batch fits, but crawls."""
        return self._retries() - self.retries if self.device.type == "cuda" else 0

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def tensor_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of all tensors among the objects; other objects count nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def split_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch: Iterable[torch.Tensor],
    factors: int,
    peak: int,
    reserved: int,
    capacity: int | None,
    libraries: int = 0,
    accumulate: int = 1,
) -> Memory:
    """Split a peak as in Eq. 3: tensors are counted, activations are the rest. Bytes.

    The gradients are DDP's buckets (`gradient_as_bucket_view`). With several micro-batches a step the sum so far is
    beside them until the last one is reduced: a second copy.
    """
    parameters = tensor_bytes(model.parameters()) + tensor_bytes(model.buffers())
    gradients = tensor_bytes(p.grad if p.grad is not None else p for p in model.parameters() if p.requires_grad)
    gradients *= min(2, accumulate)
    state = tensor_bytes(value for entry in optimizer.state.values() for value in entry.values())
    inputs = tensor_bytes(batch)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        factors=factors,
        batch=inputs,
        activations=max(0, peak - parameters - gradients - state - factors - inputs),
        peak=peak,
        reserved=reserved,
        capacity=capacity,
        libraries=libraries,
    )


def capacity(ranks: Ranks, memory_per_gpu: int | None) -> int | None:
    """Return the bytes one rank may use: the stated limit, else the GPU's memory; None on an unlimited CPU."""
    if memory_per_gpu is not None:
        return memory_per_gpu
    if ranks.device.type == "cuda":
        return int(torch.cuda.get_device_properties(ranks.device).total_memory)
    return None


def environment(ranks: Ranks) -> Environment:
    """Describe what is measured on; every rank takes part."""
    cuda = ranks.device.type == "cuda"
    hardware = torch.cuda.get_device_name(ranks.device) if cuda else processor_name()
    seen = [json.loads(text) for text in ranks.gather(json.dumps([platform.node(), hardware, _driver(ranks)]))]
    nodes = _nodes(seen)
    return Environment(
        hosts=tuple(node.name for node in nodes),
        device=ranks.device.type,
        hardware=" + ".join(sorted({name for node in nodes for name in node.hardware})),
        driver=" + ".join(sorted({node.driver for node in nodes})),
        backend="nccl" if cuda else "gloo",
        python=platform.python_version(),
        torch=torch.__version__,
        torchvision=torchvision.__version__,
        tula=tula_cli.__version__,
        nodes=nodes,
        cuda=torch.version.cuda or torch.version.hip or "",
        nccl=nccl_version(),
        system=f"{_distribution()}, {platform.system()} {platform.release()}".lstrip(", "),
        variables=recorded(os.environ),
    )


def _driver(ranks: Ranks) -> str:
    return driver_version() if ranks.device.type == "cuda" else ""


def _nodes(seen: Iterable[tuple[str, str, str]]) -> tuple[Host, ...]:
    """Join what the ranks have said (host, hardware, driver) by host, in the order of ranks."""
    by_host: dict[str, list[tuple[str, str]]] = {}
    for host, hardware, driver in seen:
        by_host.setdefault(host, []).append((hardware, driver))
    return tuple(
        Host(name=host, ranks=len(told), hardware=tuple(sorted({name for name, _ in told})), driver=told[0][1])
        for host, told in by_host.items()
    )


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:  # a container may lack the file
        return ""


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are kept: those of the allow-list, without the secrets among SLURM's.

    A token may be in SLURM_JWT, and the words of sbatch --export, with values, in SLURM_EXPORT_ENV.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(RECORDED) and not name.startswith(("SLURM_JWT", "SLURM_EXPORT", "SLURM_SPANK"))
    }


def processor_name() -> str:
    """Return the processor's name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def oversubscribed(ranks: Ranks, *, ranks_here: int) -> bool:
    """Return whether ranks share cores (one thread a rank) or GPUs: their times then say nothing of a real cluster."""
    places = torch.cuda.device_count() if ranks.device.type == "cuda" else len(os.sched_getaffinity(0))
    return ranks_here > places
