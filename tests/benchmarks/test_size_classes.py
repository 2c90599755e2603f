from collections import Counter

import pytest
from size_classes import MAX_AGE_DAYS, PastWait, bound_wait, classify_job, describe_class, merge_classes

NOW = 1_000_000_000.0


def waited(
    count: int, seconds: float, *, nodes: int = 1, minutes: float = 30.0, before: float = 86400.0
) -> list[PastWait]:
    """Return jobs that waited alike, the first of them submitted so many seconds ago."""
    return [PastWait(NOW - before + 10 * number, seconds + number % 7, nodes, minutes) for number in range(count)]


@pytest.mark.parametrize(
    ("nodes", "minutes", "words"),
    [(1, 60, "1 node, up to 1 h"), (2, 61, "2 nodes, up to 4 h"), (3, 720, "3-4 nodes, up to 12 h"),
     (9, 1441, "9-16 nodes, above 24 h")],
)  # fmt: skip
def test_classes_are_of_nodes_and_of_time_limits(nodes: int, minutes: float, words: str) -> None:
    assert describe_class(classify_job(nodes, minutes)) == words


def test_a_class_with_enough_waits_stands_by_itself() -> None:
    bound = bound_wait([*waited(100, 50), *waited(100, 9000, nodes=16)], nodes=1, minutes=20, now=NOW)
    assert bound is not None and bound.seconds <= 57 and bound.waits == 100


def test_a_thin_class_takes_its_neighbours() -> None:
    history = [*waited(20, 50), *waited(80, 400, nodes=2), *waited(200, 9000, nodes=64)]
    bound = bound_wait(history, nodes=1, minutes=20, now=NOW)
    assert bound is not None and bound.waits == 100 and 400 <= bound.seconds <= 407


def test_rings_grow_until_there_are_enough() -> None:
    counts = Counter({(0, 0): 5, (1, 0): 5, (0, 2): 5, (6, 4): 50})
    assert merge_classes((0, 0), counts, 5) == [(0, 0)]
    assert merge_classes((0, 0), counts, 10) == [(0, 0), (1, 0)]
    assert merge_classes((0, 0), counts, 1000) == sorted(counts)


def test_old_waits_and_those_of_the_future_do_not_count() -> None:
    history = [*waited(40, 50, before=(MAX_AGE_DAYS + 3) * 86400), *waited(40, 50, before=-10.0)]
    assert bound_wait(history, nodes=1, minutes=20, now=NOW) is None
    assert bound_wait([], nodes=1, minutes=20, now=NOW) is None


def test_of_too_few_waits_the_longest_is_taken_with_the_confidence_that_it_has() -> None:
    bound = bound_wait(waited(5, 50), nodes=1, minutes=20, now=NOW)
    assert bound is not None and bound.seconds == 54 and bound.confidence == pytest.approx(1 - 0.9**5)
    enough = bound_wait(waited(29, 50), nodes=1, minutes=20, now=NOW)
    assert enough is not None and enough.confidence == 0.95


def test_jobs_that_wait_longer_than_their_bound_raise_it() -> None:
    """A queue that has come to a stop tells nothing by jobs that start: none does."""
    history = waited(60, 50)
    stuck = [PastWait(NOW - 20_000 + number, float("inf"), 1, 30.0) for number in range(40)]
    calm = bound_wait(history, nodes=1, minutes=20, now=NOW)
    worse = bound_wait([*history, *stuck], nodes=1, minutes=20, now=NOW)
    assert calm is not None and worse is not None and worse.seconds > 10_000 > calm.seconds
