"""Host memory of data on its way to the ranks: in /dev/shm, in pinned copies, in processes.

The processes of a data loader pass whole micro-batches in shared memory, `PREFETCH_FACTOR` each; a GPU reads them from
pinned copies, which torch rounds up to powers of two and keeps (its caching allocator of pinned memory). Two loaders
exist at a time: at the end of an epoch that of the next epoch has its batches ready while the evaluation loads its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PREFETCH_FACTOR = 2
"""Batches that each process of a data loader prepares ahead."""
LOADERS_AT_A_TIME = 2
"""The training's loader and the evaluation's."""


@dataclass(frozen=True)
class DataMemory:
    """Host memory of the data of all ranks of a node, without the model and the processes. Bytes."""

    batches: int  # one micro-batch of each rank
    shared: int  # in /dev/shm: what loader processes have made and nobody has taken
    pinned: int  # copies that GPUs take them from
    samples: int  # that make no batch yet


def count_max_ready_batches(workers: int) -> int:
    """Return the maximum batches of a rank that are ready or in use: those prepared ahead, and one per loader."""
    return LOADERS_AT_A_TIME * (PREFETCH_FACTOR * workers + 1)


def estimate_data_memory(
    micro_batches: Sequence[int], *, sample: int, ranks: int, workers: int, on_gpu: bool
) -> DataMemory:
    """Return the maximum memory of the data at the last of the micro-batches.

    Args:
        micro_batches: samples of one rank at a time, ascending: all sizes that one process uses in turn, because pinned
            memory is not released and none of its blocks serves a larger batch. A training has one.
        sample: bytes of an input with its target.
        ranks: of the node.
        workers: loader processes per rank; without any, nothing goes through /dev/shm.
        on_gpu: whether batches are pinned.
    """
    batch = micro_batches[-1] * sample
    blocks = {_round_up_to_power_of_two(size * sample) for size in micro_batches} if on_gpu else set()
    return DataMemory(
        batches=ranks * batch,
        shared=ranks * count_max_ready_batches(workers) * batch if workers else 0,
        pinned=ranks * count_max_ready_batches(workers) * sum(blocks),
        samples=ranks * max(1, workers) * batch,
    )


def _round_up_to_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
