"""Columns and single numbers go through the same formulas: they have to say the same."""

import math
from typing import Any

import numpy as np
import pytest
from make_results import MIB, Truth, as_script_probe, make_out_of_memory, make_probes, make_spec

from tula_cli.models import cost, estimator
from tula_cli.models.choice.candidates import convert_to_configs
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.run.records.probes import Overheads
from tula_cli.run.records.recommendations import Prediction
from tula_cli.spec.job import JobSpec

PLAN = {2: (24, 48, 96, 384), 4: (12,), 8: (6,), 16: (3, 192)}
SPOT = {"pricing": {"price": 2.0, "spot": {"discount": 0.6, "interruptions_per_day": 9.0}}}
TWO_GPUS = {"cluster": {"gpus_per_node": 2, "memory_per_gpu": "1200MiB"}}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {"train": {"method": "lbt"}},
    "spot": SPOT,
    "checkpoints": {**SPOT, "train": {"checkpoint_every": "auto"}},
    "refreshes": {"train": {"method": "ags", "reference_batch": 64}, "ags": {"refresh": {"every": 50}}},
    "tuned": {**SPOT, "train": {"method": "auto", "epochs": 30}},
    "memory": {"pricing": {"kind": "gb_hour", "price": 0.2}},
    "shares": {**TWO_GPUS, "train": {"parallel": "fsdp", "method": "lbt"}},
}


def fitted(name: str) -> Estimator:
    job = make_spec(**JOBS[name], search={"nodes": [1, 2, 3, 4, 8, 16], "min_batch": 48, "max_batch": 4096})
    truth = Truth(
        gpus_per_node=job.cluster.gpus_per_node,
        noise=0.01,
        watts=250.0,
        capacity=None if name == "shares" else 600 * MIB,
    )
    ooms = [make_out_of_memory(4, 200, gpus_per_node=truth.gpus_per_node)] if name == "shares" else []
    return Estimator.fit(job, [*make_probes(truth, PLAN), *ooms])


@pytest.mark.parametrize("name", JOBS)
def test_a_table_says_of_each_configuration_what_is_said_of_it_alone(name: str) -> None:
    result = fitted(name)
    table = result.predict_configurations(*result.find_known_configurations())
    assert len(table) > 10 and table["measured"].any() and not table["measured"].all()
    spot = {Config(row.nodes, row.batch): row for row in result.predict_on_spot(table).make_predictions()}
    for config, row in zip(
        convert_to_configs(*result.find_known_configurations()), table.make_predictions(), strict=True
    ):
        alone = result.predict(config)
        assert same(row, alone)
        there = result.predict_if_known(config, "spot")
        assert (there is None) == (config not in spot) and (there is None or same(spot[config], there))
    assert bool(spot) == ("spot" in JOBS[name].get("pricing", {}))


def same(one: Prediction, other: Prediction) -> bool:
    here, there = (
        {**row.model_dump(), **(row.parts.model_dump() if row.parts else {}), "parts": None} for row in (one, other)
    )
    return here.keys() == there.keys() and all(
        math.isclose(value, there[name], rel_tol=1e-9) if isinstance(value, float) else value == there[name]
        for name, value in here.items()
    )


@pytest.mark.parametrize("name", JOBS)
def test_hours_and_cost_are_those_of_the_formulas_for_single_numbers(name: str) -> None:
    result, job = fitted(name), fitted(name).spec
    table = result.predict_configurations(*result.find_known_configurations())
    for here in (table, result.predict_on_spot(table)):
        for row in here.select_rows(range(0, len(here), 5)).make_predictions():
            hours, paid = one_by_one(result, job, row)
            assert (row.hours, row.cost) == pytest.approx((hours, paid), rel=1e-9)


def one_by_one(result: Estimator, job: JobSpec, row: Prediction) -> tuple[float, float]:
    """Return the hours and the cost of a row, by ints and floats and the record of overheads."""
    gpus, spot = job.cluster.gpus_per_node, row.market == "spot"
    at = result.overheads.estimate_overheads(np.array([row.nodes]), np.array([row.local_batch]), np.array([row.batch]))
    overheads = Overheads(
        startup=at.startup[0], eval_batch=at.eval_batch[0], eval_batch_size=at.eval_batch_size[0],
        checkpoint=at.checkpoint[0], refresh=at.refresh[0],
    )  # fmt: skip
    work = cost.count_training_work(
        job, batch=row.batch, world=row.nodes * gpus, dataset_size=result.dataset_size, eval_size=result.eval_size,
        eval_batch_size=overheads.eval_batch_size,
    )  # fmt: skip
    rate, every = cost.compute_interruption_rate(job.pricing, row.nodes), job.train.checkpoint_every
    if every == "auto":
        every = cost.compute_checkpoint_interval(overheads.checkpoint, rate=rate)

    value = {"rate": rate} if spot else {}
    seconds = cost.compute_training_seconds(
        work, step_time=row.step_time, overheads=overheads, checkpoint_every=every, **value
    )
    own_memory = result.memory.adapt_to_ranks(row.nodes * gpus).compute_reserved_memory(row.local_batch)
    reserved = row.peak_memory if row.measured else own_memory
    assert reserved == row.peak_memory
    paid = cost.compute_cost(
        job.pricing, hours=seconds / 3600, nodes=row.nodes, gpus_per_node=gpus, reserved=reserved, market=row.market
    )
    return seconds / 3600, paid


@pytest.mark.parametrize("name", ["plain", "shares"])
def test_what_fits_and_is_known_is_what_nothing_speaks_against(name: str) -> None:
    result = fitted(name)
    candidates = result.list_configurations([1, 2, 4, 8, 16, 64, 128, 256])
    record = {
        config: (result.describe_why_infeasible(config), result.describe_why_unknown(config)) for config in candidates
    }
    nodes = [1, 2, 4, 8, 16, 64, 128, 256]
    assert result.list_feasible_configurations(nodes) == [config for config, (why, _) in record.items() if not why]
    assert convert_to_configs(*result.find_known_configurations(nodes)) == [
        config for config, whys in record.items() if not any(whys)
    ]
    assert convert_to_configs(*result.find_unknown_configurations(nodes)) == [
        config for config, (why, other) in record.items() if not why and other
    ]
    assert (
        0
        < len(result.find_known_configurations(nodes)[0])
        < len(result.list_feasible_configurations(nodes))
        < len(candidates)
    )


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fitted("spot")
    whole = result.predict_candidates().make_predictions()
    monkeypatch.setattr(estimator, "_CONFIGURATIONS_PER_CHUNK", 7)
    assert all(same(*rows) for rows in zip(whole, result.predict_candidates().make_predictions(), strict=True))


def test_a_script_that_tells_little_has_a_table_too() -> None:
    result = Estimator.fit(make_spec(), [as_script_probe(probe) for probe in make_probes(Truth(), PLAN)])
    table = result.predict_configurations(*result.find_known_configurations())
    assert np.isfinite(table["hours"]).all() and np.isnan(table["kwh"]).all()
    assert same(table.make_prediction(3), result.predict(convert_to_configs(*result.find_known_configurations())[3]))
