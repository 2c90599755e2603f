"""The simulation of moldable trainings: what a job is granted, and that the turnaround is near the best in hindsight."""

import pytest
from easy_backfilling import Cluster
from lublin_feitelson import ModelJob
from moldable import JOB_TIME_LIMIT_SECONDS, START_SECONDS, compare, train

SECONDS = {1: 7200.0, 2: 3600.0, 4: 1800.0}


def test_a_job_starts_on_the_largest_of_its_sizes_that_is_free() -> None:
    busy = Cluster(4, [ModelJob(0.0, 1, 10_000.0, 10_000.0)])
    busy.until(1.0)
    ended = train(busy, (1, 2, 4), SECONDS)
    assert ended.seconds == pytest.approx(START_SECONDS + SECONDS[2])
    assert ended.node_hours == pytest.approx(2 * (START_SECONDS + SECONDS[2]) / 3600)
    assert train(busy, (4,), SECONDS).seconds == pytest.approx(9_999.0 + START_SECONDS + SECONDS[4]), (
        "a fixed number waits"
    )


def test_the_next_job_takes_what_is_free_then_and_trains_the_rest() -> None:
    half = Cluster(4, [ModelJob(0.0, 2, JOB_TIME_LIMIT_SECONDS, JOB_TIME_LIMIT_SECONDS)])
    half.until(0.0)
    seconds = {nodes: 2 * (JOB_TIME_LIMIT_SECONDS - START_SECONDS) * 2 / nodes for nodes in (2, 4)}
    assert train(half, (2, 4), seconds).seconds == pytest.approx(
        JOB_TIME_LIMIT_SECONDS + START_SECONDS + (JOB_TIME_LIMIT_SECONDS - START_SECONDS) / 2
    )


def test_the_median_turnaround_is_near_that_of_the_best_fixed_number_in_hindsight() -> None:
    (result,) = compare(0.9, fewest=(8,), trainings=40, jobs=2000, seed=0)
    assert result.median_ratio <= 1.2
    assert result.median_ratio < result.fixed_ratio < result.largest_ratio
