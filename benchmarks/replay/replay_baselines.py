"""Models compared with the step-time model. Each is fitted only to the probes, and predicts seconds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from replay_data import Where
from scipy.optimize import minimize, nnls

from tula_cli.models.time import job_fit
from tula_cli.models.time.step_model import PRIORS, Priors
from tula_cli.models.time.step_time import Estimate, Observation

Floats = NDArray[np.float64]
Predictor = Callable[[Sequence[Where]], list[Estimate]]
"""Step times with intervals; nan seconds if the model makes no prediction."""

Model = Callable[[Sequence[Observation], str], Predictor]
"""Takes the probes and the collective operation."""


def make_product_model(priors: Priors) -> Model:
    """Return the model of `tula recommend` with other priors."""

    def product(probes: Sequence[Observation], collective: str) -> Predictor:
        fit, _ = job_fit.fit_observations(probes, probes, collective=collective, priors=priors)

        def predict(places: Sequence[Where]) -> list[Estimate]:
            columns = ([p.nodes for p in places], [p.gpus_per_node for p in places], [p.local_batch for p in places])
            refused = [bool(fit.describe_why_unpredictable(p.nodes, p.gpus_per_node, p.local_batch)) for p in places]
            steps = fit.predict_step_times(*columns)
            return [Estimate(math.nan) if why else steps.get_estimate(index) for index, why in enumerate(refused)]

        return predict

    return product


def fit_least_squares(probes: Sequence[Observation], _: str) -> Predictor:
    """Eq. 2 of the paper as it is written: a + c b + d (1 - 1/N), ordinary least squares."""
    size = _choose_size(probes)

    def design(places: Sequence[Where]) -> Floats:
        return np.array([[1.0, p.local_batch, 1 - 1 / size(p)] for p in places])

    coefficients = np.linalg.lstsq(design(_configurations(probes)), _step_times(probes), rcond=None)[0]
    return lambda places: _as_estimates(design(places) @ coefficients)


def fit_non_negative(probes: Sequence[Observation], _: str) -> Predictor:
    """Non-negative least squares on relative errors over 1, b, 1 - 1/N, N, log2 N."""
    size = _choose_size(probes)

    def design(places: Sequence[Where]) -> Floats:
        return np.array([[1.0, p.local_batch, 1 - 1 / size(p), size(p), math.log2(size(p))] for p in places])

    weighted = design(_configurations(probes)) / _step_times(probes)[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    coefficients = nnls(weighted / scale, np.ones(len(probes)))[0] / scale
    return lambda places: _as_estimates(design(places) @ coefficients)


def fit_interpolation(probes: Sequence[Observation], _: str) -> Predictor:
    """Log-bilinear: log t is piecewise linear in log b at each size, and in log N between sizes; extrapolation is linear.

    A size with a single probe takes the slope over the batch from the nearest size with more probes.
    """
    size = _choose_size(probes)
    lines: dict[int, list[tuple[float, float]]] = {}
    for probe in sorted(probes, key=lambda probe: probe.local_batch):
        lines.setdefault(size(_configuration(probe)), []).append((math.log(probe.local_batch), math.log(probe.seconds)))

    def at_size(number: int, x: float) -> float:
        line = lines[number]
        if len(line) > 1:
            return _interpolate(line, x)
        others = [other for other in lines if len(lines[other]) > 1]
        if not others:
            return line[0][1]
        lender = lines[min(others, key=lambda other: abs(math.log(other / number)))]
        return line[0][1] + _interpolate(lender, x) - _interpolate(lender, line[0][0])

    def log_time(place: Where) -> float:
        x = math.log(place.local_batch)
        return _interpolate([(math.log(number), at_size(number, x)) for number in sorted(lines)], math.log(size(place)))

    return lambda places: _as_estimates([math.exp(log_time(place)) for place in places])


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate, or extrapolate the nearest segment."""
    if len(points) == 1:
        return points[0][1]
    place = next((i for i in range(1, len(points) - 1) if x < points[i][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


_MIN_SECONDS = 1e-9  # seconds
_GAMMAS = (1.0, 10.0)
_TINY = 1e-9  # relative to the shortest step: keeps logarithms of 0 finite
_STARTS = tuple(  # shares of the fixed and of the growing part, of synchronisation and of its growth; gamma
    np.array([fixed, growing, sync, 0.01, sync, 0.01, gamma])
    for fixed, growing, sync, gamma in ((0.5, 0.5, 0.3, 2.0), (0.2, 0.8, 1.0, 1.1), (0.8, 0.3, 0.1, 5.0))
)


def fit_pollux(probes: Sequence[Observation], _: str) -> Predictor:
    """The throughput model of Pollux (OSDI '21, 3.2): seven non-negative parameters, gamma between 1 and 10.

    T = (T_grad^gamma + T_sync^gamma)^(1/gamma); T_grad = a + b m; T_sync = 0 for one replica, a_l + b_l (K - 2) within a node, a_n + b_n
    (K - 2) across nodes. Fitted by L-BFGS-B to the least root mean squared logarithmic error. As in the paper, unseen effects have no
    cost (no synchronisation before two replicas, none across nodes before two nodes, no growth of it before three replicas).
    """
    places, seconds = _configurations(probes), _step_times(probes)
    unit = _PolluxUnits(float(seconds.min()), float(max(place.local_batch for place in places)))
    features, target = unit.features(places), np.log(seconds / unit.seconds)

    def loss(parameters: Floats) -> tuple[float, Floats]:
        predicted, gradient = _pollux_log_time(parameters, features)
        off = predicted - target
        return float(off @ off) / len(off), 2 * off @ gradient / len(off)

    bounds = _pollux_bounds(places)
    free = np.array([high != 0 for _, high in bounds])
    results = [minimize(loss, start * free, jac=True, method="L-BFGS-B", bounds=bounds) for start in _STARTS]
    best = min(results, key=lambda result: float(result.fun)).x
    return lambda places: _as_estimates(unit.seconds * np.exp(_pollux_log_time(best, unit.features(places))[0]))


@dataclass(frozen=True)
class _PolluxUnits:
    """Scales in which the parameters are of order one, for L-BFGS-B."""

    seconds: float
    local_batch: float

    def features(self, places: Sequence[Where]) -> Floats:
        """Columns: local batch; one, and K - 2, if replicas share one node; the same across nodes."""
        rows = []
        for place in places:
            inside, across = float(place.nodes == 1 and place.replicas > 1), float(place.nodes > 1)
            more = max(place.replicas - 2, 0)
            rows.append([place.local_batch / self.local_batch, inside, inside * more, across, across * more])
        return np.array(rows)


def _pollux_bounds(places: Sequence[Where]) -> list[tuple[float, float | None]]:
    none, any_ = (0.0, 0.0), (0.0, None)
    replicas, nodes = max(place.replicas for place in places), max(place.nodes for place in places)
    inside = any(place.nodes == 1 and place.replicas > 1 for place in places)
    return [
        (_TINY, None),
        any_,
        any_ if inside else none,
        any_ if inside and replicas > 2 else none,
        any_ if nodes > 1 else none,
        any_ if nodes > 1 and replicas > 2 else none,
        _GAMMAS,
    ]


def _pollux_log_time(parameters: Floats, features: Floats) -> tuple[Floats, Floats]:
    """Return log T and its derivatives by the parameters."""
    gamma = parameters[6]
    grad = parameters[0] + parameters[1] * features[:, 0] + _TINY
    sync = features[:, 1:] @ parameters[2:6] + _TINY
    log_grad, log_sync = np.log(grad), np.log(sync)
    total = np.logaddexp(gamma * log_grad, gamma * log_sync)
    share = np.exp(gamma * log_grad - total)  # share of the gradient in the sum of powers
    by_grad, by_sync = share / grad, (1 - share) / sync
    by_gamma = (share * log_grad + (1 - share) * log_sync) / gamma - total / gamma**2
    derivatives = np.column_stack(
        [by_grad, by_grad * features[:, 0], by_sync[:, None] * features[:, 1:], by_gamma[:, None]]
    )
    return np.asarray(total / gamma), derivatives


def _choose_size(probes: Sequence[Observation]) -> Callable[[Where], int]:
    """Count nodes, or GPUs if all probes are on one node."""
    if any(probe.nodes > 1 for probe in probes):
        return lambda place: place.nodes
    return lambda place: place.gpus_per_node


def _configuration(probe: Observation) -> Where:
    return Where(probe.nodes, probe.gpus_per_node, probe.local_batch)


def _configurations(probes: Sequence[Observation]) -> list[Where]:
    return [_configuration(probe) for probe in probes]


def _step_times(probes: Sequence[Observation]) -> Floats:
    return np.array([probe.seconds for probe in probes])


def _as_estimates(seconds: Sequence[float] | Floats) -> list[Estimate]:
    """Replace negative times by a tiny value: such a model has an error of 100 %, and chooses that configuration."""
    return [Estimate(max(float(value), _MIN_SECONDS)) for value in seconds]


MODELS: Mapping[str, Model] = {
    "tula": make_product_model(PRIORS),
    "paper OLS": fit_least_squares,
    "NNLS": fit_non_negative,
    "interpolation": fit_interpolation,
    "Pollux": fit_pollux,
}
