import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_results import spec

from tula_cli.models.cost import (
    INTERRUPTION_SECONDS,
    Work,
    checkpoint_interval,
    cost,
    price_words,
    training_seconds,
    work,
)
from tula_cli.records import Overheads
from tula_cli.spec import Pricing

NOTHING = Overheads(startup=0, eval_batch=0, eval_batch_size=64, checkpoint=0, refresh=0)


def count(batch: int = 512, *, world: int = 8, dataset_size: int = 50_000, **sections: object) -> Work:
    return work(
        spec(**sections), batch=batch, world=world, dataset_size=dataset_size, eval_size=10_000, eval_batch_size=64
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
    assert training_seconds(count(512), step_time=0.25, overheads=NOTHING) == pytest.approx(10 * 97 * 0.25)


def test_wall_clock_time_counts_what_is_beside_the_steps() -> None:
    overheads = Overheads(startup=30, eval_batch=0.5, eval_batch_size=64, checkpoint=2, refresh=3)
    todo = Work(epochs=10, steps=100, eval_batches=4, refreshes=10)
    beside_saving = 30 + 10 * (100 * 4.0 + 4 * 0.5) + 10 * 3

    def saved(every: float | None) -> float:
        seconds = training_seconds(todo, step_time=4.0, overheads=overheads, checkpoint_every=every)
        return (seconds - beside_saving) / 2  # checkpoints

    assert saved(150) == pytest.approx(10 * (1 + 2))  # one at the end of each epoch, and two in its 400 seconds
    assert saved(500) == pytest.approx(10)
    assert 300 < checkpoint_interval(2) < 600
    assert saved(None) == pytest.approx(10 * (1 + 400 // checkpoint_interval(2)))


@given(st.floats(0.1, 1000))
def test_the_checkpoint_interval_loses_the_least(save: float) -> None:
    def lost(interval: float) -> float:
        return save / interval + interval / (2 * INTERRUPTION_SECONDS)

    best = checkpoint_interval(save)
    assert lost(best) <= min(lost(best * 1.05), lost(best / 1.05))


def test_free_checkpoints_are_not_written_all_the_time() -> None:
    assert checkpoint_interval(0.0) == 30
    assert math.isfinite(training_seconds(count(), step_time=0.1, overheads=NOTHING))


@given(st.floats(0, 1e4), st.integers(1, 64), st.integers(1, 8))
def test_a_node_hour_is_its_gpu_hours(hours: float, nodes: int, gpus: int) -> None:
    def at(kind: str, price: float) -> float:
        pricing = Pricing.model_validate({"kind": kind, "price": price})
        return cost(pricing, hours=hours, nodes=nodes, gpus_per_node=gpus, reserved=8e9)

    assert at("node_hour", 2.48) == pytest.approx(hours * nodes * 2.48)
    assert at("gpu_hour", 2.48) == pytest.approx(gpus * at("node_hour", 2.48))
    assert at("gb_hour", 0.15) == pytest.approx(at("gpu_hour", 0.15 * 8))


def test_a_price_is_told_with_unit_and_source() -> None:
    pricing = Pricing(kind="gb_hour", price=0.15, currency="USD", source="list price 2025")
    assert price_words(pricing) == "0.15 USD per hour and GB of reserved GPU memory (list price 2025)"
    assert price_words(Pricing()) == "1 USD per node-hour"
