"""From the spec to datasets: where the samples come from, how they are split, transformed and seeded."""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch.utils.data
from torchvision import datasets

from tula_cli.errors import SpecError
from tula_cli.plugins import is_import_string, load
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.batches.collate import build_collate
from tula_cli.worker.build.construct import accepts_argument, call_with_arguments
from tula_cli.worker.build.samples import Datasets, EvaluationDataset, Samples, SeededDataset, Transform, sample_count
from tula_cli.worker.build.sampling import build_sampler
from tula_cli.worker.build.streams import StreamedDataset
from tula_cli.worker.build.text import source_text
from tula_cli.worker.build.transforms import build_transforms

SPLIT_SEED = 0
"""Seed of the split into training and evaluation samples; fixed, so that runs with other seeds stay comparable."""


def download_dataset(spec: JobSpec) -> None:
    """Download the dataset where the spec asks for it and torchvision can; one process at a time may do so.

    Raises:
        SpecError: the dataset cannot be downloaded, or its arguments are wrong.
    """
    if not spec.dataset.download:
        return
    name = spec.dataset.name
    if name not in DOWNLOADABLE:
        raise SpecError(
            f"dataset.download: tula cannot download {name}",
            SOURCES.get(name, "leave dataset.download out"),
        )
    root = _data_folder(spec)
    root.mkdir(parents=True, exist_ok=True)
    splits = ({"train": True}, {"train": False}) if name.startswith("CIFAR") else ({},)
    for split in splits:
        try:
            _construct_torchvision(spec, root=str(root), download=True, **split)
        except OSError as error:
            raise SpecError(
                f"{name} cannot be downloaded to {root}: {error}",
                "put it there from a machine that has a network, and set dataset.download: false",
            ) from error


def build_datasets(spec: JobSpec) -> Datasets:
    """Return the training and evaluation samples of a job; never downloads.

    Raises:
        SpecError: unknown dataset or transform, wrong arguments, or files that are not there.
    """
    transforms = (
        build_transforms(spec.transforms.train, path="transforms.train"),
        build_transforms(spec.transforms.eval, path="transforms.eval"),
    )
    build = dataset_source(spec.dataset.name)
    train, held_out, classes = build(spec, *transforms)
    collate = build_collate(spec) or source_text.COLLATES.get(spec.dataset.name)
    datasets = Datasets(_training_dataset(spec, train), _evaluation_dataset(spec, held_out), classes, collate)
    for samples, purpose in ((datasets.train, "training"), (datasets.eval, "evaluation")):
        if len(samples) == 0:
            raise SpecError(f"dataset {spec.dataset.name} has no {purpose} samples")
    return datasets


def _training_dataset(spec: JobSpec, samples: Samples) -> SeededDataset | StreamedDataset:
    settings, seed = spec.dataset, spec.train.seed
    streamed, sampler = is_stream(samples), build_sampler(spec)
    refused = [
        feature for feature, is_given in (("an iterable dataset", streamed), ("dataset.sampler", sampler)) if is_given
    ]
    if refused and spec.train.facts.tunes:
        raise SpecError(
            f"train.method {spec.train.method} holds out samples by their number, which {refused[0]} has not"
        )
    if refused and spec.train.hessian:
        raise SpecError(f"train.hessian asks for samples by their number, which {refused[0]} has not")
    if not streamed:
        if settings.length or settings.sharded:
            raise SpecError("dataset.length and dataset.sharded are for iterable datasets, and this one is none")
        return SeededDataset(samples, seed=seed, order=sampler)
    if sampler:
        raise SpecError("dataset.sampler: an iterable dataset has an order of its own", "leave dataset.sampler out")
    size = settings.length or sample_count(samples)
    return StreamedDataset(samples, size=size, seed=seed, sharded=settings.sharded)


def build_test_dataset(spec: JobSpec, datasets: Datasets) -> EvaluationDataset | StreamedDataset:
    """Return the samples of dataset.test; without one those that training is evaluated on.

    Args:
        spec: the job.
        datasets: of the same job: their classes have to be those of the test set.

    Raises:
        SpecError: as `build_datasets`, or other classes, or no samples.
    """
    if spec.dataset.test is None:
        return datasets.eval
    transform = build_transforms(spec.transforms.eval, path="transforms.eval")
    of_test = spec.model_copy(update={"dataset": spec.dataset.tested})
    if is_import_string(of_test.dataset.name):
        samples = _construct_user_dataset(of_test, is_train=False, transform=transform, path="dataset.test.args")
    else:
        samples = _construct_torchvision(of_test, root=str(_data_folder(of_test)), transform=transform)
    dataset = _evaluation_dataset(of_test, samples)
    if len(dataset) == 0:
        raise SpecError(f"dataset.test: {of_test.dataset.name} has no samples")
    _check_classes(samples, datasets)
    return dataset


def _check_classes(samples: Any, datasets: Datasets) -> None:
    """Refuse a test set whose labels mean other classes: they are numbers by the order of their names."""
    trained = datasets.train.samples
    training_classes, test_classes = (
        getattr(source, "classes", None) for source in (getattr(trained, "dataset", trained), samples)
    )
    if (
        isinstance(training_classes, list | tuple)
        and isinstance(test_classes, list | tuple)
        and list(training_classes) != list(test_classes)
    ):
        odd = ", ".join(sorted(map(str, set(training_classes) ^ set(test_classes)))[:5]) or "they are in another order"
        raise SpecError(f"dataset.test: its classes are not those of the training set: {odd}")
    count = _classes_of(samples)
    if None not in (count, datasets.classes) and count != datasets.classes:
        raise SpecError(f"dataset.test: it has {count} classes, the training set {datasets.classes}")


def _evaluation_dataset(spec: JobSpec, samples: Samples) -> EvaluationDataset | StreamedDataset:
    if is_stream(samples):
        size = spec.dataset.eval_length or sample_count(samples)
        return StreamedDataset(samples, size=size, seed=spec.train.seed, sharded=spec.dataset.sharded)
    if spec.dataset.eval_length:
        raise SpecError("dataset.eval_length is for iterable datasets, and the evaluation's is none")
    return EvaluationDataset(samples)


def is_stream(samples: Any) -> bool:
    """Return whether samples come in an order of their own: none can be asked for by its number."""
    return (hasattr(samples, "__iter__") and not hasattr(type(samples), "__getitem__")) or isinstance(
        samples, torch.utils.data.IterableDataset
    )


def dataset_source(name: str) -> Callable[[JobSpec, Transform, Transform], "Split"]:
    """Return what builds a dataset by its name.

    Raises:
        SpecError: unknown name; with the nearest known ones.
    """
    if is_import_string(name):
        return _imported_split
    return load(name, BUILTINS, kind="dataset")  # type: ignore[no-any-return]


Split = tuple[Samples, Samples, int | None]


def _imported_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    """Return both splits of a callable `(train, transform, **args)`."""
    samples = _construct_user_dataset(spec, is_train=True, transform=train)
    return samples, _construct_user_dataset(spec, is_train=False, transform=evaluate), _classes_of(samples)


def _construct_user_dataset(spec: JobSpec, *, is_train: bool, transform: Transform, path: str = "dataset.args") -> Any:
    target = load(spec.dataset.name, {}, kind="dataset")
    transforms = takes_transform(target)
    if not transforms and (spec.transforms.train or spec.transforms.eval):
        raise SpecError(
            f"transforms: dataset {spec.dataset.name} takes no transform, so they would do nothing",
            "let it take one, dataset(train, transform), or leave the section out",
        )
    arguments = {"train": is_train, **({"transform": transform} if transforms else {})}
    return call_with_arguments(target, spec.dataset.args, path=path, name=spec.dataset.name, given=arguments)


def takes_transform(target: Callable[..., Any]) -> bool:
    """Return whether a dataset of the user's own takes a transform, as images do and text does not."""
    try:
        kinds = [parameter.kind for parameter in inspect.signature(target).parameters.values()]
    except (TypeError, ValueError):  # it does not tell
        return True
    return inspect.Parameter.VAR_KEYWORD in kinds or accepts_argument(target, "transform")


def _classes_of(samples: Any) -> int | None:
    """Return the number of classes if the dataset tells it by `num_classes` or torchvision's `classes`."""
    count = getattr(samples, "num_classes", None)
    if isinstance(count, int):
        return count
    names = getattr(samples, "classes", None) or getattr(samples, "categories", None)
    return len(names) if names is not None else None


def _official_split_builder(
    key: str, train_value: Any, eval_value: Any
) -> Callable[[JobSpec, Transform, Transform], Split]:
    """Return a builder for a dataset of torchvision's that has an official split, told by the argument `key`."""

    def build(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
        root = str(_data_folder(spec))
        samples = _construct_torchvision(spec, root=root, transform=train, **{key: train_value})
        held_out = _construct_torchvision(spec, root=root, transform=evaluate, **{key: eval_value})
        return samples, held_out, len(samples.classes)

    return build


def _caltech_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    root = _data_folder(spec)
    if not (root / spec.dataset.name.lower()).is_dir():  # torchvision would create an empty one
        raise _missing_files(spec, root / spec.dataset.name.lower())
    samples = _construct_torchvision(spec, root=str(root), transform=train)
    held_out = _construct_torchvision(spec, root=str(root), transform=evaluate)
    return *_stratified_split(spec, samples, held_out, samples.y), len(samples.categories)


def _image_folder_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    root = _data_folder(spec)
    official = (root / "train").is_dir() and (root / "val").is_dir()
    folders = (root / "train", root / "val") if official else (root, root)
    samples = _construct_torchvision(spec, root=str(folders[0]), transform=train)
    held_out = _construct_torchvision(spec, root=str(folders[1]), transform=evaluate)
    if samples.classes != held_out.classes:
        odd = sorted(set(samples.classes) ^ set(held_out.classes))
        raise SpecError(f"{folders[0]} and {folders[1]} have different classes: {', '.join(odd[:5])}")
    if official:
        return samples, held_out, len(samples.classes)
    return *_stratified_split(spec, samples, held_out, samples.targets), len(samples.classes)


def _construct_torchvision(spec: JobSpec, **given: Any) -> Any:
    """Construct a dataset of torchvision's from what tula gives and the spec's arguments."""
    name = spec.dataset.name
    try:
        return call_with_arguments(
            getattr(datasets, name), spec.dataset.args, path="dataset.args", name=name, given=given
        )
    except (RuntimeError, FileNotFoundError) as error:
        raise _missing_files(spec, Path(given["root"]), reason=str(error)) from error


def _missing_files(spec: JobSpec, folder: Path, *, reason: str = "") -> SpecError:
    name = spec.dataset.name
    why = f": {reason}" if folder.is_dir() and reason else ""
    hint = SOURCES.get(name, "set dataset.download: true, or set dataset.root to where it lies")
    if spec.dataset.download and name in DOWNLOADABLE:
        hint = "the download did not complete: remove the folder and try again where there is a network"
    return SpecError(f"dataset {name} is not in {folder.absolute()}{why}", hint)


def _data_folder(spec: JobSpec) -> Path:
    return Path(spec.dataset.root).expanduser()


class InMemoryImages(torch.utils.data.Dataset[Any]):
    """Images in memory: uint8, (N, H, W), given out as gray PIL images."""

    def __init__(self, images: np.ndarray[Any, Any], labels: Sequence[int], transform: Transform) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(PIL.Image.fromarray(self.images[index])), int(self.labels[index])


def _digits_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    """Return scikit-learn's 1797 handwritten digits, 8 x 8, gray."""
    if spec.dataset.args:
        raise SpecError(f"dataset.args: digits takes none, got {', '.join(spec.dataset.args)}")
    table = _digits_table()
    images = (table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = [int(label) for label in table[:, 64]]
    return *_stratified_split(
        spec, InMemoryImages(images, labels, train), InMemoryImages(images, labels, evaluate), labels
    ), 10


def _digits_table() -> "np.ndarray[Any, Any]":
    """Return the digits, a row each: 64 pixels of 0 to 16, and the label.

    Raises:
        SpecError: scikit-learn is not installed.
    """
    # Its file is read without it where that is to be found: importing it costs each rank 1.6 s of CPU, the file 4 ms.
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise SpecError(
            "dataset.name: digits come with scikit-learn, which is not installed", "pip install scikit-learn"
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
        size: how many images.
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


def _fake_split(spec: JobSpec, train: Transform, evaluate: Transform) -> Split:
    """Return noise images: `size` to train on, and `eval_fraction` times as many others to evaluate on."""

    def shape(size: int = 1000, image_size: Sequence[int] = (3, 224, 224), num_classes: int = 10) -> tuple[Any, ...]:
        return size, tuple(image_size), num_classes

    size, image_size, classes = call_with_arguments(shape, spec.dataset.args, path="dataset.args", name="FakeData")
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


def _stratified_split(
    spec: JobSpec, train: Samples, evaluate: Samples, labels: Sequence[int]
) -> tuple[Samples, Samples]:
    """Return disjoint stratified subsets of two views (training and evaluation transforms) of the same samples."""
    train_indices, held_out = split_indices_by_class(labels, fraction=spec.dataset.eval_fraction)
    return torch.utils.data.Subset(train, train_indices), torch.utils.data.Subset(evaluate, held_out)


def split_indices_by_class(labels: Sequence[int], *, fraction: float) -> tuple[list[int], list[int]]:
    """Split indices so that each class gives the same share, at least one where it has two or more.

    Args:
        labels: class of each sample.
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
    "CIFAR10": _official_split_builder("train", True, False),
    "CIFAR100": _official_split_builder("train", True, False),
    "Caltech101": _caltech_split,
    "Caltech256": _caltech_split,
    "ImageNet": _official_split_builder("split", "train", "val"),
    "ImageFolder": _image_folder_split,
    "FakeData": _fake_split,
    "digits": _digits_split,
    **source_text.DATASETS,
}

DOWNLOADABLE = ("CIFAR10", "CIFAR100", "Caltech101", "Caltech256")

SOURCES = {
    "ImageNet": "get ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from "
    "https://image-net.org and set dataset.root to their folder",
    "ImageFolder": "set dataset.root to a folder with one sub-folder a class, or with train/ and val/ made like that",
    "FakeData": "FakeData needs no download",
    "digits": "digits come with scikit-learn",
    **dict.fromkeys(source_text.DATASETS, "it is the source text of Python's own library"),
}
