"""What adaptive gradient scaling (AGS) reads off the gradients.

Pure functions over lists of tensors: no state, no communication, no host synchronisation. Sources are Eq. 5 and
Algorithm 1 of the Tula paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision that norms and ratios of `dtype` are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
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
    for (_, dtype), indices in alike(dense).items():
        group = torch._foreach_norm([dense[i] for i in indices], 2, dtype=wide(dtype))
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
    dtype = wide(large.dtype)
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
    for indices in alike(below).values():
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


def smoothed(new: Sequence[Tensor], old: Sequence[Tensor], keep: float) -> list[Tensor]:
    """Exponential moving average: keep * old + (1 - keep) * new, for tensors that are alike in pairs."""
    return list(torch._foreach_lerp(list(old), list(new), 1 - keep))


def where_(new: Sequence[Tensor], old: Sequence[Tensor], flag: Tensor) -> list[Tensor]:
    """The new tensors where `flag` (0-dim, bool) is true, else the old ones, in the memory of the new; nobody reads it.

    An old one has its new one's shape, or is 0-dim.
    """
    result = list(new)
    for (device, _), indices in alike(new).items():
        for index in indices:
            if new[index].ndim:
                torch.where(flag.to(device), new[index], old[index], out=new[index])
        if numbers := [i for i in indices if not new[i].ndim]:  # all of them in one operation
            one, other = (torch.stack([tensors[i] for i in numbers]) for tensors in (new, old))
            for index, number in zip(numbers, torch.where(flag.to(device), one, other).unbind(), strict=True):
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
    for (device, dtype), indices in alike(stored).items():
        torch._foreach_mul_([stored[i] for i in indices], shrink.to(device, dtype))


def _bounded_(ratio: Tensor, bounds: Bounds) -> Tensor:
    low, high = bounds.rounded(ratio.dtype)
    return ratio.nan_to_num_(nan=1.0, posinf=high).clamp_(low, high)
