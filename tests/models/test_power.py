"""The energy model, on probes whose energy is known by a rule."""

import numpy as np
import pytest
from make_results import Truth, make_probe, make_probes, make_spec

from tula_cli.models import power
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.run.records.probes import Measured

SWEEP = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}
IDLE, PER_SAMPLE = 90.0, 0.7


def joules(seconds: float, local_batch: int) -> float:
    """Of one GPU and step."""
    return IDLE * seconds + PER_SAMPLE * local_batch


def counted(probe: Measured, factor: float = 1.0) -> Measured:
    value = joules(float(np.mean(probe.step_times)), probe.local_batch)
    return probe.model_copy(update={"energy": factor * probe.nodes * probe.gpus_per_node * value})


def test_what_is_drawn_while_waiting_and_for_a_sample_are_reported_apart() -> None:
    truth = Truth(gpus_per_node=4)
    model = power.fit_power_model([counted(probe) for probe in make_probes(truth, SWEEP)])
    assert model is not None
    assert (model.idle, model.per_sample) == pytest.approx((IDLE, PER_SAMPLE))
    assert model.predict_power(0.2, 512).watts == pytest.approx(joules(0.2, 512) / 0.2)
    assert model.words == "90.0 W per GPU and 0.700 J per sample, from 9 of 9 probes; median error 0.0 %"


def test_the_interval_holds_what_it_says() -> None:
    """90 % of 200 new measurements of a configuration that no probe tells."""
    inside, random, truth = 0, np.random.default_rng(4), Truth()
    for _ in range(200):
        noise = 1 + 0.05 * random.standard_normal(len(SWEEP) + 6)
        probes = [counted(p, f) for p, f in zip(make_probes(truth, SWEEP), noise, strict=False)]
        model = power.fit_power_model(probes)
        assert model is not None
        result, seconds = model.predict_power(truth.step_time(8, 256), 256), truth.step_time(8, 256)
        new = joules(seconds, 256) / seconds * (1 + 0.05 * random.standard_normal())
        assert result.error is not None
        inside += abs(new / result.watts - 1) <= result.error
    assert 165 <= inside <= 196


def test_few_probes_tell_one_power_and_one_alone_no_interval() -> None:
    power_model = power.fit_power_model([counted(make_probe(Truth(), 2, 64))])
    assert power_model is not None and power_model.error is None and power_model.per_sample == 0
    assert power_model.predict_power(1.0, 8).error is None
    two = power.fit_power_model([counted(make_probe(Truth(), 2, size)) for size in (16, 256)])
    assert two is not None and two.per_sample == 0
    assert two.error is not None and two.error > 0.5, "they draw quite different powers"


def test_where_step_time_and_batch_grow_alike_one_power_is_reported() -> None:
    proportional = Truth(fixed=0.0, sync=0.0)
    model = power.fit_power_model([counted(probe) for probe in make_probes(proportional, {1: (16, 32, 64, 128)})])
    assert model is not None
    assert (model.idle, model.per_sample) == (pytest.approx(joules(0.5, 1000) / 0.5), 0)


def test_a_part_that_would_be_negative_is_none() -> None:
    probes = [counted(probe) for probe in make_probes(Truth(), SWEEP)]
    falling = [p.model_copy(update={"energy": p.nodes * 1000.0 / p.local_batch}) for p in probes]
    model = power.fit_power_model(falling)
    assert model is not None and model.idle > 0 and model.per_sample == 0


def test_without_a_counter_there_is_no_model() -> None:
    assert Estimator.fit(make_spec(), make_probes(Truth(), SWEEP)).power is None


def test_probes_without_a_counter_are_left_out_of_the_fit() -> None:
    probes = make_probes(Truth(), SWEEP)
    model = power.fit_power_model([*map(counted, probes[:5]), *probes[5:]])
    assert model is not None
    assert (model.idle, model.per_sample) == pytest.approx((IDLE, PER_SAMPLE))
    assert "from 5 of 9 probes" in model.words


def test_where_a_configuration_was_measured_its_own_energy_counts() -> None:
    probes = [counted(probe) for probe in make_probes(Truth(), SWEEP)]
    probes[2] = counted(probes[2], 1.5)
    forecast = Estimator.fit(make_spec(), probes)
    row = forecast.predict(Config(2, 128))
    assert row.measured and row.energy == pytest.approx(probes[2].energy, rel=1e-6)
    silent = [probe if place != 2 else probe.model_copy(update={"energy": None}) for place, probe in enumerate(probes)]
    row = Estimator.fit(make_spec(), silent).predict(Config(2, 128))
    assert row.measured and row.energy == pytest.approx(2 * joules(row.step_time, 64), rel=1e-6)


def test_spot_nodes_draw_while_they_are_there() -> None:
    pricing = {"spot": {"discount": 0.5, "interruptions_per_day": 2.0}}
    forecast = Estimator.fit(make_spec(pricing=pricing), [counted(probe) for probe in make_probes(Truth(), SWEEP)])
    here = forecast.predict(Config(2, 128))
    spot = forecast.predict_if_known(Config(2, 128), "spot")
    assert spot is not None and here.kwh is not None and spot.kwh is not None
    paid = spot.cost / (2 * 2.0 * 0.5)
    assert spot.kwh / here.kwh == pytest.approx(paid / here.hours)
    assert spot.kwh / here.kwh == pytest.approx(spot.hours / here.hours)
