"""Parameters sharded over the ranks (FSDP2, torch.distributed.fsdp.fully_shard): local shards, and norms over all shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gradient_stats


def get_local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, in the same memory; any other tensor unchanged."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def is_sharded(model: nn.Module) -> bool:
    """Return whether fully_shard has sharded the module or one of its submodules."""
    # by name, because importing FSDP is slow
    return any(cls.__name__ == "FSDPModule" for module in model.modules() for cls in type(module).__mro__)


def compute_sharded_gradients(loss: Callable[[], Tensor], model: nn.Module) -> dict[Tensor, Tensor]:
    """Return this rank's shards of a gradient averaged over the ranks, of each parameter that has one; every rank must call it.

    The backward pass writes to `.grad`, whose values are restored afterwards.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    previous_gradients = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    try:
        with torch.enable_grad():
            loss().backward()
        return {p: get_local_shard(p.grad) for p in trained if p.grad is not None}
    finally:
        for p, grad in zip(trained, previous_gradients, strict=True):
            p.grad = grad


def compute_sharded_norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the l2 norm of each sharded tensor, 0-dim, equal on all ranks; every rank must call it."""
    if not parts:
        return []
    own_norms = gradient_stats.compute_norms(parts)
    squares = torch.stack([norm.to(own_norms[0]) for norm in own_norms]).square()
    dist.all_reduce(squares)
    return [norm.to(local_norm) for norm, local_norm in zip(squares.sqrt().unbind(), own_norms, strict=True)]


def compute_sharded_squared_norm(parts: Sequence[Tensor]) -> Tensor:
    """Return the squared l2 norm over all sharded tensors together, 0-dim, equal on all ranks; every rank must call it."""
    square = gradient_stats.compute_squared_norm(parts)
    dist.all_reduce(square)
    return square


def gather_shards(params: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """Gather sharded tensors on all ranks with one collective, and return them whole; every rank must call it.

    Every rank sends its shards as one flat tensor, padded to the length of the longest.

    Args:
        params: DTensors, sharded over all ranks along one dimension.
        parts: this rank's shards of the tensors, of one dtype, sharded as the parameters are.
    """
    world = dist.get_world_size()
    shapes = [[_locate_shard(param, rank)[1] for param in params] for rank in range(world)]
    longest = max(sum(map(math.prod, rank_shapes)) for rank_shapes in shapes)
    sent = parts[0].new_zeros(longest)
    torch.cat([part.reshape(-1) for part in parts], out=sent[: sum(part.numel() for part in parts)])
    received = sent.new_empty(world, longest)
    dist.all_gather_into_tensor(received.view(-1), sent)
    shards_by_rank = map(_unpack_shards, received.unbind(), shapes)
    return [
        torch.cat(shards, dim=_get_shard_dimension(param))
        for param, shards in zip(params, zip(*shards_by_rank, strict=True), strict=True)
    ]


def _unpack_shards(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the shards in the flat tensor that a rank has sent, without the padding at its end."""
    sizes = [math.prod(shape) for shape in shapes]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def select_shard(whole: Tensor, param: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharded as a parameter is."""
    start, shape = _locate_shard(param, dist.get_rank())
    dimension = _get_shard_dimension(param)
    return whole.narrow(dimension, start, shape[dimension])


def _get_shard_dimension(param: Any) -> int:
    dimension: int = param.placements[0].dim
    return dimension % int(param.ndim)


def _locate_shard(param: Tensor, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return the start of a rank's shard of a parameter along its dimension, and the shard's shape, as of torch.chunk."""
    dimension, world = _get_shard_dimension(param), dist.get_world_size()
    length = param.shape[dimension]
    max_rows = -(-length // world)
    start = min(rank * max_rows, length)
    shape = list(param.shape)
    shape[dimension] = min(max_rows, length - start)
    return start, tuple(shape)
