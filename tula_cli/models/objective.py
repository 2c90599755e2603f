"""Which configuration to take: the fastest, the cheapest, or the knee of the curve over the batch (III-A-3)."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tula_cli.records import Prediction

Curve = Literal["time", "cost"]
Objective = Literal["time", "cost", "knee"]

ALIKE = 0.02  # configurations whose values differ by less are told to be as good as each other
FALLBACK = 0.1  # without a knee: the smallest batch within this share of the best value
_FEWEST = 5  # points that a knee is looked for in
_RUNNERS_UP = 3


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
        objective: time and cost take the least of it; knee takes the batch beyond which `curve` hardly falls.
        curve: what the knee is looked for in; the other objectives ignore it.
    """
    rows = list(predictions)
    assert rows, "choose among at least one configuration"
    return _knee(rows, curve) if objective == "knee" else _least(rows, objective)


def envelope(predictions: Iterable[Prediction], *, curve: Curve = "time") -> tuple[Prediction, ...]:
    """Return the best configuration (fastest, or cheapest) of each batch, ascending by batch."""
    best: dict[int, Prediction] = {}
    for row in sorted(predictions, key=lambda row: _order(row, curve)):
        best.setdefault(row.batch, row)
    return tuple(best[batch] for batch in sorted(best))


def _order(row: Prediction, curve: Curve) -> tuple[float, float, int, int]:
    """Sort by value; where values are equal, by the other value, then fewer nodes and a smaller batch."""
    first, second = (row.hours, row.cost) if curve == "time" else (row.cost, row.hours)
    return first, second, row.nodes, row.batch


def _value(row: Prediction, curve: Curve) -> float:
    return row.hours if curve == "time" else row.cost


def _least(rows: Sequence[Prediction], curve: Curve) -> Choice:
    ordered = sorted(rows, key=lambda row: _order(row, curve))
    what = "shortest time" if curve == "time" else "lowest cost"
    count = "the only feasible configuration" if len(rows) == 1 else f"of {len(rows)} feasible configurations"
    reason = f"the {what} {count}" if len(rows) > 1 else count
    return Choice(ordered[0], reason + _as_good(ordered[0], rows, curve), tuple(ordered[1 : 1 + _RUNNERS_UP]))


def _knee(rows: Sequence[Prediction], curve: Curve) -> Choice:
    line = envelope(rows, curve=curve)
    batch = _kneedle([row.batch for row in line], [_value(row, curve) for row in line])
    if batch is None:
        chosen, reason = _without_knee(line, curve)
    else:
        chosen = next(row for row in line if row.batch == batch)
        reason = f"the knee of {curve} against batch{_gain(chosen, line, curve)}"
    others = sorted(
        (row for row in line if row != chosen),
        key=lambda row: (abs(math.log2(row.batch / chosen.batch)), _order(row, curve)),
    )
    return Choice(chosen, reason + _as_good(chosen, rows, curve), tuple(others[:_RUNNERS_UP]))


def _without_knee(line: Sequence[Prediction], curve: Curve) -> tuple[Prediction, str]:
    best = min(_value(row, curve) for row in line)
    chosen = next(row for row in line if _value(row, curve) <= best * (1 + FALLBACK))
    why = f"there are only {len(line)} batches" if len(line) < _FEWEST else "the curve has none"
    return chosen, f"no knee of {curve} against batch ({why}), so the smallest batch within {FALLBACK:.0%} of the best"


def _kneedle(batches: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the knee of a falling convex curve over log2(batch), by Kneedle [32] with S = 1; None where there is none."""
    if len(batches) < _FEWEST or max(values) <= min(values) * (1 + ALIKE):
        return None
    from kneed import KneeLocator  # imports matplotlib and scipy.signal: more than a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kneed warns where it finds none; None says the same
        found = KneeLocator(
            [math.log2(batch) for batch in batches], values, S=1.0, curve="convex", direction="decreasing", online=False
        ).knee
    return None if found is None else min(batches, key=lambda batch: abs(math.log2(batch) - found))


def _gain(chosen: Prediction, line: Sequence[Prediction], curve: Curve) -> str:
    """Say what the steps to and from the knee are worth."""
    place = line.index(chosen)
    if not 0 < place < len(line) - 1:
        return ""
    before, here, after = (_value(row, curve) for row in line[place - 1 : place + 2])
    return f": the batch before takes {before / here - 1:+.0%} of {curve}, the one after {after / here - 1:+.0%}"


def _as_good(chosen: Prediction, rows: Sequence[Prediction], curve: Curve) -> str:
    """Name the neighbouring batches that cannot be told from the chosen one; the resolution is one step of the batch."""
    line = envelope(rows, curve=curve)
    larger = [row for row in line if row.batch > chosen.batch][:1]
    smaller = [row for row in line if row.batch < chosen.batch][-1:]
    alike = [row for row in smaller + larger if _alike(chosen, row, curve)]
    if not alike:
        return ""
    named = " and ".join(f"batch {row.batch} on {row.nodes} node{'s' * (row.nodes != 1)}" for row in alike)
    return f"; {named} {'is' if len(alike) == 1 else 'are'} as good within the accuracy of the forecast"


def _alike(chosen: Prediction, other: Prediction, curve: Curve) -> bool:
    here, there = _value(chosen, curve), _value(other, curve)
    low = high = here
    if chosen.hours_low is not None and chosen.hours_high is not None and chosen.hours > 0:
        low, high = here * chosen.hours_low / chosen.hours, here * chosen.hours_high / chosen.hours
    return min(low, here * (1 - ALIKE)) <= there <= max(high, here * (1 + ALIKE))
