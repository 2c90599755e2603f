"""Jobs of a batch system by the model of Lublin and Feitelson (J. Parallel Distrib. Comput. 63, 2003), batch jobs.

Sizes: serial with one probability, else two-stage log-uniform, rounded to powers of two with another probability. Run times: the
logarithm has a hyper-gamma distribution whose mixture depends linearly on the size. Arrivals: the logarithm of the time between two
arrivals has a gamma distribution, and the day has slots of half an hour, weighted by a gamma distribution from 5:30 on. Users' time
limits: the run time divided by a ratio uniform on [0.2, 1] (the model of over-estimation of Zhang, Franke, Moreira and
Sivasubramaniam, JSSPP 2001, at 0.2), rounded up to a common limit (Tsafrir, Etsion, Feitelson, JSSPP 2005: users request almost only
round limits).
"""

import bisect
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SERIAL_PROBABILITY, POWER_OF_TWO_PROBABILITY = 0.2927, 0.6686
LOW, TWO_STAGE = 1.2, 0.875  # log2 of the smallest parallel job; probability of the first stage
FIRST, SECOND = (6.57, 0.823), (639.1, 0.0156)  # shape and scale of the gamma distributions of ln of the run time
SLOPE, LEVEL = -0.003, 0.6986  # probability of the first distribution, linear in the size
ARRIVAL, RUSH = (6.0415, 0.8531), 1.0519  # of ln of the time between arrivals; rush hours relative to the whole day
DAILY = (6.1271, 5.2740)  # of the slot of the day
SLOT, SLOTS, DAY_BEGINS = 1800.0, 48, 11
MAX_LOG_SECONDS = 12.0  # ln of seconds, 45 h: longer run times are drawn again
OVERESTIMATE = 0.2
COMMON_LIMITS = tuple(
    60.0 * m for m in (5, 10, 15, 30, 60, 120, 180, 240, 360, 480, 720, 1080, 1440, 2160, 2880, 4320, 7200, 14400)
)


@dataclass(frozen=True)
class ModelJob:
    """A job of the model; seconds."""

    submitted: float
    nodes: int
    run: float
    limit: float

    def choose_nodes(self, available: int) -> int:
        """Return how many of the available nodes the job takes; at least `nodes` are available."""
        return min(self.nodes, available)

    def seconds_on(self, nodes: int) -> float:
        """Return the run time in seconds on the granted nodes, without a limit."""
        assert nodes == self.nodes
        return self.run


def generate_jobs(count: int, *, nodes: int, load: float, seed: int) -> list[ModelJob]:
    """Return jobs in the order of their submission.

    Args:
        count: number of jobs.
        nodes: of the machine.
        load: node-seconds of all jobs relative to those of the machine; the times between arrivals are scaled to it.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    sizes = [_draw_size(rng, math.log2(nodes)) for _ in range(count)]
    runs = [_draw_run_time(rng, size) for size in sizes]
    # The mean time between arrivals, scaled to the load before the daily cycle distorts it.
    gaps = np.exp(np.minimum(rng.gamma(ARRIVAL[0] * RUSH, ARRIVAL[1], count), MAX_LOG_SECONDS))
    wanted = float(np.dot(sizes, runs)) / (load * nodes)
    arrivals = _distort_by_day(np.cumsum(gaps * wanted / gaps.sum()))
    return [ModelJob(at, size, run, _draw_limit(rng, run)) for at, size, run in zip(arrivals, sizes, runs, strict=True)]


def _draw_size(rng: np.random.Generator, high: float) -> int:
    if rng.random() < SERIAL_PROBABILITY:
        return 1
    middle = high - 2.5
    low, top = (LOW, middle) if rng.random() < TWO_STAGE else (middle, high)
    drawn = rng.uniform(low, top)
    return int(2 ** round(drawn) if rng.random() < POWER_OF_TWO_PROBABILITY else round(2**drawn))


def _draw_run_time(rng: np.random.Generator, size: int) -> float:
    first = min(1.0, max(0.0, SLOPE * size + LEVEL))
    while True:
        drawn = rng.gamma(*(FIRST if rng.random() < first else SECOND))
        if drawn <= MAX_LOG_SECONDS:
            return max(1.0, math.exp(drawn))


def _distort_by_day(points: NDArray[np.float64]) -> list[float]:
    """Return the times at which the day's slots, which run at the rate of their weights, reach the given seconds of uniform arrivals."""
    weights = day_weights()
    passed = np.concatenate([[0.0], np.cumsum(weights * SLOT)])
    days, rest = np.divmod(points, passed[-1])
    slots = np.minimum(np.searchsorted(passed, rest, "right") - 1, SLOTS - 1)
    within = (rest - passed[slots]) / weights[slots]
    return [float(value) for value in days * SLOT * SLOTS + slots * SLOT + within]


def day_weights() -> NDArray[np.float64]:
    """Return the share of each slot from midnight on in the day's arrivals, relative to a uniform day; shape (48,)."""
    from scipy.special import gammainc

    edges = gammainc(DAILY[0], (np.arange(SLOTS + 1) + DAY_BEGINS - 0.5) / DAILY[1])
    weights = np.roll(np.diff(edges), DAY_BEGINS)
    weights = np.maximum(weights, 1e-4)
    result: NDArray[np.float64] = weights * SLOTS / weights.sum()
    return result


def _draw_limit(rng: np.random.Generator, run: float) -> float:
    path = run / rng.uniform(OVERESTIMATE, 1.0)
    return COMMON_LIMITS[min(bisect.bisect_left(COMMON_LIMITS, path), len(COMMON_LIMITS) - 1)]
