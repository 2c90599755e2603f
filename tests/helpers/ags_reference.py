"""Algorithm 1 of the Tula paper (adaptive gradient scaling), line by line, with scalar loops and its own SGD.

Written only from the listing, as a reference for comparisons; slow on purpose. Line numbers are those of the listing.
If the listing does not specify a case: the first step has no previous norm and counts as sensitive; factors have a lower
bound s_min; a factor 0/0 is 1; the update is SGD with momentum and weight decay as in PyTorch.

Additions to the listing: a static factor (Eq. 8); exponential averages of the norm and of the factors, which start at the
first value; and factors that scale the update of the weights instead of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[np.float64]]
Gradient = Callable[[Arrays, int, bool], Arrays]  # (weights, step, small) -> one gradient per parameter


@dataclass(frozen=True)
class Setting:
    b_large: int
    b_small: int
    granularity: str = "element"
    delta: float = 0.5
    eps: float = 1e-8
    s_min: float = 1e-3
    lr: float = 0.1
    momentum: float = 0.0
    decay: float = 0.0
    factor: float = 1.0  # of granularity "static"
    scale_ema: float = 0.0
    apply_to: str = "gradient"


@dataclass
class Trace:
    """Per step: the weights after the step, whether line 6 scaled by factors, and the factors after the step."""

    weights: list[Arrays] = field(default_factory=list)
    scaled: list[bool] = field(default_factory=list)
    factors: list[Arrays] = field(default_factory=list)


def run(weights: Arrays, gradient: Gradient, steps: int, refreshes: Collection[int], setting: Setting) -> Trace:
    """Train for `steps` steps; the factors are updated (line 10) in the steps whose number is in `refreshes`."""
    weights = [w.copy() for w in weights]
    velocity: Arrays | None = None
    start = setting.factor if setting.granularity == "static" else 1.0
    gradscale = [np.full_like(w, start) for w in weights]  # Input: gradscale <- 1 (per-parameter)
    refreshed = False
    before: float | None = None
    trace = Trace()
    for i in range(steps):  # lines 1 and 2
        large = gradient(weights, i, False)  # line 3
        now = squared_norm(large)
        scaled = relative_change(now, before) < setting.delta  # lines 4 and 5
        before, has_factors = now, refreshed or setting.granularity == "static"
        old, used = weights, large
        if scaled and setting.apply_to == "gradient":
            used = [multiply(s, g) for s, g in zip(gradscale, large, strict=True)]  # line 6
        weights, velocity = sgd_step(weights, used, velocity, setting)  # line 9
        if scaled and setting.apply_to == "update":
            weights = [w + multiply(s, new - w) for s, w, new in zip(gradscale, old, weights, strict=True)]
        if i in refreshes and setting.granularity != "static":  # line 10, at the weights of line 3 (line 14)
            fresh = update_gradscale(gradient(old, i, True), large, setting)
            pairs = zip(fresh, gradscale, strict=True)
            gradscale = [average(new, s, setting.scale_ema) for new, s in pairs] if refreshed else fresh
            refreshed = True
        trace.scaled.append(scaled and has_factors)
        trace.weights.append([w.copy() for w in weights])
        trace.factors.append([s.copy() for s in gradscale])
    return trace


def update_gradscale(small: Arrays, large: Arrays, setting: Setting) -> Arrays:
    s_max = math.sqrt(setting.b_large / setting.b_small)  # line 12
    gradscale = []
    for g_small, g_large in zip(small, large, strict=True):  # line 15
        s = np.empty_like(g_large)
        if setting.granularity == "tensor":
            s[...] = scaling_factor(
                math.sqrt(squared_norm([g_small])), math.sqrt(squared_norm([g_large])), setting, s_max
            )
        else:
            for k in indices(g_large):
                s[k] = scaling_factor(float(g_small[k]), float(g_large[k]), setting, s_max)
        gradscale.append(s)  # line 17
    return gradscale  # line 18


def scaling_factor(g_small: float, g_large: float, setting: Setting, s_max: float) -> float:
    denominator = g_large + setting.eps
    if denominator == 0.0:
        return s_max if g_small != 0.0 else 1.0
    return max(setting.s_min, min(abs(g_small / denominator), s_max))  # line 16


def relative_change(now: float, before: float | None) -> float:
    """Eq. 5, on squared norms."""
    if before is None:
        return math.inf
    if before == 0.0:
        return math.nan if now == 0.0 else math.inf
    return abs((now - before) / before)


def average(new: NDArray[np.float64], old: NDArray[np.float64], keep: float) -> NDArray[np.float64]:
    result = np.empty_like(new)
    for k in indices(new):
        result[k] = keep * float(old[k]) + (1 - keep) * float(new[k])
    return result


def local_factor(own: Arrays, s_min: float) -> float:
    """Return the factor of one tensor from the gradients of N ranks, each of b_large / N samples."""
    mean = own[0] * 0.0
    for g in own:
        mean = mean + g / len(own)
    small = sum(squared_norm([g]) for g in own) / len(own)
    if squared_norm([mean]) == 0.0:
        return math.sqrt(len(own)) if small != 0.0 else 1.0
    return max(s_min, min(math.sqrt(small / squared_norm([mean])), math.sqrt(len(own))))


def squared_norm(grads: Arrays) -> float:
    total = 0.0
    for g in grads:
        for k in indices(g):
            total += float(g[k]) * float(g[k])
    return total


def multiply(s: NDArray[np.float64], g: NDArray[np.float64]) -> NDArray[np.float64]:
    result = np.empty_like(g)
    for k in indices(g):
        result[k] = s[k] * g[k]
    return result


def sgd_step(weights: Arrays, grads: Arrays, velocity: Arrays | None, setting: Setting) -> tuple[Arrays, Arrays]:
    first = velocity is None
    velocity = [np.zeros_like(w) for w in weights] if velocity is None else [v.copy() for v in velocity]
    weights = [w.copy() for w in weights]
    for w, g, v in zip(weights, grads, velocity, strict=True):
        for k in indices(w):
            step = g[k] + setting.decay * w[k]
            v[k] = step if first else setting.momentum * v[k] + step
            w[k] = w[k] - setting.lr * v[k]
    return weights, velocity


def indices(array: NDArray[np.float64]) -> Iterator[tuple[int, ...]]:
    return np.ndindex(*array.shape)
