"""Norms and scaling factors of gradients, and multiplication of gradients by factors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


def is_on_accelerator(tensor: Tensor) -> bool:
    """Return whether the host would have to wait for a device to read this tensor."""
    return tensor.device.type != "cpu"


# --- Norms and factors
#
# Pure functions over lists of tensors: no state, no communication, no host synchronisation. Sources are Eq. 5 and
# Algorithm 1 of the Tula paper.

CPU_PART_ELEMENTS = 1 << 18
"""Elements of a gradient that the CPU processes at a time, so that they stay in its caches over several operations."""


class Bounds(NamedTuple):
    """The closed interval that every scaling factor lies in (Lemma 1, Eq. 10)."""

    low: float
    high: float

    def round_inwards(self, dtype: torch.dtype) -> Bounds:
        """Return the bounds as numbers of `dtype`, rounded inwards so that no stored factor leaves the interval."""
        return _round_bounds_inwards(self, dtype)


@cache
def _round_bounds_inwards(bounds: Bounds, dtype: torch.dtype) -> Bounds:
    low, high = torch.tensor(bounds.low, dtype=dtype), torch.tensor(bounds.high, dtype=dtype)
    if low.item() < bounds.low:
        low = torch.nextafter(low, high)
    if high.item() > bounds.high:
        high = torch.nextafter(high, low)
    return Bounds(low.item(), high.item())


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms and ratios of values of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def group_by_dtype(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return the positions of the tensors by (device, dtype), since a foreach kernel processes one such group."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return groups


def compute_norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the l2 norm of each gradient, in the given order: 0-dim tensors, float32 (float64 for float64 gradients).

    A sparse gradient is coalesced first, since its duplicate indices add up.
    """
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    result: list[Tensor] = [torch.empty(0)] * len(dense)
    for (_, dtype), indices in group_by_dtype(dense).items():
        group = torch._foreach_norm([dense[i] for i in indices], 2, dtype=get_accumulation_dtype(dtype))
        for index, norm in zip(indices, group, strict=True):
            result[index] = norm
    return result


def compute_squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return |G|^2, the squared l2 norm over all gradients together (Eq. 5).

    Dense and sparse gradients, several dtypes and devices may be mixed. Returns a 0-dim tensor on the device of the
    first gradient, float32 unless a gradient is float64.

    Raises:
        ValueError: there is no gradient.
    """
    if not grads:
        raise ValueError("compute_squared_norm needs at least one gradient")
    device = grads[0].device
    return torch.stack([norm.to(device) for norm in compute_norms(grads)]).square().sum()


def compute_gradient_change(now: Tensor, before: Tensor | None) -> Tensor:
    """Return Delta(G), the relative change of the squared gradient norm since the step before (Eq. 5), with its sign.

    Args:
        now: |G|^2 of this step, 0-dim.
        before: |G|^2 of the step before; None in the first step, whose change counts as infinite.

    Returns:
        A 0-dim tensor; NaN or inf if `before` is zero or not finite, so that `change.abs() < delta` is false.
    """
    if before is None:
        return torch.full_like(now, math.inf)
    return (now - before) / before


def compute_factor_limit(b_large: int, b_small: int) -> float:
    """Return s_max = sqrt(b_large / b_small) (Algorithm 1, line 12)."""
    return math.sqrt(b_large / b_small)


def compute_element_factor(
    small: Tensor, large: Tensor, eps: float, bounds: Bounds, *, overwrite: bool = False
) -> Tensor:
    """Return a factor per element: |g_small / (g_large + eps)|, bounded (Algorithm 1, line 16, as printed).

    `eps` is added to the signed gradient. A ratio that is undefined (0/0) becomes 1, an infinite one the upper bound.

    Args:
        small: a parameter's gradient of the small batch.
        large: its raw gradient of the large batch at the same weights; not modified.
        overwrite: whether the result may use the memory of `small`, if both have the same dtype.

    Returns:
        A tensor of the gradients' shape and of the large gradient's dtype.
    """
    result = small if overwrite and small.dtype == large.dtype else torch.empty_like(large)
    for part, s, g in zip(*_split_for_caches(result, small, large), strict=True):
        part.copy_(_compute_ratio(s, g, eps, bounds.round_inwards(large.dtype)))
    return result


def _compute_ratio(small: Tensor, large: Tensor, eps: float, bounds: Bounds) -> Tensor:
    # 1e-8 is not representable in float16: eps would be 0 without the wider type.
    dtype = get_accumulation_dtype(large.dtype)
    ratio = large.to(dtype, copy=True).add_(eps)
    torch.div(small.to(dtype), ratio, out=ratio)
    return _clamp_(ratio.abs_(), bounds)


def _split_for_caches(*tensors: Tensor) -> list[Sequence[Tensor]]:
    """Return views of tensors of one shape, on the CPU in parts that stay in its caches over several operations."""
    if not all(t.is_cpu and t.is_contiguous() for t in tensors):
        return [[t] for t in tensors]
    return [t.view(-1).split(CPU_PART_ELEMENTS) for t in tensors]


def compute_tensor_factors(
    small: Sequence[Tensor], large: Sequence[Tensor], eps: float, bounds: Bounds
) -> list[Tensor]:
    """Return a factor per tensor: ||g_small|| / (||g_large|| + eps), bounded (line 16 with |.| as the l2 norm).

    Args:
        small: gradients of the small batch.
        large: the raw gradients of the large batch at the same weights, in the same order.

    Returns:
        0-dim tensors, float32 (float64 for float64 gradients).
    """
    above, below, result = compute_norms(small), compute_norms(large), [torch.empty(0)] * len(small)
    for indices in group_by_dtype(below).values():
        ratio = torch.stack([above[i] for i in indices]) / (torch.stack([below[i] for i in indices]) + eps)
        for index, factor in zip(indices, _clamp_(ratio, bounds).unbind(), strict=True):
            result[index] = factor
    return result


def compute_local_factors(small: Tensor, large: Tensor, before: Tensor, bounds: Bounds) -> Tensor:
    """Return a factor per tensor from the gradients of single ranks: sqrt(mean_r ||g_r||^2 / ||G||^2), bounded.

    The gradient of one of N ranks is that of a small batch of b_large / N samples; the mean is over N disjoint ones.

    Args:
        small: mean over the ranks of the squared norm of their own gradients, (n,).
        large: squared norm of the averaged gradients, (n,).
        before: the previous factors, (n,); kept for parameters whose norm is not finite.

    Returns:
        (n,) factors.
    """
    ratio = _clamp_((small / large).sqrt(), bounds)
    return torch.where(small.isfinite() & large.isfinite(), ratio, before)


def select_(new: Sequence[Tensor], old: Sequence[Tensor], flag: Tensor) -> list[Tensor]:
    """Return the new tensors if `flag` (0-dim, bool) is true, else the old ones; the host does not read the flag.

    The result is in the memory of the new tensors. An old tensor has the shape of its new one, or is 0-dim.
    """
    result = list(new)
    for (device, _), indices in group_by_dtype(new).items():
        for index in indices:
            if new[index].ndim:
                torch.where(flag.to(device), new[index], old[index], out=new[index])
        if numbers := [i for i in indices if not new[i].ndim]:  # all of them in one operation
            chosen, other = (torch.stack([tensors[i] for i in numbers]) for tensors in (new, old))
            for index, number in zip(numbers, torch.where(flag.to(device), chosen, other).unbind(), strict=True):
                result[index] = number
    return result


def clip_(grads: Sequence[Tensor], max_norm: float, *, square: Tensor | None = None) -> None:
    """Scale the gradients, dense or sparse, in place so that their joint l2 norm is at most `max_norm`.

    Args:
        grads: the gradients, or this rank's shards of them.
        max_norm: upper bound of the joint norm.
        square: squared joint norm over all shards; None: computed from `grads`.
    """
    square = compute_squared_norm(grads) if square is None else square
    # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that clipping in the optimizer gives the same result
    shrink = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    stored = [g._values() if g.is_sparse else g for g in grads]
    for (device, dtype), indices in group_by_dtype(stored).items():
        torch._foreach_mul_([stored[i] for i in indices], shrink.to(device, dtype))


def _clamp_(ratio: Tensor, bounds: Bounds) -> Tensor:
    low, high = bounds.round_inwards(ratio.dtype)
    return ratio.nan_to_num_(nan=1.0, posinf=high).clamp_(low, high)


# --- Multiplication by the factors (lines 5 to 8 of Algorithm 1)
#
# Each operation has two bit-identical versions: on the CPU the host reads `should_scale`; on a GPU the device evaluates it
# without synchronisation. Factors are 0-dim or have their tensor's shape; if all are the same 0-dim tensor, one
# multiplication by it suffices.

CHUNK_BYTES = 64 * 2**20
"""Bytes of multipliers that exist at the same time; this limits the extra memory at the cost of a few more kernels."""


def scale_(tensors: Sequence[Tensor], factors: Sequence[Tensor], should_scale: Tensor) -> None:
    """Multiply each tensor by its factor if `should_scale` (0-dim, bool) is true."""
    (scale_on_device_ if is_on_accelerator(should_scale) else scale_on_host_)(tensors, factors, should_scale)


def scale_on_host_(tensors: Sequence[Tensor], factors: Sequence[Tensor], should_scale: Tensor) -> None:
    """Multiply each tensor by its factor if `should_scale` (0-dim, bool) is true, which the host reads."""
    if tensors and bool(should_scale):
        _multiply_(list(tensors), list(factors))


def scale_on_device_(tensors: Sequence[Tensor], factors: Sequence[Tensor], should_scale: Tensor) -> None:
    """Do the same as `scale_on_host_`, bit for bit, without waiting for the device; it needs memory of CHUNK_BYTES or of one tensor."""
    for (device, dtype), indices in group_by_dtype(factors).items():
        flag = should_scale.to(device, dtype)
        for chunk in chunk_indices(factors, indices):
            _multiply_([tensors[i] for i in chunk], _compute_multipliers([factors[i] for i in chunk], flag))


def _compute_multipliers(factors: list[Tensor], flag: Tensor) -> list[Tensor]:
    """Return s f + (1 - f), which is exactly s if f = 1, and 1 if f = 0."""
    if _are_same_scalar(factors):
        return [factors[0] * flag + (1 - flag)] * len(factors)
    if all(f.ndim == 0 for f in factors):
        return list((torch.stack(factors) * flag + (1 - flag)).unbind())
    multipliers = list(torch._foreach_mul(factors, flag))
    # without alpha it converts to a number, which waits for the device
    torch._foreach_add_(multipliers, 1 - flag, alpha=1)
    return multipliers


def chunk_indices(factors: Sequence[Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of successive tensors of at most CHUNK_BYTES bytes together, or of a single larger one."""
    chunk: list[int] = []
    size = 0
    for index in indices:
        bytes_ = factors[index].numel() * factors[index].element_size()
        if chunk and size + bytes_ > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(index)
        size += bytes_
    yield chunk


@contextmanager
def scale_update(params: Sequence[Tensor], factors: Sequence[Tensor], should_scale: Tensor) -> Iterator[None]:
    """Scale the change of the parameters inside the context: w0 + s (w - w0) instead of w, if `should_scale` is true.

    It needs a temporary copy of the parameters; on a GPU also two temporaries of CHUNK_BYTES bytes, or of the largest tensor.
    """
    device = is_on_accelerator(should_scale)
    if not params or (not device and not bool(should_scale)):
        yield
        return
    before = copy_tensors(params)
    yield
    if device:
        _scale_change_on_device_(params, before, factors, should_scale)
    else:
        _scale_change_(list(params), before, list(factors))


def copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor; at least one is given."""
    result = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(result, list(tensors))
    return result


def _scale_change_on_device_(
    params: Sequence[Tensor], before: Sequence[Tensor], factors: Sequence[Tensor], should_scale: Tensor
) -> None:
    """Do the same as `_scale_change_` if `should_scale` is true, without reading it, one chunk at a time."""
    for (device, _), indices in group_by_dtype(params).items():
        for chunk in chunk_indices(params, indices):
            after, start, by = ([tensors[i] for i in chunk] for tensors in (params, before, factors))
            _scale_chunk_change_(after, start, by, should_scale.to(device))


def _scale_chunk_change_(
    after: list[Tensor], before: list[Tensor], factors: list[Tensor], should_scale: Tensor
) -> None:
    kept, _ = _pack_tensors(after)
    moved, views = _pack_tensors(after)
    _scale_change_(views, before, factors)
    torch.where(should_scale, moved, kept, out=moved)
    torch._foreach_copy_(after, views)


def _pack_tensors(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return one tensor with all values, in any order, and a view of each with its shape."""
    # a foreach kernel needs lists with equal strides: those of a dense copy, which may be channels_last
    strides = [torch.empty_like(t, device="meta").stride() for t in tensors]
    sizes = [t.numel() for t in tensors]
    flat = tensors[0].new_empty(sum(sizes))
    triples = zip(flat.split(sizes), tensors, strides, strict=True)
    views = [part.as_strided(t.shape, stride) for part, t, stride in triples]
    torch._foreach_copy_(views, tensors)
    return flat, views


def _scale_change_(after: list[Tensor], before: list[Tensor], factors: list[Tensor]) -> None:
    torch._foreach_sub_(after, before)
    _multiply_(after, factors)
    torch._foreach_add_(after, before)


def _multiply_(tensors: list[Tensor], factors: list[Tensor]) -> None:
    if _are_same_scalar(factors) and all(t.device == factors[0].device for t in tensors):
        torch._foreach_mul_(tensors, factors[0])
    else:
        torch._foreach_mul_(tensors, factors)


def _are_same_scalar(factors: Sequence[Tensor]) -> bool:
    return factors[0].ndim == 0 and all(f is factors[0] for f in factors)
