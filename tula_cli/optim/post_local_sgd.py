"""Post-local SGD (Lin et al. 2020): synchronous at first, then every rank by itself, with averages in between.

After the switch a rank's gradient is its own, and so is whatever looks at it: `Trainer.on_gradient`, and the norms that
diagnostics gather, are then of rank 0's samples alone, not of the averaged gradient. A checkpoint holds one state for all
ranks. Regular ones wait for the next average; a run that has to leave between two (at its time limit, say) averages early
to save, so that it has one average more than an unbroken run, and does not end at the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .ddp_hook import get_reduction

SWITCH_EPOCHS = 5
"""Epochs of synchronous training (Tula paper, IV-D)."""
AVERAGES_PER_EPOCH = 4
"""How often the replicas are averaged in each epoch after that (Tula paper, IV-D)."""


def synchronise_gradients(ddp: DistributedDataParallel, *, wanted: bool) -> None:
    """Let DDP average gradients and hand out rank 0's buffers, as it does by default, or leave every rank its own."""
    get_reduction(ddp).local = not wanted
    # torch calls this attribute broadcast_buffers up to 2.12, and warns of that name from then on
    setattr(ddp, "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers", wanted)


def average_due(done: int, *, batch: int, end: int) -> bool:
    """Return whether the replicas are averaged after the coming step: at each quarter of the epoch, so also at its end.

    Args:
        done: samples of the epoch before the step.
        batch: global batch.
        end: samples of the epoch after its last step.
    """
    return AVERAGES_PER_EPOCH * (done + batch) // end > AVERAGES_PER_EPOCH * done // end


@torch.no_grad()
def average_replicas(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Average parameters, buffers and the optimizer's state over all ranks, in place; afterwards all are equal.

    torch's PostLocalSGDOptimizer averages parameters alone. Momentum is averaged too ("average buffers" of Wang et al.
    2020, SlowMo), so that a checkpoint, which one rank writes, is the state of every rank. Counters are left alone: they
    are equal.
    """
    world = dist.get_world_size()
    tensors = [tensor for tensor in _tensors(model, optimizer) if tensor.is_floating_point()]
    flat = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    for handle in [dist.all_reduce(tensor, async_op=True) for tensor in flat]:
        assert handle is not None
        handle.wait()
    for tensor, total in zip(tensors, flat, strict=True):
        tensor.copy_(total.div_(world))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield them in an order that is the same on all ranks."""
    yield from model.parameters()
    yield from model.buffers()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))
