"""The grid of configurations, and columns of values over it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tula_cli.errors import SpecError

# --- Columns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def columns(configs: "Sequence[Config]") -> tuple[Ints, Ints]:
    """Return nodes and batches of configurations as arrays."""
    return in_columns([(config.nodes, config.batch) for config in configs])


def in_columns(those: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Return pairs of nodes and batch as arrays."""
    found = np.array(those, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


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


# --- The grid

Limit = int | Mapping[int, int | None] | None
"""The largest local batch that fits one GPU, by number of nodes where they share a model; None where nothing bounds it."""


def on_nodes(limit: Limit, nodes: int) -> int | None:
    """Return the limit on a number of nodes."""
    return limit.get(nodes) if isinstance(limit, Mapping) else limit


def highest(limit: Limit) -> int | None:
    """Return the limit where it is highest."""
    if not isinstance(limit, Mapping):
        return limit
    bounds = [bound for bound in limit.values() if bound is not None]
    return max(bounds) if len(bounds) == len(limit) else None


@dataclass(frozen=True, order=True)
class Config:
    """A number of nodes and a global batch (samples an optimizer step over all GPUs)."""

    nodes: int
    batch: int

    def local_batch(self, gpus_per_node: int) -> int:
        """Samples an optimizer step on one GPU."""
        return self.batch // (self.nodes * gpus_per_node)


def batches(minimum: int, maximum: int) -> list[int]:
    """Return minimum * 2^k up to and including maximum, ascending."""
    found, batch = [], minimum
    while batch <= maximum:
        found.append(batch)
        batch *= 2
    return found


def check_divides(batch: int, parts: int) -> None:
    """Refuse a batch that does not divide among nodes x GPUs a node x train.accumulate.

    Raises:
        SpecError: it does not; names the nearest that do.
    """
    if batch % parts:
        raise SpecError(
            f"batch {batch} does not divide by {parts} (nodes x GPUs a node x train.accumulate)",
            f"the nearest are {batch // parts * parts or parts} and {(batch // parts + 1) * parts}",
        )


def candidates(nodes: Iterable[int], **bounds: Any) -> list[Config]:
    """Return every feasible configuration, ordered by nodes, then batch; `bounds` are those of `places`."""
    return [Config(*place) for place in places(nodes, **bounds)]


def places(
    nodes: Iterable[int],
    *,
    gpus_per_node: int,
    min_batch: int,
    max_batch: int,
    max_local_batch: Limit = None,
    accumulate: int = 1,
) -> list[tuple[int, int]]:
    """Return nodes and batch of every feasible configuration, ordered by nodes, then batch.

    Args:
        nodes: cluster sizes.
        gpus_per_node: GPUs of one node.
        min_batch: smallest global batch.
        max_batch: largest global batch (at most the dataset's size).
        max_local_batch: largest batch that fits one GPU; None where memory sets no bound.
        accumulate: micro-batches an optimizer step; the local batch must divide by it.
    """
    found, sizes = [], batches(min_batch, max_batch)
    for count in sorted(set(nodes)):
        world, most = count * gpus_per_node, on_nodes(max_local_batch, count)
        for batch in sizes:
            if batch % (world * accumulate):
                continue
            if most is not None and batch // world > most:
                continue
            found.append((count, batch))
    return found


def configs(nodes: "Ints", batch: "Ints") -> list[Config]:
    """Return configurations of arrays, shape (n,)."""
    return [Config(*place) for place in zip(nodes.tolist(), batch.tolist(), strict=True)]
