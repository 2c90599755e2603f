"""What the data loaders of the script deliver: samples, batches, and how long it waited for them."""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Hashable, Iterator, Mapping

DEPTH = 4  # of containers within a batch
LENGTH = "its length"  # the last part of a path: the samples are the entries of a list


class Delivered:
    """Since the last step, by dataset. A script may evaluate within a step: only one of them is what it trains on."""

    def __init__(self) -> None:
        self.pending: dict[int, list[float]] = {}  # id of the dataset -> samples, batches, seconds waited
        self.steps: dict[int, int] = {}  # in how many steps it has delivered
        self.totals: dict[int, float] = {}  # samples of those steps
        self.alone: dict[int, float] = {}  # of those among them in which no other has delivered
        self.training: int | None = None  # the dataset that delivered in most steps: others are for evaluation
        self.facts: dict[int, dict[str, Any]] = {}
        self._paths: dict[int, tuple[Hashable, ...] | None] = {}

    def add(self, key: int, batch: object, *, waited: float, size: int | None) -> None:
        """Count a batch of the dataset `key`; `size` is what its sampler says that a batch holds."""
        try:
            samples = self._count(key, batch, size)
        except Exception:  # noqa: BLE001 - a type of the script's own: its batches are not counted
            samples = self._paths[key] = None
        counts = self.pending.get(key)
        if counts is None:
            counts = self.pending[key] = [0, 0, 0.0]
        counts[0] += samples or 0
        counts[1] += 1
        counts[2] += waited

    def _count(self, key: int, batch: object, size: int | None) -> int | None:
        path = self._paths.get(key)
        if path is None and key in self._paths:
            return None
        samples = _at(batch, path) if path is not None else None
        if samples is None:
            path = self._paths[key] = find_samples(batch, size)
            samples = _at(batch, path) if path is not None else None
        return samples

    def take(self) -> dict[int, list[float]]:
        """Return what was delivered since the last call."""
        taken, self.pending = self.pending, {}
        for key, counts in taken.items():
            self.steps[key] = self.steps.get(key, 0) + 1
            if self.training is None or self.steps[key] > self.steps[self.training]:
                self.training = key
            self.totals[key] = self.totals.get(key, 0) + counts[0]
            if len(taken) == 1:
                self.alone[key] = self.alone.get(key, 0) + counts[0]
        return taken

    def trained_on(self, counts: Mapping[int, list[float]]) -> int | None:
        """Return the dataset of a step, given what was delivered within it.

        Where `training` has delivered nothing, the last that has: some scripts make a dataset for each epoch, or part of it.
        """
        return self.training if self.training in counts or not counts else next(reversed(list(counts)))

    def samples(self) -> float | None:
        """Return the samples of all steps; None where there is no loader, or its batches do not show them."""
        key = self.training
        if key is None or not self.counts_samples(key):
            return None
        return self.totals[key] + sum(samples for other, samples in self.alone.items() if other != key)

    def size(self) -> int | None:
        """Return the samples that the dataset says it has; None where there is none, or it does not."""
        told = self.facts.get(self.training or 0, {}).get("dataset")
        return None if told is None else int(told)

    def counts_samples(self, key: int | None) -> bool:
        """Return whether the batches of a dataset show how many samples they hold."""
        return key is not None and self._paths.get(key) is not None


def find_samples(batch: object, size: int | None) -> tuple[Hashable, ...] | None:
    """Return the path within a batch that leads to its number of samples; None where there is nothing to count.

    The first whose count is `size`: images of different sizes come as a list of so many tensors. Without a size (samplers
    that choose batches themselves, streams) the leading dimension of the first tensor.
    """
    found = list(_paths(batch, ()))
    return next((path for path, count in found if count == size), found[0][0] if found else None)


def _paths(item: Any, path: tuple[Hashable, ...]) -> Iterator[tuple[tuple[Hashable, ...], int]]:
    shape = getattr(item, "shape", None)
    if isinstance(shape, tuple):
        if shape:
            yield path, int(shape[0])
        return
    if len(path) == DEPTH or isinstance(item, (str, bytes)):
        return
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from _paths(value, (*path, key))
    elif isinstance(item, (list, tuple)):
        for index, value in enumerate(item[:8]):
            yield from _paths(value, (*path, index))
        yield (*path, LENGTH), len(item)


def _at(batch: Any, path: tuple[Hashable, ...]) -> int | None:
    try:
        for part in path:
            if part is LENGTH:
                return len(batch)
            batch = batch[part]
        return int(batch.shape[0])
    except (LookupError, TypeError, AttributeError):
        return None  # this batch is of another shape than the last: it is looked at anew


def listen(delivered: Callable[[], Delivered | None], began: Callable[[], None]) -> None:
    """Have torch's data loaders tell what they deliver.

    Args:
        delivered: where batches are counted; None where this process does not count.
        began: called when a loader begins or ends an epoch.
    """
    from torch.utils.data import DataLoader, dataloader, get_worker_info

    iterator = dataloader._BaseDataLoaderIter
    advance, begin = iterator.__next__, DataLoader.__iter__

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        counts = delivered()
        if counts is None:
            return advance(self)
        start = time.perf_counter()
        try:
            batch = advance(self)
        except StopIteration:
            began()
            raise
        size = getattr(getattr(self, "_index_sampler", None), "batch_size", None)
        counts.add(id(self._dataset), batch, waited=time.perf_counter() - start, size=size)
        return batch

    @functools.wraps(begin)
    def __iter__(self: Any) -> Any:
        counts = delivered()
        if counts is not None and get_worker_info() is None:
            began()
            if id(self.dataset) not in counts.facts:  # another one on the same data evaluates
                counts.facts[id(self.dataset)] = facts(self)
        return begin(self)

    iterator.__next__ = __next__  # type: ignore[method-assign]
    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]


def facts(loader: Any) -> dict[str, Any]:
    """Return what a loader says of itself: samples of its dataset, batches an epoch on this rank, batch size, workers."""
    size = loader.batch_size
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return {
        "dataset": _length(loader.dataset),
        "batches": _length(loader),
        "batch_size": size if isinstance(size, int) else None,
        "workers": loader.num_workers,
        "sampler": type(loader.sampler).__name__,
        "drop_last": bool(loader.drop_last),
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # noqa: BLE001 - the script's own code: a stream may raise what it likes
        return None
