import math

import numpy as np
import pytest

from tula_cli.models.time import step_time
from tula_cli.models.time.step_model import PRIORS, SHARDED_PRIORS, OverlapFit, Priors, choose_priors
from tula_cli.models.time.step_time import Observation, StepTimeFit

SWEEP = [*((1, b) for b in (16, 32, 64, 128, 256)), (2, 16), (4, 16), (8, 16), (8, 64), (8, 256)]
UNSEEN = [(n, b) for n in (2, 4, 8) for b in (32, 64, 128, 256) if (n, b) not in SWEEP]


def step(nodes: int, batch: int, *, overlapped: bool, sync: float = 0.06) -> tuple[float, float]:
    """Return the seconds of a step and of its compute, two thirds of which may hide the synchronisation."""
    compute, traffic = 0.02 + 0.0005 * batch, sync * nodes**0.2 if nodes > 1 else 0.0
    hidden = max(compute * 2 / 3, traffic) - compute * 2 / 3 if overlapped else traffic
    return compute + hidden + (0.07 * traffic if overlapped else 0.0), compute


def fitted(
    probes: list[tuple[int, int]], *, overlapped: bool, whole: bool = True, priors: Priors = PRIORS
) -> StepTimeFit:
    seen = []
    for nodes, batch in probes:
        seconds, compute = step(nodes, batch, overlapped=overlapped)
        seen.append(Observation(nodes, 1, batch, (seconds,) * 10, math.nan if whole else compute))
    return step_time.fit_step_time(seen, collective="ring", priors=priors)


def worst(predicted: np.ndarray, *, overlapped: bool) -> float:
    truth = np.log([step(nodes, batch, overlapped=overlapped)[0] for nodes, batch in UNSEEN])
    return float(np.abs(predicted - truth).max())


def test_where_the_compute_is_known_or_nothing_is_synchronised_there_is_one_fit() -> None:
    assert len(fitted(SWEEP, overlapped=True, whole=False).model.members) == 1
    assert len(fitted([(1, 16), (1, 64)], overlapped=True).model.members) == 1


def test_gradients_of_two_buckets_make_it_open_whether_they_are_hidden() -> None:
    mib = 1 << 20
    small, large = (choose_priors(gradient_bytes=size * mib, sharded=False) for size in (26, 27))
    assert small.additive == 0.5 and large == choose_priors(gradient_bytes=0, sharded=False) == PRIORS
    assert choose_priors(gradient_bytes=mib, sharded=True).level == SHARDED_PRIORS.level


@pytest.mark.parametrize("overlapped", [False, True])
def test_of_a_small_model_both_are_fitted_where_its_compute_is_known(overlapped: bool) -> None:
    priors = choose_priors(gradient_bytes=1 << 20, sharded=False)
    fit = fitted(SWEEP, overlapped=overlapped, whole=False, priors=priors)
    assert len(fit.model.members) == 2 and (fit.model.overlap_probability > 0.5) == overlapped
    assert "compute hides" in fit.words and "only from the times of complete steps" not in fit.words
    nodes, batches = np.transpose(UNSEEN)
    predicted = fit.model.predict(fit.make_points(nodes, np.ones(len(UNSEEN)), batches))[0]
    assert worst(predicted, overlapped=overlapped) < 0.05


def test_steps_in_which_nothing_is_hidden_are_recognised() -> None:
    fit = fitted(SWEEP, overlapped=False)
    assert len(fit.model.members) == 2 and fit.model.overlap_probability < 0.5
    assert f"compute hides synchronisation with probability {100 * fit.model.overlap_probability:.0f} %" in fit.words
    nodes, batches = np.transpose(UNSEEN)
    points = fit.make_points(nodes, np.ones(len(UNSEEN)), batches)
    overlap_alone, together = (
        worst(model.predict(points)[0], overlapped=False) for model in (fit.model.members[0], fit.model)
    )
    assert together < 0.75 * overlap_alone


def test_steps_that_hide_their_synchronisation_are_recognised() -> None:
    fit = fitted(SWEEP, overlapped=True)
    assert len(fit.model.members) == 2 and fit.model.overlap_probability > 0.9
    assert "synchronisation" in fit.words and "alone" not in fitted(SWEEP, overlapped=True, whole=False).words


def test_a_prediction_holds_how_far_the_members_are_apart() -> None:
    fit = fitted([(1, 16), (1, 256), (8, 16)], overlapped=True)
    assert len(fit.model.members) == 2
    points = fit.make_points([8, 8], [1, 1], [64, 256])
    mean, sd = fit.model.predict(points)
    means, sds = zip(*(member.predict(points) for member in fit.model.members), strict=True)
    assert mean == pytest.approx(fit.model.weights @ means)
    assert sd**2 == pytest.approx(fit.model.weights @ (np.square(sds) + np.square(means - mean)))
    joint, covariance = fit.model.predict_jointly(points)
    assert joint == pytest.approx(mean)
    assert np.diag(covariance) + fit.model.compute_measurement_noise(points) ** 2 == pytest.approx(sd**2, rel=1e-6)
    step_time, compute, sync = fit.model.compute_parts(points)
    assert ((compute < step_time) & (sync > 0)).all()


def test_evidence_that_leaves_no_doubt_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OverlapFit, "log_evidence", property(lambda model: -1e6 * model.frame.priors.p))
    model = fitted(SWEEP, overlapped=True).model
    assert len(model.members) == 2 and model.weights[1] == pytest.approx(1.0) and np.isfinite(model.weights).all()
