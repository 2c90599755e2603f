"""The samples of a job: augmented by seed, epoch and index, whichever process or rank loads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils._pytree import tree_map

from tula_cli.errors import SpecError
from tula_cli.worker.build.transforms import convert_to_plain_tensor
from tula_cli.worker.seeding import seed_generators

_EVALUATION_SEED = 0x4556  # epoch number in the seeds of evaluations; no training has as many epochs


class StreamedDataset:
    """An iterable dataset with a stated length.

    Sample k of an epoch is drawn with random numbers that depend on (seed, epoch, k) alone, so that each rank, and a
    resumed run, reads the same stream.

    Args:
        samples: iterated again for each epoch, after a call of `set_epoch` if it has that method.
        size: samples of an epoch; further samples are not read.
        sharded: the dataset itself gives each rank different samples.
    """

    def __init__(self, samples: Samples, *, size: int, seed: int, sharded: bool) -> None:
        self.samples, self.size, self.seed, self.sharded = samples, size, seed, sharded

    def __len__(self) -> int:
        return self.size

    def draw_epoch_order(self, epoch: int) -> None:
        """Return None: the order is the stream's."""

    def list_first_samples(self, count: int) -> list[Any]:
        return list(itertools.islice(self.iterate_rank_samples(0, start=0, rank=0, world=1), min(count, self.size)))

    list_spread_samples = list_first_samples

    def iterate_rank_samples(self, epoch: int | None, *, start: int, rank: int, world: int) -> Iterator[Any]:
        """Yield a rank's samples of an epoch from number `start` on: every world-th, or all those of a sharded dataset.

        Earlier samples are read and skipped. Epoch None is an evaluation's.

        Raises:
            SpecError: the stream ends before its length.
        """
        size = self.size // world if self.sharded else self.size
        numbers = range(start // world, size) if self.sharded else range(start + rank, size, world)
        for number, item in self._iterate_numbered_samples(_EVALUATION_SEED if epoch is None else epoch, size):
            if number in numbers:
                yield convert_to_sample(item)

    def _iterate_numbered_samples(self, epoch: int, size: int) -> Iterator[tuple[int, Any]]:
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)
        with seed_generators(self.seed, epoch):
            stream = iter(self.samples)
        for number in range(size):
            with seed_generators(self.seed, epoch, number):
                try:
                    item = next(stream)
                except StopIteration:
                    share = " on one rank" if self.sharded else ""
                    raise SpecError(
                        f"dataset {type(self.samples).__name__} ended after {number} samples{share} instead of {size}",
                        "set dataset.length (training) and dataset.eval_length (evaluation) to the samples per epoch",
                    ) from None
            yield number, item


Samples = torch.utils.data.Dataset[Any]  # has a length; returns a sample by integer index


@dataclass(frozen=True)
class Datasets:
    """Training and evaluation samples of one job."""

    train: SeededDataset | StreamedDataset  # keys are (epoch, index)
    eval: EvaluationDataset | StreamedDataset  # keys are indices
    classes: int | None  # number of classes; None if an imported dataset does not report it
    collate: Callable[[list[Any]], Any] | None = None  # samples -> batch; None: torch's default


class SeededDataset(torch.utils.data.Dataset[Any]):
    """Samples whose augmentation depends on (seed, epoch, index) alone, whichever process or rank loads them.

    Args:
        samples: a dataset that applies its random transforms in `__getitem__`.
        order: (samples, epoch) -> indices of the epoch, the same number in each; None: all samples, shuffled.
    """

    def __init__(self, samples: Samples, *, seed: int, order: Callable[[Any, int], torch.Tensor] | None = None) -> None:
        self.samples = samples
        self.seed = seed
        self.make_user_order = order
        self.size = count_samples(samples) if order is None else len(order(samples, 0))

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.size

    def draw_epoch_order(self, epoch: int) -> torch.Tensor | None:
        """Return the order of an epoch from the user's sampler; None if there is no sampler.

        Raises:
            SpecError: the number of samples differs from that of epoch 0.
        """
        if self.make_user_order is None:
            return None
        order = self.make_user_order(self.samples, epoch)
        if len(order) != self.size:
            raise SpecError(
                f"dataset.sampler returns {len(order)} samples in epoch {epoch}, but {self.size} in epoch 0",
                "make it return the same number of samples in each epoch",
            )
        return order

    def list_first_samples(self, count: int) -> list[Any]:
        return [self[0, index] for index in range(min(count, count_samples(self.samples)))]

    def list_spread_samples(self, count: int) -> list[Any]:
        """Return `count` samples spread evenly over the dataset, or all if it has fewer."""
        size = count_samples(self.samples)
        samples_taken = min(count, size)
        return [self[0, number * size // samples_taken] for number in range(samples_taken)]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with seed_generators(self.seed, epoch, index):
            item = self.samples[index]
        return convert_to_sample(item)


class EvaluationDataset(torch.utils.data.Dataset[Any]):
    """Samples without augmentation, keyed by plain integers."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return count_samples(self.samples)

    def __getitem__(self, index: int) -> Any:
        return convert_to_sample(self.samples[index])

    def list_first_samples(self, count: int) -> list[Any]:
        return [self[index] for index in range(min(count, len(self)))]


def convert_to_sample(item: Any) -> Any:
    """Return a sample in the form in which batches are made: in most cases (input, target), else any tree."""
    if type(item) in (tuple, list) and len(item) == 2:
        return convert_to_plain_tensor(item[0]), convert_to_label(item[1])
    return tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else convert_to_plain_tensor(leaf), item)


def convert_to_label(target: Any) -> Any:
    """Return integer class numbers as `int`, which collates to int64; any other target is returned unchanged."""
    if isinstance(target, torch.Tensor) and target.ndim == 0 and not target.is_floating_point():
        return int(target)
    return int(target) if isinstance(target, np.integer) else target


def count_samples(samples: Samples) -> int:
    """Return the number of samples.

    Raises:
        SpecError: the dataset has no usable `__len__`.
    """
    if not hasattr(samples, "__len__"):
        raise SpecError(
            f"dataset {type(samples).__name__} has no length",
            "define __len__ in the dataset; for an iterable dataset without a length, set dataset.length",
        )
    try:
        return len(samples)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"dataset {type(samples).__name__}: its __len__ fails: {error}", "make __len__ return an int, at least 0"
        ) from error
