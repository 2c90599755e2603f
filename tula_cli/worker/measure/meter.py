"""Measuring steps: time, memory, gradients, and what it was measured on."""

import statistics
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tula_cli.run.records.components import Components
from tula_cli.worker.device import Clock, Mark, gpu_memory, tensor_bytes
from tula_cli.worker.ranks import Ranks


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


def split_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch: int,
    factors: int,
    peak: int,
    reserved: int,
    libraries: int = 0,
    accumulate: int = 1,
) -> Components:
    """Split a peak as in Eq. 3: tensors are counted, activations are the rest. Bytes.

    The gradients are DDP's buckets (`gradient_as_bucket_view`). With several micro-batches a step the sum so far is
    beside them until the last one is reduced: a second copy.
    """
    parameters = tensor_bytes([*model.parameters(), *model.buffers()])
    gradients = tensor_bytes(p.grad if p.grad is not None else p for p in model.parameters() if p.requires_grad)
    gradients *= min(2, accumulate)
    state = tensor_bytes(tree_leaves(list(optimizer.state.values())))
    return Components(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        factors=factors,
        batch=batch,
        activations=max(0, peak - parameters - gradients - state - factors - batch),
        peak=peak,
        reserved=reserved,
        libraries=libraries,
    )


def capacity(ranks: Ranks, memory_per_gpu: int | None) -> int | None:
    """Return the bytes one rank may use: the stated limit, else the GPU's memory; None on an unlimited CPU."""
    if memory_per_gpu is not None:
        return memory_per_gpu
    if ranks.device.type == "cuda":
        return gpu_memory(ranks.device)
    return None
