"""Moldable trainings on a real cluster: the jobs among which they run, and what their turnaround is compared with."""

import random

import pytest
from on_cluster import LAST_SUBMISSION_SECONDS, LOAD, NODES, ClusterRun, draw_jobs


def test_other_jobs_fill_the_cluster_by_the_load_and_are_the_same_for_every_number_of_nodes() -> None:
    assert draw_jobs(random.Random(1)) == draw_jobs(random.Random(1)) != draw_jobs(random.Random(2))
    jobs = [job for seed in range(300) for job in draw_jobs(random.Random(seed))]
    node_seconds = sum(job.nodes * job.seconds for job in jobs)
    assert node_seconds / (300 * LAST_SUBMISSION_SECONDS * NODES) == pytest.approx(LOAD, rel=0.1)
    assert all(0 <= job.at < LAST_SUBMISSION_SECONDS and 1 <= job.nodes < NODES for job in jobs), (
        "never all nodes, so that a range can start"
    )


def test_a_turnaround_is_compared_with_the_best_fixed_number_of_nodes() -> None:
    run = ClusterRun(0, moldable=90.0, nodes_granted=2, fixed={"1": 150.0, "2": 100.0, "4": 120.0})
    assert run.ratio == pytest.approx(0.9)
