import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_results import make_spec

from tula_cli.models.cost import (
    INTERRUPTION_SECONDS,
    TrainingTime,
    TrainingWork,
    compute_checkpoint_interval,
    compute_cost,
    compute_interruption_rate,
    compute_training_seconds,
    count_training_work,
    describe_price,
)
from tula_cli.run.records.probes import Overheads
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.spec.resources import UNPRICED_PRICING, Pricing, Spot

NOTHING = Overheads(startup=0, eval_batch=0, eval_batch_size=64, checkpoint=0, refresh=0)


def count(batch: int = 512, *, world: int = 8, dataset_size: int = 50_000, **sections: object) -> TrainingWork:
    return count_training_work(
        make_spec(**sections), batch=batch, world=world, dataset_size=dataset_size, eval_size=10_000, eval_batch_size=64
    )


def test_steps_are_whole_and_the_partial_batch_is_dropped() -> None:
    assert count(512).steps == 97  # 50000 / 512 = 97.66
    assert count(50_000).steps == 1


def test_evaluation_is_shared_by_all_ranks() -> None:
    assert count(world=8).eval_batches == 20  # 10000 / (8 x 64) = 19.5


@pytest.mark.parametrize(
    ("train", "ags", "expected"),
    [
        ({"method": "ags"}, {"refresh": "epoch"}, 10),
        ({"method": "ags"}, {"refresh": {"every": 100}}, 9),
        ({"method": "lbt"}, {"refresh": {"every": 1}}, 0),
        ({"method": "lrs"}, {}, 0),
    ],
)
def test_only_ags_refreshes_its_factors(train: dict[str, object], ags: dict[str, object], expected: int) -> None:
    assert count(train=train, ags=ags).refreshes == expected


def test_eq_4a_is_epochs_times_steps_times_step_time() -> None:
    assert compute_training_seconds(count(512), step_time=0.25, overheads=NOTHING) == pytest.approx(10 * 97 * 0.25)


def test_wall_clock_time_counts_what_is_beside_the_steps() -> None:
    overheads = Overheads(startup=30, eval_batch=0.5, eval_batch_size=64, checkpoint=2, refresh=3)
    todo = TrainingWork(epochs=10, steps=100, eval_batches=4, refreshes=10)
    beside_saving = 30 + 10 * (100 * 4.0 + 4 * 0.5) + 10 * 3

    def saved(every: float | None) -> float:
        seconds = compute_training_seconds(todo, step_time=4.0, overheads=overheads, checkpoint_every=every)
        return (seconds - beside_saving) / 2  # checkpoints

    assert saved(150) == pytest.approx(10 * (1 + 2))  # one at the end of each epoch, and two in its 400 seconds
    assert saved(500) == pytest.approx(10)
    assert 300 < compute_checkpoint_interval(2) < 600
    assert saved(None) == pytest.approx(10 * (1 + 400 // compute_checkpoint_interval(2)))


@given(st.floats(0.01, 9), st.sampled_from([20.0, 150.0, math.inf]), st.booleans())
def test_the_parts_of_a_training_are_its_whole_time(step_time: float, every: float, tunes: bool) -> None:
    overheads = Overheads(startup=30, eval_batch=0.5, eval_batch_size=64, checkpoint=2, refresh=3)
    branches = {"branches": 4, "branch_steps": 50, "branch_evals": 2} if tunes else {}
    time = TrainingTime(TrainingWork(epochs=10, steps=100, eval_batches=4, refreshes=10, **branches), overheads, every)
    parts = TimeParts(**time.compute_parts(step_time, data_wait=0.001))
    assert parts.total == pytest.approx(3600 * time.compute_hours(step_time))
    assert (parts.evaluation, parts.rest, parts.data) == (20.0, 30.0, pytest.approx(1.0))
    assert (parts.branches > 0) is tunes


@given(st.floats(0.1, 1000))
def test_the_checkpoint_interval_loses_the_least(save: float) -> None:
    def lost(interval: float) -> float:
        return save / interval + interval / (2 * INTERRUPTION_SECONDS)

    best = compute_checkpoint_interval(save)
    assert lost(best) <= min(lost(best * 1.05), lost(best / 1.05))


def test_free_checkpoints_are_not_written_all_the_time() -> None:
    assert compute_checkpoint_interval(0.0) == 30
    assert math.isfinite(compute_training_seconds(count(), step_time=0.1, overheads=NOTHING))


@given(st.floats(0, 1e4), st.integers(1, 64), st.integers(1, 8))
def test_a_node_hour_is_its_gpu_hours(hours: float, nodes: int, gpus: int) -> None:
    def at(kind: str, price: float) -> float:
        pricing = Pricing.model_validate({"kind": kind, "price": price})
        return compute_cost(pricing, hours=hours, nodes=nodes, gpus_per_node=gpus, reserved=8e9)

    assert at("node_hour", 2.48) == pytest.approx(hours * nodes * 2.48)
    assert at("gpu_hour", 2.48) == pytest.approx(gpus * at("node_hour", 2.48))
    assert at("gb_hour", 0.15) == pytest.approx(at("gpu_hour", 0.15 * 8))


def test_a_price_is_reported_with_its_unit() -> None:
    pricing = Pricing(kind="gb_hour", price=0.15, currency="USD")
    assert describe_price(pricing) == "0.15 USD per hour and GB of reserved GPU memory"
    on_spot = Pricing(price=2, spot=Spot(discount=0.6, interruptions_per_day=0.5))
    assert describe_price(on_spot) == "2 USD per node-hour; spot 60 % off, 0.5 interruptions per day and node"
    assert "pricing.price is not set" in describe_price(UNPRICED_PRICING)


@given(st.floats(0.01, 1e4), st.floats(0.01, 100), st.sampled_from(["on_demand", "spot"]))
def test_cost_grows_with_hours(hours: float, price: float, market: str) -> None:
    pricing = Pricing(price=price, spot=Spot(discount=0.7, interruptions_per_day=1))

    def at(hours: float) -> float:
        return compute_cost(pricing, hours=hours, nodes=4, gpus_per_node=2, reserved=1e9, market=market)  # type: ignore[arg-type]

    assert at(hours) < at(1.01 * hours)
    assert at(hours) == pytest.approx(hours * 4 * price * (0.3 if market == "spot" else 1))


# --- spot nodes

TODO = TrainingWork(epochs=3, steps=1000, eval_batches=10, refreshes=3)
OVERHEADS = Overheads(startup=60, eval_batch=1.5, eval_batch_size=64, checkpoint=8, refresh=20)


def simulated(rng: random.Random, *, every: float, rate: float) -> float:
    """Return the seconds of one training whose nodes are taken away after exponential times."""
    stepping = TODO.steps * 2.0 + OVERHEADS.refresh
    within = [every * number for number in range(1, int(stepping / every) + 1)]
    marks = [*within, stepping + TODO.eval_batches * OVERHEADS.eval_batch]  # of an epoch; each is saved
    now, lost_at, up = 0.0, rng.expovariate(rate), False
    for _ in range(TODO.epochs):
        saved = 0.0
        while saved < marks[-1]:
            goal = next(mark for mark in marks if mark > saved)
            end = now + (0.0 if up else OVERHEADS.startup) + goal - saved + OVERHEADS.checkpoint
            if up := end <= lost_at:
                now, saved = end, goal
            else:
                now = lost_at
                lost_at = now + rng.expovariate(rate)
    return now


@pytest.mark.parametrize(("rate", "every"), [(1 / 20_000, 900.0), (1 / 3_000, 300.0), (1 / 500, 150.0)])
def test_expected_time_is_that_of_a_simulation(rate: float, every: float) -> None:
    rng = random.Random(7)
    runs = [simulated(rng, every=every, rate=rate) for _ in range(6000)]
    expected = compute_training_seconds(TODO, step_time=2.0, overheads=OVERHEADS, checkpoint_every=every, rate=rate)
    assert expected == pytest.approx(sum(runs) / len(runs), rel=0.02)
    undisturbed = compute_training_seconds(TODO, step_time=2.0, overheads=OVERHEADS, checkpoint_every=every)
    assert expected > 1.02 * undisturbed


@given(st.floats(0.01, 5))
def test_without_interruptions_spot_takes_what_on_demand_takes(step: float) -> None:
    expected = compute_training_seconds(TODO, step_time=step, overheads=OVERHEADS, rate=0.0)
    assert expected == compute_training_seconds(TODO, step_time=step, overheads=OVERHEADS)
    almost = compute_training_seconds(TODO, step_time=step, overheads=OVERHEADS, checkpoint_every=600, rate=1e-12)
    assert almost == pytest.approx(
        compute_training_seconds(TODO, step_time=step, overheads=OVERHEADS, checkpoint_every=600)
    )


@given(st.floats(1e-7, 1e-4), st.floats(1.01, 3))
def test_more_interruptions_take_longer(rate: float, more: float) -> None:
    def at(rate: float) -> float:
        return compute_training_seconds(TODO, step_time=1.0, overheads=OVERHEADS, checkpoint_every=600, rate=rate)

    assert at(rate) < at(more * rate)


def test_interruptions_that_leave_no_time_are_infinitely_long() -> None:
    assert compute_training_seconds(TODO, step_time=1.0, overheads=OVERHEADS, rate=1.0) == math.inf


def test_the_rate_is_that_of_one_node_times_the_nodes() -> None:
    spot = Pricing(price=1, spot=Spot(discount=0.5, interruptions_per_day=2))
    assert compute_interruption_rate(spot, 6) == pytest.approx(12 / 86400)
    assert compute_interruption_rate(Pricing(price=1), 6) == 0


def test_checkpoints_are_closer_where_nodes_are_taken_away() -> None:
    assert compute_checkpoint_interval(10, rate=0.0) == pytest.approx(math.sqrt(2 * 10 * INTERRUPTION_SECONDS))
    often = compute_checkpoint_interval(10, rate=9 / INTERRUPTION_SECONDS)  # ten interruptions a day in all
    assert often == pytest.approx(compute_checkpoint_interval(10) / math.sqrt(10))


def test_a_start_that_is_interrupted_begins_again() -> None:
    starting = Overheads(startup=1000, eval_batch=0, eval_batch_size=64, checkpoint=0, refresh=0)
    nothing = TrainingWork(epochs=1, steps=0, eval_batches=0, refreshes=0)
    expected = compute_training_seconds(nothing, step_time=1.0, overheads=starting, rate=1 / 1000)
    assert expected == pytest.approx(1000 * (math.e - 1))


def test_what_was_not_measured_is_left_out() -> None:
    unknown = Overheads(startup=30, eval_batch=None, eval_batch_size=None, checkpoint=None, refresh=None)
    todo = TrainingWork(epochs=10, steps=100, eval_batches=4, refreshes=10)
    assert compute_training_seconds(todo, step_time=4.0, overheads=unknown) == pytest.approx(30 + 10 * 100 * 4.0)
    assert compute_training_seconds(todo, step_time=4.0, overheads=unknown, checkpoint_every=60) == pytest.approx(4030)


def test_where_saving_was_not_measured_an_interruption_loses_the_epoch() -> None:
    unknown = NOTHING.model_copy(update={"checkpoint": None})
    todo, rate = TrainingWork(epochs=10, steps=1000, eval_batches=0, refreshes=0), 1 / 3600
    each = math.expm1(rate * 1000) / rate
    assert compute_training_seconds(todo, step_time=1.0, overheads=unknown, rate=rate) == pytest.approx(10 * each)
    saves_often = compute_training_seconds(todo, step_time=1.0, overheads=NOTHING, rate=rate)
    assert 10_000 < saves_often < 0.9 * 10 * each
    assert compute_checkpoint_interval(None) == math.inf


def test_without_a_held_out_size_no_evaluation_is_counted() -> None:
    sizes = {"batch": 64, "world": 2, "dataset_size": 6400}
    assert count_training_work(make_spec(), **sizes, eval_size=None, eval_batch_size=10).eval_batches == 0
    assert count_training_work(make_spec(), **sizes, eval_size=100, eval_batch_size=None).eval_batches == 0
    assert count_training_work(make_spec(), **sizes, eval_size=100, eval_batch_size=10).eval_batches == 5
