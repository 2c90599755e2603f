"""Predictions for other requests from one observed configuration."""

import dataclasses
import math

import pytest
from observed_jobs import make_job, make_rank

from tula_cli.errors import BadMeasurements
from tula_cli.models.observed import (
    MeasuredJob,
    list_alternative_sizes,
    make_observed_report,
    predict_alternative_request,
)
from tula_cli.models.time.step_time import Observation


def test_parts_of_a_step_memory_and_shares_are_those_of_the_records() -> None:
    report = make_observed_report(make_job(8, 4))
    assert (report.nodes, report.gpus_per_node, report.local_batch, report.batch) == (8, 4, 32, 1024)
    assert report.step_seconds == pytest.approx(0.2) and report.sync_seconds == pytest.approx(0.1)
    assert report.compute_seconds == pytest.approx(0.099) and report.exposed_communication == pytest.approx(0.5)
    assert report.samples_per_second == pytest.approx(5120) and report.steps == 500
    assert report.shares == {"data": 0.01, "eval": 0.05, "epoch": 0.0, "save": 0.02}
    # 14.4 of 16 GiB may be used, 2 GiB of the 4 GiB do not grow with the batch.
    assert report.batch_growth == pytest.approx((0.9 * 16 - 2) / (4 - 2))
    assert {str(advice.code) for advice in report.warnings} >= {"larger-batch-fits"}


def test_a_training_that_ends_before_its_exchange_is_measured_says_so() -> None:
    job = make_job(1, 2)
    ranks = tuple(rank.model_copy(update={"split": None, "steps": 60}) for rank in job.ranks)
    beats = tuple(beat.model_copy(update={"step": 60}) for beat in job.heartbeats)
    job = dataclasses.replace(job, ranks=ranks, heartbeats=beats, sync_seconds=None)
    (note,) = make_observed_report(job).notes
    assert "only 60 steps" in note and not make_observed_report(make_job(1, 2)).notes
    without_ddp = tuple(rank.model_copy(update={"notes": ("no DistributedDataParallel",)}) for rank in ranks)
    assert make_observed_report(dataclasses.replace(job, ranks=without_ddp)).notes == ("no DistributedDataParallel",)


def test_time_and_node_hours_of_a_request_belong_together() -> None:
    for request in make_observed_report(make_job(8, 4)).other_requests:
        assert request.node_hours_ratio == pytest.approx(request.time_ratio * request.nodes / 8)
        assert request.time_low <= request.time_ratio <= request.time_high
        assert request.batch == 1024 * request.nodes // 8


def test_requests_of_fewer_gpus_never_have_longer_steps() -> None:
    observed = Observation(1, 2, 8, (0.006,) * 20, 0.0055)
    request = predict_alternative_request([observed], observed, 1, 1)
    assert request.step_seconds <= 0.006 and request.time_ratio <= 2.0


def test_a_job_without_synchronisation_gains_all_from_more_nodes() -> None:
    free = make_observed_report(make_job(8, 4, sync=0.0001)).other_requests
    half = next(request for request in free if request.nodes == 4)
    assert half.time_ratio == pytest.approx(2.0, rel=0.05) and half.node_hours_ratio == pytest.approx(1.0, rel=0.05)


def test_a_second_job_narrows_the_prediction() -> None:
    job = make_job(8, 1)
    alone = make_observed_report(job)
    together = make_observed_report(job, [make_job(4, 1, seconds=0.19, sync=0.09)])
    assert together.jobs_fitted == together.configurations_fitted == 2
    again = make_observed_report(job, [make_job(8, 1)])  # tells recommend nothing new
    assert again.jobs_fitted == 2 and again.configurations_fitted == 1
    unknown_batch = dataclasses.replace(make_job(4, 1, seconds=0.19), samples=None)
    assert make_observed_report(job, [unknown_batch]).other_requests == alone.other_requests
    assert make_observed_report(unknown_batch, [job]).configurations_fitted == 0

    def width(report: object) -> float:
        (half,) = [request for request in report.other_requests if request.nodes == 4]  # type: ignore[attr-defined]
        assert half.time_low > 0
        return math.log(half.time_high / half.time_low)

    assert width(together) < width(alone)


@pytest.mark.parametrize(
    ("place", "requests"),
    [((8, 4), [(2, 4), (4, 4), (16, 4)]), ((2, 8), [(1, 8), (4, 8)]), ((1, 8), [(1, 2), (1, 4)]), ((1, 1), [])],
)
def test_requests_are_a_quarter_half_and_twice(place: tuple[int, int], requests: list[tuple[int, int]]) -> None:
    assert list_alternative_sizes(*place) == requests


def test_waits_for_data_and_fewer_nodes_are_advised() -> None:
    report = make_observed_report(make_job(8, 1, sync=0.18, wait=30.0))
    assert [advice.code for advice in report.warnings] == [
        "fewer-nodes-are-cheaper", "data-waits-are-long", "larger-batch-fits"
    ]  # fmt: skip
    assert report.warnings[0].values["exposed_communication"] == pytest.approx(0.9)
    assert "fewer-nodes-are-cheaper" not in {a.code for a in make_observed_report(make_job(8, 1, sync=0.001)).warnings}
    short = make_job(8, 1, sync=0.18, wait=30.0)
    (beat,) = short.heartbeats
    totals = {name: seconds / 2 for name, seconds in (beat.totals or {}).items()}
    short = dataclasses.replace(short, heartbeats=(beat.model_copy(update={"totals": totals}),))
    assert "data-waits-are-long" not in {advice.code for advice in make_observed_report(short).warnings}
    packed = make_observed_report(make_job(16, 4, sync=0.195)).warnings
    assert "fewer-nodes-are-cheaper" in {advice.code for advice in packed}, "almost all of the step is communication"


@pytest.mark.parametrize("ranks", [0, 3])
def test_missing_ranks_are_said(ranks: int) -> None:
    records = [make_rank(rank, world=4, gpus=4, seconds=0.1, sync=0.01) for rank in range(ranks)]
    with pytest.raises(BadMeasurements, match=r"no step has been measured yet|only 3 of 4 ranks"):
        MeasuredJob.from_records("train", "job", records, [], 0.0)


def test_a_job_without_peak_and_totals_is_reported_without_memory_and_shares() -> None:
    job = make_job(1, 2)
    ranks = tuple(rank.model_copy(update={"peak": {}}) for rank in job.ranks)
    beats = tuple(beat.model_copy(update={"totals": {"data": 1.0}}) for beat in job.heartbeats)
    report = make_observed_report(dataclasses.replace(job, ranks=ranks, heartbeats=beats))
    assert (report.peak_bytes, report.batch_growth, report.shares) == (0, None, {})
