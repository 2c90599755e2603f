"""Which sample is trained when: a pure function of (seed, epoch, samples done), whatever the batch and the world size."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tula_cli.errors import SpecError
from tula_cli.host import devices
from tula_cli.host.processes import die_with_parent
from tula_cli.models.memory.host_memory import PREFETCH_FACTOR
from tula_cli.models.ramp.stages import Ramp
from tula_cli.plugins import load
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.batches.collate import Collate, collate_items
from tula_cli.worker.build.construct import accepts_argument, call_with_arguments
from tula_cli.worker.build.samples import sample_count
from tula_cli.worker.build.streams import StreamedDataset
from tula_cli.worker.seeding import seeded, stable_seed

_SAMPLER = 0x5341  # parts a sampler's random numbers from the job's others
Key = tuple[int, int]
"""(epoch, index): augmentation is seeded by both."""


@dataclass(frozen=True)
class Position:
    """Where a run stands. Samples are the clock: batch and world size may change at any position."""

    epoch: int = 0  # epochs completed
    done: int = 0  # samples trained in the epoch under way
    samples: int = 0  # samples trained since the start
    steps: int = 0  # optimizer steps since the start

    def advance(self, batch: int) -> "Position":
        return replace(self, done=self.done + batch, samples=self.samples + batch, steps=self.steps + 1)

    def next_epoch(self) -> "Position":
        return replace(self, epoch=self.epoch + 1, done=0)


def permutation(size: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch. Shape (size,), int64."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(stable_seed(seed, epoch)))


class MicroBatchSampler(Sampler[list[Key]]):
    """One rank's micro-batches from a position to the last epoch, without a gap between epochs.

    Global batch k of an epoch is permutation[done + k B : done + (k + 1) B]; rank r takes every world-th of it. Never
    pads; what is left of an epoch below one batch is dropped. One iteration runs over all epochs, and all sizes of batches,
    so that the data loader reads ahead across their ends.

    Args:
        size: samples of an epoch.
        ramp: which batch a step has, global.
        parts: of each batch, the micro-batches of a step on each rank.
    """

    def __init__(
        self,
        size: int,
        *,
        ramp: Ramp,
        parts: Mapping[int, int],
        rank: int,
        world: int,
        seed: int,
        epochs: int,
        start: Position,
        order: Callable[[int], torch.Tensor | None] = lambda _: None,
    ) -> None:
        self.size, self.ramp, self.parts = size, ramp, parts
        self.rank, self.world = rank, world
        self.seed, self.epochs, self.start, self.own_order = seed, epochs, start, order

    def __iter__(self) -> Iterator[list[Key]]:
        for epoch in range(self.start.epoch, self.epochs):
            user_order = self.own_order(epoch)
            order = permutation(self.size, seed=self.seed, epoch=epoch) if user_order is None else user_order
            for begin, batch in self.steps_of_epoch(epoch):
                rank_indices = order[begin + self.rank : begin + batch : self.world]
                for micro_batch in rank_indices.view(self.parts[batch], -1).tolist():
                    yield [(epoch, index) for index in micro_batch]

    def steps_of_epoch(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield, for each step of an epoch, the samples done of it before, and its batch."""
        samples_done = self.start.done if epoch == self.start.epoch else 0
        for batch, steps in self.ramp.steps_of_epoch(epoch, samples_done=samples_done, size=self.size):
            yield from ((begin, batch) for begin in range(samples_done, samples_done + steps * batch, batch))
            samples_done += steps * batch


def count_remaining_steps(size: int, samples_done: int, batch: int) -> int:
    """Return the optimizer steps left in an epoch of `size` samples when `done` are trained."""
    return max(0, size - samples_done) // batch


class StreamBatches(IterableDataset[Any]):
    """One rank's micro-batches of a stream, already collated: which samples they have is what `MicroBatchSampler` says."""

    def __init__(self, stream: StreamedDataset, batches: MicroBatchSampler, collate: Collate | None) -> None:
        self.stream, self.batches, self.collate = stream, batches, collate

    def __iter__(self) -> Iterator[Any]:
        batches = self.batches
        for epoch in range(batches.start.epoch, batches.epochs):
            stream: Iterator[Any] | None = None
            for begin, batch in batches.steps_of_epoch(epoch):
                stream = stream or self.stream.rank_share(epoch, start=begin, rank=batches.rank, world=batches.world)
                for _ in range(batches.parts[batch]):
                    yield collate_items(
                        self.collate, list(itertools.islice(stream, batch // batches.world // batches.parts[batch]))
                    )


class EvaluationBatches(IterableDataset[Any]):
    """One rank's share of a stream of evaluation samples, in batches; the last one may have fewer samples."""

    def __init__(self, stream: StreamedDataset, *, rank: int, world: int, batch: int, collate: Collate | None) -> None:
        self.stream, self.collate = stream, collate
        self.rank, self.world, self.batch = rank, world, batch
        self.count = len(range(rank, len(stream), world))

    def __len__(self) -> int:
        return -(-self.count // self.batch)

    def __iter__(self) -> Iterator[Any]:
        samples = self.stream.rank_share(None, start=0, rank=self.rank, world=self.world)
        for begin in range(0, self.count, self.batch):
            yield collate_items(self.collate, list(itertools.islice(samples, min(self.batch, self.count - begin))))


STREAM_WORKERS = 1
"""The most loader processes of a stream: each would read all of it."""


@dataclass(frozen=True)
class UserOrder:
    """The order of an epoch by a sampler of the user's own: indices, the same on every rank."""

    target: Callable[..., Any]
    args: dict[str, Any]
    name: str
    seed: int

    def __call__(self, samples: Any, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch. Shape (samples of the epoch,), int64.

        Raises:
            SpecError: it gives no indices of this dataset.
        """
        known_arguments = {"epoch": epoch, "seed": self.seed}
        arguments = {key: value for key, value in known_arguments.items() if accepts_argument(self.target, key)}
        with seeded(self.seed, _SAMPLER, epoch):
            path = f"dataset.sampler.{self.name}"
            sampler = call_with_arguments(
                self.target, self.args, path=path, name=self.name, given=arguments, first=(samples,)
            )
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            indices = list(sampler)
        size = sample_count(samples)
        wrong = [index for index in indices if not isinstance(index, int | np.integer) or not 0 <= index < size]
        if wrong or not indices:
            wrong_value = f"{wrong[0]!r}" if wrong else "nothing"
            raise SpecError(
                f"dataset.sampler {self.name} gives {wrong_value}, not numbers of the {size} samples, 0 to {size - 1}"
            )
        return torch.tensor(indices, dtype=torch.int64)


def build_sampler(spec: JobSpec) -> UserOrder | None:
    """Return the order of the job's own sampler; None where it has none.

    Raises:
        SpecError: it cannot be imported.
    """
    sampler = spec.dataset.sampler
    if sampler is None:
        return None
    name, args = (sampler, {}) if isinstance(sampler, str) else next(iter(sampler.items()))
    return UserOrder(load(name, {}, kind="sampler"), args, name, spec.train.seed)


def build_train_loader(
    dataset: Dataset[Any] | StreamedDataset,
    batches: MicroBatchSampler,
    *,
    workers: int,
    pin: bool,
    collate: Collate | None = None,
) -> "DataLoader[Any]":
    if isinstance(dataset, StreamedDataset):
        workers = min(workers, STREAM_WORKERS)
        return DataLoader(
            StreamBatches(dataset, batches, collate),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=PREFETCH_FACTOR if workers else None,
            pin_memory=pin,
            worker_init_fn=_worker_start() if workers else None,
        )
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=PREFETCH_FACTOR if workers else None,
        pin_memory=pin,
        worker_init_fn=_worker_start() if workers else None,
    )


def build_eval_loader(
    dataset: Dataset[Any] | StreamedDataset,
    *,
    size: int,
    rank: int,
    world: int,
    batch: int,
    workers: int,
    pin: bool,
    collate: Collate | None = None,
) -> "DataLoader[Any]":
    """Return this rank's share of the evaluation data: every world-th sample, each exactly once over all ranks."""
    if isinstance(dataset, StreamedDataset):
        workers = min(workers, STREAM_WORKERS)
        return DataLoader(
            EvaluationBatches(dataset, rank=rank, world=world, batch=batch, collate=collate),
            batch_size=None,
            generator=torch.Generator(),
            num_workers=workers,
            prefetch_factor=PREFETCH_FACTOR if workers else None,
            pin_memory=pin,
            persistent_workers=workers > 0,
            worker_init_fn=_worker_start() if workers else None,
        )
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=range(rank, size, world),
        collate_fn=collate,
        generator=torch.Generator(),  # its own: the process's generator stays as it is
        num_workers=workers,
        prefetch_factor=PREFETCH_FACTOR if workers else None,
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=_worker_start() if workers else None,
    )


def build_fixed_loader(
    dataset: Dataset[Any], keys: list[Key], *, batch: int, workers: int, collate: Collate | None = None
) -> "DataLoader[Any]":
    """Return a loader of just these training samples, in this order; the process's random numbers stay as they are."""
    return DataLoader(
        dataset,
        batch_sampler=[keys[start : start + batch] for start in range(0, len(keys), batch)],
        collate_fn=collate,
        generator=torch.Generator(),
        num_workers=workers,
        prefetch_factor=PREFETCH_FACTOR if workers else None,
        worker_init_fn=_worker_start() if workers else None,
    )


def _worker_start() -> Callable[[int], None]:
    # Under a fork server that one is the parent, and ends with this process.
    forked = multiprocessing.get_start_method() != "forkserver"
    return partial(_init_loader_process, os.getpid() if forked else None)


def _init_loader_process(parent: int | None, _: int) -> None:
    # A worker sees between two batches only that its rank is gone, and the driver frees the rank's memory when the last
    # copy of its device files is closed: the next attempt would meet both.
    die_with_parent(parent)
    devices.close_inherited()
    # SLURM tells every process of a job to end, but the rank still needs its data to reach the end of a step.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
