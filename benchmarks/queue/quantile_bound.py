"""An upper bound of a quantile of waits from their history alone, in the manner of QBETS (Nurmi, Brevik, Wolski 2007).

No distribution and no model of the scheduler: of n waits the k-th smallest is above the quantile q with confidence C where
P(Binomial(n, q) < k) >= C. Queues change: a run of waits above their bounds that is too long for chance trims the history
to its newest waits.
"""

import bisect
import functools
import math
from collections import deque

QUANTILE = 0.9
CONFIDENCE = 0.95
"""That the bound is not below the quantile, were the waits independent. They are not, so that 90 % are covered at best: lower
confidences cover fewer (benchmarks/queue/queue_bounds.py --confidence).
"""
MOST = 1000
"""Waits that are remembered: with more, the bound hardly comes nearer to the quantile."""
RUNS = ((0.3, 4), (0.5, 5), (0.65, 7), (0.75, 8), (0.85, 11), (0.925, 19), (1.0, 32))
"""By the correlation of a wait with the one before it (up to the first), the length of a run of exceedances of the 0.9 quantile
that one run in a hundred has: of a normal autoregressive series of first order, by simulation of a million values each.
"""


@functools.lru_cache(maxsize=4 * MOST)
def rank(count: int, *, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int | None:
    """Return which of so many values in ascending order, from 1, bounds their quantile from above; None: they are too few.

    Args:
        count: values, independent of each other.
        quantile: between 0 and 1.
        confidence: that the bound is not below the quantile.
    """
    below = 0.0
    for k in range(1, count + 1):
        below += _probability(k - 1, count, quantile)
        if below >= confidence:
            return k
    return None


def fewest(quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int:
    """Return how many values a bound needs: 29 for the 0.9 quantile at 95 % confidence."""
    return math.ceil(math.log1p(-confidence) / math.log(quantile) - 1e-12)


def _probability(k: int, count: int, quantile: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(ways + k * math.log(quantile) + (count - k) * math.log1p(-quantile))


class WaitSeries:
    """Waits (seconds) in the order in which they became known, back to the last change point."""

    def __init__(self, *, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> None:
        self.quantile, self.confidence = quantile, confidence
        self.waits: deque[float] = deque()
        self.changes = 0  # change points so far
        self._ascending: list[float] = []
        self._exceeding = 0  # the newest waits in a row that were above their bounds

    def add(self, wait: float) -> None:
        """Take the next wait, after the bound that was valid for it."""
        bound = self.bound()
        self._exceeding = self._exceeding + 1 if bound is not None and wait > bound else 0
        self.waits.append(wait)
        bisect.insort(self._ascending, wait)
        if len(self.waits) > MOST:
            self._drop()
        if self._exceeding and self._exceeding >= self._longest_run():
            self._trim()

    def bound(self) -> float | None:
        """Return the bound of the quantile, seconds; None where there are too few waits."""
        place = rank(len(self._ascending), quantile=self.quantile, confidence=self.confidence)
        return None if place is None else self._ascending[place - 1]

    def middle(self) -> float | None:
        """Return the median, seconds."""
        return self._ascending[(len(self._ascending) - 1) // 2] if self._ascending else None

    def _trim(self) -> None:
        """Keep as many of the newest waits as a bound needs."""
        for _ in range(len(self.waits) - fewest(self.quantile, self.confidence)):
            self._drop()
        self._exceeding = 0
        self.changes += 1

    def _drop(self) -> None:
        oldest = self.waits.popleft()
        del self._ascending[bisect.bisect_left(self._ascending, oldest)]

    def _longest_run(self) -> int:
        if self._exceeding < RUNS[0][1]:
            return RUNS[0][1]
        alike = _correlation(self.waits)
        return next(longest for most, longest in RUNS if alike <= most)


def _correlation(waits: deque[float]) -> float:
    """Return that of successive logarithms: waits are distributed over orders of magnitude."""
    import numpy as np

    logs = np.log1p(np.asarray(waits))
    logs -= logs.mean()
    variance = float(np.square(logs).sum())
    return min(1.0, float((logs[1:] * logs[:-1]).sum()) / variance) if variance else 0.0
