"""The step-time model, and a mixture of two of them that differ in how sharply compute hides synchronisation.

If no probe has measured compute apart from synchronisation, the exponent p of the overlap can only be inferred from how
the steps on the most nodes grow with the batch. PyTorch's DDP hides synchronisation behind the backward pass (the p of
the priors) if the gradients fill several of its buckets; many other frameworks and scripts do one after the other (p =
1, the paper's Eq. 2). For jobs without that measurement and for small models both are fitted, each weighted by its
posterior probability: the prior probability times the evidence (Laplace's approximation; MacKay 2003, chapter 27). The
variance of a prediction includes the difference between the two.
"""

import functools
import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tula_cli.models.time.formulas import (
    LEVEL,
    PARAMETERS,
    PRIORS,
    SHAPES,
    FeaturePoints,
    Flags,
    Floats,
    ModelValues,
    Points,
    Priors,
    ReferenceFrame,
    Rows,
    evaluate,
    may_hide_nothing,
)

if TYPE_CHECKING:
    from statsmodels.regression.linear_model import RegressionResultsWrapper


# --- The exponent of overlap
#
#     t(R, b) = phi c + [((1 - phi) c)^p + m^p]^(1/p) + tau m
#     c(b) = [f^q + (k b)^q]^(1/q) exp(u(ln b))                      local compute: floor f, slope k
#     m(R) = m_0 shape(R) / shape(R_0) (R / R_0)^rho exp(v(ln R))    synchronisation; none for one replica
#
# A share 1 - phi of the compute (the backward pass) hides the synchronisation as far as it can; p says how sharply one takes
# over from the other, and tau is the share of the synchronisation that nothing hides. u and v are smooth residuals (Gaussian
# processes). The paper's Eq. 2 is the case p = 1, phi = 0, tau = 0 without residuals: the parts simply add up.
#
# Where nodes of several sizes were measured, g GPUs each, the synchronisation between nodes is told apart from that inside them:
#
#     m(N, g) = m(N) g^sigma + m_g (g / g_most)^kappa                the second for g > 1, the first for N > 1
#     f(g) = f g^eta                                                 the floor is the work of a CPU that the GPUs share
#
# What a job does at one batch on one number of nodes follows from neither alone, and its neighbours do likewise: ln t and
# ln c have residuals over (ln b, ln N) as well (and over ln g, as ln m has then). They are no coordinates of the fit but part of the covariance of the probes
# (generalised least squares); what they tell of a place follows from the probes about it (kriging).
#
# A handful of probes does not determine all that. Every parameter has a prior, found on public measurements
# (benchmarks/replay/replay.py), and the fit is the most probable one (MAP); where the probes say more than the prior, they decide.
# Times are seconds, batches samples, and everything is fitted in logarithms: errors are shares of the step time.

_NOISE_WEIGHT = 6.0  # the noises of the priors count as much as so many residuals
_ROUNDS = 3  # of estimating the noise
_ITERATIONS = 25
_TOLERANCE = 1e-4
_LEVELS = (0.0, 1.0, 2.0, 3.0)  # of synchronisation that a fit to whole steps alone begins at, in standard deviations


@dataclass(frozen=True)
class Overlap:
    """The fitted model of one overlap exponent."""

    noise: float  # its estimate, as a multiple of what other clusters show
    frame: ReferenceFrame = field(repr=False)
    fitted: "_Fitted" = field(repr=False)
    _data: "_Data" = field(repr=False)

    def predict(self, points: Points) -> tuple[Floats, Floats]:
        """Return ln t and the standard deviation of one measurement of it, each of shape (n,)."""
        at = self.frame.compute_features(points)
        values, whitened = self._whiten(at)
        by_z = self._compute_remaining_derivatives(values, whitened)
        variance = np.einsum("ij,jk,ik->i", by_z, self.fitted.covariance, by_z)
        variance += values.by_compute**2 * self.frame.u.compute_unseen_variance(at.u)
        variance += values.by_across**2 * self.frame.v.compute_unseen_variance(at.v) + self._compute_noise_variance(
            values
        )
        variance += _make_step_rows(at, values).compute_variance(self.frame.priors) - np.square(whitened).sum(axis=0)
        return values.log_step + whitened.T @ self.fitted.residuals, np.sqrt(variance)

    def joint(self, points: Points) -> tuple[Floats, Floats]:
        """Return ln t, shape (n,), and its covariance without the noise of a measurement, shape (n, n)."""
        at = self.frame.compute_features(points)
        values, whitened = self._whiten(at)
        by_z, rows = self._compute_remaining_derivatives(values, whitened), _make_step_rows(at, values)
        covariance = by_z @ self.fitted.covariance @ by_z.T
        u = self.frame.u.compute_unseen_covariance(np.log(points.local_batch))
        v = self.frame.v.compute_unseen_covariance(np.log(points.replicas))
        covariance += u * np.outer(values.by_compute, values.by_compute)
        covariance += v * np.outer(values.by_across, values.by_across)
        covariance += rows.compute_covariance(rows, self.frame.priors) - whitened.T @ whitened
        return values.log_step + whitened.T @ self.fitted.residuals, covariance

    def _whiten(self, at: FeaturePoints) -> tuple[ModelValues, Floats]:
        """Return the model at points, and its local residuals' whitened covariance with the probes, shape (rows, n)."""
        values, spread = evaluate(self.fitted.z, at), self.fitted.spread
        return values, spread.whitener @ spread.rows.compute_covariance(_make_step_rows(at, values), self.frame.priors)

    def _compute_remaining_derivatives(self, values: ModelValues, whitened: Floats) -> Floats:
        """Return derivatives of ln t by z, less those of the local residuals, which depend on z too."""
        return values.of_step - whitened.T @ (self.fitted.spread.whitener @ self.fitted.jacobian)

    @property
    def whole_steps_alone(self) -> bool:
        """Whether steps include synchronisation, and no probe has measured their compute apart from it."""
        return self._data.whole_steps_alone

    @property
    def log_evidence(self) -> float:
        """ln of the probability density of the probes, up to a constant that is equal for all fits to them."""
        return self.fitted.log_evidence

    def make_regression_result(self) -> "RegressionResultsWrapper":
        """Return the final generalised least squares as a statsmodels result; `coordinates` names its parameters."""
        return self.fitted.regression

    @property
    def coordinates(self) -> tuple[str, ...]:
        """Names of the fitted coordinates: parameters, and residuals of compute and of synchronisation."""
        batches, replicas = (np.exp(process.places) for process in (self.frame.u, self.frame.v))
        return (
            *(parameter.name for parameter in fields(Priors)[:PARAMETERS]),
            *(f"compute at {batch:g}" for batch in batches),
            *(f"sync at {count:g}" for count in replicas),
        )

    def measurement_noise(self, points: Points) -> Floats:
        """Return the standard deviation of ln t from one job to the next, shape (n,)."""
        return np.sqrt(self._compute_noise_variance(evaluate(self.fitted.z, self.frame.compute_features(points))))

    def parts(self, points: Points) -> tuple[Floats, Floats, Floats]:
        """Return the step time, the compute and the synchronisation within it (hidden or not). Seconds."""
        values = evaluate(self.fitted.z, self.frame.compute_features(points))
        return np.exp(values.log_step), np.exp(values.log_compute), values.sync

    def _compute_noise_variance(self, values: ModelValues) -> Floats:
        priors = self.frame.priors
        return self.noise**2 * (priors.step_noise**2 + (priors.sync_noise * values.by_sync) ** 2)


def fit_overlap(
    points: Points, *, step: Floats, compute: Floats, spread: Floats, collective: str, priors: Priors = PRIORS
) -> Overlap:
    """Fit the model to probes.

    Args:
        points: the measured configurations; at least one.
        step: seconds per step, shape (n,).
        compute: seconds per step without synchronisation; nan if not measured.
        spread: standard deviation of the step time within its job, as a share of it; nan if unknown.
        collective: a key of SHAPES.
        priors: prior assumptions.
    """
    frame = ReferenceFrame.from_points(
        points, np.where(np.isfinite(compute), compute, step), SHAPES[collective], priors
    )
    data = _Data(frame.compute_features(points), np.log(step), np.log(compute), np.nan_to_num(spread))
    z, noise = np.zeros(frame.size), 1.0
    for attempt in range(_ROUNDS):
        spread_as = data.compute_spread(evaluate(z, data.at), noise)
        starts = _list_starting_points(z, data) if attempt == 0 else [z]
        fitted = min(
            (_maximize_posterior(start, data, spread_as) for start in starts), key=lambda fit: fit.improbability
        )
        z = fitted.z
        if attempt < _ROUNDS - 1:
            noise = _estimate_noise(noise, fitted)
    return Overlap(noise, frame, fitted, data)


def _make_step_rows(at: FeaturePoints, values: ModelValues) -> Rows:
    """Return the rows of ln t at points."""
    points = at.points
    by = np.ones(len(points)), values.by_compute, values.by_across * (at.frame.gpus is not None)
    return Rows(points.local_batch, points.replicas, points.sizes, *by)


@dataclass(frozen=True)
class _Spread:
    """Covariance of the probes' rows, ln t of all and ln c of some, about the model: noise and local residuals."""

    rows: Rows
    covariance: Floats
    whitener: Floats  # inverse of its lower Cholesky factor: takes the rows to independent ones of variance 1


@dataclass(frozen=True)
class _Data:
    """The measurements: ln of seconds, and the relative spread of the steps within each job."""

    at: FeaturePoints
    log_step: Floats
    log_compute: Floats  # nan where not measured
    spread: Floats

    @cached_property
    def has_compute(self) -> Flags:
        return np.isfinite(self.log_compute)

    @property
    def whole_steps_alone(self) -> bool:
        together = ~self.at.points.alone
        return bool(together.any()) and not bool(self.has_compute[together].any())

    def compute_spread(self, values: ModelValues, level: float) -> _Spread:
        """Return the covariance of the rows if the noise is `level` times that of other clusters."""
        has, points, repeat_variance, priors = self.has_compute, self.at.points, self.spread**2, self.at.frame.priors
        step = level**2 * (priors.step_noise**2 + (priors.sync_noise * values.by_sync) ** 2) + repeat_variance
        compute = (level * priors.compute_noise) ** 2 + repeat_variance
        rows = Rows(
            batch=np.concatenate([points.local_batch, points.local_batch[has]]),
            replicas=np.concatenate([points.replicas, points.replicas[has]]),
            gpus=np.concatenate([points.sizes, points.sizes[has]]),
            by_step=np.concatenate([np.ones(len(has)), np.zeros(has.sum())]),
            by_compute=np.concatenate([values.by_compute, np.ones(has.sum())]),
            by_across=np.concatenate([values.by_across * (self.at.frame.gpus is not None), np.zeros(has.sum())]),
        )
        covariance = rows.compute_covariance(rows, priors) + np.diag(np.concatenate([step, compute[has]]))
        return _Spread(rows, covariance, np.linalg.inv(np.linalg.cholesky(covariance)))

    def compute_residuals(self, values: ModelValues) -> tuple[Floats, Floats]:
        """Return the residuals of the rows, and the derivatives of the model's values for them."""
        has = self.has_compute
        off = np.concatenate([self.log_step - values.log_step, (self.log_compute - values.log_compute)[has]])
        return off, np.vstack([values.of_step, values.of_compute[has]])


@dataclass(frozen=True)
class _Fitted:
    """The model linearised at some coordinates, and the residuals of the probes' rows."""

    z: Floats
    off: Floats
    jacobian: Floats
    spread: _Spread

    @classmethod
    def evaluate_at(cls, z: Floats, data: _Data, spread: _Spread) -> "_Fitted":
        return cls(z, *data.compute_residuals(evaluate(z, data.at)), spread)

    @cached_property
    def residuals(self) -> Floats:
        """Whitened residuals: independent with variance 1 if all assumptions hold."""
        return self.spread.whitener @ self.off

    @cached_property
    def improbability(self) -> float:
        """-2 ln of the posterior density, up to a constant."""
        return float(self.residuals @ self.residuals + self.z @ self.z)

    @cached_property
    def log_evidence(self) -> float:
        """ln of the probability density of the rows by Laplace's approximation, up to a constant."""
        scale, curvature = np.linalg.slogdet(self.spread.whitener)[1], np.linalg.slogdet(self.precision)[1]
        return float(scale - (self.improbability + curvature) / 2)

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
        """Generalised least squares of the linearised model by statsmodels.

        The priors are further rows, one per coordinate.
        """
        from statsmodels.regression.linear_model import GLS  # takes more than a second, and of use to a summary alone

        rows, size = len(self.off), len(self.z)
        spread = np.eye(rows + size)
        spread[:rows, :rows] = self.spread.covariance
        target = np.concatenate([self.off + self.jacobian @ self.z, np.zeros(size)])
        model = GLS(target, np.vstack([self.jacobian, np.eye(size)]), sigma=spread)
        return model.fit(cov_type="fixed scale", cov_kwds={"scale": 1.0})

    def compute_gauss_newton_step(self, damping: float) -> Floats:
        """Return the coordinates of a damped Gauss-Newton step.

        Damping adds rows that pull each coordinate towards its current value (Marquardt 1963).
        """
        weight = damping * (1 + np.square(self.whitened).sum(axis=0))
        target = self.whitened.T @ (self.residuals + self.whitened @ self.z) + weight * self.z
        return np.linalg.solve(self.precision + np.diag(weight), target)


def _list_starting_points(z: Floats, data: _Data) -> list[Floats]:
    """Return the starting points of the fit.

    Whole steps alone can be explained by a floor of the compute or by synchronisation. Both may be maxima, and an
    ascent from little synchronisation ends at the floor.
    """
    if not data.whole_steps_alone:
        return [z]
    return [z + level * np.eye(len(z))[LEVEL] for level in _LEVELS]


def _maximize_posterior(start: Floats, data: _Data, spread: _Spread) -> _Fitted:
    """Find the most probable coordinates by damped Gauss-Newton steps."""
    fitted, damping = _Fitted.evaluate_at(start, data, spread), 1e-2
    for _ in range(_ITERATIONS):
        trial = _Fitted.evaluate_at(fitted.compute_gauss_newton_step(damping), data, spread)
        if trial.improbability < fitted.improbability:
            gained, fitted = fitted.improbability - trial.improbability, trial
            damping = max(damping / 5, 1e-9)
            if gained < _TOLERANCE * max(1.0, fitted.improbability):
                break
        elif (damping := damping * 6) > 1e8:
            break
    return fitted


def _estimate_noise(noise: float, fitted: _Fitted) -> float:
    """Return the noise level of the residuals, as a multiple of that of other clusters.

    The level of other clusters is weighted as `_NOISE_WEIGHT` residuals.
    """
    residuals = fitted.residuals
    degrees_of_freedom = max(0.0, len(residuals) - len(fitted.z) + float(np.trace(fitted.covariance)))
    return math.sqrt((_NOISE_WEIGHT + residuals @ residuals * noise**2) / (_NOISE_WEIGHT + degrees_of_freedom))


# --- The mixture

_MAX_LOG_ODDS = 50.0  # ln of the odds: more makes no difference


@dataclass(frozen=True)
class StepModel:
    """The step-time model: one fit to the probes, or two under different assumptions with their probabilities."""

    members: tuple[Overlap, ...]  # the first overlaps
    weights: Floats  # their probabilities, shape (members,)

    @property
    def whole_steps_alone(self) -> bool:
        """Whether no probe has measured compute apart from the synchronisation in its steps."""
        return self.members[0].whole_steps_alone

    @property
    def overlapped(self) -> float:
        """The probability that the backward pass hides synchronisation."""
        return float(self.weights[0])

    @property
    def noise(self) -> float:
        return float(self.weights @ [member.noise for member in self.members])

    def predict(self, points: Points) -> tuple[Floats, Floats]:
        """Return ln t and the standard deviation of one measurement of it, each of shape (n,)."""
        means, sds = (np.array(rows) for rows in zip(*(member.predict(points) for member in self.members), strict=True))
        mean = self.weights @ means
        return mean, np.sqrt(self.weights @ (sds**2 + (means - mean) ** 2))

    def joint(self, points: Points) -> tuple[Floats, Floats]:
        """Return ln t, shape (n,), and its covariance without the noise of a measurement, shape (n, n)."""
        means, covariances = (
            np.array(rows) for rows in zip(*(member.joint(points) for member in self.members), strict=True)
        )
        mean = self.weights @ means
        deviations = means - mean
        return mean, np.tensordot(self.weights, covariances, 1) + (self.weights * deviations.T) @ deviations

    def measurement_noise(self, points: Points) -> Floats:
        """Return the standard deviation of ln t from one job to the next, shape (n,)."""
        return np.sqrt(self.weights @ np.square([member.measurement_noise(points) for member in self.members]))

    def parts(self, points: Points) -> tuple[Floats, Floats, Floats]:
        """Return the expected step time, compute and synchronisation within it (hidden or not). Seconds."""
        step, compute, sync = np.tensordot(self.weights, [member.parts(points) for member in self.members], 1)
        return step, compute, sync


def fit_step_model(
    points: Points, *, step: Floats, compute: Floats, spread: Floats, collective: str, priors: Priors = PRIORS
) -> StepModel:
    """Fit the model to probes.

    It has two members if compute was not measured apart, or if the priors make it likely that compute hides nothing.

    Arguments as of `fit_overlap`.
    """
    fit = functools.partial(fit_overlap, points, step=step, compute=compute, spread=spread, collective=collective)
    overlapped = fit(priors=priors)
    if points.alone.all() or not (overlapped.whole_steps_alone or may_hide_nothing(priors)):
        return StepModel((overlapped,), np.ones(1))
    additive = fit(priors=replace(priors, p=1.0))
    log_odds = math.log(priors.additive / (1 - priors.additive)) + additive.log_evidence - overlapped.log_evidence
    odds = math.exp(min(_MAX_LOG_ODDS, log_odds))
    return StepModel((overlapped, additive), np.array([1.0, odds]) / (1 + odds))
