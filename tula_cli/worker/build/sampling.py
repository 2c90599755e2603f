"""Which sample is trained when: a pure function of (seed, epoch, samples done), whatever the batch and the world size."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from tula_cli.host import devices
from tula_cli.host.processes import die_with_parent
from tula_cli.models.memory.host_memory import AHEAD
from tula_cli.worker.build.batches.collate import Collate
from tula_cli.worker.seeding import stable_seed

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


class Batches(Sampler[list[Key]]):
    """One rank's micro-batches from a position to the last epoch, without a gap between epochs.

    Global batch k of an epoch is permutation[done + k B : done + (k + 1) B]; rank r takes every world-th of it. Never
    pads; what is left of an epoch below one batch is dropped. One iteration runs over all epochs,
    so that the data loader reads ahead across their ends.
    """

    def __init__(
        self, size: int, *, batch: int, accumulate: int, rank: int, world: int, seed: int, epochs: int, start: Position
    ) -> None:
        self.size, self.batch, self.accumulate = size, batch, accumulate
        self.rank, self.world = rank, world
        self.seed, self.epochs, self.start = seed, epochs, start

    def __iter__(self) -> Iterator[list[Key]]:
        done = self.start.done
        for epoch in range(self.start.epoch, self.epochs):
            order = permutation(self.size, seed=self.seed, epoch=epoch)
            for begin in range(done, done + steps_left(self.size, done, self.batch) * self.batch, self.batch):
                yield from self._micro_batches(epoch, order[begin + self.rank : begin + self.batch : self.world])
            done = 0

    def _micro_batches(self, epoch: int, mine: torch.Tensor) -> Iterator[list[Key]]:
        for part in mine.view(self.accumulate, -1).tolist():
            yield [(epoch, index) for index in part]


def steps_left(size: int, done: int, batch: int) -> int:
    """Return the optimizer steps left in an epoch of `size` samples when `done` are trained."""
    return max(0, size - done) // batch


def train_loader(
    dataset: Dataset[Any], batches: Batches, *, workers: int, pin: bool, collate: Collate | None = None
) -> "DataLoader[Any]":
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        pin_memory=pin,
        worker_init_fn=_starting() if workers else None,
    )


def eval_loader(
    dataset: Dataset[Any],
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
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=range(rank, size, world),
        collate_fn=collate,
        generator=torch.Generator(),  # its own: the process's generator stays as it is
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=_starting() if workers else None,
    )


def fixed_loader(
    dataset: Dataset[Any], keys: list[Key], *, batch: int, workers: int, collate: Collate | None = None
) -> "DataLoader[Any]":
    """Return a loader of just these training samples, in this order; the process's random numbers stay as they are."""
    return DataLoader(
        dataset,
        batch_sampler=[keys[start : start + batch] for start in range(0, len(keys), batch)],
        collate_fn=collate,
        generator=torch.Generator(),
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        worker_init_fn=_starting() if workers else None,
    )


def _starting() -> Callable[[int], None]:
    # Under a fork server that one is the parent, and ends with this process.
    forked = multiprocessing.get_start_method() != "forkserver"
    return partial(_start_loader, os.getpid() if forked else None)


def _start_loader(parent: int | None, _: int) -> None:
    # A worker sees between two batches only that its rank is gone, and the driver frees the rank's memory when the last
    # copy of its device files is closed: the next attempt would meet both.
    die_with_parent(parent)
    devices.close_inherited()
    # SLURM tells every process of a job to end, but the rank still needs its data to reach the end of a step.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
