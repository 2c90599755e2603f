"""How wide intervals have to be, by how far trainings were off theirs (models/time/calibration.py)."""

import math
from collections.abc import Iterable

import numpy as np
import pytest

from tula_cli.models.time.calibration import AS_MODELLED, BOUNDS, Tried, calibration, width
from tula_cli.models.time.noise import Z90

SD = 0.05


def tried(errors: Iterable[float], *, widened: float = 1.0, one_prediction: bool = False) -> list[Tried]:
    """Return trainings whose errors are so many standard deviations; each tries a prediction of its own, unless told."""
    half = Z90 * SD * widened
    return [
        Tried((f"run-{0 if one_prediction else at}", 2, 64, 0.1), 0.1, 0.1 * math.exp(-half), 0.1 * math.exp(half), 0.1 * math.exp(SD * z), widened)
        for at, z in enumerate(errors)
    ]  # fmt: skip


def test_nothing_tried_changes_nothing() -> None:
    assert calibration([], []) == AS_MODELLED and AS_MODELLED.step == AS_MODELLED.hours == 1.0 and not AS_MODELLED.words


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.5, 2.0, 3.0])
def test_intervals_that_were_too_narrow_by_a_factor_come_to_hold_what_they_should(factor: float) -> None:
    found = [
        calibration(tried(factor * np.random.default_rng(seed).standard_normal(40)), []).step for seed in range(20)
    ]
    assert np.mean(found) == pytest.approx(factor, rel=0.15)
    held = [math.erf(Z90 * step / factor / math.sqrt(2)) for step in found]
    assert np.mean(held) == pytest.approx(0.9, abs=0.07)
    before = math.erf(Z90 / factor / math.sqrt(2))
    assert abs(np.mean(held) - 0.9) <= abs(before - 0.9) + 0.01


def test_few_trainings_move_it_little_and_one_far_off_hardly_does() -> None:
    assert calibration(tried([3.0]), []).step < 1.25
    assert calibration(tried([50.0]), []).step < 1.25
    assert calibration(tried([0.5, -0.7, 1.0, -1.2, 0.1, 50.0]), []).step < 1.2


def test_it_stays_within_bounds() -> None:
    assert calibration(tried([0.0] * 500), []).step == BOUNDS[0]
    assert calibration(tried([20.0] * 500), []).step == BOUNDS[1]


def test_trainings_that_try_one_prediction_count_as_one() -> None:
    many = calibration(tried([3.0] * 30, one_prediction=True), [])
    assert many.step == calibration(tried([3.0]), []).step and many.trainings == 30


def test_an_interval_that_was_widened_already_is_judged_as_the_models_had_it() -> None:
    errors = [2.0, -3.0, 1.0, 2.5, -2.0]
    assert calibration(tried(errors, widened=1.7), []).step == pytest.approx(calibration(tried(errors), []).step)


def test_each_side_of_an_interval_has_its_own_width() -> None:
    lopsided = Tried(("a", 1, 1, 1.0), 1.0, 0.5, math.exp(Z90 * 0.1), math.exp(0.1))
    assert lopsided.standardised == pytest.approx(1.0)
    assert width([[lopsided]]) == pytest.approx(1.0, abs=0.01)


def test_hours_are_calibrated_by_themselves_and_a_bias_is_told_alone() -> None:
    found = calibration(tried([3.0, 2.8, 3.1, 3.2]), tried([0.2]))
    assert found.step > 1.3 and found.hours < 1.0 and (found.hours_trainings, found.inside) == (1, 0)
    assert found.bias == pytest.approx(math.expm1(SD * 3.0), rel=0.02)
    assert "of 4 finished trainings 0 ended inside theirs" in found.words
    assert "16% longer than predicted, which is told and not applied" in found.words
    assert calibration(tried([3.0, -3.0, 2.0]), []).bias is None
