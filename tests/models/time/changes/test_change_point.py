"""When a change of level is told: hardly ever without one, soon after one, and not for ever of what comes and goes."""

import itertools

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from tula_cli.models.time.changes import MAX_VALUES, MIN_LEVEL_VALUES, ChangePointTest, compute_split_statistics

Series = NDArray[np.float64]


def step_times(rng: Generator, count: int) -> Series:
    """Return times around 50 ms: Student's t with 3 degrees of freedom, and a spike of up to ten times in fifty."""
    spikes = np.where(rng.random(count) < 0.02, rng.uniform(2, 10, count), 1.0)
    return 0.05 * np.exp(0.04 * rng.standard_t(3, count)) * spikes


def told(series: Series) -> list[tuple[int, int]]:
    """Return each change: the value at which it is told, and that at which it is said to have begun."""
    test = ChangePointTest()
    result = ((at, test.add_value(float(value))) for at, value in enumerate(series))
    return [(at, at + 1 - change[0]) for at, change in result if change is not None]


def test_the_statistic_is_that_of_mann_and_whitney() -> None:
    values = np.array([3.0, 1.0, 2.0, 2.0, 5.0])
    pairs = [[np.sign(b - a) for a in values[:k] for b in values[k:]] for k in range(1, 5)]
    sds = [np.sqrt(k * (5 - k) * 6 / 3) for k in range(1, 5)]
    assert compute_split_statistics(values) == pytest.approx([sum(p) / sd for p, sd in zip(pairs, sds, strict=True)])


def test_no_alarm_in_ten_thousand_heavy_tailed_values() -> None:
    rng = np.random.default_rng(14)
    assert [told(step_times(rng, 500)) for _ in range(20)] == [[]] * 20


@pytest.mark.parametrize("factor", [1.2, 1 / 1.2])
def test_a_shift_of_a_fifth_is_reported_soon_and_dated_rightly(factor: float) -> None:
    rng = np.random.default_rng(15)
    delays, errors = [], []
    for _ in range(20):
        series = step_times(rng, 160)
        series[60:] *= factor
        ((at, since),) = told(series)
        delays.append(at + 1 - 60)
        errors.append(abs(since - 60))
    assert np.median(delays) <= 15 and max(delays) <= 40
    assert np.median(errors) <= 2 and max(errors) <= 15


def test_a_change_too_small_to_matter_is_not_told() -> None:
    series = step_times(np.random.default_rng(16), 400)
    series[200:] *= 1.06
    assert told(series) == []


def test_fewer_slow_values_than_a_level_needs_are_not_told() -> None:
    series = np.full(100, 0.05) + 1e-4 * np.arange(100) % 3e-4
    series[50 : 50 + MIN_LEVEL_VALUES - 5] *= 3
    assert told(series) == []


def test_a_load_that_comes_and_goes_is_not_told_for_ever() -> None:
    rng = np.random.default_rng(17)
    series = step_times(rng, 2000)
    for start in range(0, 2000, 2 * MIN_LEVEL_VALUES):
        series[start : start + MIN_LEVEL_VALUES] *= 1.5
    assert len(told(series)) <= 3
    lasting = step_times(rng, 1200)
    for start in range(200, 1200, 400):
        lasting[start : start + 200] *= 1.5
    result = told(lasting)
    assert len(result) == 5 and all(at - since < 2 * MAX_VALUES for at, since in result)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(result)]
    assert min(gaps) > MIN_LEVEL_VALUES
