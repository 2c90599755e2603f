import statistics

import pytest
from chosen_nodes import Request, chain_wait, judge_choices
from easy_backfilling import Cluster
from lublin_feitelson import ModelJob, day_weights, generate_jobs
from queue_bounds import measure_coverage, simulate_log
from workload_format import LoggedJob, parse_log


def test_a_log_is_read_and_jobs_without_a_wait_are_left_out() -> None:
    lines = ["; a header", "", "1 5 10 100 4 -1 -1 8 3600 -1 1 1 1 -1 -1 1 -1 -1", "2 3 -1 100 4 -1 -1 8 60 -1 1 1 1",
             "3 1 2 50 4 -1 -1 -1 -1 -1 1 1 1"]  # fmt: skip
    assert parse_log(lines) == [LoggedJob(1, 2, 50, 4, 50), LoggedJob(5, 10, 100, 8, 3600)]
    with pytest.raises(ValueError, match="Standard Workload Format"):
        parse_log(["1 2 3"])


def test_backfilling_passes_others_only_where_the_head_is_not_put_off() -> None:
    """Of 4 nodes 3 are busy till 100; the head wants 4. A short job on the free node passes it, a long one does not."""
    jobs = [ModelJob(0, 3, 100, 100), ModelJob(1, 4, 10, 10), ModelJob(2, 1, 200, 200), ModelJob(3, 1, 50, 60)]
    assert [job.wait for job in simulate_log(4, jobs)] == [0, 99, 108, 0]


def test_the_wait_of_another_job_is_that_of_a_log_that_has_it() -> None:
    jobs = generate_jobs(150, nodes=32, load=0.9, seed=3)
    moment = jobs[90].submitted + 1.0
    extra = ModelJob(moment, 16, 3000.0, 3600.0)
    cluster = Cluster(32, jobs)
    cluster.until(moment)
    requested = cluster.fork().wait_of(extra)
    both = sorted([*jobs, extra], key=lambda job: job.submitted)
    assert requested == pytest.approx(simulate_log(32, both)[both.index(extra)].wait)
    cluster.finish()
    assert len(cluster.starts) == len(jobs)  # the machine that was asked went on as if it had not been


def test_the_model_is_the_published_one() -> None:
    jobs = generate_jobs(3000, nodes=128, load=0.8, seed=0)
    assert jobs == generate_jobs(3000, nodes=128, load=0.8, seed=0)
    serial = sum(job.nodes == 1 for job in jobs) / len(jobs)
    assert 0.27 <= serial <= 0.32  # 0.2927
    assert max(job.nodes for job in jobs) <= 128 and all(job.run <= job.limit for job in jobs)
    assert statistics.median(job.run for job in jobs) < 1500 < statistics.mean(job.run for job in jobs)
    weights = day_weights()
    assert weights.mean() == pytest.approx(1.0) and 22 <= weights.argmax() <= 34  # most jobs come by day


def test_bounds_of_a_steady_queue_cover_what_they_say() -> None:
    import random

    drawn = random.Random(4)
    log = [LoggedJob(100.0 * place, drawn.expovariate(0.01), 60, 1, 600) for place in range(600)]
    (row, everything) = measure_coverage(log)
    assert row.size == "1 node, up to 1 h" and everything.jobs == 540
    assert 0.88 <= everything.covered <= 0.97


def test_what_is_chosen_is_never_better_than_the_best_in_hindsight() -> None:
    jobs = generate_jobs(300, nodes=64, load=0.7, seed=5)
    for row in judge_choices(64, jobs, simulate_log(64, jobs), count=3, seed=0):
        assert row.trainings == 3 and row.mean_regret >= 0 and row.nodes_near >= row.near


def test_every_link_waits() -> None:
    assert chain_wait(Request(4, 60, 3), 100.0, 40.0) == 180.0
    assert chain_wait(Request(4, 60, 1), 100.0, 40.0) == 100.0
