"""The step-time model: compute that depends on the local batch, synchronisation that depends on the replicas, overlapped.

    t(R, b) = phi c + [((1 - phi) c)^p + m^p]^(1/p) + tau m
    c(b) = [f^q + (k b)^q]^(1/q) exp(u(ln b))                      local compute: floor f, slope k
    m(R) = m_0 shape(R) / shape(R_0) (R / R_0)^rho exp(v(ln R))    synchronisation; none for one replica

A share 1 - phi of the compute (the backward pass) hides the synchronisation as far as it can; p says how sharply one takes
over from the other, and tau is the share of the synchronisation that nothing hides. u and v are smooth residuals (Gaussian
processes). The paper's Eq. 2 is the case p = 1, phi = 0, tau = 0 without residuals: the parts simply add up.

A handful of probes does not determine all that. Every parameter has a prior, found on public measurements
(benchmarks/replay/replay.py), and the fit is the most probable one (MAP); where the probes say more than the prior, they decide.
Times are seconds, batches samples, and everything is fitted in logarithms: errors are shares of the step time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tula_cli.models.time.priors import (
    EXPOSED,
    FLOOR,
    FORWARD,
    GROWTH,
    INSIDE,
    LEVEL,
    PARAMETERS,
    PRIORS,
    SHAPES,
    SLOPE,
    Flags,
    Floats,
    Priors,
    Smooth,
)

_NOISE_WEIGHT = 6.0  # the noises of the priors count as much as so many residuals
_ROUNDS = 3  # of estimating the noise
_ITERATIONS = 25
_TOLERANCE = 1e-4
_LEVELS = (0.0, 1.0, 2.0, 3.0)  # of synchronisation that a fit to whole steps alone begins at, in standard deviations


@dataclass(frozen=True)
class Points:
    """Configurations as the model sees them; arrays of one length."""

    replicas: Floats  # that synchronise: nodes, or GPUs where there is one node
    local_batch: Floats
    alone: Flags  # one GPU in all: nothing to synchronise
    inside: Flags  # the GPUs of one node, where the others are several nodes

    def __len__(self) -> int:
        return len(self.replicas)


@dataclass(frozen=True)
class Posterior:
    """What is believed after the probes, as far as a prior for other jobs can be made of it."""

    means: Floats  # of the parameters, in the order of Priors.parameters
    variances: Floats
    compute: Floats  # expected squares of the residual's whitened coordinates: 1 where it goes as far as its prior says
    sync: Floats
    noise: float  # as a multiple of that of the priors


@dataclass(frozen=True)
class Overlap:
    """The fitted model."""

    noise: float  # its estimate, as a multiple of what other clusters show
    _frame: "_Frame" = field(repr=False)
    _z: Floats = field(repr=False)  # whitened coordinates
    _covariance: Floats = field(repr=False)  # of z

    def predict(self, points: Points) -> tuple[Floats, Floats]:
        """Return ln t and the standard deviation of one measurement of it, each of shape (n,)."""
        at = self._frame.at(points)
        found = _evaluate(self._z, at)
        root = np.linalg.cholesky(self._covariance)
        variance = np.square(found.of_step @ root).sum(axis=1) + self._unseen(at, found) + self._noise(found)
        return found.log_step, np.sqrt(variance)

    def joint(self, points: Points) -> tuple[Floats, Floats]:
        """Return ln t, shape (n,), and its covariance without the noise of a measurement, shape (n, n)."""
        at = self._frame.at(points)
        found = _evaluate(self._z, at)
        covariance = found.of_step @ self._covariance @ found.of_step.T
        u = self._frame.u.unseen_covariance(np.log(points.local_batch))
        v = self._frame.v.unseen_covariance(np.log(points.replicas))
        covariance += u * np.outer(found.by_compute, found.by_compute)
        covariance += v * np.outer(found.by_sync * at.across, found.by_sync * at.across)
        return found.log_step, covariance

    def measurement_noise(self, points: Points) -> Floats:
        """Return the standard deviation of ln t from one job to the next, shape (n,)."""
        return np.sqrt(self._noise(_evaluate(self._z, self._frame.at(points))))

    def posterior(self) -> "Posterior":
        """Return what the probes have made of the priors."""
        own, priors = PARAMETERS, self._frame.priors
        squares = self._z**2 + np.diag(self._covariance)
        compute, sync = np.split(squares[own:], [len(self._frame.u.places)])
        return Posterior(
            means=priors.means + priors.sds * self._z[:own],
            variances=priors.sds**2 * np.diag(self._covariance)[:own],
            compute=compute,
            sync=sync,
            noise=self.noise,
        )

    def parts(self, points: Points) -> tuple[Floats, Floats, Floats]:
        """Return the step time, the compute and the synchronisation within it (hidden or not). Seconds."""
        found = _evaluate(self._z, self._frame.at(points))
        return np.exp(found.log_step), np.exp(found.log_compute), found.sync

    def _unseen(self, at: "_At", found: "_Values") -> Floats:
        """Return the variance of the smooth residuals beyond what the probes tell."""
        u = self._frame.u.unseen_variance(np.log(at.points.local_batch))
        v = self._frame.v.unseen_variance(np.log(at.points.replicas))
        return found.by_compute**2 * u + (found.by_sync * at.across) ** 2 * v

    def _noise(self, found: "_Values") -> Floats:
        priors = self._frame.priors
        return self.noise**2 * (priors.step_noise**2 + (priors.sync_noise * found.by_sync) ** 2)


def fit(
    points: Points, *, step: Floats, compute: Floats, spread: Floats, collective: str, priors: Priors = PRIORS
) -> Overlap:
    """Fit the model to probes.

    Args:
        points: where they were measured; at least one.
        step: seconds a step, shape (n,).
        compute: seconds a step without synchronisation; nan where it was not measured.
        spread: standard deviation of the step time over its own job, as a share of it; nan where it is not known.
        collective: a key of SHAPES.
        priors: what is believed before.
    """
    from statsmodels.regression.linear_model import OLS  # with pandas more than a second, and of use to a fit alone

    frame = _Frame.of(points, np.where(np.isfinite(compute), compute, step), SHAPES[collective], priors)
    at = frame.at(points)
    data = _Data(np.log(step), np.log(compute), np.nan_to_num(spread), priors)
    z, noise = np.zeros(frame.size), 1.0
    for attempt in range(_ROUNDS):
        sd = data.noise(_evaluate(z, at), noise)
        starts = _starts(z, at, data) if attempt == 0 else [z]
        z, residuals, jacobian = min((_maximise(start, at, data, sd) for start in starts), key=_improbability)
        if attempt < _ROUNDS - 1:
            noise = _estimated_noise(noise, residuals, jacobian)
    # Linearised at the solution the fit is ordinary least squares on the probes with the priors as further rows. Its
    # parameters are those of one more undamped step, which nothing keeps from going astray: only the covariance is taken.
    rows = np.vstack([jacobian, np.eye(frame.size)])
    target = np.concatenate([residuals + jacobian @ z, np.zeros(frame.size)])
    results = OLS(target, rows).fit(cov_type="fixed scale", cov_kwds={"scale": 1.0})
    return Overlap(noise, frame, z, np.asarray(results.cov_params()))


@dataclass(frozen=True)
class _Process:
    """A Gaussian process over a logarithm with its values at some places as whitened coordinates."""

    places: Floats
    sd: float
    length: float
    white: float
    _root: Floats  # lower Cholesky factor of the covariance at the places

    @classmethod
    def over(cls, places: Floats, residual: Smooth) -> "_Process":
        unique = np.unique(places)
        sd, length, white = residual.sd, residual.length, residual.white
        process = cls(unique, sd, length, white, np.zeros((0, 0)))
        covariance = process._covariance(unique, unique) + 1e-10 * np.eye(len(unique))
        return cls(unique, sd, length, white, np.asarray(np.linalg.cholesky(covariance), dtype=float))

    def map(self, at: Floats) -> Floats:
        """Return the matrix, shape (n, places), that takes coordinates to the expected values at `at`."""
        if not len(self.places):
            return np.zeros((len(at), 0))
        distinct, where = np.unique(at, return_inverse=True)
        mapped = np.asarray(np.linalg.solve(self._root, self._covariance(self.places, distinct)), dtype=float)
        return mapped.T[where]

    def unseen_variance(self, at: Floats) -> Floats:
        """Return the variance that the values at the places leave, shape (n,)."""
        known: Floats = np.square(self.map(at)).sum(axis=1)
        return np.maximum(0.0, self.sd**2 + self.white**2 - known)

    def unseen_covariance(self, at: Floats) -> Floats:
        """Return the covariance that the values at the places leave, shape (n, n)."""
        mapped = self.map(at)
        return self._covariance(at, at) - mapped @ mapped.T

    def _covariance(self, one: Floats, other: Floats) -> Floats:
        off = np.abs(one[:, None] - other[None, :])
        smooth: Floats = self.sd**2 * np.exp(-0.5 * (off / self.length) ** 2)
        return smooth + self.white**2 * (off < 1e-9)


@dataclass(frozen=True)
class _At:
    """Points with all that does not change during a fit."""

    points: Points
    frame: "_Frame"
    across: Flags  # whose synchronisation follows the shape over the replicas
    log_batch: Floats
    log_replicas: Floats  # against the fewest measured
    log_shape: Floats  # against that of the fewest measured
    u: Floats  # (n, places of u)
    v: Floats  # (n, places of v)


@dataclass(frozen=True)
class _Frame:
    """What parameters are counted from, and the places of the residuals."""

    log_scale: float  # ln seconds a sample
    log_batch: float  # of the smallest batch
    replicas: float  # the fewest that synchronise
    shape: Callable[[Floats], Floats]
    u: _Process
    v: _Process
    priors: Priors

    @classmethod
    def of(cls, points: Points, compute: Floats, shape: Callable[[Floats], Floats], priors: Priors) -> "_Frame":
        smallest = float(points.local_batch.min())
        across = ~points.alone & ~points.inside
        return cls(
            log_scale=float(np.median(np.log(compute / (points.local_batch + smallest)))),
            log_batch=math.log(smallest),
            replicas=float(points.replicas[across].min()) if across.any() else 2.0,
            shape=shape,
            u=_Process.over(np.log(points.local_batch), priors.compute),
            v=_Process.over(np.log(points.replicas[across]), priors.sync),
            priors=priors,
        )

    @property
    def size(self) -> int:
        return PARAMETERS + len(self.u.places) + len(self.v.places)

    def at(self, points: Points) -> _At:
        across = ~points.alone & ~points.inside
        replicas = np.where(across, points.replicas, self.replicas)
        least = self.shape(np.array([self.replicas]))
        return _At(
            points=points,
            frame=self,
            across=across,
            log_batch=np.log(points.local_batch),
            log_replicas=np.log(replicas / self.replicas),
            log_shape=np.log(self.shape(replicas) / least),
            u=self.u.map(np.log(points.local_batch)),
            v=self.v.map(np.log(replicas)) * across[:, None],
        )


@dataclass(frozen=True)
class _Values:
    """The model at some points. Derivatives of ln t and ln c are by the whitened coordinates, shape (n, size)."""

    log_step: Floats
    log_compute: Floats
    sync: Floats  # seconds
    of_step: Floats
    of_compute: Floats
    by_compute: Floats  # derivative of ln t by ln c
    by_sync: Floats  # and by ln m


def _evaluate(z: Floats, at: _At) -> _Values:
    """Evaluate the model and its derivatives."""
    frame, priors, own = at.frame, at.frame.priors, PARAMETERS
    theta, rest = priors.means + priors.sds * z[:own], z[own:]
    u, v = rest[: at.u.shape[1]], rest[at.u.shape[1] :]
    # Local compute.
    log_slope = frame.log_scale + theta[SLOPE] + at.log_batch
    log_floor = frame.log_scale + theta[SLOPE] + theta[FLOOR] + frame.log_batch
    log_smooth = np.logaddexp(priors.q * log_slope, priors.q * log_floor) / priors.q
    log_compute = log_smooth + at.u @ u
    # Synchronisation.
    log_across = theta[GROWTH] * at.log_replicas + at.log_shape + at.v @ v
    log_sync = frame.log_scale + frame.log_batch + math.log(2) + theta[LEVEL]
    log_sync = log_sync + np.where(at.points.inside, theta[INSIDE], log_across)
    log_sync = np.where(at.points.alone, -np.inf, np.clip(log_sync, -60.0, 60.0))
    # Both, overlapped.
    # Clipped where they saturate: a step that is tried and rejected may go anywhere.
    phi, tau = 1 / (1 + math.exp(-np.clip(theta[FORWARD], -30.0, 30.0))), math.exp(min(theta[EXPOSED], 5.0))
    log_backward = math.log1p(-phi) + log_compute
    log_longer = np.logaddexp(priors.p * log_backward, priors.p * log_sync) / priors.p
    compute, sync, longer = np.exp(log_compute), np.exp(log_sync), np.exp(log_longer)
    step = phi * compute + longer + tau * sync
    backward_share, sync_share = (
        np.exp(priors.p * (log_backward - log_longer)),
        np.exp(priors.p * (log_sync - log_longer)),
    )
    by_compute = (phi * compute + longer * backward_share) / step
    by_sync = (longer * sync_share + tau * sync) / step

    of_compute = np.zeros((len(at.points), frame.size))
    of_compute[:, SLOPE] = 1.0
    of_compute[:, FLOOR] = np.exp(priors.q * (log_floor - log_smooth))
    of_compute[:, own : own + len(u)] = at.u
    of_step = by_compute[:, None] * of_compute
    of_step[:, LEVEL] = by_sync
    of_step[:, GROWTH] = by_sync * at.log_replicas
    of_step[:, INSIDE] = by_sync * at.points.inside
    of_step[:, FORWARD] = (compute - longer * backward_share / (1 - phi)) * phi * (1 - phi) / step
    of_step[:, EXPOSED] = tau * sync / step
    of_step[:, own + len(u) :] = by_sync[:, None] * at.v
    of_step[:, :own] *= priors.sds
    of_compute[:, :own] *= priors.sds
    return _Values(np.log(step), log_compute, sync, of_step, of_compute, by_compute, by_sync)


@dataclass(frozen=True)
class _Data:
    """What was measured: ln of seconds, and the share by which each job's own steps spread."""

    log_step: Floats
    log_compute: Floats  # nan where not measured
    spread: Floats
    priors: Priors

    @property
    def has_compute(self) -> Flags:
        return np.isfinite(self.log_compute)

    def noise(self, found: _Values, level: float) -> tuple[Floats, Floats]:
        """Return the standard deviations of ln t and of ln c."""
        own, priors = self.spread**2, self.priors
        step = np.sqrt(level**2 * (priors.step_noise**2 + (priors.sync_noise * found.by_sync) ** 2) + own)
        return step, np.sqrt((level * priors.compute_noise) ** 2 + own)

    def residuals(self, found: _Values, sd: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """Return standardised residuals and the derivatives of what is predicted, both over the same noise."""
        has = self.has_compute
        residuals = np.concatenate(
            [(self.log_step - found.log_step) / sd[0], ((self.log_compute - found.log_compute) / sd[1])[has]]
        )
        jacobian = np.vstack([found.of_step / sd[0][:, None], (found.of_compute / sd[1][:, None])[has]])
        return residuals, jacobian


def _starts(z: Floats, at: _At, data: _Data) -> list[Floats]:
    """Return where to begin.

    Whole steps alone can be explained by a floor of the compute or by synchronisation. Both may be maxima, and a climb
    from little synchronisation ends at the floor.
    """
    together = ~at.points.alone
    if not together.any() or data.has_compute[together].any():
        return [z]
    return [z + level * np.eye(len(z))[LEVEL] for level in _LEVELS]


def _improbability(reached: tuple[Floats, Floats, Floats]) -> float:
    """Return what `_maximise` makes small; its sums of squares are -2 ln of the posterior density, up to a constant."""
    z, residuals, _ = reached
    return float(residuals @ residuals + z @ z)


def _maximise(start: Floats, at: _At, data: _Data, sd: tuple[Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    """Find the most probable coordinates by damped Gauss-Newton steps; return residuals and derivatives there too."""
    z, damping = start, 1e-2
    residuals, jacobian = data.residuals(_evaluate(z, at), sd)
    value = residuals @ residuals + z @ z
    for _ in range(_ITERATIONS):
        normal = jacobian.T @ jacobian + np.eye(len(z))
        gradient = jacobian.T @ residuals - z
        trial = z + np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        their, slopes = data.residuals(_evaluate(trial, at), sd)
        reached = their @ their + trial @ trial
        if reached < value:
            gained, z, residuals, jacobian, value = value - reached, trial, their, slopes, reached
            damping = max(damping / 5, 1e-9)
            if gained < _TOLERANCE * max(1.0, value):
                break
        elif (damping := damping * 6) > 1e8:
            break
    return z, residuals, jacobian


def _estimated_noise(noise: float, residuals: Floats, jacobian: Floats) -> float:
    """Return the noise that the residuals show, as a multiple of that of other clusters, which count _NOISE_WEIGHT."""
    size = jacobian.shape[1]
    taken = size - float(np.trace(np.linalg.inv(jacobian.T @ jacobian + np.eye(size))))
    left = max(0.0, len(residuals) - taken)
    return math.sqrt((_NOISE_WEIGHT + residuals @ residuals * noise**2) / (_NOISE_WEIGHT + left))
