"""Columns of values over configurations."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tula_cli.models.choice.grid import Config

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def to_columns(configs: Sequence[Config]) -> tuple[Ints, Ints]:
    """Convert configurations to arrays of nodes and batches, shape (n,)."""
    pairs = np.array(configs, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def to_configs(nodes: Ints, batch: Ints) -> list[Config]:
    """Convert arrays of nodes and batches, shape (n,), to configurations."""
    return [Config(*place) for place in zip(nodes.tolist(), batch.tolist(), strict=True)]


def compute_ratios(known: Sequence[int], at: Ints | Floats) -> Floats:
    """Return the ratio, at least 1, between each value of `at` and each known value, shape (len(at), len(known))."""
    column, other = at[:, None], np.asarray(known, dtype=float)[None, :]
    ratios: Floats = np.maximum(column / other, other / column)
    return ratios


def find_nearest(*distances: Floats) -> Ints:
    """Return for each row the column of the least distance, shape (n,); ties go to the next distance, then the first.

    Args:
        distances: in order of priority, each of shape (n, m).
    """
    candidates = np.ones(distances[0].shape, dtype=bool)
    for distance in distances:
        here = np.where(candidates, distance, np.inf)
        candidates &= here == here.min(axis=1, keepdims=True)
    nearest_index: Ints = candidates.argmax(axis=1)
    return nearest_index


def compute_by_value(of: Callable[[int], float], values: Ints | int) -> Any:
    """Apply a function to a number, or to each value of an array, shape (n,), calling it once per distinct value."""
    if isinstance(values, int):
        return of(values)
    distinct, where = np.unique(values, return_inverse=True)
    values_by_position: NDArray[Any] = np.array([of(value) for value in distinct.tolist()])[where]
    return values_by_position
