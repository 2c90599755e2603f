import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_cli.errors import BadMeasurements
from tula_cli.models.steptime import SYNCHRONISATION, Observation, centre, drift, fit, observed

POSITIVE = st.floats(min_value=1e-4, max_value=1.0)
GRID = [(nodes, batch) for nodes in (2, 4, 8, 16) for batch in (16, 64, 256)]


def terms(collective: str, nodes: int) -> list[float]:
    return {
        "ring": [1 - 1 / nodes],
        "tree": [math.log2(nodes)],
        "reduce_scatter_allgather": [1 - 1 / nodes, math.log2(nodes)],
        "parameter_server": [nodes - 1],
    }[collective]


def observation(nodes: int, batch: int, seconds: float, *, gpus: int = 1) -> Observation:
    return Observation(nodes, gpus, batch, (seconds,) * 10, sync_time=0.0, compute_time=seconds)


def truth(collective: str, nodes: int, batch: int, coefficients: list[float]) -> float:
    fixed, slope, *sync = coefficients
    return fixed + slope * batch / 100 + sum(c * s for c, s in zip(sync, terms(collective, nodes), strict=False))


@pytest.mark.parametrize("collective", SYNCHRONISATION)
@given(coefficients=st.lists(POSITIVE, min_size=4, max_size=4))
@settings(max_examples=25, deadline=None)
def test_finds_the_truth_of_each_collective(collective: str, coefficients: list[float]) -> None:
    found = fit([observation(n, b, truth(collective, n, b, coefficients)) for n, b in GRID], collective=collective)
    for nodes, batch in [(3, 32), (32, 1024), (1, 8)]:
        expected = truth(collective, nodes, batch, coefficients)
        assert found.predict(nodes, 1, batch).seconds == pytest.approx(expected, rel=1e-5)
    assert found.error == pytest.approx(0, abs=1e-9)


@given(st.lists(POSITIVE, min_size=3, max_size=3), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_prediction_never_falls_with_batch_or_nodes(coefficients: list[float], seed: int) -> None:
    noise = 1 + 0.2 * np.random.default_rng(seed).standard_normal(len(GRID)).clip(-3, 3)
    seen = [observation(n, b, truth("ring", n, b, coefficients) * e) for (n, b), e in zip(GRID, noise, strict=True)]
    found = fit(seen, collective="ring")
    times = np.array([[found.predict(n, 1, b).seconds for b in (8, 32, 512)] for n in (2, 6, 32)])
    assert (np.diff(times, axis=0) >= -1e-12).all() and (np.diff(times, axis=1) >= -1e-12).all()
    assert (times > 0).all()


def test_ninety_per_cent_intervals_hold_nine_times_in_ten() -> None:
    rng, inside = np.random.default_rng(1), []
    for _ in range(300):

        def noisy(n: int, b: int) -> float:
            return truth("ring", n, b, [0.05, 0.05, 0.08]) * (1 + 0.04 * rng.standard_normal())

        found = fit([observation(n, b, noisy(n, b)) for n, b in GRID], collective="ring")
        for nodes, batch in [(2, 128), (4, 32), (16, 128)]:
            estimate = found.predict(nodes, 1, batch)
            assert estimate.low is not None and estimate.high is not None
            assert estimate.low < estimate.seconds < estimate.high
            inside.append(estimate.low <= noisy(nodes, batch) <= estimate.high)
    assert 0.86 <= np.mean(inside) <= 0.94


def test_noise_within_the_probes_widens_the_interval() -> None:
    rng = np.random.default_rng(2)

    def seen(jitter: float) -> list[Observation]:
        return [
            Observation(n, 1, b, tuple(truth("ring", n, b, [0.05, 0.05, 0.08]) * (1 + jitter * wave)), 0.0, 0.1)
            for n, b in GRID
            for wave in [np.repeat(rng.permutation([-1.0, -0.5, 0.0, 0.5, 1.0]), 10)]
        ]

    def width(jitter: float) -> float:
        estimate = fit(seen(jitter), collective="ring").predict(4, 1, 128)
        assert estimate.low is not None and estimate.high is not None
        return (estimate.high - estimate.low) / estimate.seconds

    # The blocks of every probe spread with a standard deviation of 0.0395: an interval of at least +-1.8 of those.
    assert width(0.0) < 1e-6
    assert 0.13 < width(0.05) < 0.20


def test_four_corners_leave_one_degree_of_freedom() -> None:
    found = fit([observation(n, b, 0.1 + 0.001 * b + 0.1 / n) for n in (2, 16) for b in (16, 256)], collective="tree")
    assert found.error is not None


def test_as_many_parameters_as_probes_is_said_and_has_no_interval() -> None:
    points = [(2, 16), (2, 256), (16, 16)]
    found = fit([observation(n, b, truth("ring", n, b, [0.1, 0.1, 0.1])) for n, b in points], collective="ring")
    assert found.determined_exactly and found.error is None
    assert "exactly determined" in found.words and "residual 0" not in found.words
    estimate = found.predict(16, 1, 256)
    assert estimate.seconds == pytest.approx(truth("ring", 16, 256, [0.1, 0.1, 0.1]))
    assert estimate.low is None and estimate.high is None


def test_one_number_of_nodes_predicts_only_that() -> None:
    found = fit([observation(4, b, 0.1 + 0.001 * b) for b in (16, 64, 256)], collective="ring")
    assert found.predict(4, 1, 1024).seconds == pytest.approx(0.1 + 1.024)
    with pytest.raises(BadMeasurements, match="one number of nodes"):
        found.predict(8, 1, 64)
    assert "same (1 - 1/nodes)" in found.warnings[0]


def test_one_local_batch_predicts_only_that() -> None:
    found = fit([observation(n, 64, 0.2 - 0.1 / n) for n in (2, 4, 8)], collective="ring")
    assert found.predict(16, 1, 64).seconds == pytest.approx(0.2 - 0.1 / 16)
    with pytest.raises(BadMeasurements, match="one local batch"):
        found.predict(2, 1, 32)


def test_one_probe_predicts_only_itself() -> None:
    found = fit([observation(4, 64, 0.3)], collective="reduce_scatter_allgather")
    assert found.predict(4, 1, 64).seconds == pytest.approx(0.3)
    assert found.refusal(2, 1, 64) and found.refusal(4, 1, 32)
    assert found.error is None


def test_equal_probes_are_one_point_with_a_residual() -> None:
    found = fit([observation(4, 64, 0.3), observation(4, 64, 0.32)], collective="ring")
    estimate = found.predict(4, 1, 64)
    assert 0.3 < estimate.seconds < 0.32 and estimate.low is not None
    assert found.refusal(4, 1, 128)


def test_effects_that_change_together_are_not_told_apart() -> None:
    found = fit([observation(2, 16, 0.1), observation(8, 64, 0.2)], collective="ring")
    with pytest.raises(BadMeasurements, match="changed together"):
        found.predict(2, 1, 64)
    assert found.predict(8, 1, 64).seconds == pytest.approx(0.2)


def test_no_probe_or_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(BadMeasurements, match="no probe"):
        fit([], collective="ring")
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BadMeasurements, match="2 nodes, local batch 8"):
            fit([observation(2, 8, wrong)], collective="ring")


def test_a_step_that_gets_shorter_with_nodes_loses_that_term_and_says_so() -> None:
    found = fit([observation(n, b, 0.1 + 0.001 * b + 0.1 / n) for n, b in GRID], collective="ring")
    assert found.predict(2, 1, 64).seconds == found.predict(16, 1, 64).seconds
    assert any("does not grow with (1 - 1/nodes)" in warning for warning in found.warnings)


def test_a_negative_fixed_part_is_left_out() -> None:
    found = fit([observation(n, b, 0.002 * b - 0.01) for n, b in GRID], collective="ring")
    assert found.predict(2, 1, 1).seconds > 0
    assert any("no fixed part" in warning for warning in found.warnings)


def test_two_sizes_determine_the_bandwidth_term_of_reduce_scatter_allgather() -> None:
    corners = [(n, b) for n in (2, 16) for b in (16, 256)]
    found = fit(
        [observation(n, b, 0.1 + 0.001 * b + 0.1 * (1 - 1 / n)) for n, b in corners],
        collective="reduce_scatter_allgather",
    )
    assert found.predict(4, 1, 64).seconds == pytest.approx(0.1 + 0.064 + 0.075)
    assert any("log2 nodes" in warning for warning in found.warnings)


def test_traffic_counts_nodes_where_there_are_several_even_with_one_node_among_them() -> None:
    def seconds(nodes: int, batch: int) -> float:
        return 0.1 + 0.001 * batch + 0.2 * (1 - 1 / nodes)

    seen = [observation(n, b, seconds(n, b), gpus=8) for n in (1, 2, 4) for b in (16, 64)]
    found = fit(seen, collective="ring")
    assert found.predict(8, 8, 32).seconds == pytest.approx(seconds(8, 32))
    assert found.refusal(8, 4, 32) == "only 8 GPUs a node were measured, not 4"


def test_traffic_counts_gpus_inside_one_node() -> None:
    def seconds(gpus: int, batch: int) -> float:
        return 0.1 + 0.001 * batch + 0.2 * (1 - 1 / gpus)

    seen = [observation(1, b, seconds(g, b), gpus=g) for g in (1, 2, 4) for b in (16, 64)]
    found = fit(seen, collective="ring")
    assert found.predict(1, 8, 32).seconds == pytest.approx(seconds(8, 32))
    assert "only one node" in found.refusal(8, 8, 32)


def test_nodes_with_different_numbers_of_gpus_are_not_mixed() -> None:
    with pytest.raises(BadMeasurements, match="4, 8 GPUs a node"):
        fit([observation(2, 8, 0.1, gpus=4), observation(4, 8, 0.1, gpus=8)], collective="ring")


def test_odd_probes_are_pointed_out() -> None:
    seen = [observation(n, b, truth("ring", n, b, [0.05, 0.1, 0.05])) for n, b in GRID]
    seen[0] = observation(2, 16, 0.3)
    warnings = fit(seen, collective="ring").warnings
    assert any("misses the probe at 2 nodes, local batch 16" in warning for warning in warnings)
    assert any("not monotone: a step at 2 nodes, local batch 64" in warning for warning in warnings)


def test_the_centre_keeps_regular_slow_steps_and_drops_a_single_stall() -> None:
    every_fifth = [1.0, 1.0, 1.0, 1.0, 2.0] * 10
    assert np.median(every_fifth) == 1.0 and centre(every_fifth) == pytest.approx(1.125)
    assert centre([1.0] * 49 + [50.0]) == 1.0
    assert centre([1.0, 2.0]) == 1.5


def test_drift_ignores_what_averages_out() -> None:
    rng = np.random.default_rng(0)
    independent = drift(1 + 0.1 * rng.standard_normal(1000))
    lasting = drift(np.repeat([0.9, 1.1, 0.9, 1.1, 0.9], 200) + 0.001 * rng.standard_normal(1000))
    assert independent is not None and independent < 0.02
    assert lasting is not None and 0.09 < lasting < 0.12
    assert drift([1.0] * 4) is None


def test_a_measured_step_time_has_the_interval_of_its_own_steps_and_of_another_job() -> None:
    steady = observed([1.0, 1.1] * 10)
    assert steady.seconds == pytest.approx(1.05)
    assert steady.low is not None and steady.low == pytest.approx(1.05 * (1 - 1.645 * 0.015), rel=1e-3)
    rough = observed(np.repeat([0.9, 1.0, 1.1, 1.0, 0.9], 10).tolist())
    assert rough.low is not None and rough.high is not None and rough.low < 0.9 and rough.high > 1.1
    assert observed([1.0, 1.0]).low is None
