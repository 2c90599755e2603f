"""Parameters that are divided among the ranks (FSDP2, torch.distributed.fsdp.fully_shard): this rank's part, and sums over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import indicators


def share(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; of any other tensor, itself."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard has divided the module, or some module in it."""
    # by name: importing FSDP takes its time
    return any(cls.__name__ == "FSDPModule" for module in model.modules() for cls in type(module).__mro__)


def gradients(loss: Callable[[], Tensor], model: nn.Module) -> dict[Tensor, Tensor]:
    """This rank's parts of a gradient that is averaged over the ranks, which all take part; of each parameter that has one.

    What the backward pass writes is `.grad`, which is put aside meanwhile.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    try:
        with torch.enable_grad():
            loss().backward()
        return {p: share(p.grad) for p in trained if p.grad is not None}
    finally:
        for p, grad in zip(trained, kept, strict=True):
            p.grad = grad


def norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """The l2 norm of each tensor of which the ranks hold parts: 0-dim, the same on all ranks, which all take part."""
    if not parts:
        return []
    mine = indicators.norms(parts)
    squares = torch.stack([norm.to(mine[0]) for norm in mine]).square()
    dist.all_reduce(squares)
    return [norm.to(own) for norm, own in zip(squares.sqrt().unbind(), mine, strict=True)]


def squared_norm(parts: Sequence[Tensor]) -> Tensor:
    """The squared l2 norm over all tensors together, likewise."""
    square = indicators.squared_norm(parts)
    dist.all_reduce(square)
    return square
