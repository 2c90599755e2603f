import math
import random
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tula_cli.models.choice import objective as objectives
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.objective import Choice, Curve, Objective, find_envelope
from tula_cli.query import QUANTITIES
from tula_cli.run.records.recommendations import Prediction, SameProgress


def row(nodes: int, batch: int, hours: float, *, cost: float | None = None, spread: float | None = None) -> Prediction:
    return Prediction(
        nodes=nodes,
        batch=batch,
        local_batch=batch // nodes,
        step_time=1.0,
        step_low=None,
        step_high=None,
        hours=hours,
        hours_low=None if spread is None else hours * (1 - spread),
        hours_high=None if spread is None else hours * (1 + spread),
        cost=hours * nodes if cost is None else cost,
        peak_memory=None,
        headroom=None,
        measured=False,
    )


def choose(rows: Sequence[Prediction], *, objective: Objective, curve: Curve = "time") -> Choice:
    return objectives.choose_configuration(Candidates.from_predictions(rows), objective=objective, curve=curve)


def curve(time: Callable[[int], float], count: int = 9, **rest: float) -> list[Prediction]:
    return [row(4, 32 * 2**k, time(k), **rest) for k in range(count)]


ROWS = st.lists(
    st.builds(
        row,
        st.sampled_from([1, 2, 4]),
        st.sampled_from([32, 64, 128, 256]),
        st.floats(0.1, 100),
        cost=st.floats(0.1, 9),
    ),
    min_size=1,
    unique_by=lambda result: (result.nodes, result.batch),
)


@given(ROWS, st.randoms())
def test_time_and_cost_take_the_least_in_any_order(rows: list[Prediction], order: random.Random) -> None:
    order.shuffle(rows)
    assert choose(rows, objective="time").prediction.hours == min(outcome.hours for outcome in rows)
    assert choose(rows, objective="cost").prediction.cost == min(result.cost for result in rows)


@given(ROWS)
def test_the_choice_is_never_among_its_runners_up(rows: list[Prediction]) -> None:
    for objective in ("time", "cost", "knee"):
        choice = choose(rows, objective=objective)
        assert choice.prediction in rows and choice.prediction not in choice.runners_up
        assert len(choice.runners_up) <= 3


@given(ROWS)
def test_the_envelope_has_the_fastest_of_each_batch(rows: list[Prediction]) -> None:
    line = find_envelope(rows)
    assert [result.batch for result in line] == sorted({outcome.batch for outcome in rows})
    for value in line:
        assert value.hours == min(other.hours for other in rows if other.batch == value.batch)


def test_equal_times_go_to_the_cheaper_then_the_smaller() -> None:
    rows = [row(8, 64, 1.0), row(2, 128, 1.0), row(2, 64, 1.0)]
    assert choose(rows, objective="time").prediction == rows[2]
    assert choose([row(2, 64, 9.0, cost=0), row(8, 64, 3.0, cost=0)], objective="cost").prediction.nodes == 8


def scaling(gains: Sequence[float]) -> list[Prediction]:
    """A curve over 32 x 2^k that loses these shares of the time at its doublings."""
    return curve(lambda k: math.prod(1 - gain for gain in gains[:k]), len(gains) + 1)


@settings(max_examples=50)
@example([0, 0, 0.54, 0.4, 0.365, 0.25, -0.3, -0.3, -0.3])  # the largest batches are slower than the best
@given(st.lists(st.floats(-0.3, 0.6), min_size=4, max_size=12))
def test_kneedle_finds_where_a_doubling_saves_less_than_half_of_ideal_scaling(gains: list[float]) -> None:
    rows = scaling(gains)
    below = [row.hours * row.batch**0.5 for row in rows]
    least = sorted(below)
    assume(least[1] > least[0] * 1.001)
    place = below.index(least[0])
    choice = choose(rows, objective="knee")
    if 0 < place < len(rows) - 1:
        assert choice.prediction == rows[place]
    else:
        assert choice.reason.startswith("the smallest batch within 10 %")


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        # a knee at the fourth batch: 1 / (1 - 0.32) before it, and 1 - 0.27 after it
        ([0.5, 0.5, 0.32, 0.27, 0.1, 0.05], "time +47% at the next smaller batch, -27% at the next larger one"),
        ([0.1] * 5, "time changes steadily, by -10% per doubling of the batch"),
        ([0.1], "there are only 2 batches"),
        ([], "there is only 1 batch"),
    ],
)
def test_the_reason_tells_what_the_batches_beside_the_knee_would_change(gains: list[float], words: str) -> None:
    reason = choose(scaling(gains), objective="knee").reason
    assert words in reason and ("no knee" in reason) == ("steadily" in words or "only" in words)


def test_the_noise_of_a_measured_one_does_not_move_the_knee() -> None:
    rows = scaling([0.5, 0.5, 0.32, 0.27, 0.1, 0.05])
    assert choose(rows, objective="knee").prediction.batch == rows[3].batch
    lucky = {"hours": 0.95 * rows[4].hours, "step_time": 0.95 * rows[4].step_time, "measured": True}
    noisy = [*rows[:4], rows[4].model_copy(update=lucky), *rows[5:]]
    assert choose(noisy, objective="knee").prediction.batch == rows[4].batch
    noisy[4] = noisy[4].model_copy(update={"step_fitted": rows[4].step_time})
    assert choose(noisy, objective="knee").prediction == rows[3]


@pytest.mark.parametrize("count", [5, 8, 12])
def test_a_curve_that_halves_with_every_doubling_has_no_knee(count: int) -> None:
    """Over linear time Kneedle sees one at the third batch, at many times the best time."""
    choice = choose(scaling([0.5] * (count - 1)), objective="knee")
    assert choice.prediction.batch == 32 * 2 ** (count - 1)
    assert "time still falls by 50 % at the largest batch" in choice.reason


def test_the_knee_does_not_depend_on_where_the_curve_is_cut_off() -> None:
    gains = [0.5, 0.49, 0.45, 0.4, 0.2, 0.08, 0.03, 0.01, 0.0, 0.0]
    assert [choose(scaling(gains[:end]), objective="knee").prediction.batch for end in (6, 8, 10)] == [512] * 3
    assert choose(scaling(gains[2:]), objective="knee").prediction.batch == 512 / 2**2


@pytest.mark.parametrize("dent", [2, 3, 5])
def test_a_dent_is_not_a_knee(dent: int) -> None:
    """One slow configuration on the way down: nodes whose network is slow, a disturbed probe."""
    rows = scaling([0.48, 0.48, 0.47, 0.46, 0.45, 0.44, 0.1, 0.02])
    dented = [row.model_copy(update={"hours": row.hours * 1.5}) if k == dent else row for k, row in enumerate(rows)]
    assert choose(dented, objective="knee").prediction.batch == rows[6].batch


def test_a_curve_that_still_falls_at_the_largest_batch_has_no_knee() -> None:
    falling = choose(scaling([0.5, 0.5, 0.5, 0.3]), objective="knee")
    assert falling.prediction.batch == 512 and "still falls by 30 % at the largest batch" in falling.reason


@pytest.mark.parametrize("bend", [2, 3, 4, 5])
def test_the_knee_is_where_the_curve_bends(bend: int) -> None:
    rows = curve(lambda k: 10 + max(0, bend - k) * 20 - 0.01 * k)
    choice = choose(rows, objective="knee")
    assert choice.prediction.batch == 32 * 2**bend
    assert choice.reason.startswith("the knee of time against batch: time +")
    assert {result.batch for result in choice.runners_up[:2]} == {16 * 2**bend, 64 * 2**bend}


def test_the_knee_is_looked_for_on_the_fastest_nodes_of_each_batch() -> None:
    slow = [
        result.model_copy(update={"nodes": 2, "hours": result.hours * 3}) for result in curve(lambda k: 90 - 10 * k)
    ]
    rows = curve(lambda k: 10 + max(0, 3 - k) * 20 - 0.01 * k)
    assert choose([*slow, *rows], objective="knee").prediction == rows[3]


def test_the_knee_of_the_cost_curve_is_another() -> None:
    rows = [row(4, 32 * 2**k, 100 - k, cost=10 + max(0, 2 - k) * 20 - 0.01 * k) for k in range(9)]
    choice = choose(rows, objective="knee", curve="cost")
    assert choice.prediction.batch == 128 and "cost" in choice.reason


def test_fewer_than_five_batches_fall_back_and_say_so() -> None:
    choice = choose(curve(lambda k: [9.0, 5.0, 4.2, 4.0][k], 4), objective="knee")
    assert choice.prediction.batch == 128  # 4.2 is within 10 % of 4.0, 5.0 is not
    assert "only 4 batches" in choice.reason and "smallest batch within 10 %" in choice.reason


@pytest.mark.parametrize("time", [lambda k: 5.0, lambda k: 100.0 - 10 * k], ids=["flat", "straight"])
def test_a_curve_without_a_knee_falls_back_and_says_so(time: Callable[[int], float]) -> None:
    choice = choose(curve(time), objective="knee")
    best = min(time(k) for k in range(9))
    within = [32 * 2**k for k in range(9) if time(k) <= 1.1 * best]
    assert choice.prediction.batch == within[0]
    assert "has no knee" in choice.reason


def test_one_configuration_is_the_choice() -> None:
    choice = choose([row(2, 64, 1.0)], objective="time")
    assert choice.reason == "the only feasible configuration" and not choice.runners_up


def test_a_neighbour_as_good_is_named() -> None:
    def reason(other: float, spread: float | None = None) -> str:
        return choose([row(2, 64, other), row(2, 128, 10.0, spread=spread)], objective="time").reason

    assert "batch 64 on 2 nodes is equally good" in reason(10.1)
    assert "equally good" not in reason(10.5)
    assert "equally good" in reason(10.5, spread=0.1)


def progress(result: Prediction, epochs: float, *, low: float, high: float) -> Prediction:
    """Return a prediction whose same progress takes so many times its hours."""
    answer = SameProgress(
        epochs=epochs, epochs_low=low, epochs_high=high, epochs_alike=low, epochs_lossy=high, hours=result.hours * epochs, hours_low=result.hours * low,
        hours_high=result.hours * high, cost=result.cost * epochs,
    )  # fmt: skip
    return result.model_copy(update={"same_progress": answer})


def test_accuracy_time_takes_the_least_time_to_the_same_progress() -> None:
    rows = [
        progress(row(2, 64, 4.0), 1.0, low=0.9, high=1.1),
        progress(row(2, 128, 2.5), 1.5, low=1.0, high=3.0),
        progress(row(2, 256, 1.5), 3.0, low=1.0, high=8.0),
    ]
    choice = choose(rows, objective="accuracy-time")
    assert choice.prediction.batch == 128
    assert [result.batch for result in choice.runners_up] == [64, 256]
    assert "shortest time to the same progress of 3 feasible configurations" in choice.reason
    assert "the best batch is 64 to 256" in choice.reason
    assert [outcome.batch for outcome in find_envelope(rows, QUANTITIES["accuracy-time"])] == [64, 128, 256]


def test_a_choice_that_the_range_does_not_change_is_said_to_be_sure() -> None:
    rows = [progress(row(n, 64 * n, 4.0 / n), 1.0, low=0.9, high=1.1) for n in (1, 2)]
    assert "batch 128 over the whole range" in choose(rows, objective="accuracy-time").reason


def test_an_uncertain_forecast_has_to_be_clearly_better_than_a_certain_one() -> None:
    def between(nodes: int, batch: int, hours: float, low: float, high: float) -> Prediction:
        return row(nodes, batch, hours).model_copy(update={"hours_low": low, "hours_high": high})

    certain = between(2, 64, 1.0, 0.97, 1.03)
    choice = choose([between(4, 128, 0.9, 0.4, 2.0), certain], objective="time")
    assert choice.prediction == certain
    assert (
        "4 nodes, batch 128 is predicted to need 10.0 % less time, but this prediction is less certain" in choice.reason
    )
    slower = between(2, 32, 1.5, 1.4, 1.6)
    ranked = choose([slower, certain, between(4, 128, 0.9, 0.4, 2.0)], objective="time").runners_up
    assert [other.hours for other in ranked] == [0.9, 1.5]
    sure = between(4, 128, 0.9, 0.85, 0.95)
    assert choose([sure, certain], objective="time").prediction == sure
    clear = between(4, 128, 0.5, 0.25, 1.0)
    choice = choose([clear, certain], objective="time")
    assert choice.prediction == clear and "uncertain" not in choice.reason


def test_the_range_of_the_noise_is_reported_by_its_two_ends_also_below_the_reference_batch() -> None:
    def told(result: Prediction, *, alike: float, lossy: float) -> Prediction:
        low, high = sorted((alike, lossy))
        same = SameProgress(
            epochs=1.0, epochs_low=low, epochs_high=high, epochs_alike=alike, epochs_lossy=lossy, hours=result.hours,
            hours_low=result.hours * low, hours_high=result.hours * high, cost=result.cost,
        )  # fmt: skip
        return result.model_copy(update={"same_progress": same})

    # Below the reference batch a lossy noise takes fewer epochs, above it more.
    small, large = told(row(1, 32, 2.0), alike=1.0, lossy=0.5), told(row(1, 512, 1.5), alike=1.0, lossy=3.0)
    assert "the best batch is 32 to 512" in choose([small, large], objective="accuracy-time").reason


def test_the_knee_pays_for_no_node_that_only_makes_the_time_more_certain() -> None:
    certain = [row(2, 64, 1.5, spread=0.05), row(2, 128, 1.0, spread=0.05), row(2, 256, 0.99, spread=0.05)]
    cheaper = row(1, 128, 0.98, spread=0.3)
    assert choose([*certain, cheaper], objective="knee").prediction == cheaper
    for kept in (row(1, 128, 1.01, spread=0.3), row(1, 128, 0.98, cost=3.0, spread=0.3), row(1, 128, 0.98, spread=0.6)):
        choice = choose([*certain, kept], objective="knee")
        assert choice.prediction == certain[1]
        assert {other.batch for other in choice.runners_up} == {64, 256}


def test_every_objective_minimises_a_quantity_of_the_candidates() -> None:
    assert set(get_args(Objective)) == {*QUANTITIES, "knee"}
    table = Candidates.from_predictions([row(2, 64, 1.0)])
    for quantity in QUANTITIES.values():
        assert len(table[quantity.column]) == len(table[f"{quantity.interval}_low"]) == 1
