"""Jobs of a batch system as Lublin and Feitelson model them (J. Parallel Distrib. Comput. 63, 2003), batch jobs.

Sizes: serial with one probability, else two-stage log-uniform, rounded to powers of two with another. Run times: the
logarithm has a hyper-gamma distribution whose mixture depends linearly on the size. Arrivals: the logarithm of the time
between two has a gamma distribution, and the day has slots of half an hour, weighted by a gamma distribution from 5:30 on.
Users' time limits: the run time over a ratio uniform on [0.2, 1] (the model of over-estimation of Zhang, Franke, Moreira and
Sivasubramaniam, JSSPP 2001, at 0.2), rounded up to a limit that users ask for (Tsafrir, Etsion, Feitelson, JSSPP 2005: hardly
any other than round ones).
"""

import bisect
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SERIAL, POWERS_OF_TWO = 0.2927, 0.6686
LOW, TWO_STAGE = 1.2, 0.875  # log2 of the least parallel job; probability of the first stage
FIRST, SECOND = (6.57, 0.823), (639.1, 0.0156)  # shape and scale of the gammas of ln of the run time
SLOPE, LEVEL = -0.003, 0.6986  # probability of the first by the size
ARRIVAL, RUSH = (6.0415, 0.8531), 1.0519  # of ln of the time between arrivals; rush hours against the whole day
DAILY = (6.1271, 5.2740)  # of the slot of the day
SLOT, SLOTS, DAY_BEGINS = 1800.0, 48, 11
LONGEST = 12.0  # ln of seconds, 45 h: longer ones are drawn again
OVERESTIMATE = 0.2
POPULAR = tuple(
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
        """Return how many of the available nodes it takes; at least `nodes` are available."""
        return min(self.nodes, available)

    def seconds_on(self, nodes: int) -> float:
        """Return the seconds that it runs on the nodes that it took, without a limit."""
        assert nodes == self.nodes
        return self.run


def model_jobs(count: int, *, nodes: int, load: float, seed: int) -> list[ModelJob]:
    """Return jobs in the order of their submission.

    Args:
        count: of them.
        nodes: of the machine.
        load: node-seconds of all jobs over those of the machine; the times between arrivals are stretched to it.
        seed: of what is drawn.
    """
    rng = np.random.default_rng(seed)
    sizes = [_size(rng, math.log2(nodes)) for _ in range(count)]
    runs = [_run(rng, size) for size in sizes]
    # The mean of the time between arrivals, stretched to the load before the cycle of the day bends it.
    gaps = np.exp(np.minimum(rng.gamma(ARRIVAL[0] * RUSH, ARRIVAL[1], count), LONGEST))
    wanted = float(np.dot(sizes, runs)) / (load * nodes)
    arrivals = _through_the_day(np.cumsum(gaps * wanted / gaps.sum()))
    return [ModelJob(at, size, run, _limit(rng, run)) for at, size, run in zip(arrivals, sizes, runs, strict=True)]


def _size(rng: np.random.Generator, high: float) -> int:
    if rng.random() < SERIAL:
        return 1
    middle = high - 2.5
    low, top = (LOW, middle) if rng.random() < TWO_STAGE else (middle, high)
    drawn = rng.uniform(low, top)
    return int(2 ** round(drawn) if rng.random() < POWERS_OF_TWO else round(2**drawn))


def _run(rng: np.random.Generator, size: int) -> float:
    first = min(1.0, max(0.0, SLOPE * size + LEVEL))
    while True:
        drawn = rng.gamma(*(FIRST if rng.random() < first else SECOND))
        if drawn <= LONGEST:
            return max(1.0, math.exp(drawn))


def _through_the_day(points: NDArray[np.float64]) -> list[float]:
    """Return the times at which the day's slots, each as fast as its weight, have let so many seconds of the mean pass."""
    weights = day_weights()
    passed = np.concatenate([[0.0], np.cumsum(weights * SLOT)])
    days, rest = np.divmod(points, passed[-1])
    slots = np.minimum(np.searchsorted(passed, rest, "right") - 1, SLOTS - 1)
    within = (rest - passed[slots]) / weights[slots]
    return [float(value) for value in days * SLOT * SLOTS + slots * SLOT + within]


def day_weights() -> NDArray[np.float64]:
    """Return the share of each slot from midnight on in the day's arrivals, over that of an even day; shape (48,)."""
    from scipy.special import gammainc

    edges = gammainc(DAILY[0], (np.arange(SLOTS + 1) + DAY_BEGINS - 0.5) / DAILY[1])
    weights = np.roll(np.diff(edges), DAY_BEGINS)
    weights = np.maximum(weights, 1e-4)
    result: NDArray[np.float64] = weights * SLOTS / weights.sum()
    return result


def _limit(rng: np.random.Generator, run: float) -> float:
    path = run / rng.uniform(OVERESTIMATE, 1.0)
    return POPULAR[min(bisect.bisect_left(POPULAR, path), len(POPULAR) - 1)]
