"""The centre and the noise of repeated steps; without statsmodels, so that a training process can afford it."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCKS = 5

Z90 = 1.645
"""Standard deviations from the middle of a 90 % interval to its ends."""


def compute_trimmed_mean(step_times: Sequence[float]) -> float:
    """Return the mean step time without the fastest and the slowest tenth. Seconds.

    Training time is the sum of its steps, so the mean is wanted: a median would leave out a slow step that comes every
    few steps (a refilled loader queue). Among a few dozen steps a single stall would move a plain mean too far.
    """
    return float(np.mean(_clip_outliers(step_times)))


def compute_block_deviation(step_times: Sequence[float]) -> float | None:
    """Return the standard deviation of the means of five successive blocks of steps; None below five steps. Seconds.

    Noise between single steps averages out over an epoch; what lasts for a block (a neighbour on the network, a clock
    that throttles) does not. Outliers are pulled in as far as `centre` leaves them out.
    """
    if len(step_times) < BLOCKS:
        return None
    trimmed = _clip_outliers(step_times)
    blocks = np.array_split(np.clip(step_times, trimmed[0], trimmed[-1]), BLOCKS)
    return float(np.std([block.mean() for block in blocks], ddof=1))


def compute_standard_error(step_times: Sequence[float]) -> float:
    """Return the standard error of `centre`; inf below five steps. Seconds.

    Two are known, and the larger counts. One is that of a trimmed mean of independent values (Tukey and McLaughlin 1963: by
    the variance where outliers are pulled in). The other is that of the means of five successive blocks (batch means),
    which also holds where neighbouring steps are alike; by itself it is too often small by chance.
    """
    spread = compute_block_deviation(step_times)
    if spread is None:
        return math.inf
    trimmed, count = _clip_outliers(step_times), len(step_times)
    pulled_in = float(np.std(np.clip(step_times, trimmed[0], trimmed[-1]), ddof=1))
    return max(pulled_in * math.sqrt(count) / len(trimmed), spread / math.sqrt(BLOCKS))


def _clip_outliers(step_times: Sequence[float]) -> Floats:
    ordered = np.sort(np.asarray(step_times, dtype=float))
    cut = max(1, len(ordered) // 10) if len(ordered) >= BLOCKS else 0
    return ordered[cut : len(ordered) - cut]
