"""The grid of configurations: nodes and batches, with limits on both; without numpy, which most commands do without."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tula_cli.errors import SpecError

Number = Any
"""A number, or an array of them."""

LimitByNodes = int | Mapping[int, int | None] | None
"""The largest local batch that fits one GPU, by number of nodes if the GPUs share a model; None if unbounded."""


def find_highest_limit(limit: LimitByNodes) -> int | None:
    """Return the highest limit over all numbers of nodes; None if one of them is unbounded."""
    if not isinstance(limit, Mapping):
        return limit
    bounds = [bound for bound in limit.values() if bound is not None]
    return max(bounds) if len(bounds) == len(limit) else None


class Config(NamedTuple):
    """A number of nodes and a global batch (samples per optimizer step over all GPUs)."""

    nodes: int
    batch: int

    def compute_local_batch(self, gpus_per_node: int) -> int:
        """Return the samples per optimizer step on one GPU."""
        return self.batch // (self.nodes * gpus_per_node)


def list_batches(minimum: int, maximum: int) -> list[int]:
    """Return minimum * 2^k up to and including maximum, ascending."""
    sizes, batch = [], minimum
    while batch <= maximum:
        sizes.append(batch)
        batch *= 2
    return sizes


def check_divisibility(batch: int, parts: int) -> None:
    """Check that a batch divides among nodes x GPUs per node x train.accumulate.

    Raises:
        SpecError: it does not; the hint names the nearest batches that do.
    """
    if batch % parts:
        raise SpecError(
            f"batch {batch} is not divisible by {parts} (nodes x GPUs per node x train.accumulate)",
            describe_nearest_multiples(batch, parts),
        )


def describe_nearest_multiples(batch: int, divisor: int) -> str:
    """Return the hint that names the multiples of `divisor` next to a batch that it does not divide."""
    below = batch // divisor * divisor
    return f"the nearest are {below} and {below + divisor}" if below else f"the nearest is {divisor}"


def list_candidates(
    nodes: Iterable[int],
    *,
    gpus_per_node: int,
    min_batch: int,
    max_batch: int,
    max_local_batch: LimitByNodes = None,
    accumulate: int = 1,
) -> list[Config]:
    """Return every feasible configuration, ordered by nodes, then batch.

    Args:
        nodes: cluster sizes.
        min_batch: smallest global batch.
        max_batch: largest global batch (at most the dataset's size).
        max_local_batch: largest batch that fits one GPU; None if memory sets no bound.
        accumulate: micro-batches per optimizer step; the local batch must divide by it.
    """
    feasible: list[Config] = []
    sizes = list_batches(min_batch, max_batch)
    for count in sorted(set(nodes)):
        world = count * gpus_per_node
        limit = max_local_batch.get(count) if isinstance(max_local_batch, Mapping) else max_local_batch
        fitting = [batch for batch in sizes if limit is None or batch // world <= limit]
        feasible += [Config(count, batch) for batch in fitting if batch % (world * accumulate) == 0]
    return feasible
