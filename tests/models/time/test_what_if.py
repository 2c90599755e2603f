import math
from dataclasses import replace

import numpy as np
import pytest
from make_results import Truth, probe_all, spec

from tula_cli.errors import BadMeasurements
from tula_cli.models.time import steptime
from tula_cli.models.time.steptime import Observation, StepTimeFit
from tula_cli.models.time.what_if import Change, changed, supposed

GRID = [(nodes, batch) for nodes in (2, 4, 8) for batch in (16, 64, 256)]
ELSEWHERE = [2, 4, 8], [1, 1, 1], [32, 32, 128]


def step(nodes: int, batch: int, *, compute: float = 1.0, sync: float = 1.0) -> Observation:
    """A step whose backward pass hides a ring; compute and synchronisation take so many times as long."""
    local, traffic = compute * (0.01 + 0.001 * batch), sync * 0.08 * (1 - 1 / nodes)
    seconds = local / 3 + max(local * 2 / 3, traffic) + 0.05 * traffic
    return Observation(nodes, 1, batch, (seconds,) * 10, local)


@pytest.fixture(scope="module")
def fit() -> StepTimeFit:
    return steptime.fit_step_time([step(*at) for at in GRID], collective="ring")


def truth(**factors: float) -> np.ndarray:
    return np.array([step(nodes, batch, **factors).seconds for nodes, _, batch in zip(*ELSEWHERE, strict=True)])


def test_nothing_changed_is_the_fit(fit: StepTimeFit) -> None:
    for found, known in zip(changed(fit, Change()).predict_all(*ELSEWHERE), fit.predict_all(*ELSEWHERE), strict=True):
        assert found == pytest.approx(known, rel=0.06)


@pytest.mark.parametrize(
    ("change", "factors", "wider"),
    [
        (Change(compute=2.0), {"compute": 0.5}, 0.95),  # synchronisation sets the pace then, which is as it was
        (Change(compute=0.5), {"compute": 2.0}, 1.3),
        (Change(interconnect=0.25), {"sync": 4.0}, 2.0),
        (Change(compute=2.0, interconnect=4.0), {"compute": 0.5, "sync": 0.25}, 1.3),
    ],
)
def test_what_is_changed_lies_in_an_interval_as_wide_as_is_open(
    fit: StepTimeFit, change: Change, factors: dict[str, float], wider: float
) -> None:
    middle, low, high = changed(fit, change).predict_all(*ELSEWHERE)
    _, narrow_low, narrow_high = fit.predict_all(*ELSEWHERE)
    assert (low < truth(**factors)).all() and (truth(**factors) < high).all() and (low < middle).all()
    assert np.mean(np.log(high / low)) > wider * np.mean(np.log(narrow_high / narrow_low))
    assert np.abs(middle / truth(**factors) - 1).max() < np.abs(truth() / truth(**factors) - 1).max()


def test_a_faster_network_does_not_help_where_its_work_is_hidden(fit: StepTimeFit) -> None:
    hidden = [8], [1], [256]
    assert changed(fit, Change(interconnect=10.0)).predict_all(*hidden)[0] == pytest.approx(
        fit.predict_all(*hidden)[0], rel=0.05
    )


def test_draws_are_of_what_is_changed(fit: StepTimeFit) -> None:
    drawn = np.exp(changed(fit, Change(compute=2.0)).draws(*map(list, ELSEWHERE)))
    assert np.median(drawn, axis=0) == pytest.approx(
        changed(fit, Change(compute=2.0)).predict_all(*ELSEWHERE)[0], rel=0.08
    )
    assert changed(fit, Change(compute=2.0)).compute(2, 1, 64) == pytest.approx(fit.compute(2, 1, 64) / 2)
    assert changed(fit, Change(compute=2.0)).second_opinion(2, 1, 64) is None


def test_no_step_comes_below_what_the_loader_takes(fit: StepTimeFit) -> None:
    loaded = changed(fit, Change(compute=10.0), loader=0.0008)
    assert loaded.predict_all([2], [1], [256])[1][0] == pytest.approx(0.0008 * 256, rel=0.01)
    assert loaded.compute(2, 1, 256) == pytest.approx(0.0008 * 256)


def test_the_bandwidth_there_is_follows_from_the_bytes_and_the_time_they_take(fit: StepTimeFit) -> None:
    gradients = 10**8
    now = changed(fit, Change(bandwidth=1e12), gradients=gradients).bandwidth_now()
    assert now is not None and now.nodes == 8 and now.sent == gradients
    # The probes show no part of it that would be latency: a share of it may be, so links may be faster than that.
    assert now.low < 8 * 2 * (1 - 1 / 8) * gradients / (0.08 * (1 - 1 / 8)) < now.high
    low, middle, high = changed(fit, Change(bandwidth=1e12), gradients=gradients).times_now()
    assert low < 0.7 * 1e12 / now.middle < high and middle == pytest.approx(0.7 * 1e12 / now.middle, rel=0.2)


def test_a_given_bandwidth_is_as_its_ratio_and_less_sure(fit: StepTimeFit) -> None:
    given = changed(fit, Change(bandwidth=4e9), gradients=10**8)
    ratio = changed(fit, Change(interconnect=given.times_now()[1]))
    one, other = (np.array(each.predict_all(*ELSEWHERE)) for each in (given, ratio))
    assert one[0] == pytest.approx(other[0], rel=0.1)


def test_whole_steps_alone_leave_more_open() -> None:
    seen = [step(*at) for at in GRID[::2]]
    apart = steptime.fit_step_time(seen, collective="ring")
    whole = steptime.fit_step_time([replace(o, compute_time=math.nan) for o in seen], collective="ring")
    widths = [
        np.mean(np.log(high / low))
        for fit in (apart, whole)
        for _, low, high in [changed(fit, Change(compute=4.0)).predict_all(*ELSEWHERE)]
    ]
    assert widths[1] > widths[0]


def test_one_node_tells_nothing_of_a_network() -> None:
    fit = steptime.fit_step_time([Observation(1, 1, b, (0.001 * b,) * 9, math.nan) for b in (8, 64)], collective="ring")
    with pytest.raises(BadMeasurements, match="only one node was measured"):
        supposed(fit, Change(interconnect=2.0), [], spec())
    assert supposed(fit, Change(compute=2.0), [], spec()).predict(1, 1, 8).seconds == pytest.approx(0.004, rel=0.1)


def test_bytes_that_are_not_known_take_a_ratio(fit: StepTimeFit) -> None:
    probes = probe_all(Truth(), {2: (16,)})
    assert supposed(fit, Change(bandwidth=1e10), probes, spec()).gradients == Truth().model_bytes
    for job in (spec(train={"epochs": 1, "parallel": "fsdp"}), spec(cluster={"collective": "parameter_server"})):
        with pytest.raises(BadMeasurements, match="do not tell how many bytes"):
            supposed(fit, Change(bandwidth=1e10), probes, job)
        assert supposed(fit, Change(interconnect=2.0), probes, job).bandwidth_now() is None
