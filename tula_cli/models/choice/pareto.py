"""Which of several configurations are worth a look: those that nothing beats in both of two values (Pareto)."""

import math
from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each point whether no other is as small in both values and smaller in one.

    Equal points do not beat each other: all of them are in the front, or none.

    Args:
        points: pairs of values to be small, for example time and cost.
    """
    least, found = math.inf, [False] * len(points)
    ordered = sorted(range(len(points)), key=points.__getitem__)
    corner = (math.nan, math.nan)  # the last point that was in the front
    for index in ordered:
        first, second = points[index]
        if second < least:
            least, corner = second, (first, second)
        found[index] = (first, second) == corner
    return found
