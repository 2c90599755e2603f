"""How time and memory grow with the length of text."""

import itertools

import numpy as np
import pytest

from tula_cli.models.time.growth import fit_length_growth


def taken(length: int, samples: float) -> float:
    return 0.01 + samples * length * (2e-6 + 1e-9 * length)


SEEN = [(length, samples, taken(length, samples)) for length, samples in itertools.product((128, 512, 2048), (8, 64))]


def test_the_square_is_distinguished_from_the_line_and_from_what_is_fixed() -> None:
    length_growth = fit_length_growth(SEEN)
    assert length_growth is not None and length_growth.error == pytest.approx(0, abs=1e-6)
    assert (length_growth.fixed, length_growth.linear, length_growth.square) == pytest.approx(
        (0.01, 2e-6, 1e-9), rel=1e-6
    )
    assert length_growth.quadratic_share(2000) == pytest.approx(0.5) and length_growth(1024, 16) == pytest.approx(
        taken(1024, 16)
    )


def test_no_coefficient_is_negative() -> None:
    flat = [(length, samples, 1.0 + 0.001 * samples) for length, samples, _ in SEEN]
    length_growth = fit_length_growth(flat)
    assert length_growth is not None and min(length_growth.fixed, length_growth.linear, length_growth.square) >= 0
    noisy = [(length, samples, value * (1 + 0.1 * noise)) for (length, samples, value), noise in
             zip(SEEN, np.random.default_rng(1).standard_normal(len(SEEN)), strict=True)]  # fmt: skip
    again = fit_length_growth(noisy)
    assert again is not None and min(again.fixed, again.linear, again.square) >= 0 and again.error is not None


def test_one_length_or_two_points_tell_no_growth() -> None:
    assert (
        fit_length_growth([]) is None
        and fit_length_growth(SEEN[:2]) is None
        and fit_length_growth([SEEN[0], SEEN[2]]) is None
    )
    determined = fit_length_growth(SEEN[:3])
    assert determined is not None and determined.error is None
