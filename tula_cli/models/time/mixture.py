"""The step-time model of jobs whose probes time whole steps alone: a mixture over how sharply compute hides synchronisation.

Where no probe has measured compute apart from synchronisation, nothing tells the exponent p of `overlap` but how the steps of the
most nodes grow with the batch. PyTorch's DDP hides synchronisation behind the backward pass (the p of the priors); many other
frameworks and scripts do one after the other (p = 1, the paper's Eq. 2). Both are fitted, and each counts by its probability
after the probes: its prior one times its evidence (Laplace's approximation; MacKay 2003, chapter 27). The variance of a prediction
holds how far the two are apart.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from tula_cli.models.time import overlap
from tula_cli.models.time.formulas import Points
from tula_cli.models.time.overlap import Overlap, Posterior
from tula_cli.models.time.priors import PRIORS, Floats, Priors

_ADDITIVE = 1 / 21
"""Prior probability that nothing is hidden: found on step times of which synchronisation was hidden from the fit, and on the same
put together anew with none overlapped, without each application and each cluster once (docs/how-it-measures.md)."""
_MAX_LOG_ODDS = 50.0  # ln of the odds: more makes no difference


@dataclass(frozen=True)
class Mixture:
    """Fits to the same probes under different assumptions, with their probabilities; predicts as `Overlap` does."""

    members: tuple[Overlap, ...]  # the first overlaps
    weights: Floats  # their probabilities, shape (members,)

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

    def posterior(self) -> Posterior:
        """Return what the probes have made of the priors of the likeliest member."""
        return self.members[int(np.argmax(self.weights))].posterior()

    def parts(self, points: Points) -> tuple[Floats, Floats, Floats]:
        """Return the expected step time, compute and synchronisation within it (hidden or not). Seconds."""
        step, compute, sync = np.tensordot(self.weights, [member.parts(points) for member in self.members], 1)
        return step, compute, sync


StepModel = Overlap | Mixture


def fit_step_model(
    points: Points, *, step: Floats, compute: Floats, spread: Floats, collective: str, priors: Priors = PRIORS
) -> StepModel:
    """Fit the model to probes: a mixture if they hold whole steps alone. Arguments as of `overlap.fit`."""

    def fit_with(p: float) -> Overlap:
        return overlap.fit_overlap(
            points, step=step, compute=compute, spread=spread, collective=collective, priors=replace(priors, p=p)
        )

    overlapped = fit_with(priors.p)
    if not overlapped.whole_steps_alone:
        return overlapped
    additive = fit_with(1.0)
    log_odds = math.log(_ADDITIVE / (1 - _ADDITIVE)) + additive.log_evidence - overlapped.log_evidence
    odds = math.exp(min(_MAX_LOG_ODDS, log_odds))
    return Mixture((overlapped, additive), np.array([1.0, odds]) / (1 + odds))
