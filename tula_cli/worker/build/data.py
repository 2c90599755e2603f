"""Datasets, their transforms, and the samples that each rank reads."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.utils.data
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from tula_cli.errors import SpecError
from tula_cli.host import devices
from tula_cli.host.processes import die_with_parent
from tula_cli.models.memory import PREFETCH_FACTOR
from tula_cli.models.ramp import Ramp
from tula_cli.plugins import is_import_string, load, suggest_nearest
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import text
from tula_cli.worker.build.batches import Collate, build_collate, make_batch
from tula_cli.worker.build.construct import accepts_argument, call_with_arguments
from tula_cli.worker.seeding import compute_stable_seed, seed_generators

# --- Iterable datasets

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

    def __init__(self, samples: Samples, *, size: int, seed: int, sharded: bool = False) -> None:
        self.samples, self.size, self.seed, self.sharded = samples, size, seed, sharded

    def __len__(self) -> int:
        return self.size

    def make_epoch_order(self, epoch: int) -> None:
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
        positions = range(self.size // world if self.sharded else self.size)
        stream = self._assign_samples_to_rank(_EVALUATION_SEED if epoch is None else epoch, len(positions))
        if self.sharded:
            yield from (convert_to_sample(item) for number, item in stream if number >= start // world)
        else:
            yield from (
                convert_to_sample(item)
                for number, item in stream
                if number >= start and (number - start) % world == rank
            )

    def _assign_samples_to_rank(self, epoch: int, size: int) -> Iterator[tuple[int, Any]]:
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


# --- Samples

Transform = Callable[[Any], Any]

Order = Callable[[Any, int], torch.Tensor]
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

    def __init__(self, samples: Samples, *, seed: int, order: Order | None = None) -> None:
        self.samples = samples
        self.seed = seed
        self.own_order = order
        self.size = count_samples(samples) if order is None else len(order(samples, 0))

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.size

    def make_epoch_order(self, epoch: int) -> torch.Tensor | None:
        """Return the order of an epoch from the user's sampler; None if there is no sampler.

        Raises:
            SpecError: the number of samples differs from that of epoch 0.
        """
        if self.own_order is None:
            return None
        order = self.own_order(self.samples, epoch)
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


def convert_to_plain_tensor(sample: Any) -> Any:
    """Return an image tensor of torchvision's as a plain tensor: its subclass makes every operation slower."""
    return sample.as_subclass(torch.Tensor) if isinstance(sample, tv_tensors.TVTensor) else sample


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


# --- The sampler and the loaders

_SAMPLER_SEED = 0x5341  # part of the seed, so that a sampler's random numbers differ from the job's others
Key = tuple[int, int]
"""(epoch, index): augmentation is seeded by both."""


@dataclass(frozen=True)
class Position:
    """The progress of a run. It is measured in samples, because batch and world size may change at any position."""

    epoch: int = 0  # epochs completed
    done: int = 0  # samples trained in the current epoch
    samples: int = 0  # samples trained since the start
    steps: int = 0  # optimizer steps since the start

    def advance(self, batch: int) -> Position:
        return replace(self, done=self.done + batch, samples=self.samples + batch, steps=self.steps + 1)

    def start_next_epoch(self) -> Position:
        return replace(self, epoch=self.epoch + 1, done=0)


def make_epoch_permutation(size: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the shuffled order of an epoch. Shape (size,), int64."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(compute_stable_seed(seed, epoch)))


class MicroBatchSampler(Sampler[list[Key]]):
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
        start: Position,
        order: Callable[[int], torch.Tensor | None] = lambda _: None,
    ) -> None:
        self.size, self.ramp, self.parts = size, ramp, parts
        self.rank, self.world = rank, world
        self.seed, self.epochs, self.start, self.own_order = seed, epochs, start, order

    def __iter__(self) -> Iterator[list[Key]]:
        for epoch in range(self.start.epoch, self.epochs):
            user_order = self.own_order(epoch)
            order = make_epoch_permutation(self.size, seed=self.seed, epoch=epoch) if user_order is None else user_order
            for position_in_epoch, batch in self.list_epoch_steps(epoch):
                rank_indices = order[position_in_epoch + self.rank : position_in_epoch + batch : self.world]
                for micro_batch in rank_indices.view(self.parts[batch], -1).tolist():
                    yield [(epoch, index) for index in micro_batch]

    def list_epoch_steps(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield, for each step of an epoch, the samples of the epoch done before it, and its batch."""
        samples_done = self.start.done if epoch == self.start.epoch else 0
        for batch, steps in self.ramp.list_epoch_steps(epoch, samples_done=samples_done, size=self.size):
            yield from (
                (position_in_epoch, batch)
                for position_in_epoch in range(samples_done, samples_done + steps * batch, batch)
            )
            samples_done += steps * batch


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
                for _ in range(batches.parts[batch]):
                    yield make_batch(
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
            problem = (
                f"the index {wrong[0]!r}, but the dataset has {size} samples (0 to {size - 1})"
                if wrong
                else "no indices"
            )
            raise SpecError(f"dataset.sampler {self.name} returns {problem}")
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
    return UserOrder(load(name, {}, kind="sampler"), args, name, spec.train.seed)


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
    dataset: Dataset[Any] | StreamedDataset,
    *,
    size: int,
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
    return DataLoader(dataset, batch_size=batch, sampler=range(rank, size, world), collate_fn=collate, **options)


def _make_worker_options(dataset: Dataset[Any] | StreamedDataset, workers: int, *, pin: bool) -> dict[str, Any]:
    """Return the options of a data loader that depend on its number of worker processes."""
    workers = min(workers, STREAM_WORKERS) if isinstance(dataset, StreamedDataset) else workers
    return {
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR if workers else None,
        "pin_memory": pin,
        "worker_init_fn": _choose_worker_start_method() if workers else None,
    }


def build_fixed_loader(
    dataset: Dataset[Any], keys: list[Key], *, batch: int, workers: int, collate: Collate | None = None
) -> DataLoader[Any]:
    """Return a loader of exactly these training samples, in this order; the process's random state is unchanged."""
    return DataLoader(
        dataset,
        batch_sampler=[keys[start : start + batch] for start in range(0, len(keys), batch)],
        collate_fn=collate,
        generator=torch.Generator(),
        **_make_worker_options(dataset, workers, pin=False),
    )


def _choose_worker_start_method() -> Callable[[int], None]:
    # Workers of a fork server have the server as their parent, which exits with this process.
    forked = multiprocessing.get_start_method() != "forkserver"
    return partial(_init_loader_process, os.getpid() if forked else None)


def _init_loader_process(parent: int | None, _: int) -> None:
    # A worker notices only between two batches that its rank has exited, and the driver frees the rank's GPU memory
    # only when the last copy of its device files is closed: both would disturb the next attempt.
    die_with_parent(parent)
    devices.close_inherited_device_files()
    # SLURM sends SIGTERM to every process of a job, but the rank still needs data to finish its step.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


# --- Transforms


def build_transforms(items: Sequence[str | dict[str, dict[str, Any]]], *, path: str = "transforms") -> Transform:
    """Return one transform from a list of names; an empty list means ToTensor.

    Args:
        items: names of torchvision.transforms.v2 classes, `{Name: {arguments}}`, or import strings.
        path: path of the list in the spec, for messages.

    Raises:
        SpecError: unknown name or wrong arguments.
    """
    steps = [_build_transform(item, path=f"{path}[{index}]") for index, item in enumerate(items)]
    if not steps:
        return to_tensor
    return steps[0] if len(steps) == 1 else v2.Compose(steps)


def to_tensor(image: Any) -> torch.Tensor:
    """Return an image as float32 (channels, height, width) in [0, 1], as ToImage and ToDtype(float32, scale) do."""
    if not isinstance(image, PIL.Image.Image) or image.mode not in ("L", "RGB"):
        pixels = convert_to_plain_tensor(
            v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)
        )
        return pixels.contiguous()  # type: ignore[no-any-return]
    # For a small image the checks and wrappers of ToImage and ToDtype take three times as long as the conversion.
    pixels = torch.from_numpy(np.array(image))
    return (pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()).float().div_(255)


def _build_transform(item: str | dict[str, dict[str, Any]], *, path: str) -> Transform:
    if isinstance(item, dict) and len(item) != 1:
        raise SpecError(f"{path}: each entry must have one transform, got {', '.join(item) or 'none'}")
    name, args = (item, None) if isinstance(item, str) else next(iter(item.items()))
    target = load(name, TRANSFORMS, kind="transform")
    if is_import_string(name) and args is None and not isinstance(target, type):
        return target  # type: ignore[no-any-return]  # a plain function from image to image
    arguments = {key: _build_argument(key, value, path=f"{path}.{name}") for key, value in (args or {}).items()}
    return call_with_arguments(target, arguments, path=f"{path}.{name}", name=name)  # type: ignore[no-any-return]


def _build_argument(key: str, value: Any, *, path: str) -> Any:
    """Return a transform's argument, converted if it names a dtype, an interpolation, a policy or inner transforms.

    YAML can only name these.
    """
    if key == "transforms" and isinstance(value, list):
        return [_build_transform(item, path=f"{path}.transforms[{index}]") for index, item in enumerate(value)]
    if key not in ENUMERATIONS or not isinstance(value, str):
        return value
    values = ENUMERATIONS[key]
    if value not in values:
        hint = suggest_nearest(value, values) or f"choose from: {', '.join(values)}"
        raise SpecError(f"{path}.{key}: unknown {key} {value!r}", hint)
    return values[value]


TRANSFORMS: dict[str, Any] = {
    **{name: kind for name, kind in vars(v2).items() if isinstance(kind, type) and issubclass(kind, v2.Transform)},
    "Compose": v2.Compose,
    "ToTensor": lambda: to_tensor,
}

ENUMERATIONS: dict[str, dict[str, Any]] = {
    "dtype": {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
    "interpolation": {mode.value: mode for mode in v2.InterpolationMode},
    "policy": {policy.value: policy for policy in v2.AutoAugmentPolicy},
}


def check_sample(sample: Any, *, path: str) -> torch.Tensor:
    """Check one transformed input and return it.

    Args:
        path: the list of transforms that made it ("transforms.train").

    Raises:
        SpecError: it is not a floating-point tensor.
    """
    if not isinstance(sample, torch.Tensor):
        raise SpecError(f"{path} returns {type(sample).__name__}, but must return a tensor", f"add ToTensor to {path}")
    if not sample.is_floating_point():
        dtype = str(sample.dtype).removeprefix("torch.")
        raise SpecError(
            f"{path} returns a tensor of {dtype}, but must return floating-point numbers",
            f"add ToTensor, or {{ToDtype: {{dtype: float32, scale: true}}}}, to {path}",
        )
    return sample


# --- Datasets

SPLIT_SEED = 0
"""Seed of the split into training and evaluation samples; fixed, so that runs with other seeds remain comparable."""


def download_dataset(spec: JobSpec) -> None:
    """Download the dataset if the spec requests it and torchvision can; only one process at a time may call this.

    Raises:
        SpecError: the dataset cannot be downloaded, or its arguments are wrong.
    """
    if not spec.dataset.download:
        return
    name = spec.dataset.name
    if name not in DOWNLOADABLE:
        raise SpecError(
            f"dataset.download: tula cannot download {name}",
            SOURCES.get(name, "remove dataset.download"),
        )
    root = _get_data_folder(spec)
    root.mkdir(parents=True, exist_ok=True)
    splits = ({"train": True}, {"train": False}) if name.startswith("CIFAR") else ({},)
    for split in splits:
        try:
            _construct_torchvision(spec, root=str(root), download=True, **split)
        except OSError as error:
            raise SpecError(
                f"{name} cannot be downloaded to {root}: {error}",
                "copy it there from a machine with internet access, and set dataset.download: false",
            ) from error


def build_datasets(spec: JobSpec) -> Datasets:
    """Return the training and evaluation samples of a job; never downloads.

    Raises:
        SpecError: unknown dataset or transform, wrong arguments, or missing files.
    """
    transforms = (
        build_transforms(spec.transforms.train, path="transforms.train"),
        build_transforms(spec.transforms.eval, path="transforms.eval"),
    )
    build = find_dataset_source(spec.dataset.name)
    train, held_out, classes = build(spec, *transforms)
    collate = build_collate(spec) or text.COLLATES.get(spec.dataset.name)
    datasets = Datasets(_make_training_dataset(spec, train), _make_evaluation_dataset(spec, held_out), classes, collate)
    for samples, purpose in ((datasets.train, "training"), (datasets.eval, "evaluation")):
        if len(samples) == 0:
            raise SpecError(f"dataset {spec.dataset.name} has no {purpose} samples")
    return datasets


def _make_training_dataset(spec: JobSpec, samples: Samples) -> SeededDataset | StreamedDataset:
    settings, seed = spec.dataset, spec.train.seed
    streamed, sampler = is_stream(samples), build_sampler(spec)
    reason = ""
    if streamed or sampler:
        reason = (
            f"samples by index, which is not possible with {'an iterable dataset' if streamed else 'dataset.sampler'}"
        )
    if reason and spec.train.training_method.tunes:
        raise SpecError(f"train.method {spec.train.method} selects {reason}")
    if reason and "hessian" in spec.train.diagnostics:
        raise SpecError(f"train.diagnostics: hessian selects {reason}")
    if not streamed:
        if settings.length or settings.sharded:
            raise SpecError(
                "dataset.length and dataset.sharded are only for iterable datasets, and this dataset is not iterable"
            )
        return SeededDataset(samples, seed=seed, order=sampler)
    if sampler:
        raise SpecError(
            "dataset.sampler has no effect on an iterable dataset, which determines its own order",
            "remove dataset.sampler",
        )
    size = settings.length or count_samples(samples)
    return StreamedDataset(samples, size=size, seed=seed, sharded=settings.sharded)


def build_test_dataset(spec: JobSpec, datasets: Datasets) -> EvaluationDataset | StreamedDataset:
    """Return the samples of dataset.test; if it is not set, those that training is evaluated on.

    Args:
        datasets: datasets of the same job; their classes must be those of the test set.

    Raises:
        SpecError: as `build_datasets`, or the classes differ, or there are no samples.
    """
    if spec.dataset.test is None:
        return datasets.eval
    transform = build_transforms(spec.transforms.eval, path="transforms.eval")
    of_test = spec.model_copy(update={"dataset": spec.dataset.test_dataset})
    if is_import_string(of_test.dataset.name):
        samples = _construct_user_dataset(of_test, is_train=False, transform=transform, path="dataset.test.args")
    else:
        samples = _construct_torchvision(of_test, root=str(_get_data_folder(of_test)), transform=transform)
    dataset = _make_evaluation_dataset(of_test, samples)
    if len(dataset) == 0:
        raise SpecError(f"dataset.test: {of_test.dataset.name} has no samples")
    _check_classes(samples, datasets)
    return dataset


def _check_classes(samples: Any, datasets: Datasets) -> None:
    """Refuse a test set with other classes than the training set: labels are numbered by class name."""
    trained = datasets.train.samples
    training_classes, test_classes = (
        getattr(source, "classes", None) for source in (getattr(trained, "dataset", trained), samples)
    )
    if (
        isinstance(training_classes, list | tuple)
        and isinstance(test_classes, list | tuple)
        and list(training_classes) != list(test_classes)
    ):
        if odd := ", ".join(sorted(map(str, set(training_classes) ^ set(test_classes)))[:5]):
            raise SpecError(f"dataset.test and the training set have different classes: {odd}")
        raise SpecError("dataset.test lists the classes in another order than the training set")
    count = _find_classes(samples)
    if None not in (count, datasets.classes) and count != datasets.classes:
        raise SpecError(f"dataset.test has {count} classes, but the training set has {datasets.classes}")


def _make_evaluation_dataset(spec: JobSpec, samples: Samples) -> EvaluationDataset | StreamedDataset:
    if is_stream(samples):
        size = spec.dataset.eval_length or count_samples(samples)
        return StreamedDataset(samples, size=size, seed=spec.train.seed, sharded=spec.dataset.sharded)
    if spec.dataset.eval_length:
        raise SpecError("dataset.eval_length is only for iterable datasets, and the evaluation dataset is not iterable")
    return EvaluationDataset(samples)


def is_stream(samples: Any) -> bool:
    """Return whether a dataset is iterable only, so that samples cannot be loaded by index."""
    return (hasattr(samples, "__iter__") and not hasattr(type(samples), "__getitem__")) or isinstance(
        samples, torch.utils.data.IterableDataset
    )


def find_dataset_source(name: str) -> Callable[[JobSpec, Transform, Transform], Split]:
    """Return the function that builds a dataset by its name.

    Raises:
        SpecError: unknown name; the hint suggests the nearest known names.
    """
    if is_import_string(name):
        return _build_imported_split
    return load(name, BUILTINS, kind="dataset")  # type: ignore[no-any-return]


Split = tuple[Samples, Samples, int | None]


def _build_imported_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    """Return both splits of a callable `(train, transform, **args)`."""
    samples = _construct_user_dataset(spec, is_train=True, transform=train)
    return samples, _construct_user_dataset(spec, is_train=False, transform=evaluate), _find_classes(samples)


def _construct_user_dataset(spec: JobSpec, *, is_train: bool, transform: Transform, path: str = "dataset.args") -> Any:
    target = load(spec.dataset.name, {}, kind="dataset")
    transforms = accepts_transform(target)
    if not transforms and (spec.transforms.train or spec.transforms.eval):
        raise SpecError(
            f"transforms: dataset {spec.dataset.name} takes no transforms, so they would have no effect",
            "add an argument transform to the dataset, as in dataset(train, transform), or remove section transforms",
        )
    arguments = {"train": is_train, **({"transform": transform} if transforms else {})}
    return call_with_arguments(target, spec.dataset.args, path=path, name=spec.dataset.name, given=arguments)


def accepts_transform(target: Callable[..., Any]) -> bool:
    """Return whether a user's dataset takes a transform, as image datasets do and text datasets do not."""
    try:
        kinds = [parameter.kind for parameter in inspect.signature(target).parameters.values()]
    except (TypeError, ValueError):  # the signature is unknown
        return True
    return inspect.Parameter.VAR_KEYWORD in kinds or accepts_argument(target, "transform")


def _find_classes(samples: Any) -> int | None:
    """Return the number of classes from `num_classes`, or torchvision's `classes` or `categories`; else None."""
    count = getattr(samples, "num_classes", None)
    if isinstance(count, int):
        return count
    names = getattr(samples, "classes", None) or getattr(samples, "categories", None)
    return len(names) if names is not None else None


def _make_official_split_builder(
    key: str, train_value: Any, eval_value: Any
) -> Callable[[JobSpec, Transform, Transform], Split]:
    """Return a builder for a torchvision dataset with an official split, which the argument `key` selects."""

    def build(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
        root = str(_get_data_folder(spec))
        samples = _construct_torchvision(spec, root=root, transform=train, **{key: train_value})
        held_out = _construct_torchvision(spec, root=root, transform=evaluate, **{key: eval_value})
        return samples, held_out, len(samples.classes)

    return build


def _build_caltech_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    root = _get_data_folder(spec)
    if not (root / spec.dataset.name.lower()).is_dir():  # torchvision would create an empty one
        raise _make_missing_files_error(spec, root / spec.dataset.name.lower())
    samples = _construct_torchvision(spec, root=str(root), transform=train)
    held_out = _construct_torchvision(spec, root=str(root), transform=evaluate)
    return *_build_stratified_split(spec, samples, held_out, samples.y), len(samples.categories)


def _build_image_folder_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    root = _get_data_folder(spec)
    official = (root / "train").is_dir() and (root / "val").is_dir()
    folders = (root / "train", root / "val") if official else (root, root)
    samples = _construct_torchvision(spec, root=str(folders[0]), transform=train)
    held_out = _construct_torchvision(spec, root=str(folders[1]), transform=evaluate)
    if samples.classes != held_out.classes:
        odd = sorted(set(samples.classes) ^ set(held_out.classes))
        raise SpecError(f"{folders[0]} and {folders[1]} have different classes: {', '.join(odd[:5])}")
    if official:
        return samples, held_out, len(samples.classes)
    return *_build_stratified_split(spec, samples, held_out, samples.targets), len(samples.classes)


def _construct_torchvision(spec: JobSpec, **given: Any) -> Any:
    """Construct a torchvision dataset from tula's arguments and those of the spec."""
    name = spec.dataset.name
    try:
        return call_with_arguments(
            getattr(datasets, name), spec.dataset.args, path="dataset.args", name=name, given=given
        )
    except (RuntimeError, FileNotFoundError) as error:
        raise _make_missing_files_error(spec, Path(given["root"]), reason=str(error)) from error


def _make_missing_files_error(spec: JobSpec, folder: Path, *, reason: str = "") -> SpecError:
    name = spec.dataset.name
    why = f": {reason}" if folder.is_dir() and reason else ""
    hint = SOURCES.get(name, "set dataset.download: true, or set dataset.root to its folder")
    if spec.dataset.download and name in DOWNLOADABLE:
        hint = "the download is incomplete: remove the folder, and download again on a machine with internet access"
    return SpecError(f"dataset {name} is not in {folder.absolute()}{why}", hint)


def _get_data_folder(spec: JobSpec) -> Path:
    return Path(spec.dataset.root).expanduser()


class InMemoryImages(torch.utils.data.Dataset[Any]):
    """Images in memory: uint8, (N, H, W), returned as gray PIL images."""

    def __init__(self, images: np.ndarray[Any, Any], labels: Sequence[int], transform: Transform) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(PIL.Image.fromarray(self.images[index])), int(self.labels[index])


def _build_digits_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    """Return the split of scikit-learn's 1797 handwritten digits, 8 x 8, gray."""
    if spec.dataset.args:
        raise SpecError(f"dataset.args: dataset digits takes no arguments, got {', '.join(spec.dataset.args)}")
    table = _read_digits_table()
    images = (table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = [int(label) for label in table[:, 64]]
    return *_build_stratified_split(
        spec, InMemoryImages(images, labels, train), InMemoryImages(images, labels, evaluate), labels
    ), 10


def _read_digits_table() -> np.ndarray[Any, Any]:
    """Return the digits, one per row: 64 pixels from 0 to 16, and the label.

    Raises:
        SpecError: scikit-learn is not installed.
    """
    # If possible, read the file without importing scikit-learn, which takes each rank 1.6 s of CPU (the file: 4 ms).
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise SpecError(
            "dataset.name: digits is part of scikit-learn, which is not installed", "pip install scikit-learn"
        )
    for folder in package.submodule_search_locations or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


class FakeImages(torch.utils.data.Dataset[Any]):
    """Noise that depends on its index alone, as PIL images with uniformly drawn labels.

    Args:
        image_size: (channels, height, width), with 1 or 3 channels.
        num_classes: labels are 0 to num_classes - 1.
        offset: number of the first image.
        transform: applied to each image.
    """

    def __init__(
        self, size: int, image_size: tuple[int, int, int], num_classes: int, *, offset: int, transform: Transform
    ) -> None:
        self.size, self.offset, self.transform = size, offset, transform
        self.image_size, self.num_classes = image_size, num_classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        generator = np.random.default_rng(self.offset + index)
        channels, height, width = self.image_size
        shape = (height, width) if channels == 1 else (height, width, channels)
        label = int(generator.integers(self.num_classes))
        image = PIL.Image.fromarray(generator.integers(0, 256, size=shape, dtype=np.uint8))
        return self.transform(image), label


def _build_fake_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    """Return noise images: `size` for training, and `eval_fraction` times as many others for evaluation."""

    def make_shape(
        size: int = 1000, image_size: Sequence[int] = (3, 224, 224), num_classes: int = 10
    ) -> tuple[Any, ...]:
        return size, tuple(image_size), num_classes

    size, image_size, classes = call_with_arguments(make_shape, spec.dataset.args, path="dataset.args", name="FakeData")
    if len(image_size) != 3 or image_size[0] not in (1, 3) or min(image_size[1:]) < 1:
        raise SpecError(
            f"dataset.args.image_size: must be [channels, height, width] with 1 or 3 channels, got {image_size}"
        )
    for key, value in (("size", size), ("num_classes", classes)):
        if not isinstance(value, int) or value < 1:
            raise SpecError(f"dataset.args.{key}: must be a positive integer, got {value!r}")
    held_out = max(1, round(size * spec.dataset.eval_fraction))
    return (
        FakeImages(size, image_size, classes, offset=0, transform=train),
        FakeImages(held_out, image_size, classes, offset=size, transform=evaluate),
        classes,
    )


def _build_stratified_split(
    spec: JobSpec, train: Samples, evaluate: Samples, labels: Sequence[int]
) -> tuple[Samples, Samples]:
    """Return disjoint stratified subsets of two views (training and evaluation transforms) of the same samples."""
    train_indices, held_out = split_indices_by_class(labels, fraction=spec.dataset.eval_fraction)
    return torch.utils.data.Subset(train, train_indices), torch.utils.data.Subset(evaluate, held_out)


def split_indices_by_class(labels: Sequence[int], *, fraction: float) -> tuple[list[int], list[int]]:
    """Split indices so that each class contributes the same share, at least one sample if it has two or more.

    Args:
        fraction: share held out.

    Returns:
        Indices kept and indices held out, each ascending.
    """
    generator = np.random.RandomState(SPLIT_SEED)  # its stream is the same in every numpy version
    array = np.asarray(labels)
    held_out: list[int] = []
    for label in np.unique(array):
        members = generator.permutation(np.flatnonzero(array == label))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held_out.extend(members[:count].tolist())
    chosen = set(held_out)
    return [index for index in range(len(array)) if index not in chosen], sorted(held_out)


BUILTINS: dict[str, Callable[[JobSpec, Transform, Transform], Split]] = {
    "CIFAR10": _make_official_split_builder("train", True, False),
    "CIFAR100": _make_official_split_builder("train", True, False),
    "Caltech101": _build_caltech_split,
    "Caltech256": _build_caltech_split,
    "ImageNet": _make_official_split_builder("split", "train", "val"),
    "ImageFolder": _build_image_folder_split,
    "FakeData": _build_fake_split,
    "digits": _build_digits_split,
    **text.DATASETS,
}

DOWNLOADABLE = ("CIFAR10", "CIFAR100", "Caltech101", "Caltech256")

SOURCES = {
    "ImageNet": "get ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from "
    "https://image-net.org and set dataset.root to their folder",
    "ImageFolder": "set dataset.root to a folder with one sub-folder per class, or to one with train/ and val/ of this kind",
    "FakeData": "remove dataset.download: the samples of FakeData are generated",
    "digits": "remove dataset.download: digits is part of scikit-learn",
    **dict.fromkeys(
        text.DATASETS,
        "remove dataset.download: this dataset is the source text of Python's standard library, which is already installed",
    ),
}
