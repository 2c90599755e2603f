"""The first samples of a job and the batch that they form, checked before anything is trained on them."""

import math
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import PIL.Image
import torch
from torch.utils._pytree import tree_leaves

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import JobFailed, SpecError, TulaError
from tula_cli.plugins import is_import_string
from tula_cli.spec.job import JobSpec
from tula_cli.worker import messages
from tula_cli.worker.build import text_datasets
from tula_cli.worker.build.batches import (
    Collate,
    describe_tree,
    find_sequence_length,
    list_tensors,
    make_batch,
    slice_batch,
)
from tula_cli.worker.build.samples import Datasets, EvaluationDataset, SeededDataset, count_samples
from tula_cli.worker.build.transforms import check_sample

SAMPLES_BATCHED = 5
"""Number of samples that must form a batch: a number that occurs in no other size of a sample (such as colour
channels)."""
SAMPLES_COMPARED, SAMPLES_INSPECTED = 16, 256
"""Numbers of samples used to detect varying lengths, and then to find the longest sample; spread over the training
set."""
SAMPLES_PADDED = 32
"""Samples of the batch whose padding is reported; larger batches have more padding."""
PLAIN_TYPES = (torch.Tensor, type(None), str, bytes, int, float)


@dataclass(frozen=True)
class FirstSamples:
    """Some training samples that form a batch."""

    item: Any  # one sample; if lengths vary, the longest of the samples that were read
    batch: Any  # batch of `count` samples
    count: int
    warnings: tuple[Diagnostic, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the input if it is a tensor; empty otherwise."""
        pair = type(self.item) in (tuple, list) and len(self.item) == 2
        return tuple(self.item[0].shape) if pair and isinstance(self.item[0], torch.Tensor) else ()


def load_first_samples(spec: JobSpec, datasets: Datasets) -> FirstSamples:
    """Return the first training samples and the batch that they form.

    Raises:
        SpecError: the samples form no batch, or a batch that cannot be sliced.
        JobFailed: the user's dataset or collate_fn fails.
    """
    is_user_dataset = is_import_string(spec.dataset.name) or spec.dataset.name in text_datasets.DATASETS
    try:
        items = datasets.train.list_first_samples(SAMPLES_BATCHED)
        held_out = datasets.eval.list_first_samples(1)[0]
        if is_user_dataset:
            _check_last_sample(spec, datasets)
    except TulaError:
        raise
    except Exception as error:  # the user's dataset and transforms may raise anything
        if is_user_dataset:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise JobFailed(
                f"dataset {spec.dataset.name} returns no sample: {describe_error(error)}",
                f"raised in {frame.filename}, line {frame.lineno}, {frame.name}",
            ) from error
        raise SpecError(f"a sample of {spec.dataset.name} cannot be transformed: {describe_error(error)}") from error
    _check_sample_tensors(spec, items, held_out, is_user_dataset=is_user_dataset)
    batch = _make_batch(spec, items, datasets.collate)
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, PLAIN_TYPES):
            raise SpecError(
                f"a batch of {spec.dataset.name} contains {type(leaf).__name__}, in which tula finds no tensors",
                "return a tensor, a tuple, a list or a dictionary, or register the class with torch's pytree",
            )
    slice_batch(batch, samples=len(items), stop=1, from_user=datasets.collate is not None)
    longest = find_longest_sample(datasets)
    if longest is None:
        return FirstSamples(items[0], batch, len(items))
    item, inspected = longest
    # neighbours may be of one class or sorted by length
    spread_samples = datasets.train.list_spread_samples(SAMPLES_PADDED)
    warning = messages.samples_differ_in_shape(
        inspected=inspected,
        largest=describe_tree(item),
        padding=_measure_padding(spread_samples, datasets.collate),
        padded=len(spread_samples),
    )
    return FirstSamples(item, batch, len(items), (warning,))


def find_class_numbers(datasets: Datasets) -> torch.Tensor:
    """Return the class numbers of samples spread over the training set, because files may be sorted by class."""
    items = datasets.train.list_spread_samples(SAMPLES_COMPARED)
    targets = [item[1] for item in items if isinstance(item, tuple | list) and len(item) == 2]
    return torch.tensor([target for target in targets if isinstance(target, int)] or [0])


def _check_last_sample(spec: JobSpec, datasets: Datasets) -> None:
    """Refuse a dataset that cannot return the last sample that its `__len__` promises.

    Raises:
        JobFailed: the last sample cannot be read.
    """
    for samples, name in ((datasets.train, "training"), (datasets.eval, "evaluation")):
        if isinstance(samples, SeededDataset | EvaluationDataset):
            last_index = count_samples(samples.samples) - 1
            try:
                samples[(0, last_index) if isinstance(samples, SeededDataset) else last_index]  # type: ignore[index]
            except Exception as error:
                raise JobFailed(
                    f"dataset {spec.dataset.name} has {last_index + 1} {name} samples by its __len__, but sample {last_index} fails:"
                    f" {describe_error(error)}",
                    "make __len__ return the number of samples that __getitem__ returns, or correct the sample that fails",
                ) from error


def _measure_padding(items: Sequence[Any], collate: Collate | None) -> int | None:
    """Return the percentage of padding in a batch of text; None if the samples are not text with known field names."""
    lengths = [find_sequence_length(make_batch(collate, [item])) for item in items]
    known_lengths = [length for length in lengths if length]
    if not known_lengths or len(known_lengths) < len(lengths):
        return None
    padded_length = find_sequence_length(make_batch(collate, items)) or max(known_lengths)
    return round(100 * (1 - statistics.fmean(known_lengths) / padded_length))


def find_longest_sample(datasets: Datasets) -> tuple[Any, int] | None:
    """Return the largest of some training samples, as in a batch, and how many were inspected; None for equal shapes.

    None also without a collate_fn, because samples must then have equal shapes.
    """
    if datasets.collate is None:
        return None
    compared = datasets.train.list_spread_samples(SAMPLES_COMPARED)
    if len({_list_tensor_shapes(datasets.collate, item) for item in compared}) <= 1:
        return None
    inspected = datasets.train.list_spread_samples(SAMPLES_INSPECTED)
    largest = max(inspected, key=lambda item: sum(map(math.prod, _list_tensor_shapes(datasets.collate, item))))
    return largest, len(inspected)


def _list_tensor_shapes(collate: Collate | None, item: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in list_tensors(make_batch(collate, [item])))


def _check_sample_tensors(spec: JobSpec, items: Sequence[Any], held_out: Any, *, is_user_dataset: bool) -> None:
    """Refuse images that are not converted to tensors, and in datasets that tula knows, inputs that are no images."""
    if is_user_dataset:
        for item, path in ((held_out, "transforms.eval"), (items[0], "transforms.train")):
            if any(isinstance(leaf, PIL.Image.Image) for leaf in tree_leaves(item)) and not spec.dataset.collate_fn:
                raise SpecError(f"{path} returns an image, but must return a tensor", f"add ToTensor to {path}")
        return
    check_sample(held_out[0], path="transforms.eval")
    shapes = [tuple(check_sample(sample[0], path="transforms.train").shape) for sample in items]
    if len(set(shapes)) > 1 and spec.dataset.collate_fn is None:
        raise SpecError(
            f"transforms.train: inputs have different shapes ({', '.join(map(str, dict.fromkeys(shapes)))}),"
            " so they cannot be batched",
            "resize or crop all images to one size, for example {Resize: {size: 256}}, {CenterCrop: {size: 224}}",
        )


def _make_batch(spec: JobSpec, items: Sequence[Any], collate: Collate | None) -> Any:
    try:
        return make_batch(collate, items)
    except Exception as error:
        if collate is not None:
            raise JobFailed(
                f"dataset.collate_fn fails on {describe_tree(list(items))}: {describe_error(error)}"
            ) from error
        descriptions = " and ".join(dict.fromkeys(map(describe_tree, items)))
        raise SpecError(
            f"samples of {spec.dataset.name} cannot be batched: they are {descriptions}",
            "set dataset.collate_fn to a function (list of samples) -> batch that pads them;"
            " for images, resize or crop all of them to one size in transforms",
        ) from error


def describe_error(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
