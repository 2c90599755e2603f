"""Lines 5 to 8 of Algorithm 1: multiply by the factors where the gate allows it.

Each in two forms with the same bits: on the CPU the host reads the branch; elsewhere the device computes it without a
synchronisation.
Factors are 0-dim or of their tensor's shape; a list that repeats one 0-dim tensor takes the shorter way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from . import placement
from .indicators import alike

CHUNK = 64 * 2**20
"""Bytes of multipliers made at a time: the peak stays near two copies, with hardly more kernels."""


def scale_(tensors: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """Multiply each tensor by its factor where `calm` (0-dim, bool) is true."""
    (scale_on_device_ if placement.on_device(calm) else scale_on_host_)(tensors, factors, calm)


def scale_on_host_(tensors: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """Multiply each tensor by its factor where `calm` (0-dim, bool) is true; reads `calm` on the host."""
    if tensors and bool(calm):
        _multiply_(list(tensors), list(factors))


def scale_on_device_(tensors: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """What `scale_on_host_` does, bit by bit, without waiting for the device; takes CHUNK or a tensor of memory more."""
    for (device, dtype), indices in alike(factors).items():
        flag = calm.to(device, dtype)
        for chunk in chunks(factors, indices):
            _multiply_([tensors[i] for i in chunk], _multipliers([factors[i] for i in chunk], flag))


def _multipliers(factors: list[Tensor], flag: Tensor) -> list[Tensor]:
    """s f + (1 - f), which is exact: s where f = 1, and 1 where f = 0."""
    if _is_one(factors):
        return [factors[0] * flag + (1 - flag)] * len(factors)
    if all(f.ndim == 0 for f in factors):
        return list((torch.stack(factors) * flag + (1 - flag)).unbind())
    multipliers = list(torch._foreach_mul(factors, flag))
    torch._foreach_add_(multipliers, 1 - flag, alpha=1)  # without alpha it takes a number, and waits for the device
    return multipliers


def chunks(factors: Sequence[Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
    """Runs of tensors of at most CHUNK bytes together, or a single larger one."""
    chunk: list[int] = []
    size = 0
    for index in indices:
        bytes_ = factors[index].numel() * factors[index].element_size()
        if chunk and size + bytes_ > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(index)
        size += bytes_
    yield chunk


@contextmanager
def scaled_update(params: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> Iterator[None]:
    """Scale what happens to the parameters inside: w0 + s (w - w0) instead of w, where `calm` is true.

    For a moment one copy of the parameters more, on the device two of CHUNK or of the largest tensor besides.
    """
    device = placement.on_device(calm)
    if not params or (not device and not bool(calm)):
        yield
        return
    before = copies(params)
    yield
    if device:
        _stretch_on_device_(params, before, factors, calm)
    else:
        _stretch_(list(params), before, list(factors))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor, of which there is at least one."""
    result = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(result, list(tensors))
    return result


def _stretch_on_device_(
    params: Sequence[Tensor], before: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor
) -> None:
    """What `_stretch_` does where `calm` is true, without reading it; a chunk at a time."""
    for (device, _), indices in alike(params).items():
        for chunk in chunks(params, indices):
            after, start, by = ([tensors[i] for i in chunk] for tensors in (params, before, factors))
            _stretch_chunk_(after, start, by, calm.to(device))


def _stretch_chunk_(after: list[Tensor], before: list[Tensor], factors: list[Tensor], calm: Tensor) -> None:
    kept, _ = _packed(after)
    moved, views = _packed(after)
    _stretch_(views, before, factors)
    torch.where(calm, moved, kept, out=moved)
    torch._foreach_copy_(after, views)


def _packed(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return one tensor with all values, in any order, and a view of each with its shape."""
    # a foreach kernel takes lists whose strides are the same: those of a dense copy, be it channels_last
    strides = [torch.empty_like(t, device="meta").stride() for t in tensors]
    sizes = [t.numel() for t in tensors]
    flat = tensors[0].new_empty(sum(sizes))
    triples = zip(flat.split(sizes), tensors, strides, strict=True)
    views = [part.as_strided(t.shape, stride) for part, t, stride in triples]
    torch._foreach_copy_(views, tensors)
    return flat, views


def _stretch_(after: list[Tensor], before: list[Tensor], factors: list[Tensor]) -> None:
    torch._foreach_sub_(after, before)
    _multiply_(after, factors)
    torch._foreach_add_(after, before)


def _multiply_(tensors: list[Tensor], factors: list[Tensor]) -> None:
    if _is_one(factors) and all(t.device == factors[0].device for t in tensors):
        torch._foreach_mul_(tensors, factors[0])
    else:
        torch._foreach_mul_(tensors, factors)


def _is_one(factors: Sequence[Tensor]) -> bool:
    return factors[0].ndim == 0 and all(f is factors[0] for f in factors)
