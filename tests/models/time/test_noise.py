"""How well the mean of some steps is known."""

import math

import numpy as np
import pytest

from tula_cli.models.time.noise import compute_standard_error

RNG = np.random.default_rng(0)


def test_fewer_than_five_steps_tell_nothing() -> None:
    assert math.isinf(compute_standard_error([1.0] * 4)) and compute_standard_error([1.0] * 5) == 0


def test_of_independent_steps_it_is_that_of_their_mean() -> None:
    results = [compute_standard_error(RNG.normal(1, 0.1, 400).tolist()) for _ in range(200)]
    assert np.median(results) == pytest.approx(0.1 / math.sqrt(400), rel=0.15)
    assert min(results) > 0.8 * 0.1 / math.sqrt(400)


def test_steps_like_their_neighbours_tell_less() -> None:
    walks = [np.repeat(RNG.normal(1, 0.1, 8), 50).tolist() for _ in range(50)]
    assert np.median([compute_standard_error(walk) for walk in walks]) > 3 * 0.1 / math.sqrt(400)


def test_one_stall_does_not_count() -> None:
    steps = RNG.normal(1, 0.01, 50)
    steps[7] = 30
    assert compute_standard_error(steps.tolist()) < 0.01
