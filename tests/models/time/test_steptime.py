import dataclasses
import math
import re

import numpy as np
import pytest
from read_diagnostics import values

from tula_cli.errors import BadMeasurements
from tula_cli.models.time.noise import compute_block_deviation, compute_trimmed_mean
from tula_cli.models.time.step_time import Observation, estimate_measured_step_time, fit_step_time

GRID = [(nodes, batch) for nodes in (2, 4, 8, 16) for batch in (16, 64, 256)]


def observation(nodes: int, batch: int, seconds: float, *, gpus: int = 1, compute: float = math.nan) -> Observation:
    return Observation(nodes, gpus, batch, (seconds,) * 10, compute_time=compute)


def overlapped(nodes: int, batch: int, *, gpus: int = 1, sync: float = 0.1) -> Observation:
    """A step whose backward pass hides a ring."""
    compute, traffic = max(0.02, 0.001 * batch), sync * (1 - 1 / nodes)
    seconds = compute / 3 + max(compute * 2 / 3, traffic) + 0.05 * traffic
    return observation(nodes, batch, seconds, gpus=gpus, compute=compute)


def test_predicts_what_was_not_measured_with_an_interval() -> None:
    step_time = fit_step_time([overlapped(n, b) for n, b in GRID], collective="ring")
    for nodes, batch in [(4, 32), (8, 128), (12, 200)]:
        estimate = step_time.predict(nodes, 1, batch)
        assert estimate.seconds == pytest.approx(overlapped(nodes, batch).seconds, rel=0.06)
        assert estimate.low is not None and estimate.high is not None
        assert estimate.low < estimate.seconds < estimate.high
    assert step_time.error is not None and step_time.error < 0.03 and not step_time.warnings


def test_more_nodes_than_were_measured_are_less_certain_and_not_any_number() -> None:
    step_time = fit_step_time([overlapped(n, b) for n, b in GRID if n <= 4], collective="ring")
    widths = [e.high / e.low for n in (4, 8, 16, 32) if (e := step_time.predict(n, 1, 64)).high and e.low]
    assert len(widths) == 4 and widths == sorted(widths)
    assert step_time.describe_why_unpredictable(33, 1, 64) == "33 nodes are more than 8 times the 4 that were measured"


def test_all_at_once_is_the_same_as_one_by_one() -> None:
    step_time = fit_step_time([overlapped(n, b) for n, b in GRID], collective="ring")
    together = step_time.predict_step_times([2, 6, 16], [1, 1, 1], [16, 48, 512])
    for index, (nodes, batch) in enumerate([(2, 16), (6, 48), (16, 512)]):
        estimate = step_time.predict(nodes, 1, batch)
        assert (estimate.seconds, estimate.low, estimate.high) == pytest.approx(
            (together.seconds[index], together.low[index], together.high[index])
        )


def test_noise_within_the_probes_widens_the_interval() -> None:
    rng = np.random.default_rng(2)

    def width(jitter: float) -> float:
        waves = {key: 1 + jitter * np.repeat(rng.permutation([-1.0, -0.5, 0.0, 0.5, 1.0]), 10) for key in GRID}
        seen = [
            Observation(n, 1, b, tuple(overlapped(n, b).seconds * waves[n, b]), overlapped(n, b).compute_time)
            for n, b in GRID
        ]
        estimate = fit_step_time(seen, collective="ring").predict(6, 1, 128)
        assert estimate.low is not None and estimate.high is not None
        return (estimate.high - estimate.low) / estimate.seconds

    assert 1.1 * width(0.0) < width(0.3)


def test_the_fit_is_reported_in_one_line() -> None:
    words = fit_step_time([overlapped(n, b) for n, b in GRID], collective="ring").words
    assert words.startswith("step = compute 2") and " at local batch 16 to " in words and " at local batch 256" in words
    assert (
        "overlapped with synchronisation" in words and " at 2 nodes to " in words and " at 16 nodes (12 probes" in words
    )
    alone = fit_step_time([observation(1, b, 0.1 + 0.001 * b) for b in (16, 64, 256)], collective="ring").words
    assert "synchronisation" not in alone


def test_as_many_parameters_as_measurements_is_said() -> None:
    corners = [(2, 16), (2, 256), (16, 16), (16, 256)]
    step_time = fit_step_time([observation(n, b, overlapped(n, b).seconds) for n, b in corners], collective="ring")
    assert step_time.is_exactly_determined and step_time.error is None
    assert "exactly determined" in step_time.words and "residual 0" not in step_time.words
    # Compute measured apart from synchronisation is a measurement of its own.
    assert not fit_step_time([overlapped(n, b) for n, b in corners], collective="ring").is_exactly_determined


def test_a_fit_that_misses_a_probe_is_not_said_to_be_exact() -> None:
    step_time = fit_step_time([observation(1, 16, 0.5), observation(1, 64, 0.1)], collective="ring")
    assert values(step_time.warnings, "fit-misses")["kind"] == "probe"
    assert not step_time.is_exactly_determined and "exactly" not in step_time.words


def test_one_number_of_nodes_predicts_only_that() -> None:
    step_time = fit_step_time([observation(4, b, 0.1 + 0.001 * b) for b in (16, 64, 256)], collective="ring")
    assert step_time.predict(4, 1, 128).seconds == pytest.approx(0.228, rel=0.05)
    assert "one number of nodes" in step_time.describe_why_unpredictable(8, 1, 64)


def test_one_local_batch_predicts_only_that() -> None:
    step_time = fit_step_time([overlapped(n, 64) for n in (2, 4, 8)], collective="ring")
    assert step_time.predict(16, 1, 64).seconds == pytest.approx(overlapped(16, 64).seconds, rel=0.25)
    assert "one local batch" in step_time.describe_why_unpredictable(2, 1, 32)


def test_one_probe_predicts_only_itself() -> None:
    step_time = fit_step_time([observation(4, 64, 0.3)], collective="reduce_scatter_allgather")
    assert step_time.predict(4, 1, 64).seconds == pytest.approx(0.3, rel=0.02)
    assert step_time.describe_why_unpredictable(2, 1, 64) and step_time.describe_why_unpredictable(4, 1, 32)
    assert step_time.error is None


def test_equal_probes_are_one_point_between_them() -> None:
    step_time = fit_step_time([observation(4, 64, 0.3), observation(4, 64, 0.32)], collective="ring")
    assert 0.3 < step_time.predict(4, 1, 64).seconds < 0.32
    assert step_time.describe_why_unpredictable(4, 1, 128)


def test_no_probe_or_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(BadMeasurements, match="no probe"):
        fit_step_time([], collective="ring")
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BadMeasurements, match="2 nodes, local batch 8"):
            fit_step_time([observation(2, 8, wrong)], collective="ring")


def test_traffic_counts_nodes_where_there_are_several_even_with_one_node_among_them() -> None:
    seen = [overlapped(n, b, gpus=8) for n in (2, 4, 8) for b in (16, 64)]
    alone = [observation(1, b, max(0.02, 0.001 * b), gpus=8, compute=max(0.02, 0.001 * b)) for b in (16, 64)]
    step_time = fit_step_time([*seen, *alone], collective="ring")
    assert step_time.predict(6, 8, 32).seconds == pytest.approx(overlapped(6, 32).seconds, rel=0.06)
    assert step_time.predict(1, 8, 32).seconds == pytest.approx(0.032, rel=0.15)
    assert step_time.describe_why_unpredictable(8, 4, 32) == "only 8 GPUs per node were measured, not 4"


def test_traffic_counts_gpus_inside_one_node() -> None:
    seen = [
        observation(1, b, overlapped(g, b).seconds, gpus=g, compute=overlapped(g, b).compute_time)
        for g in (1, 2, 4)
        for b in (16, 64)
    ]
    step_time = fit_step_time(seen, collective="ring")
    assert step_time.predict(1, 8, 32).seconds == pytest.approx(overlapped(8, 32).seconds, rel=0.1)
    assert "only one node" in step_time.describe_why_unpredictable(8, 8, 32)


def two_level(nodes: int, gpus: int, batch: int) -> Observation:
    """A step whose synchronisation is that inside a node and then between nodes, which the backward pass hides a part of."""
    compute = 0.02 + 0.001 * batch
    traffic = 0.06 * (nodes > 1) * (nodes / 2) ** 0.2 + 0.015 * (gpus > 1) * (gpus / 2) ** 0.7
    seconds = compute / 3 + max(compute * 2 / 3, traffic) + 0.05 * traffic
    return observation(nodes, batch, seconds, gpus=gpus, compute=compute)


def test_nodes_of_several_gpus_follow_from_one_node_and_nodes_of_one_gpu() -> None:
    apart = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1)]
    step_time = fit_step_time([two_level(n, g, b) for n, g in apart for b in (16, 64, 256)], collective="ring")
    assert "at 1 node of 8 GPUs to" in step_time.words
    for nodes, gpus, batch in [(2, 8, 16), (4, 8, 64), (4, 4, 16), (4, 2, 128), (4, 6, 32)]:
        estimate, truth = step_time.predict(nodes, gpus, batch), two_level(nodes, gpus, batch).seconds
        assert estimate.low is not None and estimate.high is not None and estimate.low < truth < estimate.high
        assert estimate.seconds == pytest.approx(truth, rel=0.25)
    assert step_time.describe_why_unpredictable(2, 16, 16) == "only 1, 2, 4, 8 GPUs per node were measured, not 16"
    assert "more than 8 times" in step_time.describe_why_unpredictable(33, 8, 16)


def test_one_probe_on_several_nodes_of_several_gpus_tells_most_of_the_others() -> None:
    apart = [(n, g, b) for n, g in [(1, 1), (1, 4), (1, 8), (2, 1), (4, 1)] for b in (16, 64, 256)]
    widths = []
    for corner in ([], [(2, 8, 16)]):
        result = fit_step_time([two_level(*at) for at in [*apart, *corner]], collective="ring").predict(4, 8, 32)
        assert result.low is not None and result.high is not None
        assert result.low < two_level(4, 8, 32).seconds < result.high
        widths.append(result.high / result.low)
    assert widths[1] < 0.9 * widths[0]


def test_odd_probes_are_pointed_out() -> None:
    seen = [overlapped(n, b) for n, b in GRID]
    seen[0] = observation(2, 16, 0.3)
    warnings = fit_step_time(seen, collective="ring").warnings
    assert "2 nodes, local batch 16" in values(warnings, "fit-misses")["where"][0]
    assert values(warnings, "step-time-falls-with-batch")["pairs"][0] == "2 nodes, local batch 16 and 64"


def test_a_missed_probe_is_shown_with_what_the_fit_has_for_it() -> None:
    fit = fit_step_time([observation(2, 16, 0.3), *(overlapped(n, b) for n, b in GRID[1:])], collective="ring")
    fitted = 1000 * fit.predict(2, 1, 16).seconds
    where = values(fit.warnings, "fit-misses")["where"][0]
    measured, shown = re.findall(r"([\d.]+) ms", where)
    assert float(measured) == 300 and float(shown) == pytest.approx(fitted, rel=0.01)


@pytest.mark.parametrize(("seconds", "falls"), [(0.0905, False), (0.0895, True)])
def test_a_step_that_is_a_tenth_shorter_at_a_larger_batch_is_pointed_out(seconds: float, falls: bool) -> None:
    seen = [observation(1, 16, 0.1), observation(1, 32, seconds), observation(2, 16, 0.05), observation(2, 16, 0.04)]
    warnings = fit_step_time(seen, collective="ring").warnings
    pairs = values(warnings, "step-time-falls-with-batch")["pairs"] if falls else []
    assert len(pairs) == falls == ("step-time-falls-with-batch" in [warning.code for warning in warnings])


def test_warnings_of_one_kind_are_one_line() -> None:
    slower = np.repeat([1.0, 1.0, 1.0, 1.5, 2.0], 10)
    steady = [overlapped(n, b) for n, b in GRID]
    seen = [
        dataclasses.replace(probe, step_times=tuple(probe.seconds * slower)) if probe.local_batch == 64 else probe
        for probe in steady
    ]
    drifting = values(fit_step_time(seen, collective="ring").warnings, "step-times-drift")["probes"]
    assert len(drifting) == len([b for _, b in GRID if b == 64]) > 1
    assert all(", local batch 64 by " in probe for probe in drifting)


def test_the_centre_keeps_regular_slow_steps_and_drops_a_single_stall() -> None:
    every_fifth = [1.0, 1.0, 1.0, 1.0, 2.0] * 10
    assert np.median(every_fifth) == 1.0 and compute_trimmed_mean(every_fifth) == pytest.approx(1.125)
    assert compute_trimmed_mean([1.0] * 49 + [50.0]) == 1.0
    assert compute_trimmed_mean([1.0, 2.0]) == 1.5


def test_drift_ignores_what_averages_out() -> None:
    rng = np.random.default_rng(0)
    independent = compute_block_deviation(1 + 0.1 * rng.standard_normal(1000))
    lasting = compute_block_deviation(np.repeat([0.9, 1.1, 0.9, 1.1, 0.9], 200) + 0.001 * rng.standard_normal(1000))
    assert independent is not None and independent < 0.02
    assert lasting is not None and 0.09 < lasting < 0.12
    assert compute_block_deviation([1.0] * 4) is None


def test_a_measured_step_time_has_the_interval_of_its_own_steps_and_of_another_job() -> None:
    steady = estimate_measured_step_time([1.0, 1.1] * 10, 0.03)
    assert steady.seconds == pytest.approx(1.05)
    assert steady.low is not None and steady.low == pytest.approx(1.05 * (1 - 1.645 * math.sqrt(2) * 0.03), rel=1e-3)
    rough = estimate_measured_step_time(np.repeat([0.9, 1.0, 1.1, 1.0, 0.9], 10).tolist(), 0.03)
    assert rough.low is not None and rough.high is not None and rough.low < 0.9 and rough.high > 1.1
    assert estimate_measured_step_time([1.0, 1.0], 0.03).low is None


def test_how_far_jobs_differ_is_learnt_from_configurations_that_were_measured_again() -> None:
    """Three per cent is the prior; twenty runs that agree to .2 % lower it, and twenty that are 10 % apart raise it."""

    def repeats(apart: float) -> float:
        rng = np.random.default_rng(0)
        seen = [in_whole(overlapped(n, b)) for n in (2, 8) for b in (16, 64)]
        seen += [
            dataclasses.replace(o, step_times=tuple(np.multiply(o.step_times, 1 + apart * rng.standard_normal())))
            for o in seen * 5
        ]
        return float(fit_step_time(seen, collective="ring").compute_repeat_deviation([2], [1], [64])[0])

    assert repeats(0.002) < 0.025 < 0.05 < repeats(0.1)


# --- whole steps alone, as of a script without DDP


def in_whole(seen: Observation) -> Observation:
    return dataclasses.replace(seen, compute_time=math.nan)


def overlapping(nodes: int, batch: int, *, floor: float, sync: float) -> Observation:
    """A floor and a slope of compute, of which two thirds hide a ring that grows slowly."""
    compute, traffic = floor + 0.0005 * batch, sync * nodes**0.2 if nodes > 1 else 0.0
    return observation(nodes, batch, compute / 3 + max(compute * 2 / 3, traffic) + 0.1 * traffic, compute=compute)


@pytest.mark.parametrize(
    "probes",
    [
        [(n, b) for n in (1, 2, 4, 8, 16) for b in (16, 64, 256)],
        [*((2, b) for b in (16, 32, 64, 128, 256)), (4, 8), (8, 4), (16, 2), (16, 256)],
        [*((1, b) for b in (16, 32, 64, 128, 256)), (2, 16), (4, 8), (8, 4), (16, 256)],
    ],
    ids=["full", "sweep", "sweep from one"],
)
@pytest.mark.parametrize("sync", [0.01, 0.03])
def test_whole_steps_tell_what_was_not_measured(probes: list[tuple[int, int]], sync: float) -> None:
    """Within 10 % at any place between the probes, and 3 % in the median; the measured compute would tell no more."""
    step_time = fit_step_time(
        [in_whole(overlapping(n, b, floor=0.02, sync=sync)) for n, b in probes], collective="ring"
    )
    least = min(n for n, _ in probes)
    held_out = [(n, b) for n in (1, 2, 4, 8, 16) for b in (8, 16, 32, 64, 128) if n >= least and (n, b) not in probes]
    off = [
        abs(step_time.predict(n, 1, b).seconds / overlapping(n, b, floor=0.02, sync=sync).seconds - 1)
        for n, b in held_out
    ]
    assert max(off) < 0.1 and np.median(off) < 0.03
    assert "only from the times of complete steps, compute hides synchronisation with" in step_time.words


def test_probes_with_and_without_synchronisation_apart_are_fitted_together() -> None:
    """One rank has none to measure, and some ranks ran without DDP."""
    probes = [(n, b) for n in (1, 2, 4, 8) for b in (16, 64, 256)]
    seen = [overlapping(n, b, floor=0.02, sync=0.03) for n, b in probes]
    mixed = [in_whole(o) if o.nodes == 1 or index % 2 else o for index, o in enumerate(seen)]
    step_time = fit_step_time(mixed, collective="ring")
    assert "alone" not in step_time.words
    for nodes, batch in ((2, 32), (4, 128), (6, 64)):
        expected = overlapping(nodes, batch, floor=0.02, sync=0.03).seconds
        assert step_time.predict(nodes, 1, batch).seconds == pytest.approx(expected, rel=0.06)


def test_on_one_gpu_whole_steps_are_all_there_is() -> None:
    step_time = fit_step_time(
        [in_whole(overlapping(1, b, floor=0.02, sync=0.0)) for b in (16, 64, 256)], collective="ring"
    )
    assert "alone" not in step_time.words
    assert step_time.predict(1, 1, 128).seconds == pytest.approx(0.084, rel=0.03)
