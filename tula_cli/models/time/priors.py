"""What is believed of step times before anything is measured."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Prior:
    """What is believed of one parameter before any probe: a normal distribution."""

    mean: float
    sd: float


@dataclass(frozen=True)
class Smooth:
    """How far a residual may go (standard deviations of a logarithm) and how soon it changes (length of its argument)."""

    sd: float
    length: float
    white: float  # beside the smooth part, what belongs to one place alone


@dataclass(frozen=True)
class Local:
    """A residual over ln b and ln N together: how far it may go, and how soon it changes over either."""

    sd: float
    batch: float
    replicas: float


@dataclass(frozen=True)
class Priors:
    """Everything that the fit believes before it has seen a probe."""

    slope: Prior = Prior(0.0, 2.0)  # ln k, against the scale of the probes
    floor: Prior = Prior(0.85, 1.4)  # ln of f over k times the smallest batch
    level: Prior = Prior(-1.6, 1.5)  # ln m_0, against the compute of the smallest batch
    growth: Prior = Prior(0.0, 0.6)  # rho, beyond the collective's shape
    inside: Prior = Prior(-0.9, 1.1)  # ln of synchronisation inside one node over m_0
    forward: Prior = Prior(-0.95, 0.7)  # logit phi
    exposed: Prior = Prior(-2.6, 1.0)  # ln tau
    shared: Prior = Prior(0.0, 0.3)  # growth of synchronisation between nodes with the GPUs of each
    inner: Prior = Prior(0.7, 0.4)  # and of that inside a node
    crowded: Prior = Prior(0.1, 0.2)  # growth of the floor with the GPUs of a node, whose processes share its CPU
    compute: Smooth = Smooth(0.06, 1.2, 0.05)  # residual of ln c over ln b
    sync: Smooth = Smooth(0.28, 0.25, 0.2)  # residual of ln m over ln R
    local_step: Local = Local(0.04, 1.0, 0.5)  # residual of ln t over both
    local_compute: Local = Local(0.04, 1.5, 0.7)  # residual of ln c over both
    local_sync: Local = Local(
        0.2, math.inf, 0.5
    )  # residual of ln m between nodes, where nodes of several sizes were measured
    p: float = 7.5  # how sharply compute and synchronisation take over from each other
    q: float = 1.2  # the same for floor and slope
    step_noise: float = 0.03  # of a step time, from one job to the next
    compute_noise: float = 0.04  # of its compute, measured apart
    sync_noise: float = 0.05  # of its synchronisation

    @property
    def parameters(self) -> tuple[Prior, ...]:
        return (
            self.slope,
            self.floor,
            self.level,
            self.growth,
            self.inside,
            self.forward,
            self.exposed,
            self.shared,
            self.inner,
            self.crowded,
        )

    @cached_property
    def means(self) -> Floats:
        return np.array([prior.mean for prior in self.parameters])

    @cached_property
    def sds(self) -> Floats:
        return np.array([prior.sd for prior in self.parameters])


PRIORS = Priors()
"""Found on public measurements; `benchmarks/replay/replay_priors.py` tells how well they do where they were not found."""

SHARDED = replace(PRIORS, level=Prior(PRIORS.level.mean + math.log(1.5), PRIORS.level.sd), forward=Prior(-3.0, 1.0))
"""Of a model in shares. Two all-gathers and a reduce-scatter move half as much again as an all-reduce, which is one of each
(Rajbhandari et al. 2020, section 7), and the forward pass hides its all-gathers as the backward pass does its traffic."""

PARAMETERS = 10
SLOPE, FLOOR, LEVEL, GROWTH, INSIDE, FORWARD, EXPOSED, SHARED, INNER, CROWDED = range(PARAMETERS)
SHAPES: Mapping[str, Callable[[Floats], Floats]] = {
    # A ring's traffic grows as 1 - 1/R, by 1.9 from 2 to 16; measured rings do so evenly, not mostly from 2 to 4.
    "ring": lambda replicas: replicas**0.2,
    "tree": lambda replicas: np.log2(replicas),
    "reduce_scatter_allgather": lambda replicas: 2 * (1 - 1 / replicas) + 0.2 * np.log2(replicas),
    "parameter_server": lambda replicas: replicas - 1,
}
"""How synchronisation grows with the replicas (two and more), up to a factor."""
