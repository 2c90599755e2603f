"""An upper bound of a quantile of waits from their history alone, in the manner of QBETS (Nurmi, Brevik, Wolski 2007).

It assumes no distribution and no model of the scheduler: the k-th smallest of n waits is above the quantile q with confidence C if
P(Binomial(n, q) < k) >= C. Queues change: if more successive waits exceed their bounds than chance allows, the history is cut to its
newest waits.
"""

import bisect
import functools
import math
from collections import deque

QUANTILE = 0.9
CONFIDENCE = 0.95
"""Confidence that the bound is not below the quantile, for independent waits. Waits are not independent, so at best 90 % are covered;
lower confidences cover fewer (benchmarks/queue/queue_bounds.py --confidence).
"""
MAX_HISTORY = 1000
"""Maximum length of the history: with more waits, the bound hardly gets closer to the quantile."""
MAX_RUNS = ((0.3, 4), (0.5, 5), (0.65, 7), (0.75, 8), (0.85, 11), (0.925, 19), (1.0, 32))
"""By the correlation of successive waits (up to the first number), the length of a run of exceedances of the 0.9 quantile that occurs
with probability 1 %: of a normal autoregressive series of first order, by simulation of a million values each.
"""


@functools.lru_cache(maxsize=4 * MAX_HISTORY)
def bound_rank(count: int, *, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int | None:
    """Return the rank (from 1, ascending) of the value that bounds the quantile from above; None if there are too few values.

    Args:
        count: number of independent values.
        quantile: between 0 and 1.
        confidence: that the bound is not below the quantile.
    """
    below = 0.0
    for k in range(1, count + 1):
        below += _probability(k - 1, count, quantile)
        if below >= confidence:
            return k
    return None


def min_values(quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int:
    """Return the number of values that a bound needs: 29 for the 0.9 quantile at 95 % confidence."""
    return math.ceil(math.log1p(-confidence) / math.log(quantile) - 1e-12)


def _probability(k: int, count: int, quantile: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(ways + k * math.log(quantile) + (count - k) * math.log1p(-quantile))


class WaitSeries:
    """Waits (seconds) in the order in which they became known, since the last change point."""

    def __init__(self, *, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> None:
        self.quantile, self.confidence = quantile, confidence
        self.waits: deque[float] = deque()
        self.changes = 0  # change points so far
        self._ascending: list[float] = []
        self._exceeding = 0  # number of newest successive waits above their bounds

    def add(self, wait: float) -> None:
        """Add a wait, after reading the bound that was valid for it."""
        bound = self.bound()
        self._exceeding = self._exceeding + 1 if bound is not None and wait > bound else 0
        self.waits.append(wait)
        bisect.insort(self._ascending, wait)
        if len(self.waits) > MAX_HISTORY:
            self._drop()
        if self._exceeding and self._exceeding >= self._longest_run():
            self._trim()

    def bound(self) -> float | None:
        """Return the bound of the quantile in seconds; None if there are too few waits."""
        place = bound_rank(len(self._ascending), quantile=self.quantile, confidence=self.confidence)
        return None if place is None else self._ascending[place - 1]

    def middle(self) -> float | None:
        """Return the median, seconds."""
        return self._ascending[(len(self._ascending) - 1) // 2] if self._ascending else None

    def _trim(self) -> None:
        """Cut the history to the newest waits that a bound needs."""
        for _ in range(len(self.waits) - min_values(self.quantile, self.confidence)):
            self._drop()
        self._exceeding = 0
        self.changes += 1

    def _drop(self) -> None:
        oldest = self.waits.popleft()
        del self._ascending[bisect.bisect_left(self._ascending, oldest)]

    def _longest_run(self) -> int:
        if self._exceeding < MAX_RUNS[0][1]:
            return MAX_RUNS[0][1]
        alike = _correlation(self.waits)
        return next(longest for most, longest in MAX_RUNS if alike <= most)


def _correlation(waits: deque[float]) -> float:
    """Return the correlation of successive logarithms, because waits are distributed over orders of magnitude."""
    import numpy as np

    logs = np.log1p(np.asarray(waits))
    logs -= logs.mean()
    variance = float(np.square(logs).sum())
    return min(1.0, float((logs[1:] * logs[:-1]).sum()) / variance) if variance else 0.0
