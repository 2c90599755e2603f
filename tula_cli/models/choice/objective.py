"""Which configuration to take: the fastest, the cheapest, the knee of the curve over the batch (III-A-3), the one that makes
the same progress soonest, or that of least energy."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tula_cli.models.time.noise import Z90
from tula_cli.run.records.recommendations import Prediction
from tula_cli.words import plural

Floats = NDArray[np.float64]

Curve = Literal["time", "cost"]
Objective = Literal["time", "cost", "knee", "accuracy-time", "energy"]
Quantity = Literal["time", "cost", "accuracy-time", "energy"]
"""What the least is taken of."""

ALIKE = 0.02  # configurations whose values differ by less are told to be as good as each other
FALLBACK = 0.1  # without a knee: the smallest batch within this share of the best value
NEARLY = 0.05  # a knee this near may come out instead: the ratio of two step times that vary by 2 % stays within it
KNEE_SAVES = 1 - math.sqrt(0.5)  # of the time: what a doubling of the batch saves up to the knee, half of ideal scaling
_FEWEST = 5  # points that a knee is looked for in
_BEYOND = 100  # doublings by which a curve is continued: many more than it has itself
_RUNNERS_UP = 3
INTERVAL = 2 * Z90
"""Standard deviations from end to end of a 90 % interval."""

_MOST_CAUTIOUS = 5.0


@dataclass(frozen=True)
class Choice:
    """The configuration chosen, why, and what comes next."""

    prediction: Prediction
    reason: str
    runners_up: tuple[Prediction, ...]


def choose(predictions: Iterable[Prediction], *, objective: Objective, curve: Curve = "time") -> Choice:
    """Choose among feasible configurations.

    Args:
        predictions: at least one.
        objective: time and cost take the least of it; knee takes the batch beyond which `curve` hardly falls;
            accuracy-time takes the least time to the same progress, and energy the least kWh, which every prediction then
            has to have.
        curve: what the knee is looked for in; the other objectives ignore it.
    """
    rows = list(predictions)
    assert rows, "choose among at least one configuration"
    return _knee(rows, curve) if objective == "knee" else _least(rows, objective)


def envelope(predictions: Iterable[Prediction], *, curve: Quantity = "time") -> tuple[Prediction, ...]:
    """Return the best configuration (fastest, cheapest ...) of each batch, ascending by batch."""
    best: dict[int, Prediction] = {}
    for row in sorted(predictions, key=lambda row: _order(row, curve)):
        best.setdefault(row.batch, row)
    return tuple(best[batch] for batch in sorted(best))


def _order(row: Prediction, curve: Quantity) -> tuple[float, float, int, int]:
    """Sort by cautious value; where values are equal, by the other value, then fewer nodes and a smaller batch."""
    return _cautious(row, curve), row.hours if curve == "cost" else row.cost, row.nodes, row.batch


def _cautious(row: Prediction, curve: Quantity) -> float:
    """Return the value, the larger the less certain it is.

    Among many uncertain forecasts the least is more often one that errs low than the best. A factor exp(variance of ln
    time) makes up for that: nothing within 5 %, 6 % where the interval is +-50 %.
    """
    low, _, high = _interval(row, curve)
    if not low or not high:
        return _value(row, curve)
    sd = math.log(high / low) / INTERVAL
    return _value(row, curve) * math.exp(min(sd**2, _MOST_CAUTIOUS))


def _interval(row: Prediction, curve: Quantity) -> tuple[float | None, float | None, float | None]:
    """Return the value with the ends of its interval; all values but kWh are as uncertain as the hours are."""
    return (row.kwh_low, row.kwh, row.kwh_high) if curve == "energy" else (row.hours_low, row.hours, row.hours_high)


def _value(row: Prediction, curve: Quantity) -> float:
    if curve == "energy":
        assert row.kwh is not None, "choose by energy where it is known"
        return row.kwh
    if curve == "accuracy-time":
        assert row.same_progress is not None, "choose by time to the same progress where it is known"
        return row.same_progress.hours
    return row.hours if curve == "time" else row.cost


_LEAST = {
    "time": "shortest time",
    "cost": "lowest cost",
    "accuracy-time": "shortest time to the same progress",
    "energy": "lowest energy",
}


def _least(rows: Sequence[Prediction], curve: Quantity) -> Choice:
    ordered = sorted(rows, key=lambda row: _order(row, curve))
    what = _LEAST[curve]
    count = "the only feasible configuration" if len(rows) == 1 else f"of {len(rows)} feasible configurations"
    reason = f"the {what} {count}{_range(rows, curve)}" if len(rows) > 1 else count
    reason += _passed_over(ordered[0], rows, curve) + _as_good(ordered[0], rows, curve)
    return Choice(ordered[0], reason, tuple(ordered[1 : 1 + _RUNNERS_UP]))


def _passed_over(chosen: Prediction, rows: Sequence[Prediction], curve: Quantity) -> str:
    """Name what is forecast to be better than the chosen one, but too uncertain to rely on."""
    least = min(rows, key=lambda row: (_value(row, curve), row.nodes, row.batch))
    saved = 1 - _value(least, curve) / _value(chosen, curve) if _value(chosen, curve) else 0.0
    if saved < ALIKE / 2:
        return ""
    return (
        f", apart from batch {least.batch} on {plural(least.nodes)}, which is forecast to be"
        f" {saved:.0%} below but too uncertain to rely on (measuring it would tell)"
    )


def _range(rows: Sequence[Prediction], curve: Quantity) -> str:
    """Say which batches are best at the ends of the range that the growth of the gradient noise leaves."""
    if curve != "accuracy-time":
        return ""
    ends = [(row, row.same_progress) for row in rows if row.same_progress is not None]
    lossy = min(ends, key=lambda end: end[0].hours * end[1].epochs_lossy)[0].batch
    alike = min(ends, key=lambda end: end[0].hours * end[1].epochs_alike)[0].batch
    if lossy == alike:
        return f" (batch {alike} over the whole range of the noise)"
    return f" (over the range of the noise the best batch runs from {min(lossy, alike)} to {max(lossy, alike)})"


def _knee(rows: Sequence[Prediction], curve: Curve) -> Choice:
    line = envelope(rows, curve=curve)
    batch = _kneedle([row.batch for row in line], [_value(row, curve) for row in line])
    if batch is None:
        chosen, reason = _without_knee(line, curve)
    else:
        chosen = next(row for row in line if row.batch == batch)
        reason = f"the knee of {curve} against batch{_gain(chosen, line, curve)}{_bends_too(chosen, line, curve)}"
    others = sorted(
        (row for row in line if row != chosen),
        key=lambda row: (abs(math.log2(row.batch / chosen.batch)), _order(row, curve)),
    )
    reason += _as_good(chosen, rows, curve) + _beaten(chosen, rows, curve)
    return Choice(chosen, reason, tuple(others[:_RUNNERS_UP]))


def _beaten(chosen: Prediction, rows: Sequence[Prediction], curve: Curve) -> str:
    """Name the best of what takes clearly less time and less cost than the knee: a knee is chosen for its smaller batch."""
    better = [
        row
        for row in rows
        if row.hours < chosen.hours * (1 - ALIKE) and row.cost < chosen.cost * (1 - ALIKE) and row.batch != chosen.batch
    ]
    if not better:
        return ""
    best = min(better, key=lambda row: _order(row, curve))
    return (
        f"; batch {best.batch} on {plural(best.nodes)} takes {1 - best.hours / chosen.hours:.0%} less time and"
        f" {1 - best.cost / chosen.cost:.0%} less cost, where the accuracy bears that batch"
    )


def _without_knee(line: Sequence[Prediction], curve: Curve) -> tuple[Prediction, str]:
    best = min(_value(row, curve) for row in line)
    chosen = next(row for row in line if _value(row, curve) <= best * (1 + FALLBACK))
    why = f"there are only {len(line)} batches" if len(line) < _FEWEST else f"the curve has none: {_shape(line, curve)}"
    return chosen, f"no knee of {curve} against batch ({why}), so the smallest batch within {FALLBACK:.0%} of the best"


def _shape(line: Sequence[Prediction], curve: Curve) -> str:
    """Say what a curve without a knee looks like."""
    first, before, last = (_value(line[place], curve) for place in (0, -2, -1))
    if last <= before * (1 - KNEE_SAVES):
        return f"{curve} still falls by {1 - last / before:.0%} at the largest batch{_bends_too(line[-1], line, curve)}"
    change = (last / first) ** (1 / (len(line) - 1)) - 1
    return f"a doubling of the batch changes {curve} by {change:+.0%} on average, without a bend"


def _kneedle(batches: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the knee of a falling curve by Kneedle [32] with S = 1; None where it does not lie between the ends.

    Kneedle takes the point farthest below the chord, so its answer depends on the axes and on where the curve is cut
    off. Over linear time, a curve that halves with every doubling of the batch, and so has no knee, gets one near its
    smallest batch, at many times the best time. So both axes are logarithmic here, and the curve is continued by what
    curves tend to: half the time at every doubling before the first batch, no gain after the last. The chord then
    falls as fast as half of ideal scaling: up to the knee a doubling of the batch saves at least 1 - 1/sqrt(2) = 29 %.
    """
    if len(batches) < _FEWEST or max(values) <= min(values) * (1 + ALIKE):
        return None
    from kneed import KneeLocator  # imports matplotlib and scipy.signal: more than a second

    x, y = _continued(*_lower_hull(np.log2(batches), np.log2(values)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kneed warns where it finds none; None says the same
        found = KneeLocator(x, y, S=1.0, curve="convex", direction="decreasing", online=False).knee
    nearest = min(batches, key=lambda batch: abs(math.log2(batch) - (math.inf if found is None else found)))
    return nearest if batches[0] < nearest < batches[-1] else None


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


def _gain(chosen: Prediction, line: Sequence[Prediction], curve: Curve) -> str:
    """Say what the steps to and from the knee are worth."""
    place = line.index(chosen)
    if not 0 < place < len(line) - 1:
        return ""
    before, here, after = (_value(row, curve) for row in line[place - 1 : place + 2])
    return f": the batch before takes {before / here - 1:+.0%} of {curve}, the one after {after / here - 1:+.0%}"


def _bends_too(chosen: Prediction, line: Sequence[Prediction], curve: Curve) -> str:
    """Name the neighbouring batches that a little noise would make the knee instead."""

    def below_chord(row: Prediction) -> float:
        return _value(row, curve) * math.sqrt(row.batch)

    place = line.index(chosen)
    around = [line[i] for i in (place - 1, place + 1) if 0 <= i < len(line)]
    close = [row for row in around if below_chord(row) <= below_chord(chosen) * (1 + NEARLY)]
    return f" (the knee may as well be at {' or '.join(str(row.batch) for row in close)})" if close else ""


def _as_good(chosen: Prediction, rows: Sequence[Prediction], curve: Quantity) -> str:
    """Name the neighbouring batches that cannot be told from the chosen one; the resolution is one step of the batch."""
    line = envelope(rows, curve=curve)
    larger = [row for row in line if row.batch > chosen.batch][:1]
    smaller = [row for row in line if row.batch < chosen.batch][-1:]
    alike = [row for row in smaller + larger if _alike(chosen, row, curve)]
    if not alike:
        return ""
    named = " and ".join(f"batch {row.batch} on {plural(row.nodes)}" for row in alike)
    return f"; {named} {'is' if len(alike) == 1 else 'are'} as good within the accuracy of the forecast"


def _alike(chosen: Prediction, other: Prediction, curve: Quantity) -> bool:
    here, there = _value(chosen, curve), _value(other, curve)
    low = high = here
    least, middle, most = _interval(chosen, curve)
    if least is not None and most is not None and middle:
        low, high = here * least / middle, here * most / middle
    return min(low, here * (1 - ALIKE)) <= there <= max(high, here * (1 + ALIKE))
