"""When a series of times has come to another level, and since when; without distributions, so that spikes do not matter."""

import math
from collections import deque

import numpy as np

from tula_cli.models.time.noise import Floats

MIN_VALUES = 10
"""Values that a new level has to last for, and that have to be known of the level before."""
MAX_VALUES = 8 * MIN_VALUES
"""What a new level has to last for after others that did not."""
WINDOW = 8
"""Values that are remembered, in multiples of what a level has to last for."""
THRESHOLD = 5.0
"""Of the largest standardised Mann-Whitney statistic."""
MIN_RATIO = 1.1
"""Ratio of two levels below which a change makes too little difference to be told."""


class ChangePointTest:
    """Looks for a change of level in a series, value by value.

    Every split of the remembered values is judged by Mann and Whitney's statistic (1947), the largest counts, as in the
    change-point model of Hawkins and Deng (2010). It goes by ranks: how often it errs on independent values does not
    depend on their distribution, and a spike counts as one value, however high. Where neighbours are alike, as of a load
    that lingers, they count less. A change is told where the medians on both sides also differ by NOTABLE. What is
    remembered begins with the new level then, and the next change has to last twice as long, up to MOST: a load that
    comes and goes is not told for ever.
    """

    def __init__(self) -> None:
        self.least = MIN_VALUES
        self.values: deque[float] = deque(maxlen=WINDOW * MAX_VALUES)

    def add(self, value: float) -> tuple[int, int] | None:
        """Take the next value; return how many of the newest are of a new level, and how many before them of the old one.

        None where there is no new level.

        Args:
            value: positive, as times are.
        """
        self.values.append(value)
        values = np.asarray(self.values)[-WINDOW * self.least :]
        if len(values) < 2 * MIN_VALUES:
            return None
        statistics = split_statistics(values)
        split = int(np.argmax(np.abs(statistics[MIN_VALUES - 1 : len(values) - MIN_VALUES]))) + MIN_VALUES
        if len(values) - split < self.least:
            return None
        certainty = abs(statistics[split - 1]) / math.sqrt(_variance_inflation(values, split))
        median_before, after = np.median(values[:split]), np.median(values[split:])
        if certainty < THRESHOLD or abs(math.log(after / median_before)) < math.log(MIN_RATIO):
            return None
        self.least = min(MAX_VALUES, 2 * self.least)
        self.values = deque(values[split:], maxlen=WINDOW * MAX_VALUES)
        return len(values) - split, split


def split_statistics(values: Floats) -> Floats:
    """Return the standardised Mann-Whitney statistic of each split of a series; positive where what follows is larger.

    Args:
        values: shape (n,).

    Returns:
        Shape (n - 1,): of the split after the first value, the first two and so on.
    """
    count = len(values)
    ranks = _ranks(values)
    # Each pair within a part adds 1 and -1: what is left of the sum of a part's signs is between the parts.
    between = -np.cumsum(2 * ranks - count - 1)[:-1]
    sizes = np.arange(1, count)
    return between / np.sqrt(sizes * (count - sizes) * (count + 1) / 3)


def _variance_inflation(values: Floats, split: int) -> float:
    """Return by how much the variance of a level's mean rank is larger than with independent values.

    By the autocorrelation of successive ranks within the two levels, as of an autoregressive series; where neighbours are
    alike, fewer values count.
    """
    ranks = _ranks(values)
    ranks[:split] -= ranks[:split].mean()
    ranks[split:] -= ranks[split:].mean()
    variance = float(np.square(ranks).mean())
    alike = float((ranks[1:] * ranks[:-1]).mean()) / variance if variance else 0.0
    alike = min(0.95, max(0.0, alike))
    return (1 + alike) / (1 - alike)


def _ranks(values: Floats) -> Floats:
    """Return the rank of each value, from 1; the mean one of equal values."""
    ordered = np.sort(values)
    ranks: Floats = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1) / 2
    return ranks
