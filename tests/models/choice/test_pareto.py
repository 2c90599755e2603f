from hypothesis import given
from hypothesis import strategies as st

from tula_cli.models.choice.pareto import front

VALUES = st.integers(0, 6).map(float)  # few, so that ties are common
POINTS = st.lists(st.tuples(VALUES, VALUES), max_size=30)


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] and one != other


@given(POINTS)
def test_the_front_is_exactly_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    assert front(points) == [not any(beats(other, point) for other in points) for point in points]


def test_equal_points_stand_or_fall_together() -> None:
    assert front([(1, 2), (1, 2), (2, 1), (2, 2), (2, 2), (1, 3)]) == [True, True, True, False, False, False]


@given(POINTS, st.randoms())
def test_the_order_does_not_matter(points: list[tuple[float, float]], random: object) -> None:
    shuffled = list(points)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    inside = dict(zip(points, front(points), strict=True))
    assert front(shuffled) == [inside[point] for point in shuffled]
