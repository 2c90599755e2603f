"""Step times of a training as measurements of its configuration (models/time/stretches.py)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import make_runs as make
import numpy as np
import pytest
from make_results import Truth, make_probe, make_spec
from read_diagnostics import codes

from tula_cli.models.estimator import Estimator
from tula_cli.models.observations import convert_to_observation
from tula_cli.models.time import step_time, stretches
from tula_cli.models.time.noise import Z90
from tula_cli.models.time.step_time import DEFAULT_REPEAT_SD, Observation, estimate_measured_step_time
from tula_cli.models.time.stretches import list_observations_from_training
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.run.records.tasks import Rung, TrainTask


def task(attempt: int = 1, *, nodes: int = 2, batch: int = 128, **changes: Any) -> TrainTask:
    fields: dict[str, Any] = {
        "spec": make_spec(),
        "workdir": "/",
        "signature": "ab12cd34",
        "workers": "auto",
        **changes,
    }
    name = f"train-ab12cd34-{attempt}"
    return TrainTask(id=name, job=name, nodes=nodes, attempt=attempt, ladder=(Rung(batch=batch),), **fields)


def start(attempt: int = 1) -> dict[str, Any]:
    return {"kind": "start", "time": 0.0, "samples": 0, "epoch": 0.0, "attempt": attempt}


def steps(seconds: float, *, count: int = 30, at: float = 1.0, **changes: Any) -> list[dict[str, Any]]:
    fields = {"kind": "step", "count": 10, "step_time": seconds, "data_wait": 0.001, "compute": None, "sync": None}
    return [{**fields, "step": 10 * n, "time": at + n, "samples": 0, **changes} for n in range(count)]


def told(rows: Sequence[dict[str, Any]], *tasks: TrainTask) -> tuple[TrainedSteps, ...]:
    return list_observations_from_training(tasks or (task(),), rows, lambda task, environment: "").steps


def test_a_training_tells_one_step_time_of_each_configuration_it_ran_at() -> None:
    rows = [start(1), *steps(0.1), start(2), *steps(0.1), start(3), *steps(0.06)]
    result = told(rows, task(1), task(2), task(3, batch=64))
    assert [(item.batch, item.local_batch, item.step_time) for item in result] == [
        (128, 64, pytest.approx(0.1)), (64, 32, pytest.approx(0.06)),
    ]  # fmt: skip
    assert result[0].steps == 2 * 27 * 10, "of each start the first three rows are warm-up"
    assert result[0].noise == pytest.approx(DEFAULT_REPEAT_SD), "however long, it is another job than the probes"


def test_steps_of_smaller_batches_before_its_own_do_not_count() -> None:
    (result,) = told([start(), *steps(0.02, batch=32), *steps(0.1, at=31.0, batch=128)])
    assert (result.batch, result.step_time) == (128, pytest.approx(0.1))


def test_its_compute_holds_the_wait_for_data_as_that_of_a_probe_does() -> None:
    (item,) = told([start(), *steps(0.1, compute=0.07, sync=0.02)])
    assert (item.compute, item.sync, item.data_wait) == (pytest.approx(0.071), 0.02, 0.001)


def test_of_a_script_whole_steps_count() -> None:
    rows = [
        {"kind": "step", "step": 50 * at, "time": 1.0 + at, "samples": 0, "step_time": 0.1, "eta": 5.0}
        for at in range(30)
    ]
    (item,) = told([start(), *rows])
    assert (item.step_time, item.steps, item.compute, item.data_wait) == (pytest.approx(0.1), 27 * 50, None, None)


def test_refreshes_are_no_part_of_a_step() -> None:
    often = steps(0.3, refreshed=5, plain_time=0.1)
    always = steps(0.3, refreshed=10, plain_time=None, count=3, at=40.0)
    (item,) = told([start(), *often, *always])
    assert item.step_time == pytest.approx(0.1) and item.steps == 27 * 5
    scaled = make_spec(train={"method": "ags", "reference_batch": 32})
    assert not told([start(), *steps(0.3)], task(spec=scaled)), "an older log does not tell refreshes apart"


def test_steps_before_a_change_do_not_count_and_those_after_it_count_less() -> None:
    change = make.step_change(began_at=20.0).model_dump(mode="json")
    rows = [start(), *steps(0.06, count=19), {"kind": "change", "change": change}, *steps(0.09, at=21.0)]
    (item,) = told(rows)
    assert item.step_time == pytest.approx(0.09)
    assert item.noise == pytest.approx(math.hypot(DEFAULT_REPEAT_SD, math.log(1.5) / Z90), rel=0.01)


@pytest.mark.parametrize("unlike", [{"splits": 2}, {"workers": 1}], ids=["cut", "fewer loaders"])
def test_steps_such_as_no_probe_makes_do_not_count(unlike: dict[str, Any]) -> None:
    observations = list_observations_from_training(
        (task(1, **unlike), task(2)), [start(1), *steps(0.2), start(2), *steps(0.1)], lambda task, row: ""
    )
    assert [item.step_time for item in observations.steps] == [pytest.approx(0.1)]
    assert len(observations.left_out) == 1


def test_where_it_ran_may_leave_it_out_and_too_few_steps_do() -> None:
    rows = [start(), {"kind": "environment", "hardware": "x"}, *steps(0.1)]
    observations = list_observations_from_training(
        (task(),), rows, lambda task, environment: f"it ran on {(environment or {})['hardware']}"
    )
    assert observations.steps == () and observations.left_out == ("it ran on x",)
    assert not told([start(), *steps(0.1, count=12)])


def test_noise_grows_with_the_spread_of_its_stretches() -> None:
    rng = np.random.default_rng(0)
    rows = [start(), *(steps(float(took), count=1, at=at)[0] for at, took in enumerate(0.1 + 0.03 * rng.random(200)))]
    (item,) = told(rows)
    assert DEFAULT_REPEAT_SD < item.noise < 0.03


# --- beside a probe


def trained(seconds: float, *, noise: float = DEFAULT_REPEAT_SD, until: float = 0.0) -> TrainedSteps:
    return TrainedSteps(
        signature="ab12cd34", nodes=8, gpus_per_node=1, batch=512, step_time=seconds, step_times=(seconds,) * 40, compute=None,
        sync=None, data_wait=None, steps=400, changed=0.0, noise=noise, since=0.0, until=until,
    )  # fmt: skip


def test_a_training_replaces_the_probe_of_its_configuration() -> None:
    probe = (0.1,) * 20
    alone, both = (
        stretches.estimate_from_measurements(probe, (), 0.01),
        stretches.estimate_from_measurements(probe, [trained(0.101)], 0.01),
    )
    assert (
        alone == estimate_measured_step_time(probe, 0.01)
        and stretches.estimate_from_measurements(None, (), 0.01) is None
    )
    assert both is not None and both.seconds == pytest.approx(0.101)
    apart = [trained(0.1), trained(0.12, noise=0.2)]
    weighted = stretches.estimate_from_measurements(probe, apart, 0.01)
    assert weighted is not None and 0.1 < weighted.seconds < 0.1005


def test_the_interval_includes_a_probe_that_disagrees() -> None:
    result = stretches.estimate_from_measurements((0.1,) * 20, [trained(0.115)], 0.01)
    assert result is not None and result.seconds == pytest.approx(0.115)
    assert result.low is not None and result.high is not None and result.low < 0.1


def test_trainings_of_equal_noise_that_disagree_have_the_interval_of_their_deviation() -> None:
    result = stretches.estimate_from_measurements(None, [trained(0.1), trained(0.12)], 0.01)
    assert result is not None and result.low is not None and result.high is not None
    assert result.seconds == pytest.approx(math.sqrt(0.1 * 0.12))
    # The standard error of a mean of two is half their difference; another job adds its repeats.
    assert math.log(result.high / result.seconds) == pytest.approx(Z90 * math.hypot(math.log(1.2) / 2, 0.01))
    assert result.low * result.high == pytest.approx(result.seconds**2)


# --- in the fit

TRUTH = Truth(fixed=0.02, slope=0.0005, sync=0.06)
PROBES = {2: (8, 32, 128, 512), 4: (8,), 8: (8,), 16: (8, 128)}
NEAR = [(8, 32), (8, 128), (4, 64), (16, 64), (8, 256), (16, 32)]


def unseen(seen: Sequence[Observation]) -> tuple[float, float, float]:
    """Return the mean error at the neighbours, the share of them inside their intervals, and how wide these are."""
    fit = step_time.fit_step_time(seen, collective="ring")
    nodes, local_batches = zip(*NEAR, strict=True)
    steps = fit.predict_step_times(nodes, [1] * len(NEAR), local_batches)
    seconds, low, high = steps.seconds, steps.low, steps.high
    truth = np.array([TRUTH.step_time(*place) for place in NEAR])
    kept = np.mean((low <= truth) & (truth <= high))
    return float(np.abs(seconds / truth - 1).mean()), float(kept), float(np.log(high / low).mean())


def test_a_training_at_the_choice_betters_what_is_predicted_of_its_neighbours() -> None:
    noisy, result = dataclasses.replace(TRUTH, noise=0.04, jitter=0.02), []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        probes = [
            convert_to_observation(make_probe(noisy, nodes, b, rng=rng))
            for nodes, value in PROBES.items()
            for b in value
        ]
        seconds = TRUTH.step_time(8, 64) * (1 + DEFAULT_REPEAT_SD * rng.standard_normal())
        result.append([unseen(probes), unseen([*probes, stretches.convert_to_observation(trained(seconds))])])
    (error, _, width), (later_error, later_held, later_width) = np.mean(result, axis=0)
    assert later_error < 0.75 * error
    assert later_width < 0.95 * width and later_held >= 0.9


def test_the_fit_says_how_many_of_its_observations_are_trainings() -> None:
    probes = [make_probe(TRUTH, nodes, b) for nodes, value in PROBES.items() for b in value]
    forecast = Estimator.fit(make_spec(), probes, trained=[trained(0.1), trained(0.102, until=5.0)])
    assert "(8 probes and 2 trainings, " in forecast.steps.words
    row = next(row for row in forecast.predict_candidates().make_predictions() if (row.nodes, row.batch) == (8, 512))
    assert row.measured and row.trained == "ab12cd34" and row.step_time == pytest.approx(0.101, rel=1e-3)
    assert "fit-misses" not in codes(forecast.warnings)
    before = Estimator.fit(make_spec(), probes)
    assert "training" not in before.steps.words and not any(
        row.trained for row in before.predict_candidates().make_predictions()
    )


def test_a_training_on_more_nodes_than_any_probe_had_is_no_extrapolation() -> None:
    probes = [make_probe(TRUTH, nodes, b) for nodes in (2, 4) for b in (8, 128)]
    rows = Estimator.fit(make_spec(), probes, trained=[trained(0.11)]).predict_candidates([8]).make_predictions()
    assert not any(row.further for row in rows)
    assert all(row.further for row in Estimator.fit(make_spec(), probes).predict_candidates([8]).make_predictions())
