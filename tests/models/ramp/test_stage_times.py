"""Durations of trainings with a growing batch: the sum over the stages, and the message if one is unknown."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_results import Truth, make_probes, make_spec
from read_diagnostics import codes

from tula_cli.models.choice.candidates import convert_to_columns
from tula_cli.models.choice.grid import Config
from tula_cli.models.cost import compute_remaining_time_share, shorten_prediction
from tula_cli.models.efficiency import (
    Noise,
    add_same_progress,
    compute_equivalent_constant_noise,
    compute_equivalent_epochs,
)
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp import NoisePath
from tula_cli.models.ramp_costs import StageTimes, build_ramp_on_nodes
from tula_cli.models.time.step_time import Estimates
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import EarlyStopping

PROBES = {2: (16, 32, 64, 128), 16: (2, 64)}
TRUTH = Truth(dataset_size=12_800)


def job(ramp: object, method: str = "lrs", **search: object) -> JobSpec:
    return make_spec(train={"method": method, "ramp": ramp, "epochs": 10, "reference_batch": 32}, search=search)


def forecast(ramp: object, **how: object) -> Estimator:
    return Estimator.fit(job(ramp, **how), make_probes(TRUTH, PROBES))  # type: ignore[arg-type]


def test_a_training_takes_the_sum_over_its_stages() -> None:
    plain, grown = (forecast(ramp).predict(Config(2, 256)) for ramp in (None, "auto"))
    times = {batch: forecast(None).predict(Config(2, batch)).step_time for batch in (32, 64, 128, 256)}
    # half an epoch each of 32, 64 and 128, of 12,800 samples, and 8.5 epochs
    assert [(stage.batch, stage.steps) for stage in grown.stages] == [(32, 200), (64, 100), (128, 50)]
    assert {stage.batch: stage.step_time for stage in grown.stages} == pytest.approx(
        {b: times[b] for b in (32, 64, 128)}
    )
    steps = {32: 200, 64: 100, 128: 50, 256: 25 + 8 * 50}
    seconds = sum(count * times[batch] for batch, count in steps.items())
    assert grown.parts is not None and plain.parts is not None
    assert grown.parts.steps == pytest.approx(seconds)
    assert plain.parts.steps == pytest.approx(500 * times[256]) and plain.stages == ()
    assert grown.hours - plain.hours == pytest.approx((seconds - 500 * times[256]) / 3600)
    assert grown.step_time == plain.step_time and grown.cost / plain.cost == pytest.approx(grown.hours / plain.hours)


def test_a_training_that_ends_early_has_taken_its_stages_whole() -> None:
    whole = forecast("auto").predict(Config(2, 256))
    short = shorten_prediction(whole, epochs=5, all_epochs=10)
    assert short.parts is not None and whole.parts is not None
    stages = sum(stage.steps * stage.step_time for stage in whole.stages)
    assert short.parts.steps == pytest.approx(stages + (25 + 3 * 50) * whole.step_time, rel=0.01)
    assert shorten_prediction(whole, epochs=10, all_epochs=10).hours == pytest.approx(whole.hours)


def test_epochs_that_are_not_trained_take_nothing() -> None:
    subject = job("auto")
    train = subject.train.model_copy(update={"early_stopping": EarlyStopping(epochs=1)})
    short = Estimator.fit(subject.model_copy(update={"train": train}), make_probes(TRUTH, PROBES))
    row = short.predict(Config(2, 256))
    assert [(stage.batch, stage.steps) for stage in row.stages] == [(32, 200), (64, 100), (128, 0)]
    assert row.parts is not None
    assert row.parts.steps == pytest.approx(sum(stage.steps * stage.step_time for stage in row.stages))


def test_many_at_once_are_those_one_by_one() -> None:
    subject = forecast("auto", method="ramp")
    for row in subject.predict_candidates().make_predictions():
        alone = forecast("auto", method="ramp").predict(Config(row.nodes, row.batch))
        assert row.hours == pytest.approx(alone.hours) and [a.step_time for a in row.stages] == pytest.approx(
            [a.step_time for a in alone.stages]
        )
        assert [stage.batch for stage in row.stages] == [b for b in (32 << k for k in range(9)) if b < row.batch]


def test_spot_nodes_wait_for_the_stages_too() -> None:
    price = {"price": 2.0, "spot": {"discount": 0.5, "interruptions_per_day": 1.0}}
    rows = []
    for ramp in (None, "auto"):
        subject = job(ramp).model_copy(update={"pricing": make_spec(pricing=price).pricing})
        row = Estimator.fit(subject, make_probes(TRUTH, PROBES)).predict_if_known(Config(2, 256), "spot")
        assert row is not None
        rows.append(row.hours / forecast(ramp).predict(Config(2, 256)).hours)
    assert rows[0] == pytest.approx(rows[1], rel=0.05)


def test_a_stage_that_does_not_divide_rules_a_configuration_out() -> None:
    subject = forecast([{"epochs": 1, "batch": 40}])
    assert subject.describe_why_infeasible(Config(2, 128)) == ""
    assert "batch 40 is not divisible by 16" in subject.describe_why_infeasible(Config(16, 128))
    assert {row.nodes for row in subject.predict_candidates().make_predictions() if row.batch > 40} == {2, 4, 8}


def test_what_a_training_would_refuse_to_begin_at_is_not_offered_and_stays_to_fall_back_to() -> None:
    subject = forecast([{"epochs": 1, "batch": 64}], min_batch=16)
    assert min(row.batch for row in subject.predict_candidates().make_predictions()) == 128
    assert "batch 64 is not below 64, the batch of the training" in subject.describe_why_not_startable(Config(2, 64))
    assert subject.describe_why_infeasible(Config(2, 64)) == "" == subject.describe_why_not_startable(Config(2, 128))
    assert [rung.batch for rung in subject.list_oom_fallbacks(2, 256)] == [256, 128, 64, 32, 16]


def test_a_stage_of_which_nothing_tells_takes_as_long_as_the_training_and_that_is_said() -> None:
    results = make_probes(TRUTH, {2: (128,), 4: (128,)})
    subject = Estimator.fit(job("auto"), results)
    row = subject.predict(Config(2, 256))
    assert {stage.step_time for stage in row.stages} == {row.step_time}
    assert "stage-times-not-measured" in codes(subject.warnings)
    assert "stage-times-not-measured" not in codes(forecast("auto").warnings)


def test_the_same_progress_knows_that_stages_lose_less() -> None:
    noise = Noise(scale=100.0, low=80.0, high=120.0, error=10.0, probes=4)
    rows = [forecast(ramp).predict_configurations(*convert_to_columns([Config(2, 256)])) for ramp in (None, "auto")]
    plain, grown = (
        add_same_progress(row, epochs=10, reference=32, noise=noise).make_prediction(0).same_progress for row in rows
    )
    assert plain is not None and grown is not None
    whole = compute_equivalent_constant_noise(100.0, reference=32, epochs=10)
    at = {batch: compute_equivalent_epochs(10, batch, reference=32, noise=whole) for batch in (32, 64, 128, 256)}
    assert plain.epochs == pytest.approx(at[256]) and at[32] == pytest.approx(10)
    shares = {32: 0.05, 64: 0.05, 128: 0.05, 256: 0.85}
    assert grown.epochs == pytest.approx(1 / sum(share / at[batch] for batch, share in shares.items()))
    assert grown.epochs < plain.epochs
    assert grown.epochs_alike == pytest.approx(10), "where every sample counts alike a batch loses nothing"


def test_what_is_left_behind_the_stages_takes_less_than_its_share_of_the_epochs() -> None:
    row = forecast("auto").predict(Config(2, 256))
    assert compute_remaining_time_share(row, 1.0) == pytest.approx(1) and compute_remaining_time_share(
        row, 0.0
    ) == pytest.approx(0)
    assert row.parts is not None
    steps = (8.5 - 4) * 50 * row.step_time  # after 5.5 of 10 epochs
    other = 0.45 * (row.parts.total - row.parts.steps)
    assert (
        compute_remaining_time_share(row, 0.45) == pytest.approx((steps + other) / row.parts.total, rel=0.01)
        and compute_remaining_time_share(row, 0.45) < 0.45
    )
    assert compute_remaining_time_share(forecast(None).predict(Config(2, 256)), 0.45) == 0.45


RAMPS = st.sampled_from([{"ramp": "auto"}, {"ramp": "noise"}, {"ramp": "decay", "ramp_nodes": "auto"},
                         {"ramp": "auto", "ramp_nodes": "auto"}, {"ramp": [{"epochs": 1.5, "batch": 48}]}])  # fmt: skip


@given(train=RAMPS, size=st.integers(3000, 9000), seed=st.integers(0, 99), has_noise=st.booleans())
@settings(max_examples=60)
def test_the_stages_of_many_are_those_of_each_ramp(
    train: dict[str, Any], size: int, seed: int, has_noise: bool
) -> None:
    """Batches, steps and shares are those of `Ramp`, and the time is that of the steps."""
    subject = make_spec(train={"method": "lrs", "epochs": 7, "reference_batch": 24, **train}, schedule={"kind": "cosine"},
                   search={"nodes": [1, 2, 3, 4, 6, 12]})  # fmt: skip
    noise = NoisePath.from_measurements({0.0: 20.0, 2.0: 60.0}, reference=24) if has_noise else None
    random = np.random.default_rng(seed)

    def predict(nodes: Any, batch: Any) -> Estimates:
        seconds = 0.1 + batch / nodes / 1000 + 0.02 * np.log(nodes)
        return Estimates(seconds, seconds * 0.9, seconds * 1.1, np.full(len(nodes), np.nan))

    times = StageTimes(
        subject, size, predict, find_unknown=lambda nodes, batch: np.zeros(len(nodes), dtype=bool),
        startup=lambda nodes, batch: np.full(len(nodes), 2.0), noise=noise,
    )  # fmt: skip
    gpus = subject.cluster.gpus_per_node
    counts = random.choice([1, 2, 3, 4, 6], 12)
    nodes, batch = convert_to_columns(
        [Config(int(n), int(n) * gpus * 12 * 2 ** int(random.integers(0, 6))) for n in counts]
    )
    table = times.make_stage_table(nodes, batch, predict(nodes, batch))
    for row, (count, value) in enumerate(zip(nodes.tolist(), batch.tolist(), strict=True)):
        ramp = build_ramp_on_nodes(subject, batch=value, nodes=count, dataset_size=size, noise=noise)
        is_stage = table.batch[row] > 0
        assert table.batch[row][is_stage].tolist() == [stage.batch for stage in ramp.stages]
        assert table.steps[row][is_stage].tolist() == list(ramp.count_remaining_steps(size=size, epochs=7).values())
        begins = np.minimum([stage.begin for stage in ramp.stages] + [7 * size], 7 * size)
        assert table.share[row][is_stage] == pytest.approx(np.diff(begins) / (7 * size))
        assert table.steps[row][~is_stage].sum() == 0 and [stage.batch for stage in table.build_records(row)] == [
            stage.batch for stage in ramp.stages[:-1]
        ]
        assert table.step_time[row][is_stage] == pytest.approx(
            predict(table.nodes[row][is_stage], table.batch[row][is_stage]).seconds
        )
        assert (np.diff(table.nodes[row][is_stage]) >= 0).all() and table.nodes[row, -1] == count


@pytest.mark.parametrize("ramp", ["auto", [{"epochs": 1, "batch": 64}]])
def test_the_stages_of_a_dataset_whose_samples_overflow_an_integer_are_forecast(ramp: object) -> None:
    subject = Estimator.fit(job(ramp), make_probes(Truth(dataset_size=2**63 - 1), PROBES))
    row = subject.predict(Config(2, 256))
    seconds = sum(stage.share * 10 * 2**63 / stage.batch * stage.step_time for stage in row.stages)
    assert row.parts is not None and row.parts.steps > seconds > 0
