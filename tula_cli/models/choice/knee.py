"""The knee of a curve over the batch (III-A-3), by the Kneedle algorithm."""

import functools
import math
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tula_cli.models.choice.candidates import Floats, Ints

MAX_EQUAL_DIFFERENCE = 0.02  # relative difference below which configurations are reported as equally good
# share of time that a doubling of the batch must save up to the knee: half of ideal scaling
MIN_SAVING_UP_TO_KNEE = 1 - math.sqrt(0.5)
MIN_BATCHES_FOR_KNEE = 5  # minimum number of points for a knee
_EXTENSION_DOUBLINGS = 100  # doublings by which a curve is extended on each side


def find_knee(batches: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the knee of a falling curve by Kneedle [32] with S = 1; None if there is none between the ends.

    Kneedle takes the point farthest below the chord, so its answer depends on the axes and on where the curve is cut
    off. Over linear time, a curve that halves with every doubling of the batch, and so has no knee, gets one near its
    smallest batch, at many times the best time. Both axes are therefore logarithmic here, and the curve is extended by
    its limiting behaviour: half the time at every doubling before the first batch, no gain after the last. The chord
    then falls as fast as half of ideal scaling: up to the knee a doubling of the batch saves at least 1 - 1/sqrt(2) =
    29 %.
    """
    if len(batches) < MIN_BATCHES_FOR_KNEE or max(values) <= min(values) * (1 + MAX_EQUAL_DIFFERENCE):
        return None
    x, y = _extend_curve(*_compute_lower_hull(np.log2(batches), np.log2(values)))
    knee = _locate_knee(batches, x, y)
    return knee if knee is not None and batches[0] < knee < batches[-1] else None


def run_kneedle(batches: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the knee that Kneedle [32] finds on the curve without extension; None if it finds none.

    It depends on where the search cut the curve off, so it is reported but not chosen.
    """
    if len(batches) < MIN_BATCHES_FOR_KNEE or max(values) <= min(values) * (1 + MAX_EQUAL_DIFFERENCE):
        return None
    hull_x, hull_y = _compute_lower_hull(np.log2(batches), np.log2(values))
    x = np.arange(hull_x[0], hull_x[-1] + 0.5)
    return _locate_knee(batches, x, np.interp(x, hull_x, hull_y))


def _locate_knee(batches: Sequence[int], x: Floats, y: Floats) -> int | None:
    """Return the batch nearest to the knee that Kneedle finds on a curve over log2 of the batch; None if it finds none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kneed warns if there is no knee, for which this function returns None
        knee = _import_knee_locator()(x, y, S=1.0, curve="convex", direction="decreasing", online=False).knee
    return None if knee is None else min(batches, key=lambda batch: abs(math.log2(batch) - float(knee)))


@functools.cache
def _import_knee_locator() -> Any:
    """Import kneed without matplotlib and scipy.signal, which takes a third of the time that `tula recommend` takes.

    kneed draws with matplotlib, and uses one function of scipy.signal. Modules that the program has already imported are not
    affected, and a later import by the program is complete.
    """
    modules: dict[str, Any] = sys.modules
    replaced: dict[str, Any] = {"matplotlib": None, "scipy.signal": types.ModuleType("scipy.signal")}
    replaced["scipy.signal"].argrelextrema = find_relative_extrema
    replaced = {} if "kneed" in modules else {name: replaced[name] for name in replaced if name not in modules}
    modules.update(replaced)
    try:
        from kneed import KneeLocator
    finally:
        for name in [name for name in modules if replaced and name.partition(".")[0] == "kneed"] + list(replaced):
            del modules[name]
    return KneeLocator


def find_relative_extrema(
    values: Floats, comparator: Callable[[Floats, Floats], NDArray[np.bool_]]
) -> tuple[Ints, ...]:
    """Return the indices of values that compare so with both neighbours, as scipy.signal.argrelextrema does.

    An end of the curve is a neighbour of itself.
    """
    extended = np.concatenate((values[:1], values, values[-1:]))
    return np.nonzero(comparator(values, extended[2:]) & comparator(values, extended[:-2]))


def _compute_lower_hull(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the lower convex hull, so that no dent due to noise is taken for the knee."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1 and _is_above_chord(x, y, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
    return x[hull], y[hull]


def _is_above_chord(x: Floats, y: Floats, left: int, middle: int, right: int) -> bool:
    chord = y[left] + (y[right] - y[left]) * (x[middle] - x[left]) / (x[right] - x[left])
    return bool(y[middle] >= chord)


def _extend_curve(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the curve at every doubling (kneed needs equal steps), extended on both sides.

    The chord of the extended curve falls by half a doubling per step.
    """
    inside = np.arange(x[0], x[-1] + 0.5)
    doublings = np.arange(1, _EXTENSION_DOUBLINGS + 1)
    # Close to _EXTENSION_DOUBLINGS. Kneedle draws its chord to the lowest value of the curve, not to the last one.
    before = y.min() - y[0] + (len(inside) - 1 + 2 * _EXTENSION_DOUBLINGS) / 2
    return (
        np.concatenate([x[0] - doublings[::-1], inside, inside[-1] + doublings]),
        np.concatenate(
            [
                y[0] + doublings[::-1] * before / _EXTENSION_DOUBLINGS,
                np.interp(inside, x, y),
                np.full(_EXTENSION_DOUBLINGS, y[-1]),
            ]
        ),
    )


def compute_knee_probabilities(batches: NDArray[np.int_], log_values: Floats) -> dict[int, float]:
    """Return the probability that each batch is the knee: the share of posterior samples in which it is.

    From `MIN_BATCHES_FOR_KNEE` batches on, the first and the last are left out.

    The minimum of value x sqrt(batch) is where the curve falls as fast as half of ideal scaling, the rule of
    `find_knee`.

    Args:
        batches: of the configurations, shape (n,).
        log_values: ln of time or cost, one row per sample, shape (samples, n).
    """
    unique = np.unique(batches)
    best = np.stack([log_values[:, batches == batch].min(axis=1) for batch in unique], axis=1)
    best_values = unique[np.argmin(best + np.log(unique) / 2, axis=1)]
    inside = (unique if len(unique) < MIN_BATCHES_FOR_KNEE else unique[1:-1]).tolist()
    return {batch: float(np.mean(best_values == batch)) for batch in inside if (best_values == batch).any()}
