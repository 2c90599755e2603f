"""Mean, parts and noise of repeated step times; without statsmodels, so that training processes can import it cheaply."""

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tula_cli.run.records.probes import Measured
from tula_cli.run.records.results import StepParts

Floats = NDArray[np.float64]

BLOCK_COUNT = 5

SETTLING_SAMPLES = 3
"""Number of first samples that are not judged, while caches fill and loaders start."""

Z90 = 1.645
"""Half the width of a 90 % interval in standard deviations."""


def compute_trimmed_mean(step_times: Sequence[float]) -> float:
    """Return the mean step time without the fastest and the slowest tenth. Seconds.

    Training time is the sum of its steps, so the mean is needed: a median would ignore a slow step that occurs every
    few steps (a refilled loader queue). Among a few dozen steps a single stall would move a plain mean too far.
    """
    return float(np.mean(_trim_outliers(step_times)))


def compute_known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known_values = [value for value in values if value is not None]
    return statistics.median(known_values) if known_values else None


def split_step_time(probe: Measured) -> StepParts:
    """Return the parts of a probe's step, in seconds; they add up to the step time, though each is measured by itself.

    Unknown parts are None; synchronisation is 0 on a single GPU. Without a known wait or synchronisation, computing is
    what a step without synchronisation takes beyond its wait.
    """
    step = compute_trimmed_mean(probe.step_times)
    wait = None if probe.data_wait is None else min(probe.data_wait, step)
    sync = 0.0 if probe.nodes * probe.gpus_per_node == 1 else probe.sync_time
    if wait is not None and sync is not None:
        sync = min(sync, step - wait)
        return StepParts(step=step, data=wait, compute=step - wait - sync, sync=sync)
    compute = None if probe.compute_time is None else max(0.0, probe.compute_time - (wait or 0.0))
    return StepParts(step=step, data=wait, compute=compute, sync=sync)


def compute_block_deviation(step_times: Sequence[float]) -> float | None:
    """Return the standard deviation of the means of five successive blocks of steps; None below five steps. Seconds.

    Noise between single steps averages out over an epoch; disturbances that last for a block (a neighbour on the
    network, a throttled clock) do not. Outliers are clipped to the range that `compute_trimmed_mean` keeps.
    """
    if len(step_times) < BLOCK_COUNT:
        return None
    trimmed = _trim_outliers(step_times)
    blocks = np.array_split(np.clip(step_times, trimmed[0], trimmed[-1]), BLOCK_COUNT)
    return float(np.std([block.mean() for block in blocks], ddof=1))


def compute_standard_error(step_times: Sequence[float]) -> float:
    """Return the standard error of `compute_trimmed_mean`; inf below five steps. Seconds.

    The larger of two estimates. One is that of a trimmed mean of independent values (Tukey and McLaughlin 1963: from
    the variance with outliers clipped). The other is that of the means of five successive blocks (batch means), which
    also holds if neighbouring steps are correlated, but alone is too often small by chance.
    """
    spread = compute_block_deviation(step_times)
    if spread is None:
        return math.inf
    trimmed, count = _trim_outliers(step_times), len(step_times)
    pulled_in = float(np.std(np.clip(step_times, trimmed[0], trimmed[-1]), ddof=1))
    return max(pulled_in * math.sqrt(count) / len(trimmed), spread / math.sqrt(BLOCK_COUNT))


def _trim_outliers(step_times: Sequence[float]) -> Floats:
    """Return the step times without the fastest and the slowest tenth, ascending."""
    ordered = np.sort(np.asarray(step_times, dtype=float))
    cut = max(1, len(ordered) // 10) if len(ordered) >= BLOCK_COUNT else 0
    return ordered[cut : len(ordered) - cut]
