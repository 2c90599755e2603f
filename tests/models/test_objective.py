import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_cli.models.objective import choose, envelope
from tula_cli.records import Prediction


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
    unique_by=lambda found: (found.nodes, found.batch),
)


@given(ROWS, st.randoms())
def test_time_and_cost_take_the_least_in_any_order(rows: list[Prediction], order: random.Random) -> None:
    order.shuffle(rows)
    assert choose(rows, objective="time").prediction.hours == min(found.hours for found in rows)
    assert choose(rows, objective="cost").prediction.cost == min(found.cost for found in rows)


@given(ROWS)
def test_the_choice_is_never_among_its_runners_up(rows: list[Prediction]) -> None:
    for objective in ("time", "cost", "knee"):
        choice = choose(rows, objective=objective)
        assert choice.prediction in rows and choice.prediction not in choice.runners_up
        assert len(choice.runners_up) <= 3


@given(ROWS)
def test_the_envelope_has_the_fastest_of_each_batch(rows: list[Prediction]) -> None:
    line = envelope(rows)
    assert [found.batch for found in line] == sorted({found.batch for found in rows})
    for found in line:
        assert found.hours == min(other.hours for other in rows if other.batch == found.batch)


def test_equal_times_go_to_the_cheaper_then_the_smaller() -> None:
    rows = [row(8, 64, 1.0), row(2, 128, 1.0), row(2, 64, 1.0)]
    assert choose(rows, objective="time").prediction == rows[2]
    assert choose([row(2, 64, 9.0, cost=0), row(8, 64, 3.0, cost=0)], objective="cost").prediction.nodes == 8


@pytest.mark.parametrize("bend", [2, 3, 4, 5])
def test_the_knee_is_where_the_curve_bends(bend: int) -> None:
    rows = curve(lambda k: 10 + max(0, bend - k) * 20 - 0.01 * k)
    choice = choose(rows, objective="knee")
    assert choice.prediction.batch == 32 * 2**bend
    assert choice.reason.startswith("the knee of time against batch: the batch before takes +")
    assert {found.batch for found in choice.runners_up[:2]} == {16 * 2**bend, 64 * 2**bend}


def test_the_knee_is_looked_for_on_the_fastest_nodes_of_each_batch() -> None:
    slow = [found.model_copy(update={"nodes": 2, "hours": found.hours * 3}) for found in curve(lambda k: 90 - 10 * k)]
    rows = curve(lambda k: 10 + max(0, 3 - k) * 20 - 0.01 * k)
    assert choose([*slow, *rows], objective="knee").prediction == rows[3]


def test_the_knee_of_the_cost_curve_is_another() -> None:
    rows = [row(4, 32 * 2**k, 100 - k, cost=10 + max(0, 2 - k) * 20 - 0.01 * k) for k in range(9)]
    choice = choose(rows, objective="knee", curve="cost")
    assert choice.prediction.batch == 128 and "cost" in choice.reason


def test_fewer_than_five_batches_fall_back_and_say_so() -> None:
    choice = choose(curve(lambda k: [9.0, 5.0, 4.2, 4.0][k], 4), objective="knee")
    assert choice.prediction.batch == 128  # 4.2 is within 10 % of 4.0, 5.0 is not
    assert "only 4 batches" in choice.reason and "smallest batch within 10%" in choice.reason


@pytest.mark.parametrize("time", [lambda k: 5.0, lambda k: 100.0 - 10 * k], ids=["flat", "straight"])
def test_a_curve_without_a_knee_falls_back_and_says_so(time: Callable[[int], float]) -> None:
    choice = choose(curve(time), objective="knee")
    best = min(time(k) for k in range(9))
    within = [32 * 2**k for k in range(9) if time(k) <= 1.1 * best]
    assert choice.prediction.batch == within[0]
    assert "the curve has none" in choice.reason


def test_one_configuration_is_the_choice() -> None:
    choice = choose([row(2, 64, 1.0)], objective="time")
    assert choice.reason == "the only feasible configuration" and not choice.runners_up


def test_a_neighbour_as_good_is_named() -> None:
    def reason(other: float, spread: float | None = None) -> str:
        return choose([row(2, 64, other), row(2, 128, 10.0, spread=spread)], objective="time").reason

    assert "batch 64 on 2 nodes is as good" in reason(10.1)
    assert "as good" not in reason(10.5)
    assert "as good" in reason(10.5, spread=0.1)
