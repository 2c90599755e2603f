"""Datasets by their names in the job file: built-in ones, torchvision's, and those of the user."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.utils.data
from torchvision import datasets

from tula_cli.errors import SpecError
from tula_cli.plugins import is_import_string, load_named_object
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build import text_datasets
from tula_cli.worker.build.batches import build_collate
from tula_cli.worker.build.construct import accepts_argument, call_with_arguments
from tula_cli.worker.build.loaders import build_sampler
from tula_cli.worker.build.samples import (
    Datasets,
    EvaluationDataset,
    Samples,
    SeededDataset,
    StreamedDataset,
    count_samples,
)
from tula_cli.worker.build.transforms import Transform, build_transforms

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
            DATASET_SOURCES.get(name, "remove dataset.download"),
        )
    root = _get_data_folder(spec)
    root.mkdir(parents=True, exist_ok=True)
    splits = ({"train": True}, {"train": False}) if name.startswith("CIFAR") else ({},)
    for split in splits:
        try:
            _construct_torchvision_dataset(spec, root=str(root), download=True, **split)
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
    train_transform = build_transforms(spec.transforms.train, path="transforms.train")
    eval_transform = build_transforms(spec.transforms.eval, path="transforms.eval")
    train, held_out, classes = find_dataset_source(spec.dataset.name)(spec, train_transform, eval_transform)
    collate = build_collate(spec) or text_datasets.COLLATES.get(spec.dataset.name)
    datasets = Datasets(_make_training_dataset(spec, train), _make_evaluation_dataset(spec, held_out), classes, collate)
    for samples, purpose in ((datasets.train, "training"), (datasets.eval, "evaluation")):
        if len(samples) == 0:
            raise SpecError(f"dataset {spec.dataset.name} has no {purpose} samples")
    return datasets


def _make_training_dataset(spec: JobSpec, samples: Samples) -> SeededDataset | StreamedDataset:
    settings, seed = spec.dataset, spec.train.seed
    streamed, sampler = is_stream(samples), build_sampler(spec)
    if streamed or sampler:
        kind = "an iterable dataset" if streamed else "dataset.sampler"
        reason = f"samples by index, which is not possible with {kind}"
        if spec.train.training_method.is_self_tuning:
            raise SpecError(f"train.method {spec.train.method} selects {reason}")
        if "hessian" in spec.train.diagnostics:
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
        samples = _construct_torchvision_dataset(of_test, root=str(_get_data_folder(of_test)), transform=transform)
    dataset = _make_evaluation_dataset(of_test, samples)
    if len(dataset) == 0:
        raise SpecError(f"dataset.test: {of_test.dataset.name} has no samples")
    _check_classes(samples, datasets)
    return dataset


def _check_classes(samples: Any, datasets: Datasets) -> None:
    """Refuse a test set with other classes than the training set: labels are numbered by class name."""
    trained = datasets.train.samples
    training_classes: Any = getattr(getattr(trained, "dataset", trained), "classes", None)
    test_classes: Any = getattr(samples, "classes", None)
    are_listed = isinstance(training_classes, list | tuple) and isinstance(test_classes, list | tuple)
    if are_listed and list(training_classes) != list(test_classes):
        if unmatched := ", ".join(sorted(map(str, set(training_classes) ^ set(test_classes)))[:5]):
            raise SpecError(f"dataset.test and the training set have different classes: {unmatched}")
        raise SpecError("dataset.test lists the classes in another order than the training set")
    count = _find_class_count(samples)
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
    return load_named_object(name, BUILTIN_DATASETS, kind="dataset")  # type: ignore[no-any-return]


Split = tuple[Samples, Samples, int | None]


def _build_imported_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    """Return both splits of a callable `(train, transform, **args)`."""
    samples = _construct_user_dataset(spec, is_train=True, transform=train)
    return samples, _construct_user_dataset(spec, is_train=False, transform=evaluate), _find_class_count(samples)


def _construct_user_dataset(spec: JobSpec, *, is_train: bool, transform: Transform, path: str = "dataset.args") -> Any:
    target = load_named_object(spec.dataset.name, {}, kind="dataset")
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


def _find_class_count(samples: Any) -> int | None:
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

    def build_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
        root = str(_get_data_folder(spec))
        samples = _construct_torchvision_dataset(spec, root=root, transform=train, **{key: train_value})
        held_out = _construct_torchvision_dataset(spec, root=root, transform=evaluate, **{key: eval_value})
        return samples, held_out, len(samples.classes)

    return build_split


def _build_caltech_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    root = _get_data_folder(spec)
    folder = root / spec.dataset.name.lower()
    if not folder.is_dir():  # torchvision would create an empty one
        raise _make_missing_files_error(spec, folder)
    samples = _construct_torchvision_dataset(spec, root=str(root), transform=train)
    held_out = _construct_torchvision_dataset(spec, root=str(root), transform=evaluate)
    return *_build_stratified_split(spec, samples, held_out, samples.y), len(samples.categories)


def _build_image_folder_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    root = _get_data_folder(spec)
    official = (root / "train").is_dir() and (root / "val").is_dir()
    folders = (root / "train", root / "val") if official else (root, root)
    samples = _construct_torchvision_dataset(spec, root=str(folders[0]), transform=train)
    held_out = _construct_torchvision_dataset(spec, root=str(folders[1]), transform=evaluate)
    if samples.classes != held_out.classes:
        unmatched = sorted(set(samples.classes) ^ set(held_out.classes))
        raise SpecError(f"{folders[0]} and {folders[1]} have different classes: {', '.join(unmatched[:5])}")
    if official:
        return samples, held_out, len(samples.classes)
    return *_build_stratified_split(spec, samples, held_out, samples.targets), len(samples.classes)


def _construct_torchvision_dataset(spec: JobSpec, **given: Any) -> Any:
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
    hint = DATASET_SOURCES.get(name, "set dataset.download: true, or set dataset.root to its folder")
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


BUILTIN_DATASETS: dict[str, Callable[[JobSpec, Transform, Transform], Split]] = {
    "CIFAR10": _make_official_split_builder("train", True, False),
    "CIFAR100": _make_official_split_builder("train", True, False),
    "Caltech101": _build_caltech_split,
    "Caltech256": _build_caltech_split,
    "ImageNet": _make_official_split_builder("split", "train", "val"),
    "ImageFolder": _build_image_folder_split,
    "FakeData": _build_fake_split,
    "digits": _build_digits_split,
    **text_datasets.DATASETS,
}

DOWNLOADABLE = ("CIFAR10", "CIFAR100", "Caltech101", "Caltech256")

DATASET_SOURCES = {
    "ImageNet": "get ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from "
    "https://image-net.org and set dataset.root to their folder",
    "ImageFolder": "set dataset.root to a folder with one sub-folder per class, or to one with train/ and val/ of this kind",
    "FakeData": "remove dataset.download: the samples of FakeData are generated",
    "digits": "remove dataset.download: digits is part of scikit-learn",
    **dict.fromkeys(
        text_datasets.DATASETS,
        "remove dataset.download: this dataset is the source text of Python's standard library, which is already installed",
    ),
}
