"""The formulas of the step-time model, with their derivatives by the whitened coordinates that are fitted."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# --- Priors

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Prior:
    """The prior of one parameter: a normal distribution."""

    mean: float
    sd: float


@dataclass(frozen=True)
class SmoothResidual:
    """Standard deviation (of a logarithm) and correlation length (of its argument) of a smooth residual."""

    sd: float
    length: float
    white: float  # beside the smooth part, what belongs to one place alone


@dataclass(frozen=True)
class LocalResidual:
    """A residual over ln b and ln N together: its standard deviation and its correlation lengths over both."""

    sd: float
    batch: float
    replicas: float


@dataclass(frozen=True)
class Priors:
    """All prior assumptions of the fit."""

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
    compute: SmoothResidual = SmoothResidual(0.06, 1.2, 0.05)  # residual of ln c over ln b
    sync: SmoothResidual = SmoothResidual(0.28, 0.25, 0.2)  # residual of ln m over ln R
    local_step: LocalResidual = LocalResidual(0.04, 1.0, 0.5)  # residual of ln t over both
    local_compute: LocalResidual = LocalResidual(0.04, 1.5, 0.7)  # residual of ln c over both
    local_sync: LocalResidual = LocalResidual(
        0.2, math.inf, 0.5
    )  # residual of ln m between nodes, where nodes of several sizes were measured
    p: float = 7.5  # how sharply compute and synchronisation take over from each other
    additive: float = 1 / 21  # probability that compute hides no synchronisation: then p is 1
    q: float = 1.2  # the same for floor and slope
    step_noise: float = 0.03  # of a step time, from one job to the next
    compute_noise: float = 0.04  # of its compute, measured apart
    sync_noise: float = 0.05  # of its synchronisation

    def __post_init__(self) -> None:
        if not 0 < self.additive < 1:
            raise ValueError(f"additive must be a probability above 0 and below 1, got {self.additive}")

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
"""Fitted to public measurements; `benchmarks/replay/replay_priors.py` evaluates them on data to which they were not
fitted. `additive` comes from step times whose synchronisation was hidden from the fit, and from the same times
recomposed without any overlap, leaving out each application and each cluster once (docs/explanation/how-it-measures.md)."""

SHARDED = replace(PRIORS, level=Prior(PRIORS.level.mean + math.log(1.5), PRIORS.level.sd), forward=Prior(-3.0, 1.0))
"""Priors for a sharded model. Two all-gathers and a reduce-scatter move half as much again as an all-reduce, which is
one of each (Rajbhandari et al. 2020, section 7), and the forward pass hides its all-gathers as the backward pass hides
its traffic."""

_BUCKETS = (1 << 20) + (25 << 20)
"""Bytes of DDP's first two buckets of gradients (Li et al. 2020, section 4.2; torch's defaults)."""


def choose_priors(*, gradient_bytes: int, sharded: bool) -> Priors:
    """Return the priors of a job.

    If the gradients fill at most two buckets, DDP sends all but the first bucket only after the backward pass, so that
    the prior probability that compute hides nothing is one half. Measured gradients of a sharded model, which has no
    buckets, were not hidden either.

    Args:
        gradient_bytes: of the whole model; 0 if unknown.
        sharded: whether the ranks share the model.
    """
    priors = SHARDED if sharded else PRIORS
    return replace(priors, additive=0.5) if 0 < gradient_bytes <= _BUCKETS else priors


def may_hide_nothing(priors: Priors) -> bool:
    """Return whether the priors make it likely that compute hides nothing, even if compute is measured apart."""
    return priors.additive > PRIORS.additive


PARAMETERS = 10
SLOPE, FLOOR, LEVEL, GROWTH, INSIDE, FORWARD, EXPOSED, SHARED, INNER, CROWDED = range(PARAMETERS)
SHAPES: Mapping[str, Callable[[Floats], Floats]] = {
    # A ring's traffic grows as 1 - 1/R, by 1.9 from 2 to 16; measured rings do so evenly, not mostly from 2 to 4.
    "ring": lambda replicas: replicas**0.2,
    "tree": lambda replicas: np.log2(replicas),
    "reduce_scatter_allgather": lambda replicas: 2 * (1 - 1 / replicas) + 0.2 * np.log2(replicas),
    "parameter_server": lambda replicas: replicas - 1,
}
"""Growth of synchronisation with the number of replicas (two or more), up to a factor."""


# --- Correlated residuals


@dataclass(frozen=True)
class Process:
    """A Gaussian process over a logarithm; its values at some places are given by whitened coordinates."""

    places: Floats
    sd: float
    length: float
    white: float
    _root: Floats  # lower Cholesky factor of the covariance at the places

    @classmethod
    def from_positions(cls, positions: Floats, residual: SmoothResidual) -> "Process":
        unique = np.unique(positions)
        sd, length, white = residual.sd, residual.length, residual.white
        process = cls(unique, sd, length, white, np.zeros((0, 0)))
        covariance = process._compute_covariance(unique, unique) + 1e-10 * np.eye(len(unique))
        return cls(unique, sd, length, white, np.asarray(np.linalg.cholesky(covariance), dtype=float))

    def compute_map(self, at: Floats) -> Floats:
        """Return the matrix, shape (n, places), that maps coordinates to the expected values at `at`."""
        if not len(self.places):
            return np.zeros((len(at), 0))
        distinct, where = np.unique(at, return_inverse=True)
        mapped = np.asarray(np.linalg.solve(self._root, self._compute_covariance(self.places, distinct)), dtype=float)
        return mapped.T[where]

    def compute_unseen_variance(self, mapped: Floats) -> Floats:
        """Return the variance not explained by the values at the places, shape (n,), where `compute_map` returns `mapped`."""
        explained: Floats = np.square(mapped).sum(axis=1)
        return np.maximum(0.0, self.sd**2 + self.white**2 - explained)

    def compute_unseen_covariance(self, at: Floats) -> Floats:
        """Return the covariance not explained by the values at the places, shape (n, n)."""
        mapped = self.compute_map(at)
        return self._compute_covariance(at, at) - mapped @ mapped.T

    def _compute_covariance(self, left_positions: Floats, right_positions: Floats) -> Floats:
        off = np.abs(left_positions[:, None] - right_positions[None, :])
        smooth: Floats = self.sd**2 * np.exp(-0.5 * (off / self.length) ** 2)
        return smooth + self.white**2 * (off < 1e-9)


@dataclass(frozen=True)
class Rows:
    """The rows to which local residuals contribute: ln t (with all residuals) or ln c. Arrays of one length."""

    batch: Floats
    replicas: Floats
    gpus: Floats  # of a node, where they are not as many everywhere
    by_step: Floats  # derivative by the residual of ln t: 1, and 0 for a ln c
    by_compute: Floats  # and by that of ln c
    by_across: Floats  # and by that of ln m between nodes; 0 where nodes of one size were measured

    def compute_covariance(self, others: "Rows", priors: Priors) -> Floats:
        """Return the covariance of the local residuals between these rows and others, shape (n, m)."""
        off = [
            np.subtract.outer(np.log(a), np.log(b))
            for a, b in ((self.batch, others.batch), (self.replicas, others.replicas), (self.gpus, others.gpus))
        ]
        step = np.outer(self.by_step, others.by_step) * _compute_local_covariance(priors.local_step, *off)
        compute = np.outer(self.by_compute, others.by_compute) * _compute_local_covariance(priors.local_compute, *off)
        return (
            step
            + compute
            + np.outer(self.by_across, others.by_across) * _compute_local_covariance(priors.local_sync, *off)
        )

    def compute_variance(self, priors: Priors) -> Floats:
        """Return the diagonal of the rows' own covariance, shape (n,)."""
        residuals = (priors.local_step, priors.local_compute, priors.local_sync)
        by = (self.by_step, self.by_compute, self.by_across)
        contributions = [(factor * residual.sd) ** 2 for factor, residual in zip(by, residuals, strict=True)]
        return np.asarray(np.sum(contributions, axis=0), dtype=float)


def _compute_local_covariance(residual: LocalResidual, batch: Floats, replicas: Floats, gpus: Floats) -> Floats:
    off = (batch / residual.batch) ** 2 + (replicas / residual.replicas) ** 2 + (gpus / residual.replicas) ** 2
    return np.asarray(residual.sd**2 * np.exp(-0.5 * off))


# --- Formulas


@dataclass(frozen=True)
class Points:
    """Configurations in the coordinates of the model; arrays of one length."""

    replicas: Floats  # that synchronise: nodes, or GPUs where there is one node
    local_batch: Floats
    alone: Flags  # one GPU in all: nothing to synchronise
    inside: Flags  # the GPUs of one node, where the others are several nodes
    gpus: Floats | None = None  # of a node, where nodes of several sizes were measured; None: as many everywhere

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def sizes(self) -> Floats:
        """GPUs per node; ones if the number is the same everywhere."""
        return np.ones(self.replicas.shape) if self.gpus is None else self.gpus


@dataclass(frozen=True)
class FeaturePoints:
    """Points with all quantities that are constant during a fit."""

    points: Points
    frame: "ReferenceFrame"
    across: Flags  # whose synchronisation follows the shape over the replicas
    log_batch: Floats
    log_replicas: Floats  # against the fewest measured
    log_shape: Floats  # against that of the fewest measured
    log_gpus: Floats  # of a node, against the fewest measured
    log_inner: Floats  # and against the most
    single: Flags  # one GPU a node, where other nodes have more: nothing to synchronise inside
    u: Floats  # (n, places of u)
    v: Floats  # (n, places of v)


@dataclass(frozen=True)
class ReferenceFrame:
    """The reference point of the parameters, and the places of the residuals."""

    log_scale: float  # ln seconds a sample
    log_batch: float  # of the smallest batch
    replicas: float  # the fewest that synchronise
    gpus: tuple[float, float] | None  # of a node, the fewest and the most; None where nodes of one size were measured
    shape: Callable[[Floats], Floats]
    u: Process
    v: Process
    priors: Priors

    @classmethod
    def from_points(
        cls, points: Points, compute: Floats, shape: Callable[[Floats], Floats], priors: Priors
    ) -> "ReferenceFrame":
        smallest = float(points.local_batch.min())
        across = ~points.alone & ~points.inside
        return cls(
            log_scale=float(np.median(np.log(compute / (points.local_batch + smallest)))),
            log_batch=math.log(smallest),
            replicas=float(points.replicas[across].min()) if across.any() else 2.0,
            gpus=None if points.gpus is None else (float(points.gpus.min()), float(points.gpus.max())),
            shape=shape,
            u=Process.from_positions(np.log(points.local_batch), priors.compute),
            v=Process.from_positions(np.log(points.replicas[across]), priors.sync),
            priors=priors,
        )

    @cached_property
    def size(self) -> int:
        return PARAMETERS + len(self.u.places) + len(self.v.places)

    def compute_features(self, points: Points) -> FeaturePoints:
        across = ~points.alone & ~points.inside
        replicas = np.where(across, points.replicas, self.replicas)
        least = self.shape(np.array([self.replicas]))
        fewest, most = self.gpus or (1.0, 1.0)
        return FeaturePoints(
            points=points,
            frame=self,
            across=across,
            log_batch=np.log(points.local_batch),
            log_replicas=np.log(replicas / self.replicas),
            log_shape=np.log(self.shape(replicas) / least),
            log_gpus=np.log(points.sizes / fewest),
            log_inner=np.log(points.sizes / most),
            single=points.sizes == 1,
            u=self.u.compute_map(np.log(points.local_batch)),
            v=self.v.compute_map(np.log(replicas)) * across[:, None],
        )


@dataclass(frozen=True)
class ModelValues:
    """Values of the model at some points.

    Derivatives of ln t and ln c are with respect to the whitened coordinates, shape (n, size).
    """

    log_step: Floats
    log_compute: Floats
    sync: Floats  # seconds
    of_step: Floats
    of_compute: Floats
    by_compute: Floats  # derivative of ln t by ln c
    by_sync: Floats  # and by ln m
    by_across: Floats  # and by ln of the part of m that is between nodes


def evaluate(z: Floats, at: FeaturePoints) -> ModelValues:
    """Evaluate the model and its derivatives.

    Args:
        z: whitened coordinates, shape (size,).
        at: the points.
    """
    frame, priors, parameter_count = at.frame, at.frame.priors, PARAMETERS
    theta, residuals = priors.means + priors.sds * z[:parameter_count], z[parameter_count:]
    u, v = residuals[: at.u.shape[1]], residuals[at.u.shape[1] :]
    slope, floor, level, growth, inside, forward, exposed, shared, inner, crowded = theta[:, None]
    log_slope = frame.log_scale + slope + at.log_batch
    log_floor = frame.log_scale + slope + floor + frame.log_batch + crowded * at.log_gpus
    log_power = np.logaddexp(priors.q * log_slope, priors.q * log_floor)
    log_level = frame.log_scale + frame.log_batch + math.log(2) + level
    log_across = np.clip(
        log_level + growth * at.log_replicas + at.log_shape + shared * at.log_gpus + v @ at.v.T, -60.0, 60.0
    )
    log_inside = np.clip(log_level + inside + inner * at.log_inner, -60.0, 60.0)
    # Where nodes of one size were measured, what they synchronise inside is part of their level.
    together = at.points.inside if frame.gpus is None else ~at.points.alone & ~at.single
    log_across, log_inside = np.where(at.across, log_across, -np.inf), np.where(together, log_inside, -np.inf)
    floor_share = np.exp(priors.q * log_floor - log_power)  # of the floor in the compute's sum of q-th powers
    # Clipped where they saturate: a step that is tried and rejected may go anywhere.
    phi = float(1 / (1 + np.exp(-np.clip(forward[0], -30.0, 30.0))))
    tau = float(np.exp(np.minimum(exposed[0], 5.0)))

    log_compute, log_sync = log_power / priors.q + u @ at.u.T, np.logaddexp(log_across, log_inside)
    log_backward = np.log1p(-phi) + log_compute
    # ln of the joint duration of the backward pass and the synchronisation that it hides.
    log_longer = np.logaddexp(priors.p * log_backward, priors.p * log_sync) / priors.p
    compute, sync, longer = np.exp(log_compute), np.exp(log_sync), np.exp(log_longer)
    log_step = np.log(phi * compute + longer + tau * sync)
    step = np.exp(log_step)
    backward_share, sync_share = (np.exp(priors.p * (part - log_longer)) for part in (log_backward, log_sync))
    by_compute = (phi * compute + longer * backward_share) / step
    by_sync = (longer * sync_share + tau * sync) / step
    inside_share = np.exp(log_inside - np.where(sync > 0, log_sync, 0.0))
    by_inside, by_across = by_sync * inside_share, by_sync * (1 - inside_share)

    of_compute = np.zeros((len(at.points), frame.size))
    of_compute[:, SLOPE] = 1.0
    of_compute[:, FLOOR] = floor_share
    of_compute[:, CROWDED] = floor_share * at.log_gpus
    of_compute[:, parameter_count : parameter_count + at.u.shape[1]] = at.u
    of_step = by_compute[:, None] * of_compute
    of_step[:, LEVEL] = by_sync
    of_step[:, GROWTH] = by_across * at.log_replicas
    of_step[:, SHARED] = by_across * at.log_gpus
    of_step[:, INSIDE] = by_inside
    of_step[:, INNER] = by_inside * at.log_inner
    of_step[:, FORWARD] = (compute - longer * backward_share / (1 - phi)) * phi * (1 - phi) / step
    of_step[:, EXPOSED] = tau * sync / step
    of_step[:, parameter_count + at.u.shape[1] :] = by_across[:, None] * at.v
    of_step[:, :parameter_count] *= priors.sds
    of_compute[:, :parameter_count] *= priors.sds
    return ModelValues(log_step, log_compute, sync, of_step, of_compute, by_compute, by_sync, by_across)
