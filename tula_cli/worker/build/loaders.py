"""The order of an epoch, the share of it that each rank reads, and the data loaders."""

from __future__ import annotations

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
import torch.utils.data
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tula_cli.errors import SpecError
from tula_cli.host import devices
from tula_cli.host.processes import set_parent_death_signal
from tula_cli.models.memory import PREFETCH_FACTOR
from tula_cli.models.ramp import Ramp
from tula_cli.plugins import load_named_object
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.batches import Collate, make_batch
from tula_cli.worker.build.construct import accepts_argument, call_with_arguments
from tula_cli.worker.build.samples import EvaluationDataset, StreamedDataset, count_samples
from tula_cli.worker.seeding import compute_stable_seed, seed_generators

_SAMPLER_SEED = 0x5341  # part of the seed, so that a sampler's random numbers differ from the job's others
SampleKey = tuple[int, int]
"""(epoch, index): augmentation is seeded by both."""


@dataclass(frozen=True)
class TrainingPosition:
    """The progress of a run. It is measured in samples, because batch and world size may change at any position."""

    epoch: int = 0  # epochs completed
    done: int = 0  # samples trained in the current epoch
    samples: int = 0  # samples trained since the start
    steps: int = 0  # optimizer steps since the start

    def advance(self, batch: int) -> TrainingPosition:
        return replace(self, done=self.done + batch, samples=self.samples + batch, steps=self.steps + 1)

    def start_next_epoch(self) -> TrainingPosition:
        return replace(self, epoch=self.epoch + 1, done=0)


def make_epoch_permutation(size: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the shuffled order of an epoch. Shape (size,), int64."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(compute_stable_seed(seed, epoch)))


class MicroBatchSampler(Sampler[list[SampleKey]]):
    """One rank's micro-batches from a position to the last epoch, without a gap between epochs.

    Global batch k of an epoch is permutation[done + k B : done + (k + 1) B]; rank r takes every world-th of it. Never
    pads; a remainder of an epoch smaller than one batch is dropped. One iteration covers all epochs, and all batch
    sizes, so that the data loader reads ahead across their ends.

    Args:
        size: samples of an epoch.
        ramp: determines the global batch of each step.
        parts: batch -> micro-batches per step on each rank.
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
        start: TrainingPosition,
        order: Callable[[int], torch.Tensor | None] = lambda _: None,
    ) -> None:
        self.size, self.ramp, self.parts = size, ramp, parts
        self.rank, self.world = rank, world
        self.seed, self.epochs, self.start, self.make_user_order = seed, epochs, start, order

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for epoch in range(self.start.epoch, self.epochs):
            user_order = self.make_user_order(epoch)
            order = make_epoch_permutation(self.size, seed=self.seed, epoch=epoch) if user_order is None else user_order
            for position_in_epoch, batch in self.list_epoch_steps(epoch):
                rank_indices = order[position_in_epoch + self.rank : position_in_epoch + batch : self.world]
                for micro_batch in rank_indices.view(self.parts[batch], -1).tolist():
                    yield [(epoch, index) for index in micro_batch]

    def list_epoch_steps(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield, for each step of an epoch, the samples of the epoch done before it, and its batch."""
        samples_done = self.start.done if epoch == self.start.epoch else 0
        for batch, steps in self.ramp.list_epoch_steps(epoch, samples_done=samples_done, size=self.size):
            end = samples_done + steps * batch
            yield from ((position_in_epoch, batch) for position_in_epoch in range(samples_done, end, batch))
            samples_done = end


def count_remaining_steps(size: int, samples_done: int, batch: int) -> int:
    """Return the optimizer steps left in an epoch of `size` samples after `samples_done`."""
    return max(0, size - samples_done) // batch


class StreamBatches(IterableDataset[Any]):
    """One rank's micro-batches of a stream, already collated, with the batch sizes of a `MicroBatchSampler`."""

    def __init__(self, stream: StreamedDataset, batches: MicroBatchSampler, collate: Collate | None) -> None:
        self.stream, self.batches, self.collate = stream, batches, collate

    def __iter__(self) -> Iterator[Any]:
        batches = self.batches
        for epoch in range(batches.start.epoch, batches.epochs):
            stream: Iterator[Any] | None = None
            for begin, batch in batches.list_epoch_steps(epoch):
                stream = stream or self.stream.iterate_rank_samples(
                    epoch, start=begin, rank=batches.rank, world=batches.world
                )
                parts = batches.parts[batch]
                for _ in range(parts):
                    yield make_batch(self.collate, list(itertools.islice(stream, batch // batches.world // parts)))


class EvaluationBatches(IterableDataset[Any]):
    """One rank's share of a stream of evaluation samples, in batches; the last one may have fewer samples."""

    def __init__(self, stream: StreamedDataset, *, rank: int, world: int, batch: int, collate: Collate | None) -> None:
        self.stream, self.collate = stream, collate
        self.rank, self.world, self.batch = rank, world, batch
        self.count = len(range(rank, len(stream), world))

    def __len__(self) -> int:
        return -(-self.count // self.batch)

    def __iter__(self) -> Iterator[Any]:
        samples = self.stream.iterate_rank_samples(None, start=0, rank=self.rank, world=self.world)
        for begin in range(0, self.count, self.batch):
            yield make_batch(self.collate, list(itertools.islice(samples, min(self.batch, self.count - begin))))


STREAM_WORKERS = 1
"""The most loader processes of a stream: each would read the whole stream."""


@dataclass(frozen=True)
class UserOrder:
    """The order of an epoch by a user's sampler: indices, the same on every rank."""

    target: Callable[..., Any]
    args: dict[str, Any]
    name: str
    seed: int

    def __call__(self, samples: Any, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch. Shape (samples of the epoch,), int64.

        Raises:
            SpecError: the sampler returns values that are not indices of this dataset, or none.
        """
        known_arguments = {"epoch": epoch, "seed": self.seed}
        arguments = {key: value for key, value in known_arguments.items() if accepts_argument(self.target, key)}
        with seed_generators(self.seed, _SAMPLER_SEED, epoch):
            path = f"dataset.sampler.{self.name}"
            sampler = call_with_arguments(
                self.target, self.args, path=path, name=self.name, given=arguments, first=(samples,)
            )
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            indices = list(sampler)
        size = count_samples(samples)
        wrong = [index for index in indices if not isinstance(index, int | np.integer) or not 0 <= index < size]
        if wrong or not indices:
            out_of_range = (
                f"the index {wrong[0]!r}, but the dataset has {size} samples (0 to {size - 1})" if wrong else ""
            )
            raise SpecError(f"dataset.sampler {self.name} returns {out_of_range or 'no indices'}")
        return torch.tensor(indices, dtype=torch.int64)


def build_sampler(spec: JobSpec) -> UserOrder | None:
    """Return the order given by the job's sampler; None if the job has no sampler.

    Raises:
        SpecError: it cannot be imported.
    """
    sampler = spec.dataset.sampler
    if sampler is None:
        return None
    name, args = (sampler, {}) if isinstance(sampler, str) else next(iter(sampler.items()))
    return UserOrder(load_named_object(name, {}, kind="sampler"), args, name, spec.train.seed)


def build_train_loader(
    dataset: Dataset[Any] | StreamedDataset,
    batches: MicroBatchSampler,
    *,
    workers: int,
    pin: bool,
    collate: Collate | None = None,
) -> DataLoader[Any]:
    options = _make_worker_options(dataset, workers, pin=pin)
    if isinstance(dataset, StreamedDataset):
        return DataLoader(StreamBatches(dataset, batches, collate), batch_size=None, **options)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **options)


def build_eval_loader(
    dataset: EvaluationDataset | StreamedDataset,
    *,
    rank: int,
    world: int,
    batch: int,
    workers: int,
    pin: bool,
    collate: Collate | None = None,
) -> DataLoader[Any]:
    """Return this rank's share of the evaluation data: every world-th sample, each exactly once over all ranks."""
    options = _make_worker_options(dataset, workers, pin=pin)
    # A separate generator leaves that of the process unchanged.
    options |= {"generator": torch.Generator(), "persistent_workers": options["num_workers"] > 0}
    if isinstance(dataset, StreamedDataset):
        share = EvaluationBatches(dataset, rank=rank, world=world, batch=batch, collate=collate)
        return DataLoader(share, batch_size=None, **options)
    return DataLoader(
        dataset, batch_size=batch, sampler=range(rank, len(dataset), world), collate_fn=collate, **options
    )


def _make_worker_options(dataset: Dataset[Any] | StreamedDataset, workers: int, *, pin: bool) -> dict[str, Any]:
    """Return the options of a data loader that depend on its number of worker processes."""
    workers = min(workers, STREAM_WORKERS) if isinstance(dataset, StreamedDataset) else workers
    return {
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR if workers else None,
        "pin_memory": pin,
        "worker_init_fn": _make_worker_init() if workers else None,
    }


def build_fixed_loader(
    dataset: Dataset[Any], keys: list[SampleKey], *, batch: int, workers: int, collate: Collate | None = None
) -> DataLoader[Any]:
    """Return a loader of exactly these training samples, in this order; the process's random state is unchanged."""
    return DataLoader(
        dataset,
        batch_sampler=[keys[start : start + batch] for start in range(0, len(keys), batch)],
        collate_fn=collate,
        generator=torch.Generator(),
        **_make_worker_options(dataset, workers, pin=False),
    )


def _make_worker_init() -> Callable[[int], None]:
    # Workers of a fork server have the server as their parent, which exits with this process.
    forked = multiprocessing.get_start_method() != "forkserver"
    return partial(_init_loader_process, os.getpid() if forked else None)


def _init_loader_process(parent: int | None, _: int) -> None:
    # A worker notices only between two batches that its rank has exited, and the driver frees the rank's GPU memory
    # only when the last copy of its device files is closed: both would disturb the next attempt.
    set_parent_death_signal(parent)
    devices.close_inherited_device_files()
    # SLURM sends SIGTERM to every process of a job, but the rank still needs data to finish its step.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
