"""Samples and batches that the script's data loaders deliver, and the time it waits for them."""

from __future__ import annotations

import hashlib
import time
import weakref
from typing import Any, Callable, Hashable, Iterator, Mapping

from .function_hooks import hook_function

MAX_BATCH_NESTING = 4  # maximum nesting of containers in a batch
LENGTH_PATH_PART = "its length"  # last part of a path to a list whose length is the number of samples


class LoaderPass:
    """One iterator of a data loader. Batches delivered before the first backward pass may never be trained on."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self.untrained: list[float] = [0, 0, 0.0]  # samples, batches, seconds waited before the first backward pass
        self.trained = False  # there was a backward pass after a batch of this pass
        self.batches = 0
        self.withheld: list[float] = [0, 0, 0.0]  # the same of the previous pass, not counted so far
        self.withheld_from: LoaderPass | None = None  # the previous pass, if its batches are withheld

    def is_pass_of(self, iterator: Any) -> bool:
        return iterator is None or self._iterator() is iterator


class DeliveredBatches:
    """Batches delivered since the last step, by dataset: a script that evaluates within a step has several datasets."""

    def __init__(self) -> None:
        self.pending: dict[int, list[float]] = {}  # id of the dataset -> samples, batches, seconds waited
        self.steps: dict[int, int] = {}  # id of the dataset -> number of steps in which it delivered batches
        self.totals: dict[int, float] = {}  # id of the dataset -> samples delivered in these steps
        self.samples_alone: dict[int, float] = {}  # id of the dataset -> samples of steps without another dataset
        self.training: int | None = None  # id of the dataset that delivered in most steps; others are for evaluation
        self.facts: dict[int, dict[str, Any]] = {}
        self._paths: dict[int, tuple[Hashable, ...] | None] = {}
        self._passes: dict[int, LoaderPass] = {}  # id of the dataset -> its newest pass

    def begin_pass(self, key: int, iterator: Any) -> None:
        """Register a new iterator over the dataset `key`.

        Batches of the previous iterator do not count if nothing was trained on (a batch was only inspected), unless the
        new iterator is dropped after one batch as well: some loops make an iterator for each batch.
        """
        before, current = self._passes.get(key), LoaderPass(iterator)
        self._passes[key] = current
        if before is None:
            return
        if before.batches == 1:
            self._restore_withheld_batches(key, before)
        if before.untrained[1] and not before.trained:
            self._add_counts(key, before.untrained, -1)
            current.withheld, current.withheld_from = before.untrained, before
        before.withheld_from = None

    def count_backward(self) -> None:
        """Record a backward pass: the batches delivered so far count."""
        for newest in self._passes.values():
            newest.trained = newest.trained or newest.batches > 0

    def _restore_withheld_batches(self, key: int, loader_pass: LoaderPass) -> None:
        if loader_pass.withheld[1]:
            self._add_counts(key, loader_pass.withheld, 1)
            loader_pass.withheld = [0, 0, 0.0]

    def _add_counts(self, key: int, counts: list[float], sign: int) -> None:
        pending = self.pending.setdefault(key, [0, 0, 0.0])
        for index, value in enumerate(counts):
            pending[index] += sign * value
        if pending[1] <= 0:
            del self.pending[key]

    def _count_pass(self, key: int, iterator: Any, samples: int, waited: float) -> None:
        newest = self._passes.get(key)
        if newest is None:
            return
        before = newest.withheld_from
        if before is not None and iterator is not None and before.is_pass_of(iterator):
            self._restore_withheld_batches(key, newest)  # both iterators are read alternately
        if newest.is_pass_of(iterator):
            newest.batches += 1
            if not newest.trained:
                earlier_samples, batches, seconds = newest.untrained
                newest.untrained = [earlier_samples + samples, batches + 1, seconds + waited]

    def add_batch(self, key: int, batch: object, *, waited: float, size: int | None, iterator: Any = None) -> None:
        """Count a batch of the dataset `key`; `size` is the batch size that its sampler reports."""
        try:
            samples = self._count_batch_samples(key, batch, size)
        except Exception:  # noqa: BLE001 - a type of the script that cannot be inspected; its batches are not counted
            samples = self._paths[key] = None
        self._add_counts(key, [samples or 0, 1, waited], 1)
        self._count_pass(key, iterator, samples or 0, waited)

    def _count_batch_samples(self, key: int, batch: object, size: int | None) -> int | None:
        path = self._paths.get(key)
        if path is None and key in self._paths:
            return None
        samples = _get_count_at_path(batch, path) if path is not None else None
        if samples is None:
            path = self._paths[key] = find_sample_count_path(batch, size)
            samples = _get_count_at_path(batch, path) if path is not None else None
        return samples

    def pop_batch_counts(self) -> dict[int, list[float]]:
        """Return the batches delivered since the last call; they count even if no backward pass of torch was seen."""
        self.count_backward()
        taken, self.pending = self.pending, {}
        for key, counts in taken.items():
            self.steps[key] = self.steps.get(key, 0) + 1
            if self.training is None or self.steps[key] > self.steps[self.training]:
                self.training = key
            self.totals[key] = self.totals.get(key, 0) + counts[0]
            if len(taken) == 1:
                self.samples_alone[key] = self.samples_alone.get(key, 0) + counts[0]
        return taken

    def find_trained_dataset(self, counts: Mapping[int, list[float]]) -> int | None:
        """Return the key of the dataset that a step trained on, given the batches delivered within it by key.

        None if there were none and `training` is unknown. If `training` has delivered nothing, this is the last dataset
        that has: some scripts make a dataset for each epoch, or part of an epoch.
        """
        return self.training if self.training in counts or not counts else next(reversed(list(counts)))

    def count_samples(self) -> float | None:
        """Return the samples trained in all steps; None without a loader, or if the size of its batches is unknown.

        These are the samples of the training dataset, and those of steps in which only one other dataset delivered:
        scripts that make a dataset for each epoch train on each of them alone.
        """
        training_key = self.training
        if training_key is None or not self.can_count_samples(training_key):
            return None
        return self.totals[training_key] + sum(
            samples for key, samples in self.samples_alone.items() if key != training_key
        )

    def get_dataset_size(self) -> int | None:
        """Return the number of samples that the dataset reports; None if there is no dataset, or it reports none."""
        dataset = self.facts.get(self.training or 0, {}).get("dataset")
        return None if dataset is None else int(dataset)

    def can_count_samples(self, key: int | None) -> bool:
        """Return whether the number of samples in the batches of a dataset can be determined."""
        return key is not None and self._paths.get(key) is not None


def find_sample_count_path(batch: object, size: int | None) -> tuple[Hashable, ...] | None:
    """Return the keys that lead from a batch to its number of samples; None if the batch contains no tensor or list.

    The number is the leading dimension of a tensor, or the length of a list (of images of different sizes). The keys
    are those of the first number that equals `size`; if there is none, or no `size` (samplers that choose batches
    themselves, streams), those of the first number.
    """
    paths = list(_list_count_paths(batch, ()))
    return next((path for path, count in paths if count == size), paths[0][0] if paths else None)


def _list_count_paths(item: Any, path: tuple[Hashable, ...]) -> Iterator[tuple[tuple[Hashable, ...], int]]:
    shape = getattr(item, "shape", None)
    if isinstance(shape, tuple):
        if shape:
            yield path, int(shape[0])
        return
    if len(path) == MAX_BATCH_NESTING or isinstance(item, (str, bytes)):
        return
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from _list_count_paths(value, (*path, key))
    elif isinstance(item, (list, tuple)):
        for index, value in enumerate(item[:8]):
            yield from _list_count_paths(value, (*path, index))
        yield (*path, LENGTH_PATH_PART), len(item)


def _get_count_at_path(batch: Any, path: tuple[Hashable, ...]) -> int | None:
    try:
        for part in path:
            if part is LENGTH_PATH_PART:
                return len(batch)
            batch = batch[part]
        return int(batch.shape[0])
    except (LookupError, TypeError, AttributeError):
        return None  # another structure than before; the caller searches for a new path


def hook_loaders(delivered: Callable[[], DeliveredBatches | None], began: Callable[[], None]) -> None:
    """Hook torch's data loaders, so that they report the batches that they deliver.

    Args:
        delivered: returns the object that counts batches; None if this process does not count now.
        began: called when a loader begins or ends an epoch.
    """
    from torch.utils.data import DataLoader, dataloader, get_worker_info

    def count_next_batch(original: Any, self: Any) -> Any:
        counts = delivered()
        if counts is None:
            return original(self)
        start = time.perf_counter()
        try:
            batch = original(self)
        except StopIteration:
            began()
            raise
        size = getattr(getattr(self, "_index_sampler", None), "batch_size", None)
        counts.add_batch(id(self._dataset), batch, waited=time.perf_counter() - start, size=size, iterator=self)
        return batch

    def begin_pass(original: Any, self: Any) -> Any:
        counts = delivered()
        if counts is None or get_worker_info() is not None:
            return original(self)
        began()
        if id(self.dataset) not in counts.facts:  # a second loader of the same dataset is for evaluation
            counts.facts[id(self.dataset)] = describe_loader(self)
        iterator = original(self)
        counts.begin_pass(id(self.dataset), iterator)
        return iterator

    hook_function(dataloader._BaseDataLoaderIter, "__next__", count_next_batch)
    hook_function(DataLoader, "__iter__", begin_pass)


def describe_loader(loader: Any) -> dict[str, Any]:
    """Return the properties of a loader, such as samples of its dataset, batches per epoch on this rank and batch
    size."""
    sampler = getattr(loader, "batch_sampler", None)
    size = loader.batch_size if loader.batch_size is not None else getattr(sampler, "batch_size", None)
    return {
        "dataset": _get_length(loader.dataset),
        "batches": _get_length(loader),
        "batch_size": size if isinstance(size, int) else None,
        "workers": loader.num_workers,
        "sampler": type(loader.sampler).__name__,
        "drop_last": bool(loader.drop_last or getattr(sampler, "drop_last", False)),
        "epoch_samples": count_epoch_samples(loader),
        "content": compute_content_digest(loader.dataset),
    }


def count_epoch_samples(loader: Any) -> int | None:
    """Return the samples per epoch of a loader on this rank, without a dropped last batch, with repeated samples.

    None for streams, and for samplers that choose batches in their own way.
    """
    sampler = getattr(loader, "batch_sampler", None)
    size = loader.batch_size if loader.batch_size is not None else getattr(sampler, "batch_size", None)
    drop_last = loader.drop_last or getattr(sampler, "drop_last", False)
    order = getattr(sampler, "sampler", None) if sampler is not None else loader.sampler
    count = _get_length(order) if order is not None else None
    batches = _get_length(loader)
    if count is None or batches is None or not isinstance(size, int):
        return None
    if batches != (count // size if drop_last else -(-count // size)):
        return None
    return batches * size if drop_last else count


def compute_content_digest(dataset: Any) -> str:
    """Return a digest of both ends of a dataset's content, which distinguishes ranks with different parts of it.

    Nothing of the dataset is called, because loading a sample may draw random numbers. Empty if there is nothing to
    compare.
    """
    try:
        ends = list(_read_content_ends(dataset))
    except Exception:  # noqa: BLE001 - errors of the script's types
        return ""
    return hashlib.sha256(repr(ends).encode()).hexdigest()[:16] if ends else ""


def _read_content_ends(obj: Any, depth: int = 0) -> Iterator[Any]:
    for name, value in sorted(getattr(obj, "__dict__", {}).items()):
        if name in ("dataset", "_dataset") and depth < MAX_BATCH_NESTING:
            yield from _read_content_ends(value, depth + 1)
        elif name == "_fingerprint":
            yield name, value  # Hugging Face's digest of a dataset and its transforms
        elif isinstance(value, (list, tuple, range)) or hasattr(value, "shape"):
            yield name, _summarize_ends(value)


def _summarize_ends(value: Any, depth: int = 0) -> Any:
    """Return plain values that identify a value of a dataset, without reading all of it.

    Of a sequence, its length and both ends; of an array, its shape and the first and last four numbers; of a tensor on a
    GPU, only its shape, because reading it would synchronise.
    """
    if hasattr(value, "shape"):
        if getattr(getattr(value, "device", None), "type", "cpu") != "cpu" or not len(value.shape):
            return str(value.shape)
        flat = value.reshape(-1)
        return str(value.shape), flat[:4].tolist(), flat[-4:].tolist()
    if isinstance(value, (list, tuple, range)):
        if depth == MAX_BATCH_NESTING or not value:
            return len(value)
        return len(value), _summarize_ends(value[0], depth + 1), _summarize_ends(value[-1], depth + 1)
    return value if isinstance(value, (str, bytes, int, float)) else str(type(value))


def _get_length(obj: Any) -> int | None:
    try:
        return len(obj)
    except Exception:  # noqa: BLE001 - __len__ of the script's types may raise any exception
        return None
