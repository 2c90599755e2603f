"""The model of the time of one optimizer step (the paper's Eq. 2, with compute and synchronisation overlapped).

The formulas come first, with their derivatives by the whitened coordinates that are fitted; then the model, and a
mixture of two of them that differ in how sharply compute hides synchronisation.

If no probe has measured compute apart from synchronisation, the exponent p of the overlap can only be inferred from how
the steps on the most nodes grow with the batch. PyTorch's DDP hides synchronisation behind the backward pass (the p of
the priors) if the gradients fill several of its buckets; many other frameworks and scripts do one after the other (p =
1, the paper's Eq. 2). For jobs without that measurement and for small models both are fitted, each weighted by its
posterior probability: the prior probability times the evidence (Laplace's approximation; MacKay 2003, chapter 27). The
variance of a prediction includes the difference between the two.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tula_cli.models.choice.candidates import Flags, Floats

if TYPE_CHECKING:
    from statsmodels.regression.linear_model import RegressionResultsWrapper

# --- Priors


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
    white: float  # standard deviation of an independent part at each point


@dataclass(frozen=True)
class LocalResidual:
    """A residual over ln b and ln N together: its standard deviation and its correlation lengths over both."""

    sd: float
    batch: float
    replicas: float


@dataclass(frozen=True)
class Priors:
    """All prior assumptions of the fit."""

    slope: Prior = Prior(0.0, 2.0)  # ln k, relative to the scale of the probes
    floor: Prior = Prior(0.85, 1.4)  # ln of f over (k times the smallest batch)
    level: Prior = Prior(-1.6, 1.5)  # ln m_0, relative to the compute time of the smallest batch
    growth: Prior = Prior(0.0, 0.6)  # rho, beyond the collective's shape
    log_sync_within_node: Prior = Prior(-0.9, 1.1)  # ln of synchronisation inside one node over m_0
    forward: Prior = Prior(-0.95, 0.7)  # logit phi
    exposed: Prior = Prior(-2.6, 1.0)  # ln tau
    shared: Prior = Prior(0.0, 0.3)  # sigma: growth of synchronisation between nodes with the GPUs per node
    inner: Prior = Prior(0.7, 0.4)  # kappa: growth of synchronisation inside a node with its GPUs
    # eta: growth of the floor with the GPUs per node, whose processes share its CPU
    floor_growth_with_gpus: Prior = Prior(0.1, 0.2)
    compute: SmoothResidual = SmoothResidual(0.06, 1.2, 0.05)  # residual of ln c over ln b
    sync: SmoothResidual = SmoothResidual(0.28, 0.25, 0.2)  # residual of ln m over ln R
    local_step: LocalResidual = LocalResidual(0.04, 1.0, 0.5)  # residual of ln t over batch and replicas
    local_compute: LocalResidual = LocalResidual(0.04, 1.5, 0.7)  # residual of ln c over batch and replicas
    # residual of ln m between nodes, where nodes of several sizes were measured
    local_sync: LocalResidual = LocalResidual(0.2, math.inf, 0.5)
    p: float = 7.5  # sharpness of the transition between compute and synchronisation
    additive: float = 1 / 21  # probability that compute hides no synchronisation: then p is 1
    q: float = 1.2  # sharpness of the transition between floor and slope
    step_noise: float = 0.03  # relative standard deviation of the step time between jobs
    compute_noise: float = 0.04  # relative standard deviation of the separately measured compute time
    sync_noise: float = 0.05  # relative standard deviation of the synchronisation time

    def __post_init__(self) -> None:
        if not 0 < self.additive < 1:
            raise ValueError(f"additive must be a probability above 0 and below 1, got {self.additive}")

    @property
    def parameters(self) -> tuple[Prior, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Prior))

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

SHARDED_PRIORS = replace(
    PRIORS, level=Prior(PRIORS.level.mean + math.log(1.5), PRIORS.level.sd), forward=Prior(-3.0, 1.0)
)
"""Priors for a sharded model. Two all-gathers and a reduce-scatter move half as much again as an all-reduce, which is
one of each (Rajbhandari et al. 2020, section 7), and the forward pass hides its all-gathers as the backward pass hides
its traffic."""

_FIRST_DDP_BUCKETS_BYTES = (1 << 20) + (25 << 20)
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
    priors = SHARDED_PRIORS if sharded else PRIORS
    return replace(priors, additive=0.5) if 0 < gradient_bytes <= _FIRST_DDP_BUCKETS_BYTES else priors


def may_lack_overlap(priors: Priors) -> bool:
    """Return whether the priors make it likely that compute hides nothing, even if compute is measured apart."""
    return priors.additive > PRIORS.additive


PARAMETERS = 10
SLOPE, FLOOR, LEVEL, GROWTH, INSIDE, FORWARD, EXPOSED, SHARED, INNER, CROWDED = range(PARAMETERS)
SHAPES: Mapping[str, Callable[[Floats], Floats]] = {
    # The traffic of a ring grows as 1 - 1/R, by 1.9 from 2 to 16 replicas; measured times grow evenly in that range.
    "ring": lambda replicas: replicas**0.2,
    "tree": lambda replicas: np.log2(replicas),
    "reduce_scatter_allgather": lambda replicas: 2 * (1 - 1 / replicas) + 0.2 * np.log2(replicas),
    "parameter_server": lambda replicas: replicas - 1,
}
"""Growth of synchronisation with the number of replicas (two or more), up to a factor."""


# --- Correlated residuals


@dataclass(frozen=True)
class GaussianProcess:
    """A Gaussian process over a logarithm; its values at some positions are given by whitened coordinates."""

    positions: Floats
    sd: float
    length: float
    independent_sd: float
    _cholesky: Floats  # lower Cholesky factor of the covariance at `positions`

    @classmethod
    def from_positions(cls, positions: Floats, residual: SmoothResidual) -> "GaussianProcess":
        unique = np.unique(positions)
        sd, length, white = residual.sd, residual.length, residual.white
        process = cls(unique, sd, length, white, np.zeros((0, 0)))
        covariance = process._compute_covariance(unique, unique) + 1e-10 * np.eye(len(unique))
        return cls(unique, sd, length, white, np.asarray(np.linalg.cholesky(covariance), dtype=float))

    def compute_map(self, at: Floats) -> Floats:
        """Return the matrix, shape (n, positions), that maps coordinates to the expected values at `at`."""
        if not len(self.positions):
            return np.zeros((len(at), 0))
        distinct, where = np.unique(at, return_inverse=True)
        mapped = np.asarray(
            np.linalg.solve(self._cholesky, self._compute_covariance(self.positions, distinct)), dtype=float
        )
        return mapped.T[where]

    def compute_unseen_variance(self, mapped: Floats) -> Floats:
        """Return the variance not explained by the values at the positions, shape (n,), where `compute_map` returns `mapped`."""
        explained: Floats = np.square(mapped).sum(axis=1)
        return np.maximum(0.0, self.sd**2 + self.independent_sd**2 - explained)

    def compute_unseen_covariance(self, at: Floats) -> Floats:
        """Return the covariance not explained by the values at the positions, shape (n, n)."""
        mapped = self.compute_map(at)
        return self._compute_covariance(at, at) - mapped @ mapped.T

    def _compute_covariance(self, left_positions: Floats, right_positions: Floats) -> Floats:
        distances = np.abs(left_positions[:, None] - right_positions[None, :])
        smooth: Floats = self.sd**2 * np.exp(-0.5 * (distances / self.length) ** 2)
        return smooth + self.independent_sd**2 * (distances < 1e-9)


@dataclass(frozen=True)
class ResidualRows:
    """The rows to which local residuals contribute: ln t (with all residuals) or ln c. Arrays of one length."""

    batch: Floats
    replicas: Floats
    gpus: Floats  # GPUs per node; ones if the number is the same everywhere
    by_step: Floats  # derivative by the residual of ln t: 1 for rows of ln t, 0 for ln c
    by_compute: Floats  # derivative by the residual of ln c
    by_across: Floats  # derivative by the residual of ln m between nodes; 0 if all nodes have the same size

    def compute_covariance(self, others: "ResidualRows", priors: Priors) -> Floats:
        """Return the covariance of the local residuals between these rows and others, shape (n, m)."""
        distances = [
            np.subtract.outer(np.log(a), np.log(b))
            for a, b in ((self.batch, others.batch), (self.replicas, others.replicas), (self.gpus, others.gpus))
        ]
        step, compute, sync = (
            np.outer(by, by_others) * _compute_local_covariance(residual, *distances)
            for by, by_others, residual in (
                (self.by_step, others.by_step, priors.local_step),
                (self.by_compute, others.by_compute, priors.local_compute),
                (self.by_across, others.by_across, priors.local_sync),
            )
        )
        return np.asarray(step + compute + sync)

    def compute_variance(self, priors: Priors) -> Floats:
        """Return the diagonal of the rows' own covariance, shape (n,)."""
        residuals = (priors.local_step, priors.local_compute, priors.local_sync)
        by = (self.by_step, self.by_compute, self.by_across)
        contributions = [(factor * residual.sd) ** 2 for factor, residual in zip(by, residuals, strict=True)]
        return np.asarray(np.sum(contributions, axis=0), dtype=float)


def _compute_local_covariance(residual: LocalResidual, batch: Floats, replicas: Floats, gpus: Floats) -> Floats:
    squared_distances = (
        (batch / residual.batch) ** 2 + (replicas / residual.replicas) ** 2 + (gpus / residual.replicas) ** 2
    )
    return np.asarray(residual.sd**2 * np.exp(-0.5 * squared_distances))


# --- Formulas


@dataclass(frozen=True)
class ConfigurationPoints:
    """Configurations in the coordinates of the model; arrays of one length."""

    replicas: Floats  # synchronising replicas: nodes, or GPUs if there is one node
    local_batch: Floats
    is_single_gpu: Flags  # a single GPU: no synchronisation
    is_within_node: Flags  # one node whose GPUs synchronise, while other points have several nodes
    gpus: Floats | None = None  # GPUs per node; None if the number is the same everywhere

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def sizes(self) -> Floats:
        """GPUs per node; ones if the number is the same everywhere."""
        return np.ones(self.replicas.shape) if self.gpus is None else self.gpus


@dataclass(frozen=True)
class FeaturePoints:
    """Points with all quantities that are constant during a fit."""

    points: ConfigurationPoints
    frame: "ReferenceFrame"
    across: Flags  # whether synchronisation follows the collective's shape over replicas
    log_batch: Floats
    log_replicas: Floats  # relative to the fewest measured
    log_shape: Floats  # relative to that of the fewest measured
    log_gpus: Floats  # GPUs per node, relative to the fewest measured
    log_inner: Floats  # GPUs per node, relative to the most measured
    single: Flags  # one GPU per node while other nodes have more: no synchronisation inside
    u: Floats  # shape (n, positions of u)
    v: Floats  # shape (n, positions of v)


@dataclass(frozen=True)
class ReferenceFrame:
    """The reference point of the parameters, and the positions of the residuals."""

    log_scale: float  # ln of seconds per sample
    log_batch: float  # ln of the smallest batch
    replicas: float  # fewest synchronising replicas
    gpus: tuple[float, float] | None  # fewest and most GPUs per node; None if all nodes have the same size
    shape: Callable[[Floats], Floats]
    u: GaussianProcess
    v: GaussianProcess
    priors: Priors

    @classmethod
    def from_points(
        cls, points: ConfigurationPoints, compute: Floats, shape: Callable[[Floats], Floats], priors: Priors
    ) -> "ReferenceFrame":
        smallest = float(points.local_batch.min())
        across = ~points.is_single_gpu & ~points.is_within_node
        return cls(
            log_scale=float(np.median(np.log(compute / (points.local_batch + smallest)))),
            log_batch=math.log(smallest),
            replicas=float(points.replicas[across].min()) if across.any() else 2.0,
            gpus=None if points.gpus is None else (float(points.gpus.min()), float(points.gpus.max())),
            shape=shape,
            u=GaussianProcess.from_positions(np.log(points.local_batch), priors.compute),
            v=GaussianProcess.from_positions(np.log(points.replicas[across]), priors.sync),
            priors=priors,
        )

    @cached_property
    def size(self) -> int:
        return PARAMETERS + len(self.u.positions) + len(self.v.positions)

    def compute_features(self, points: ConfigurationPoints) -> FeaturePoints:
        across = ~points.is_single_gpu & ~points.is_within_node
        replicas = np.where(across, points.replicas, self.replicas)
        least = self.shape(np.array([self.replicas]))
        min_gpus, max_gpus = self.gpus or (1.0, 1.0)
        return FeaturePoints(
            points=points,
            frame=self,
            across=across,
            log_batch=np.log(points.local_batch),
            log_replicas=np.log(replicas / self.replicas),
            log_shape=np.log(self.shape(replicas) / least),
            log_gpus=np.log(points.sizes / min_gpus),
            log_inner=np.log(points.sizes / max_gpus),
            single=points.sizes == 1,
            u=self.u.compute_map(np.log(points.local_batch)),
            v=self.v.compute_map(np.log(replicas)) * across[:, None],
        )


@dataclass(frozen=True)
class ModelEvaluation:
    """Values of the model at some points.

    Derivatives of ln t and ln c are with respect to the whitened coordinates, shape (n, size).
    """

    log_step: Floats
    log_compute: Floats
    sync: Floats  # seconds
    of_step: Floats
    of_compute: Floats
    by_compute: Floats  # derivative of ln t by ln c
    by_sync: Floats  # derivative of ln t by ln m
    by_across: Floats  # derivative of ln t by ln of the part of m between nodes


def evaluate_model(z: Floats, at: FeaturePoints) -> ModelEvaluation:
    """Evaluate the model and its derivatives.

    Args:
        z: whitened coordinates, shape (size,).
        at: the points.
    """
    frame, priors = at.frame, at.frame.priors
    theta, residuals = priors.means + priors.sds * z[:PARAMETERS], z[PARAMETERS:]
    u, v = residuals[: at.u.shape[1]], residuals[at.u.shape[1] :]
    slope, floor, level, growth, inside, forward, exposed, shared, within_node, floor_growth = theta[:, None]
    log_slope = frame.log_scale + slope + at.log_batch
    log_floor = frame.log_scale + slope + floor + frame.log_batch + floor_growth * at.log_gpus
    log_power = np.logaddexp(priors.q * log_slope, priors.q * log_floor)
    log_level = frame.log_scale + frame.log_batch + math.log(2) + level
    log_across = np.clip(
        log_level + growth * at.log_replicas + at.log_shape + shared * at.log_gpus + v @ at.v.T, -60.0, 60.0
    )
    log_inside = np.clip(log_level + inside + within_node * at.log_inner, -60.0, 60.0)
    # If all nodes have the same size, synchronisation inside nodes is part of the level.
    is_synchronised = at.points.is_within_node if frame.gpus is None else ~at.points.is_single_gpu & ~at.single
    log_across, log_inside = np.where(at.across, log_across, -np.inf), np.where(is_synchronised, log_inside, -np.inf)
    floor_share = np.exp(priors.q * log_floor - log_power)  # share of the floor in the sum of q-th powers
    # Clipped, because rejected trial steps of the solver may be far off.
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

    of_compute = np.zeros((len(log_compute), frame.size))
    of_compute[:, SLOPE] = 1.0
    of_compute[:, FLOOR] = floor_share
    of_compute[:, CROWDED] = floor_share * at.log_gpus
    of_compute[:, PARAMETERS : PARAMETERS + at.u.shape[1]] = at.u
    of_step = by_compute[:, None] * of_compute
    of_step[:, LEVEL] = by_sync
    of_step[:, GROWTH] = by_across * at.log_replicas
    of_step[:, SHARED] = by_across * at.log_gpus
    of_step[:, INSIDE] = by_inside
    of_step[:, INNER] = by_inside * at.log_inner
    of_step[:, FORWARD] = (compute - longer * backward_share / (1 - phi)) * phi * (1 - phi) / step
    of_step[:, EXPOSED] = tau * sync / step
    of_step[:, PARAMETERS + at.u.shape[1] :] = by_across[:, None] * at.v
    of_step[:, :PARAMETERS] *= priors.sds
    of_compute[:, :PARAMETERS] *= priors.sds
    return ModelEvaluation(log_step, log_compute, sync, of_step, of_compute, by_compute, by_sync, by_across)


# --- The model for one overlap exponent
#
#     t(R, b) = phi c + [((1 - phi) c)^p + m^p]^(1/p) + tau m
#     c(b) = [f^q + (k b)^q]^(1/q) exp(u(ln b))                      local compute: floor f, slope k
#     m(R) = m_0 shape(R) / shape(R_0) (R / R_0)^rho exp(v(ln R))    synchronisation; none for one replica
#
# A share 1 - phi of the compute (the backward pass) hides synchronisation; p is the sharpness of the transition between
# the two, and tau is the share of synchronisation that is never hidden. u and v are smooth residuals (Gaussian
# processes). The paper's Eq. 2 is the case p = 1, phi = 0, tau = 0 without residuals: the terms add up.
#
# For nodes of several sizes (g GPUs each), synchronisation between nodes is separate from that inside them:
#
#     m(N, g) = m(N) g^sigma + m_g (g / g_most)^kappa                the second for g > 1, the first for N > 1
#     f(g) = f g^eta                                                 the floor is the work of a CPU that the GPUs share
#
# Deviations of a configuration depend on batch and nodes together, and are similar for its neighbours: ln t and
# ln c also have residuals over (ln b, ln N), with nodes of several sizes over ln g too. They are part of the covariance of the probes
# (generalised least squares), not coordinates of the fit; predictions interpolate those of nearby probes (kriging).
#
# A handful of probes does not determine all parameters. Each one has a prior from public measurements
# (benchmarks/replay/replay.py), and the fit is the maximum a posteriori (MAP) estimate.
# Times are in seconds, batches in samples. The fit is in logarithms, so errors are shares of the step time.

_NOISE_WEIGHT = 6.0  # weight of the prior noise, as a number of residuals
_NOISE_ROUNDS = 3  # iterations of estimating the noise
_MAX_ITERATIONS = 25
_TOLERANCE = 1e-4
_INITIAL_SYNC_LEVELS = (0.0, 1.0, 2.0, 3.0)
"""Initial levels of synchronisation for fits to whole steps only, in standard deviations."""


@dataclass(frozen=True)
class OverlapFit:
    """The fitted model of one overlap exponent."""

    noise: float  # estimated noise, as a multiple of that in the priors
    frame: ReferenceFrame = field(repr=False)
    fitted: "_LinearisedFit" = field(repr=False)
    data: "_FitData" = field(repr=False)

    def predict(self, points: ConfigurationPoints) -> tuple[Floats, Floats]:
        """Return ln t and the standard deviation of one measurement of it, each of shape (n,)."""
        at = self.frame.compute_features(points)
        values, whitened = self._whiten_points(at)
        by_z = self._compute_remaining_derivatives(values, whitened)
        variance = np.einsum("ij,jk,ik->i", by_z, self.fitted.covariance, by_z)
        variance += values.by_compute**2 * self.frame.u.compute_unseen_variance(at.u)
        variance += values.by_across**2 * self.frame.v.compute_unseen_variance(at.v) + self._compute_noise_variance(
            values
        )
        variance += _make_step_rows(at, values).compute_variance(self.frame.priors) - np.square(whitened).sum(axis=0)
        return values.log_step + whitened.T @ self.fitted.residuals, np.sqrt(variance)

    def predict_jointly(self, points: ConfigurationPoints) -> tuple[Floats, Floats]:
        """Return ln t, shape (n,), and its covariance without the noise of a measurement, shape (n, n)."""
        at = self.frame.compute_features(points)
        values, whitened = self._whiten_points(at)
        by_z, rows = self._compute_remaining_derivatives(values, whitened), _make_step_rows(at, values)
        covariance = by_z @ self.fitted.covariance @ by_z.T
        u = self.frame.u.compute_unseen_covariance(np.log(points.local_batch))
        v = self.frame.v.compute_unseen_covariance(np.log(points.replicas))
        covariance += u * np.outer(values.by_compute, values.by_compute)
        covariance += v * np.outer(values.by_across, values.by_across)
        covariance += rows.compute_covariance(rows, self.frame.priors) - whitened.T @ whitened
        return values.log_step + whitened.T @ self.fitted.residuals, covariance

    def _whiten_points(self, at: FeaturePoints) -> tuple[ModelEvaluation, Floats]:
        """Return the model at points, and its local residuals' whitened covariance with the probes, shape (rows, n)."""
        values, spread = evaluate_model(self.fitted.z, at), self.fitted.spread
        return values, spread.whitener @ spread.rows.compute_covariance(_make_step_rows(at, values), self.frame.priors)

    def _compute_remaining_derivatives(self, values: ModelEvaluation, whitened: Floats) -> Floats:
        """Return derivatives of ln t by z, less those of the local residuals, which depend on z too."""
        return values.of_step - whitened.T @ (self.fitted.spread.whitener @ self.fitted.jacobian)

    @property
    def log_evidence(self) -> float:
        """ln of the probability density of the probes, up to a constant that is equal for all fits to them."""
        return self.fitted.log_evidence

    @property
    def coordinates(self) -> tuple[str, ...]:
        """Names of the fitted coordinates: parameters, and residuals of compute and of synchronisation."""
        batches, replicas = (np.exp(process.positions) for process in (self.frame.u, self.frame.v))
        return (
            *(parameter.name for parameter in fields(Priors)[:PARAMETERS]),
            *(f"compute at {batch:g}" for batch in batches),
            *(f"sync at {count:g}" for count in replicas),
        )

    def compute_measurement_noise(self, points: ConfigurationPoints) -> Floats:
        """Return the standard deviation of ln t from one job to the next, shape (n,)."""
        return np.sqrt(self._compute_noise_variance(evaluate_model(self.fitted.z, self.frame.compute_features(points))))

    def compute_parts(self, points: ConfigurationPoints) -> tuple[Floats, Floats, Floats]:
        """Return the step time, the compute and the synchronisation within it (hidden or not). Seconds."""
        values = evaluate_model(self.fitted.z, self.frame.compute_features(points))
        return np.exp(values.log_step), np.exp(values.log_compute), values.sync

    def _compute_noise_variance(self, values: ModelEvaluation) -> Floats:
        priors = self.frame.priors
        return self.noise**2 * (priors.step_noise**2 + (priors.sync_noise * values.by_sync) ** 2)


@dataclass(frozen=True)
class TimedConfigurations:
    """Measured configurations, at least one, with their step times; arrays of shape (n,)."""

    points: ConfigurationPoints
    step: Floats  # seconds per step
    compute: Floats  # seconds per step without synchronisation; nan if not measured
    spread: Floats  # standard deviation of the step time within its job, as a share of it; nan if unknown


def fit_overlap(timed: TimedConfigurations, *, collective: str, priors: Priors) -> OverlapFit:
    """Fit the step-time model in which synchronisation may overlap with compute.

    The result is the maximum of the posterior, with the measurement noise estimated from the same probes.

    Args:
        timed: the probes.
        collective: a key of SHAPES.
        priors: prior assumptions.
    """
    compute_or_step = np.where(np.isfinite(timed.compute), timed.compute, timed.step)
    frame = ReferenceFrame.from_points(timed.points, compute_or_step, SHAPES[collective], priors)
    data = _FitData(
        frame.compute_features(timed.points), np.log(timed.step), np.log(timed.compute), np.nan_to_num(timed.spread)
    )
    z, noise = np.zeros(frame.size), 1.0
    for attempt in range(_NOISE_ROUNDS):
        spread_as = data.compute_spread(evaluate_model(z, data.at), noise)
        starts = _list_starting_points(z, data) if attempt == 0 else [z]
        fitted = min(
            (_maximize_posterior(start, data, spread_as) for start in starts), key=lambda fit: fit.minus_2_log_posterior
        )
        z = fitted.z
        if attempt < _NOISE_ROUNDS - 1:
            noise = _estimate_noise(noise, fitted)
    return OverlapFit(noise, frame, fitted, data)


def _make_step_rows(at: FeaturePoints, values: ModelEvaluation) -> ResidualRows:
    points = at.points
    by = np.ones(len(points)), values.by_compute, values.by_across * (at.frame.gpus is not None)
    return ResidualRows(points.local_batch, points.replicas, points.sizes, *by)


@dataclass(frozen=True)
class _Spread:
    """Covariance of the probes' rows, ln t of all and ln c of some, about the model: noise and local residuals."""

    rows: ResidualRows
    covariance: Floats
    whitener: Floats  # inverse of the lower Cholesky factor of `covariance`: makes rows independent with variance 1


@dataclass(frozen=True)
class _FitData:
    """The measurements: ln of seconds, and the relative spread of the steps within each job."""

    at: FeaturePoints
    log_step: Floats
    log_compute: Floats  # nan if not measured
    spread: Floats

    @cached_property
    def has_compute(self) -> Flags:
        return np.isfinite(self.log_compute)

    @property
    def has_only_whole_steps(self) -> bool:
        """Whether steps include synchronisation, and no probe has measured their compute apart from it."""
        is_synchronised = ~self.at.points.is_single_gpu
        return bool(is_synchronised.any()) and not bool(self.has_compute[is_synchronised].any())

    def compute_spread(self, values: ModelEvaluation, level: float) -> _Spread:
        """Return the covariance of the rows if the noise is `level` times that of other clusters."""
        has, points, repeat_variance, priors = self.has_compute, self.at.points, self.spread**2, self.at.frame.priors
        step = level**2 * (priors.step_noise**2 + (priors.sync_noise * values.by_sync) ** 2) + repeat_variance
        compute = (level * priors.compute_noise) ** 2 + repeat_variance
        rows = ResidualRows(
            batch=np.concatenate([points.local_batch, points.local_batch[has]]),
            replicas=np.concatenate([points.replicas, points.replicas[has]]),
            gpus=np.concatenate([points.sizes, points.sizes[has]]),
            by_step=np.concatenate([np.ones(len(has)), np.zeros(has.sum())]),
            by_compute=np.concatenate([values.by_compute, np.ones(has.sum())]),
            by_across=np.concatenate([values.by_across * (self.at.frame.gpus is not None), np.zeros(has.sum())]),
        )
        covariance = rows.compute_covariance(rows, priors) + np.diag(np.concatenate([step, compute[has]]))
        return _Spread(rows, covariance, np.linalg.inv(np.linalg.cholesky(covariance)))

    def compute_residuals(self, values: ModelEvaluation) -> tuple[Floats, Floats]:
        """Return the residuals of the rows, and the derivatives of the model's values for them."""
        has = self.has_compute
        residuals = np.concatenate([self.log_step - values.log_step, (self.log_compute - values.log_compute)[has]])
        return residuals, np.vstack([values.of_step, values.of_compute[has]])


@dataclass(frozen=True)
class _LinearisedFit:
    """The model linearised at some coordinates, and the residuals of the probes' rows."""

    z: Floats
    row_residuals: Floats
    jacobian: Floats
    spread: _Spread

    @classmethod
    def from_coordinates(cls, z: Floats, data: _FitData, spread: _Spread) -> "_LinearisedFit":
        return cls(z, *data.compute_residuals(evaluate_model(z, data.at)), spread)

    @cached_property
    def residuals(self) -> Floats:
        """Whitened residuals: independent with variance 1 if all assumptions hold."""
        return self.spread.whitener @ self.row_residuals

    @cached_property
    def minus_2_log_posterior(self) -> float:
        """-2 ln of the posterior density, up to a constant."""
        return float(self.residuals @ self.residuals + self.z @ self.z)

    @cached_property
    def log_evidence(self) -> float:
        """ln of the probability density of the rows by Laplace's approximation, up to a constant."""
        scale, curvature = np.linalg.slogdet(self.spread.whitener)[1], np.linalg.slogdet(self.precision)[1]
        return float(scale - (self.minus_2_log_posterior + curvature) / 2)

    @cached_property
    def whitened(self) -> Floats:
        """The jacobian of the whitened rows."""
        return self.spread.whitener @ self.jacobian

    @cached_property
    def precision(self) -> Floats:
        """Inverse covariance of the coordinates: the information of the rows, plus 1 each from the priors."""
        return np.asarray(self.whitened.T @ self.whitened + np.eye(len(self.z)))

    @cached_property
    def covariance(self) -> Floats:
        """Covariance of the coordinates after the probes, the same as in `regression`."""
        return np.asarray(np.linalg.inv(self.precision), dtype=float)

    @cached_property
    def regression(self) -> "RegressionResultsWrapper":
        """Generalised least squares of the linearised model by statsmodels; `OverlapFit.coordinates` names its parameters.

        The priors are further rows, one per coordinate.
        """
        # the import takes more than a second, and only summaries need it
        from statsmodels.regression.linear_model import GLS

        rows, size = len(self.row_residuals), len(self.z)
        spread = np.eye(rows + size)
        spread[:rows, :rows] = self.spread.covariance
        target = np.concatenate([self.row_residuals + self.jacobian @ self.z, np.zeros(size)])
        model = GLS(target, np.vstack([self.jacobian, np.eye(size)]), sigma=spread)
        return model.fit(cov_type="fixed scale", cov_kwds={"scale": 1.0})

    def compute_gauss_newton_step(self, damping: float) -> Floats:
        """Return the coordinates of a damped Gauss-Newton step.

        Damping adds rows that pull each coordinate towards its current value (Marquardt 1963).
        """
        weight = damping * (1 + np.square(self.whitened).sum(axis=0))
        target = self.whitened.T @ (self.residuals + self.whitened @ self.z) + weight * self.z
        return np.linalg.solve(self.precision + np.diag(weight), target)


def _list_starting_points(z: Floats, data: _FitData) -> list[Floats]:
    """Return the starting points of the fit.

    Whole steps alone can be explained by a floor of the compute or by synchronisation. Both may be maxima, and an
    ascent from little synchronisation ends at the floor.
    """
    if not data.has_only_whole_steps:
        return [z]
    return [z + level * np.eye(len(z))[LEVEL] for level in _INITIAL_SYNC_LEVELS]


def _maximize_posterior(start: Floats, data: _FitData, spread: _Spread) -> _LinearisedFit:
    """Find the most probable coordinates by damped Gauss-Newton steps."""
    fitted, damping = _LinearisedFit.from_coordinates(start, data, spread), 1e-2
    for _ in range(_MAX_ITERATIONS):
        trial = _LinearisedFit.from_coordinates(fitted.compute_gauss_newton_step(damping), data, spread)
        if trial.minus_2_log_posterior < fitted.minus_2_log_posterior:
            gained, fitted = fitted.minus_2_log_posterior - trial.minus_2_log_posterior, trial
            damping = max(damping / 5, 1e-9)
            if gained < _TOLERANCE * max(1.0, fitted.minus_2_log_posterior):
                break
        elif (damping := damping * 6) > 1e8:
            break
    return fitted


def _estimate_noise(noise: float, fitted: _LinearisedFit) -> float:
    """Return the noise level of the residuals, as a multiple of that of other clusters.

    The level of other clusters is weighted as `_NOISE_WEIGHT` residuals.
    """
    residuals = fitted.residuals
    degrees_of_freedom = max(0.0, len(residuals) - len(fitted.z) + float(np.trace(fitted.covariance)))
    return math.sqrt((_NOISE_WEIGHT + residuals @ residuals * noise**2) / (_NOISE_WEIGHT + degrees_of_freedom))


# --- The mixture

_MAX_LOG_ODDS = 50.0  # bound of ln(odds)


@dataclass(frozen=True)
class StepModel:
    """The step-time model: one fit to the probes, or two under different assumptions with their probabilities."""

    members: tuple[OverlapFit, ...]  # the first one assumes overlap of compute and synchronisation
    weights: Floats  # their probabilities, shape (members,)

    @property
    def has_only_whole_steps(self) -> bool:
        """Whether no probe has measured compute apart from the synchronisation in its steps."""
        return self.members[0].data.has_only_whole_steps

    @property
    def overlap_probability(self) -> float:
        """The probability that the backward pass hides synchronisation."""
        return float(self.weights[0])

    @property
    def noise(self) -> float:
        return float(self.weights @ [member.noise for member in self.members])

    def predict(self, points: ConfigurationPoints) -> tuple[Floats, Floats]:
        """Return ln t and the standard deviation of one measurement of it, each of shape (n,)."""
        means, sds = (np.array(rows) for rows in zip(*(member.predict(points) for member in self.members), strict=True))
        mean = self.weights @ means
        return mean, np.sqrt(self.weights @ (sds**2 + (means - mean) ** 2))

    def predict_jointly(self, points: ConfigurationPoints) -> tuple[Floats, Floats]:
        """Return ln t, shape (n,), and its covariance without the noise of a measurement, shape (n, n)."""
        means, covariances = (
            np.array(rows) for rows in zip(*(member.predict_jointly(points) for member in self.members), strict=True)
        )
        mean = self.weights @ means
        deviations = means - mean
        return mean, np.tensordot(self.weights, covariances, 1) + (self.weights * deviations.T) @ deviations

    def compute_measurement_noise(self, points: ConfigurationPoints) -> Floats:
        """Return the standard deviation of ln t from one job to the next, shape (n,)."""
        return np.sqrt(self.weights @ np.square([member.compute_measurement_noise(points) for member in self.members]))

    def compute_parts(self, points: ConfigurationPoints) -> tuple[Floats, Floats, Floats]:
        """Return the expected step time, compute and synchronisation within it (hidden or not). Seconds."""
        step, compute, sync = np.tensordot(self.weights, [member.compute_parts(points) for member in self.members], 1)
        return step, compute, sync


def fit_step_model(timed: TimedConfigurations, *, collective: str, priors: Priors) -> StepModel:
    """Fit the step time as a weighted average of a model with overlap and one without; the weights are posterior odds.

    The second is left out for single GPUs, and if compute was timed separately and `priors` do not make a lack of
    overlap likely.

    Args: as of `fit_overlap`.
    """
    overlapped = fit_overlap(timed, collective=collective, priors=priors)
    if timed.points.is_single_gpu.all() or not (overlapped.data.has_only_whole_steps or may_lack_overlap(priors)):
        return StepModel((overlapped,), np.ones(1))
    additive = fit_overlap(timed, collective=collective, priors=replace(priors, p=1.0))
    log_odds = math.log(priors.additive / (1 - priors.additive)) + additive.log_evidence - overlapped.log_evidence
    odds = math.exp(min(_MAX_LOG_ODDS, log_odds))
    return StepModel((overlapped, additive), np.array([1.0, odds]) / (1 + odds))
