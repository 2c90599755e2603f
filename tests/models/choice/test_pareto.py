from hypothesis import given
from hypothesis import strategies as st

from tula_cli.models.choice.candidates import find_pareto_front

VALUES = st.integers(0, 6).map(float)  # few, so that ties are common
POINTS = st.integers(2, 3).flatmap(lambda count: st.lists(st.tuples(*[VALUES] * count), max_size=30))


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(POINTS)
def test_the_front_is_exactly_what_nothing_beats(points: list[tuple[float, ...]]) -> None:
    assert find_pareto_front(points).tolist() == [not any(beats(other, point) for other in points) for point in points]


def test_what_is_better_in_one_of_three_values_is_in_the_front() -> None:
    assert find_pareto_front([(1, 1, 9), (2, 2, 1), (3, 3, 1), (1, 1, 9)]).tolist() == [True, True, False, True]


def test_equal_points_stand_or_fall_together() -> None:
    points = [(1, 2), (1, 2), (2, 1), (2, 2), (2, 2), (1, 3)]
    assert find_pareto_front(points).tolist() == [True, True, True, False, False, False]


@given(POINTS, st.randoms())
def test_the_order_does_not_matter(points: list[tuple[float, ...]], random: object) -> None:
    shuffled = list(points)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    inside = dict(zip(points, find_pareto_front(points), strict=True))
    assert find_pareto_front(shuffled).tolist() == [inside[point] for point in shuffled]
