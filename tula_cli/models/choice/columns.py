"""Quantities of many configurations as columns: arrays of one length, worked out together and not one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def apart(known: Sequence[int], at: Ints | Floats) -> Floats:
    """Return how many times the one is the other of each place and each of those that are known, shape (places, known)."""
    one, other = at[:, None], np.asarray(known, dtype=float)[None, :]
    found: Floats = np.maximum(one / other, other / one)
    return found


def nearest(*distances: Floats) -> Ints:
    """Return for each row the column of the least distance, shape (n,); of equal ones by the next distance, then the first.

    Args:
        distances: in order of their weight, each of shape (n, m).
    """
    left = np.ones(distances[0].shape, dtype=bool)
    for distance in distances:
        here = np.where(left, distance, np.inf)
        left &= here == here.min(axis=1, keepdims=True)
    found: Ints = left.argmax(axis=1)
    return found


def by_value(of: Callable[[int], float], values: Ints) -> NDArray[Any]:
    """Return what a function gives for each value, which it is asked once for: shape (n,)."""
    distinct, where = np.unique(values, return_inverse=True)
    found: NDArray[Any] = np.array([of(value) for value in distinct.tolist()])[where]
    return found
