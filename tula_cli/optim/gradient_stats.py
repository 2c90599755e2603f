"""Norms and scaling factors of gradients, and multiplication of gradients by factors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


def on_device(tensor: Tensor) -> bool:
    """Whether the host would have to wait to read this."""
    return tensor.device.type != "cpu"


# --- Norms and factors
#
# Pure functions over lists of tensors: no state, no communication, no host synchronisation. Sources are Eq. 5 and
# Algorithm 1 of the Tula paper.

PART = 1 << 18
"""Elements of a gradient that are taken through several operations at a time on the CPU."""


class Bounds(NamedTuple):
    """The closed interval that every scaling factor lies in (Lemma 1, Eq. 10)."""

    low: float
    high: float

    def rounded(self, dtype: torch.dtype) -> Bounds:
        """The same bounds as numbers of `dtype`, rounded inwards so that no stored factor leaves the interval."""
        return _rounded(self, dtype)


@cache
def _rounded(bounds: Bounds, dtype: torch.dtype) -> Bounds:
    low, high = torch.tensor(bounds.low, dtype=dtype), torch.tensor(bounds.high, dtype=dtype)
    if low.item() < bounds.low:
        low = torch.nextafter(low, high)
    if high.item() > bounds.high:
        high = torch.nextafter(high, low)
    return Bounds(low.item(), high.item())


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that norms and ratios of `dtype` are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def group_by_dtype(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """The positions of the tensors by (device, dtype): what one foreach kernel can take together."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return groups


def norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The l2 norm of each gradient, in the given order: 0-dim tensors, float32 (float64 for float64 gradients).

    A sparse gradient is coalesced first, since its duplicate indices add up.
    """
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    result: list[Tensor] = [torch.empty(0)] * len(dense)
    for (_, dtype), indices in group_by_dtype(dense).items():
        group = torch._foreach_norm([dense[i] for i in indices], 2, dtype=accumulation_dtype(dtype))
        for index, norm in zip(indices, group, strict=True):
            result[index] = norm
    return result


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """|G|^2, the squared l2 norm over all gradients together (Eq. 5).

    Dense and sparse gradients, several dtypes and devices may be mixed. Returns a 0-dim tensor on the device of the
    first gradient, float32 unless a gradient is float64.

    Raises:
        ValueError: no gradient was given.
    """
    if not grads:
        raise ValueError("squared_norm needs at least one gradient")
    device = grads[0].device
    return torch.stack([norm.to(device) for norm in norms(grads)]).square().sum()


def gradient_change(now: Tensor, before: Tensor | None) -> Tensor:
    """Delta(G), the relative change of the squared gradient norm since the step before (Eq. 5), with its sign.

    Args:
        now: |G|^2 of this step, 0-dim.
        before: |G|^2 of the step before; None in the first step, where the change counts as infinite.

    Returns:
        A 0-dim tensor; NaN or inf where `before` is zero or not finite, so that `change.abs() < delta` is false there.
    """
    if before is None:
        return torch.full_like(now, math.inf)
    return (now - before) / before


def factor_limit(b_large: int, b_small: int) -> float:
    """s_max = sqrt(b_large / b_small) (Algorithm 1, line 12)."""
    return math.sqrt(b_large / b_small)


def element_factor(small: Tensor, large: Tensor, eps: float, bounds: Bounds, *, overwrite: bool = False) -> Tensor:
    """One factor for each element: |g_small / (g_large + eps)|, bounded (Algorithm 1, line 16, as printed).

    `eps` is added to the signed gradient. A ratio that is undefined (0/0) becomes 1, an infinite one the upper bound.

    Args:
        small: a parameter's gradient of the small batch.
        large: its raw gradient of the large batch at the same weights; left as it is.
        overwrite: let the result take the memory of `small`, where that has the large gradient's dtype.

    Returns:
        A tensor of the gradients' shape and of the large gradient's dtype.
    """
    result = small if overwrite and small.dtype == large.dtype else torch.empty_like(large)
    for part, s, g in zip(*_in_parts(result, small, large), strict=True):
        part.copy_(_ratio(s, g, eps, bounds.rounded(large.dtype)))
    return result


def _ratio(small: Tensor, large: Tensor, eps: float, bounds: Bounds) -> Tensor:
    # float16 has no 1e-8: eps would vanish without the wider type
    dtype = accumulation_dtype(large.dtype)
    ratio = large.to(dtype, copy=True).add_(eps)
    torch.div(small.to(dtype), ratio, out=ratio)
    return _bounded_(ratio.abs_(), bounds)


def _in_parts(*tensors: Tensor) -> list[Sequence[Tensor]]:
    """Views of tensors of one shape, on the CPU in parts that go through its caches from one operation to the next."""
    if not all(t.is_cpu and t.is_contiguous() for t in tensors):
        return [[t] for t in tensors]
    return [t.view(-1).split(PART) for t in tensors]


def tensor_factors(small: Sequence[Tensor], large: Sequence[Tensor], eps: float, bounds: Bounds) -> list[Tensor]:
    """One factor for each tensor: ||g_small|| / (||g_large|| + eps), bounded (line 16, |.| read as the l2 norm).

    Args:
        small: gradients of the small batch.
        large: the raw gradients of the large batch at the same weights, in the same order.

    Returns:
        0-dim tensors, float32 (float64 for float64 gradients).
    """
    above, below, result = norms(small), norms(large), [torch.empty(0)] * len(small)
    for indices in group_by_dtype(below).values():
        ratio = torch.stack([above[i] for i in indices]) / (torch.stack([below[i] for i in indices]) + eps)
        for index, factor in zip(indices, _bounded_(ratio, bounds).unbind(), strict=True):
            result[index] = factor
    return result


def local_factors(small: Tensor, large: Tensor, before: Tensor, bounds: Bounds) -> Tensor:
    """One factor for each tensor from the ranks' own gradients: sqrt(mean_r ||g_r||^2 / ||G||^2), bounded.

    What a rank holds is the gradient of a small batch of b_large / N samples; the mean is over N disjoint ones.

    Args:
        small: mean over the ranks of the squared norm of their own gradients, (n,).
        large: squared norm of the averaged gradients, (n,).
        before: the factors so far, (n,); they stay where a norm is not finite.

    Returns:
        (n,) factors.
    """
    ratio = _bounded_((small / large).sqrt(), bounds)
    return torch.where(small.isfinite() & large.isfinite(), ratio, before)


def smooth_factors(new: Sequence[Tensor], old: Sequence[Tensor], keep: float) -> list[Tensor]:
    """Exponential moving average: keep * old + (1 - keep) * new, for tensors that are alike in pairs."""
    return list(torch._foreach_lerp(list(old), list(new), 1 - keep))


def where_(new: Sequence[Tensor], old: Sequence[Tensor], flag: Tensor) -> list[Tensor]:
    """The new tensors where `flag` (0-dim, bool) is true, else the old ones, in the memory of the new; nobody reads it.

    An old one has its new one's shape, or is 0-dim.
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


def moving_average(now: Tensor, before: Tensor | None, keep: float) -> Tensor:
    """keep * before + (1 - keep) * now, 0-dim; `now` where there is nothing before, or nothing finite."""
    if before is None or not keep:
        return now
    return torch.where(before.isfinite(), torch.lerp(before, now, 1 - keep), now)


def clip_(grads: Sequence[Tensor], max_norm: float, *, square: Tensor | None = None) -> None:
    """Scale the gradients, dense or sparse, in place so that their joint l2 norm is at most `max_norm`.

    `square` is that norm squared, where the gradients are parts of what it is of.
    """
    square = squared_norm(grads) if square is None else square
    # 1e-6 as torch.nn.utils.clip_grad_norm_ has it, so that moving a clip into the optimizer changes nothing
    shrink = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    stored = [g._values() if g.is_sparse else g for g in grads]
    for (device, dtype), indices in group_by_dtype(stored).items():
        torch._foreach_mul_([stored[i] for i in indices], shrink.to(device, dtype))


def _bounded_(ratio: Tensor, bounds: Bounds) -> Tensor:
    low, high = bounds.rounded(ratio.dtype)
    return ratio.nan_to_num_(nan=1.0, posinf=high).clamp_(low, high)


# --- Multiplication by the factors (lines 5 to 8 of Algorithm 1)
#
# Each in two forms with the same bits: on the CPU the host reads the branch; elsewhere the device computes it without a
# synchronisation.
# Factors are 0-dim or of their tensor's shape; a list that repeats one 0-dim tensor takes the shorter way.

CHUNK = 64 * 2**20
"""Bytes of multipliers made at a time: the peak stays near two copies, with hardly more kernels."""


def scale_(tensors: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """Multiply each tensor by its factor where `calm` (0-dim, bool) is true."""
    (scale_on_device_ if on_device(calm) else scale_on_host_)(tensors, factors, calm)


def scale_on_host_(tensors: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """Multiply each tensor by its factor where `calm` (0-dim, bool) is true; reads `calm` on the host."""
    if tensors and bool(calm):
        _multiply_(list(tensors), list(factors))


def scale_on_device_(tensors: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor) -> None:
    """Do the same as `scale_on_host_`, bit for bit, without waiting for the device; needs CHUNK or one tensor of memory more."""
    for (device, dtype), indices in group_by_dtype(factors).items():
        flag = calm.to(device, dtype)
        for chunk in chunk_indices(factors, indices):
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


def chunk_indices(factors: Sequence[Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
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
    device = on_device(calm)
    if not params or (not device and not bool(calm)):
        yield
        return
    before = copy_tensors(params)
    yield
    if device:
        _stretch_on_device_(params, before, factors, calm)
    else:
        _stretch_(list(params), before, list(factors))


def copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor, of which there is at least one."""
    result = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(result, list(tensors))
    return result


def _stretch_on_device_(
    params: Sequence[Tensor], before: Sequence[Tensor], factors: Sequence[Tensor], calm: Tensor
) -> None:
    """Do the same as `_stretch_` if `calm` is true, without reading it, one chunk at a time."""
    for (device, _), indices in group_by_dtype(params).items():
        for chunk in chunk_indices(params, indices):
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
