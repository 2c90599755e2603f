"""Parameters that are divided among the ranks (FSDP2, torch.distributed.fsdp.fully_shard): this rank's part, and sums over all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gradient_stats


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; of any other tensor, itself."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard has divided the module, or some module in it."""
    # by name: importing FSDP takes its time
    return any(cls.__name__ == "FSDPModule" for module in model.modules() for cls in type(module).__mro__)


def sharded_gradients(loss: Callable[[], Tensor], model: nn.Module) -> dict[Tensor, Tensor]:
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
        return {p: local_shard(p.grad) for p in trained if p.grad is not None}
    finally:
        for p, grad in zip(trained, kept, strict=True):
            p.grad = grad


def sharded_norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """The l2 norm of each tensor of which the ranks hold parts: 0-dim, the same on all ranks, which all take part."""
    if not parts:
        return []
    mine = gradient_stats.norms(parts)
    squares = torch.stack([norm.to(mine[0]) for norm in mine]).square()
    dist.all_reduce(squares)
    return [norm.to(local_norm) for norm, local_norm in zip(squares.sqrt().unbind(), mine, strict=True)]


def sharded_squared_norm(parts: Sequence[Tensor]) -> Tensor:
    """The squared l2 norm over all tensors together, likewise."""
    square = gradient_stats.squared_norm(parts)
    dist.all_reduce(square)
    return square


def gather_shards(params: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole tensors of which the ranks hold parts, the same on all ranks, which all take part; one collective.

    Args:
        params: DTensors, divided among all ranks along one dimension.
        parts: this rank's, of one type, divided as the parameters are.
    """
    world = dist.get_world_size()
    shapes = [[_part(param, rank)[1] for param in params] for rank in range(world)]
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    longest = max(map(sum, sizes))
    sent = parts[0].new_zeros(longest)
    torch.cat([part.reshape(-1) for part in parts], out=sent[: sum(part.numel() for part in parts)])
    received = sent.new_empty(world, longest)
    dist.all_gather_into_tensor(received.view(-1), sent)
    pieces = [
        [flat.view(shape) for flat, shape in zip(row.split([*size, longest - sum(size)]), shape_, strict=False)]
        for row, size, shape_ in zip(received.unbind(), sizes, shapes, strict=True)
    ]
    return [
        torch.cat(pieces_of_param, dim=_dimension(param))
        for param, pieces_of_param in zip(params, zip(*pieces, strict=True), strict=True)
    ]


def shard_of(whole: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor that is divided as a parameter is."""
    start, shape = _part(param, dist.get_rank())
    dimension = _dimension(param)
    return whole.narrow(dimension, start, shape[dimension])


def _dimension(param: Any) -> int:
    dimension: int = param.placements[0].dim
    return dimension % int(param.ndim)


def _part(param: Tensor, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return where a rank's part of a parameter starts, and its shape: as torch.chunk divides."""
    dimension, world = _dimension(param), dist.get_world_size()
    length = param.shape[dimension]
    most = -(-length // world)
    start = min(rank * most, length)
    shape = list(param.shape)
    shape[dimension] = min(most, length - start)
    return start, tuple(shape)
