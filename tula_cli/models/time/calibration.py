"""How wide intervals have to be, by how far finished trainings were off theirs.

An error is standardised by its own interval: 1 is as far as the models' standard deviation. The mean square of such errors is
1 where intervals are as wide as they should be. Its estimate is shrunk towards 1 as by an inverse gamma prior that is worth
PRIOR trainings, and errors beyond CLIPPED standard deviations (as they come out) count as so many: one job that something
else held up tells little of the others (Huber 1964, proposal 2).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tula_cli.models.time.noise import Z90
from tula_cli.run.records.recommendations import Calibration

PRIOR = 10.0
"""Trainings that the belief counts that intervals are as wide as they should be."""
BOUNDS = (0.7, 4.0)
"""Of the factor."""
CLIPPED = 2.0
_KEPT = 0.920  # mean square of a normal variable that is clipped at two standard deviations
_ROUNDS = 100
_LEAST = 3  # predictions that were tried, from which on a bias is told

AS_MODELLED = Calibration()
"""Intervals as wide as the models have them."""

Alike = tuple[str, int, int, float]
"""What trainings share that were predicted alike: run, nodes, batch and predicted value. They try one prediction."""


@dataclass(frozen=True)
class Tried:
    """A prediction with its interval, as it was told, and what came of it."""

    alike: Alike
    predicted: float
    low: float
    high: float
    actual: float
    widened: float = 1.0  # the interval was so many times as wide as the models had it

    @property
    def inside(self) -> bool:
        return self.low <= self.actual <= self.high

    @property
    def error(self) -> float:
        """ln of actual over predicted."""
        return math.log(self.actual / self.predicted)

    @property
    def standardised(self) -> float:
        """The error over the standard deviation that the models gave it, on its side of the prediction."""
        bound = self.high if self.error > 0 else self.low
        return abs(self.error) * Z90 * self.widened / abs(math.log(bound / self.predicted))


def calibration(steps: Sequence[Tried], hours: Sequence[Tried]) -> Calibration:
    """Return how wide intervals have to be.

    Args:
        steps: predicted step times; what cannot be standardised is left out beforehand.
        hours: predicted times of whole trainings.
    """
    return Calibration(
        trainings=len(steps),
        inside=sum(one.inside for one in steps),
        step=width(_grouped(steps).values()),
        hours_trainings=len(hours),
        hours_inside=sum(one.inside for one in hours),
        hours=width(_grouped(hours).values()),
        bias=_bias(_grouped(steps)),
    )


def width(tried: Iterable[Sequence[Tried]]) -> float:
    """Return the factor of the intervals' width; 1 where nothing was tried.

    Args:
        tried: trainings by what they tried. Several that tried one prediction count as one: they share its error.
    """
    groups = [[one.standardised for one in group] for group in tried]
    square, most = 1.0, BOUNDS[1] ** 2
    for _ in range(_ROUNDS if groups else 0):
        limit, before = CLIPPED**2 * square, square
        seen = sum(statistics.fmean(min(error**2, limit) for error in group) for group in groups) / _KEPT
        square = min(most, (PRIOR + seen) / (PRIOR + len(groups)))
        if abs(square - before) < 1e-6:
            break
    return max(BOUNDS[0], math.sqrt(square))


def _grouped(tried: Iterable[Tried]) -> Mapping[Alike, list[Tried]]:
    groups: dict[Alike, list[Tried]] = {}
    for one in tried:
        groups.setdefault(one.alike, []).append(one)
    return groups


def _bias(groups: Mapping[Alike, Sequence[Tried]]) -> float | None:
    """Return the share by which trainings took longer than predicted; None where chance explains it (two standard errors)."""
    errors = [statistics.fmean(one.error for one in group) for group in groups.values()]
    if len(errors) < _LEAST:
        return None
    mean, error = statistics.fmean(errors), statistics.stdev(errors) / math.sqrt(len(errors))
    return math.expm1(mean) if abs(mean) > 2 * error else None
