import math

import numpy as np
import pytest

from tula_cli.models.time.changes import MIN_DIFFERENCE, MIN_STANDARD_ERRORS_APART, compare_step_times


def times(middle: float, jitter: float, seed: int, steps: int = 30) -> list[float]:
    return list(middle * (1 + jitter * np.random.default_rng(seed).standard_normal(steps)))


def test_probes_that_are_alike_are_hardly_ever_told_apart() -> None:
    answer = sum(
        compare_step_times(times(0.1, 0.1, seed), times(0.1, 0.1, seed + 5000)).is_beyond_noise for seed in range(400)
    )
    assert answer <= 4, "1 % of 400"


def test_a_fifth_more_is_found_where_steps_scatter_by_five_percent() -> None:
    results = [compare_step_times(times(0.1, 0.05, seed), times(0.12, 0.05, seed + 5000)) for seed in range(50)]
    assert all(item.is_beyond_noise for item in results)
    assert np.median([first.ratio for first in results]) == pytest.approx(1.2, rel=0.01)


def test_the_same_way_back() -> None:
    first, other = times(0.1, 0.02, 1), times(0.13, 0.02, 2)
    there, back = compare_step_times(first, other), compare_step_times(other, first)
    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.error == pytest.approx(back.error) and there.is_beyond_noise and back.is_beyond_noise


def test_what_is_closer_than_jobs_are_by_themselves_is_not_told() -> None:
    exact = compare_step_times([0.1] * 10, [0.1 * (1 + MIN_DIFFERENCE / 2)] * 10)
    assert exact.error == pytest.approx(0, abs=1e-9) and not exact.is_beyond_noise
    assert compare_step_times([0.1] * 10, [0.1 * (1 + 2 * MIN_DIFFERENCE)] * 10).is_beyond_noise


def test_too_few_steps_tell_nothing() -> None:
    step_times = compare_step_times([0.1] * 4, [0.3] * 4)
    assert math.isinf(step_times.error) and not step_times.is_beyond_noise
    assert step_times.ratio == pytest.approx(3)
    assert MIN_STANDARD_ERRORS_APART > 2
