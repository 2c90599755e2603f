"""Which of several configurations are worth a look: those that nothing beats in all of their values (Pareto)."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return for each point whether no other is as small in all values and smaller in one.

    Equal points do not beat each other: all of them are in the front, or none.

    Args:
        points: values to be small, for example time and cost; as many of each.
    """
    found = [False] * len(points)
    kept: dict[tuple[float, ...], None] = {}  # those of the front so far, each once
    for index in sorted(range(len(points)), key=points.__getitem__):  # nothing is beaten by what comes after it
        point = points[index]
        if point in kept or not any(_no_larger(other, point) for other in reversed(kept)):
            kept[point], found[index] = None, True
    return found


def _no_larger(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
