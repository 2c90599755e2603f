"""Datasets that are read from their beginning: samples come in the stream's order, and none has a number to ask for it by."""

import itertools
from collections.abc import Iterator
from typing import Any

from tula_cli.errors import SpecError
from tula_cli.worker.build.samples import Samples, as_sample
from tula_cli.worker.seeding import seeded

_EVALUATION = 0x4556  # the epoch whose random numbers an evaluation draws: no training comes to it


class StreamedDataset:
    """An iterable dataset with a stated length.

    Sample k of an epoch is drawn with random numbers that depend on (seed, epoch, k) alone, so that each rank, and a run that
    is resumed, reads the same stream.

    Args:
        samples: read anew for each epoch; told of it by `set_epoch` where it has that.
        size: samples of an epoch; what comes after them is not read.
        seed: the job's seed.
        sharded: each rank is given its own samples by the dataset itself.
    """

    def __init__(self, samples: Samples, *, size: int, seed: int, sharded: bool = False) -> None:
        self.samples, self.size, self.seed, self.sharded = samples, size, seed, sharded

    def __len__(self) -> int:
        return self.size

    def order(self, epoch: int) -> None:
        """Return None: the order is the stream's."""

    def first_samples(self, count: int) -> list[Any]:
        """Return the first samples."""
        return list(itertools.islice(self.rank_share(0, start=0, rank=0, world=1), min(count, self.size)))

    spread_samples = first_samples

    def rank_share(self, epoch: int | None, *, start: int, rank: int, world: int) -> Iterator[Any]:
        """Yield a rank's samples of an epoch, of those from number `start` on every world-th.

        What lies before is read and passed over. None is an evaluation's epoch.

        Raises:
            SpecError: the stream ends before its length.
        """
        positions = range(self.size // world if self.sharded else self.size)
        stream = self._numbered_samples(_EVALUATION if epoch is None else epoch, len(positions))
        if self.sharded:
            yield from (as_sample(item) for number, item in stream if number >= start // world)
        else:
            yield from (
                as_sample(item) for number, item in stream if number >= start and (number - start) % world == rank
            )

    def _numbered_samples(self, epoch: int, size: int) -> Iterator[tuple[int, Any]]:
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)
        with seeded(self.seed, epoch):
            stream = iter(self.samples)
        for number in range(size):
            with seeded(self.seed, epoch, number):
                try:
                    item = next(stream)
                except StopIteration:
                    share = " of a rank" if self.sharded else ""
                    raise SpecError(
                        f"dataset {type(self.samples).__name__} ends after {number} samples{share}, not {size}",
                        "set dataset.length and dataset.eval_length to what an epoch has",
                    ) from None
            yield number, item
