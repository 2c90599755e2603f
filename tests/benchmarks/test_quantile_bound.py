import random

import pytest
from quantile_bound import MAX_HISTORY, WaitSeries, bound_rank, min_values


@pytest.mark.parametrize(("count", "found"), [(28, None), (29, 29), (46, 45), (100, 96), (1000, 916)])
def test_the_rank_is_that_of_the_binomial_order_statistic(count: int, found: int | None) -> None:
    """Of 29 values the largest bounds the 0.9 quantile at 95 %: 1 - 0.9^29 = 0.953."""
    assert bound_rank(count, quantile=0.9, confidence=0.95) == found
    assert min_values(0.9, 0.95) == 29


def test_the_bound_is_above_the_quantile_as_often_as_it_says() -> None:
    drawn = random.Random(0)
    kept = 0
    for _ in range(400):
        series = WaitSeries()
        for _ in range(120):
            series.add(drawn.random())
        kept += (series.bound() or 0.0) >= 0.9
    assert 0.92 <= kept / 400 <= 0.995


def test_too_few_waits_bound_nothing() -> None:
    series = WaitSeries()
    for wait in range(28):
        series.add(wait)
    assert series.bound() is None
    series.add(5)
    assert series.bound() == 27


def test_a_run_of_exceedances_trims_the_history_and_a_single_one_does_not() -> None:
    drawn = random.Random(1)
    series = WaitSeries()
    for _ in range(300):
        series.add(drawn.uniform(50, 60))
    series.add(5000)
    assert series.changes == 0 and (series.bound() or 0) < 60
    for _ in range(60):
        series.add(drawn.uniform(1000, 1100))
    assert series.changes >= 1 and (series.bound() or 0) > 1000
    assert len(series.waits) < 120


def test_what_is_remembered_is_bounded_and_stays_in_order() -> None:
    drawn = random.Random(2)
    series = WaitSeries()
    for _ in range(MAX_HISTORY + 50):
        series.add(round(drawn.random(), 2))
    assert len(series.waits) == MAX_HISTORY
    assert series.bound() in series.waits
