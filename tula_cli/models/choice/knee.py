"""Where a curve over the batch bends: up to there a larger batch pays (III-A-3 of the paper), beyond it hardly."""

import functools
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALIKE = 0.02  # configurations whose values differ by less are told to be as good as each other
KNEE_SAVES = 1 - math.sqrt(0.5)  # of the time: what a doubling of the batch saves up to the knee, half of ideal scaling
FEWEST = 5  # points that a knee is looked for in
_BEYOND = 100  # doublings by which a curve is continued: many more than it has itself


def knee(batches: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the knee of a falling curve by Kneedle [32] with S = 1; None where it does not lie between the ends.

    Kneedle takes the point farthest below the chord, so its answer depends on the axes and on where the curve is cut
    off. Over linear time, a curve that halves with every doubling of the batch, and so has no knee, gets one near its
    smallest batch, at many times the best time. So both axes are logarithmic here, and the curve is continued by what
    curves tend to: half the time at every doubling before the first batch, no gain after the last. The chord then
    falls as fast as half of ideal scaling: up to the knee a doubling of the batch saves at least 1 - 1/sqrt(2) = 29 %.
    """
    if len(batches) < FEWEST or max(values) <= min(values) * (1 + ALIKE):
        return None
    x, y = _continued(*_lower_hull(np.log2(batches), np.log2(values)))
    nearest = _nearest(batches, _located(x, y))
    return nearest if batches[0] < nearest < batches[-1] else None


def kneedle(batches: Sequence[int], values: Sequence[float]) -> int | None:
    """Return what Kneedle [32] says of the same curve where it is not continued; None where it finds none.

    It depends on where the search has cut the curve off, so it is told and not chosen.
    """
    if len(batches) < FEWEST or max(values) <= min(values) * (1 + ALIKE):
        return None
    hull_x, hull_y = _lower_hull(np.log2(batches), np.log2(values))
    x = np.arange(hull_x[0], hull_x[-1] + 0.5)
    found = _located(x, np.interp(x, hull_x, hull_y))
    return None if found is None else _nearest(batches, found)


def _located(x: Floats, y: Floats) -> float | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kneed warns where it finds none; None says the same
        found = _knee_locator()(x, y, S=1.0, curve="convex", direction="decreasing", online=False).knee
    return None if found is None else float(found)


@functools.cache
def _knee_locator() -> Any:
    """Import kneed without matplotlib, which it only draws with: half a second and 30 MB less.

    What a program has imported itself remains as it is, and its own import of kneed later comes with matplotlib.
    """
    if "kneed" not in sys.modules and "matplotlib" not in sys.modules:
        modules: dict[str, Any] = sys.modules
        modules["matplotlib"] = None
        try:
            from kneed import KneeLocator
        finally:
            for name in [name for name in modules if name == "matplotlib" or name.partition(".")[0] == "kneed"]:
                del modules[name]
        return KneeLocator
    from kneed import KneeLocator

    return KneeLocator


def _nearest(batches: Sequence[int], log_batch: float | None) -> int:
    return min(batches, key=lambda batch: abs(math.log2(batch) - (math.inf if log_batch is None else log_batch)))


def _lower_hull(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the lower convex hull: with one bend nowhere else, no dent of the noise is taken for the knee."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1 and _above(x, y, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
    return x[hull], y[hull]


def _above(x: Floats, y: Floats, left: int, middle: int, right: int) -> bool:
    chord = y[left] + (y[right] - y[left]) * (x[middle] - x[left]) / (x[right] - x[left])
    return bool(y[middle] >= chord)


def _continued(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the curve at every doubling (kneed wants equal steps), continued so that its chord falls by half a step."""
    inside = np.arange(x[0], x[-1] + 0.5)
    beyond = np.arange(1, _BEYOND + 1)
    before = y[-1] - y[0] + (len(inside) - 1 + 2 * _BEYOND) / 2  # nearly _BEYOND: time halves at every doubling
    return (
        np.concatenate([x[0] - beyond[::-1], inside, inside[-1] + beyond]),
        np.concatenate([y[0] + beyond[::-1] * before / _BEYOND, np.interp(inside, x, y), np.full(_BEYOND, y[-1])]),
    )


def shares(batches: NDArray[np.int_], log_values: Floats) -> dict[int, float]:
    """Return how often each batch is the knee in draws of what is believed; ends, where there is none, are left out.

    The least of value x sqrt(batch) is where the curve falls as fast as half of ideal scaling, which is `knee`'s rule.

    Args:
        batches: of the configurations, shape (n,).
        log_values: ln of time or cost, a row a draw, shape (draws, n).
    """
    unique = np.unique(batches)
    best = np.stack([log_values[:, batches == batch].min(axis=1) for batch in unique], axis=1)
    found = unique[np.argmin(best + np.log(unique) / 2, axis=1)]
    inside = (unique if len(unique) < FEWEST else unique[1:-1]).tolist()
    return {batch: float(np.mean(found == batch)) for batch in inside if (found == batch).any()}
