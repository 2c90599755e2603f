"""Which of several configurations are worth a look: those that nothing beats in all of their values (Pareto)."""

from bisect import bisect_left, bisect_right
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from tula_cli.models.choice.columns import Flags
from tula_cli.models.choice.offers import Offers


def front(points: ArrayLike) -> Flags:
    """Return for each point whether no other is as small in all values and smaller in one, shape (n,).

    Equal points do not beat each other: all of them are in the front, or none.

    Args:
        points: two or three values to be small, for example time and cost, shape (n, values).
    """
    values = np.asarray(points, dtype=float)
    if not len(values):
        return np.zeros(0, dtype=bool)
    order = np.lexsort(values.T[::-1])
    new = np.append(True, (values[order[1:]] != values[order[:-1]]).any(axis=1))
    rest = values[order[new]][:, 1:].tolist()  # ascending by the first value: nothing is beaten by what comes after it
    inside = np.array(_inside([(row[0], row[-1]) for row in rest]))
    found = np.zeros(len(values), dtype=bool)
    found[order] = inside[np.cumsum(new) - 1]
    return found


def _inside(points: list[tuple[float, float]]) -> list[bool]:
    """Return for each of some points in a row whether none before it is as small in both values."""
    firsts: list[float] = []  # of those that no other one before is as small as: ascending, and their seconds falling
    seconds: list[float] = []
    found = []
    for first, second in points:
        place = bisect_right(firsts, first)
        found.append(not place or seconds[place - 1] > second)
        if not found[-1]:
            continue
        start = end = bisect_left(firsts, first, hi=place)
        while end < len(seconds) and seconds[end] >= second:
            end += 1
        firsts[start:end], seconds[start:end] = [first], [second]
    return found


def marked(rows: Offers) -> Offers:
    """Return the rows with those marked that are in the front of time, cost and, where all tell it, energy."""
    energy = [rows.kwh] if not np.isnan(rows.kwh).any() else []
    return replace(rows, pareto=front(np.stack([rows.hours, rows.cost, *energy], axis=1)))
