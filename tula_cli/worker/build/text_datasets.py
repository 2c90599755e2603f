"""Text datasets: `python_source`, blocks of text for language models, and `python_packages`, fragments whose class is the package
they come from. Both hold out whole files. The text depends only on the version of Python.
"""

import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.construct import call_with_arguments

EXCLUDED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "pydoc_data",
)
"""Folders that are not part of the library, that not every installation has, or that are tables rather than programs."""
MAX_FILE_BYTES = 65536
"""Bytes read per file, so that one long module does not make up half of a dataset."""
PADDING_BYTE = 0
"""A byte that does not occur in the source text."""

Text = np.ndarray[Any, Any]


class TextBlockDataset(torch.utils.data.Dataset[Any]):
    """Text in blocks of equal length, each {input_ids, labels}: int64 (length), equal; the model shifts the labels."""

    def __init__(self, text: Text, length: int) -> None:
        count = len(text) // length
        self.blocks = text[: count * length].reshape(count, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


class TextFragmentDataset(torch.utils.data.Dataset[Any]):
    """Fragments of text up to a length, each {input_ids: int64 (bytes), labels: the number of its package}."""

    def __init__(self, fragments: Sequence[bytes], labels: Sequence[int]) -> None:
        self.fragments, self.labels = fragments, labels

    def __len__(self) -> int:
        return len(self.fragments)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = np.frombuffer(self.fragments[index], dtype=np.uint8).astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), "labels": self.labels[index]}


def collate_padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest fragment: {input_ids, attention_mask: int64 (N, length), labels: int64 (N)}."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [item["input_ids"] for item in items], batch_first=True, padding_value=PADDING_BYTE
    )
    labels = torch.tensor([item["labels"] for item in items])
    return {"input_ids": ids, "attention_mask": (ids != PADDING_BYTE).long(), "labels": labels}


def build_block_datasets(spec: JobSpec, *_: Any) -> tuple[TextBlockDataset, TextBlockDataset, None]:
    """Return `python_source`: training and held-out blocks of `length` bytes, from `size` bytes of source text."""

    def collect_settings(length: int = 128, size: int = 1_000_000) -> tuple[int, int]:
        return length, size

    _refuse_transforms(spec)
    length, size = _require_positive(
        call_with_arguments(collect_settings, spec.dataset.args, path="dataset.args", name="python_source")
    )
    held_out, train_files = _choose_held_out_files(_read_bytes(_list_source_files(), size), spec.dataset.eval_fraction)
    datasets = TextBlockDataset(_join_bytes(train_files), length), TextBlockDataset(_join_bytes(held_out), length)
    if not all(map(len, datasets)):
        raise SpecError(
            f"dataset.args: {size} bytes are too few for a training and an evaluation block of length {length}",
            "set a larger size or a smaller length",
        )
    return *datasets, None


def build_fragment_datasets(spec: JobSpec, *_: Any) -> tuple[TextFragmentDataset, TextFragmentDataset, int]:
    """Return training set, held-out set and number of classes of dataset `python_packages`.

    The samples are fragments of at most `length` bytes of source text, labelled by their package: the `classes` packages
    with the most text.
    """

    def collect_settings(length: int = 128, classes: int = 8, size: int = 100_000) -> tuple[int, ...]:
        return length, classes, size

    _refuse_transforms(spec)
    length, classes, size = _require_positive(
        call_with_arguments(collect_settings, spec.dataset.args, path="dataset.args", name="python_packages")
    )
    packages: dict[str, list[tuple[str, bytes]]] = {}
    for name, text in _list_source_files():
        if "/" in name:
            packages.setdefault(name.partition("/")[0], []).append((name, text))
    # one file to train, one held out
    multi_file_packages = {name: files for name, files in packages.items() if len(files) > 1}
    largest = sorted(
        multi_file_packages, key=lambda name: (-sum(len(text) for _, text in multi_file_packages[name]), name)
    )[:classes]
    if len(largest) < classes or classes < 2:
        raise SpecError(
            f"dataset.args.classes must be between 2 and {len(multi_file_packages)} (the number of standard-library packages with more than"
            f" one file), got {classes}"
        )
    splits: tuple[tuple[list[bytes], list[int]], ...] = (([], []), ([], []))
    for label, name in enumerate(sorted(largest)):
        split_files = _choose_held_out_files(_read_bytes(multi_file_packages[name], size), spec.dataset.eval_fraction)
        for (texts, labels), files in zip(splits, split_files, strict=True):
            new = [fragment for text in files for fragment in _split_lines(text, length)]
            texts += new
            labels += [label] * len(new)
    held_out, train = (TextFragmentDataset(texts, labels) for texts, labels in splits)
    return train, held_out, classes


DATASETS: dict[str, Callable[[JobSpec, Any, Any], tuple[Any, Any, int | None]]] = {
    "python_source": build_block_datasets,
    "python_packages": build_fragment_datasets,
}
COLLATES: dict[str, Callable[[list[Any]], Any]] = {"python_packages": collate_padded}
"""Collate functions for samples that torch's default one cannot stack."""


def _refuse_transforms(spec: JobSpec) -> None:
    for key, transforms in (("train", spec.transforms.train), ("eval", spec.transforms.eval)):
        if transforms not in ([], ["ToTensor"]):
            raise SpecError(f"transforms.{key} has no effect on dataset {spec.dataset.name}, which is text; remove it")


def _require_positive(values: Any) -> Any:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:
            raise SpecError(f"dataset.args: length, size and classes must be integers of at least 2, got {value!r}")
    return values


def _list_source_files() -> list[tuple[str, bytes]]:
    """Return the name and text of each file of the library, in an arbitrary order that is the same everywhere.

    Raises:
        SpecError: there is no source text.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    included = [name for name in names if not set(name.split("/")[:-1]) & set(EXCLUDED_FOLDERS)]
    if not included:
        raise SpecError(
            f"{root} does not contain the source of Python's standard library",
            "run the jobs with a Python installation that contains it, or use your own dataset",
        )
    included.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    texts = ((name, (root / name).read_bytes()[:MAX_FILE_BYTES]) for name in included)
    return [(name, text.replace(b"\0", b" ")) for name, text in texts if text.strip()]


def _read_bytes(files: Sequence[tuple[str, bytes]], size: int) -> list[bytes]:
    """Return the first files up to `size` bytes in total; at most a fifth of that of each, so that there are
    several."""
    chunks: list[bytes] = []
    remaining = size
    for _, text in files:
        if remaining > 0:
            chunks.append(text[: min(remaining, max(1, size // 5))])
            remaining -= len(chunks[-1])
    return chunks


def _choose_held_out_files(files: Sequence[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Return the files to hold out, about `fraction` of the bytes, and the remaining files; at least one file each."""
    wanted_bytes, held_out_bytes, count = fraction * sum(map(len, files)), 0, 0
    while count < len(files) - 1 and (not count or held_out_bytes + len(files[count]) / 2 <= wanted_bytes):
        held_out_bytes += len(files[count])
        count += 1
    return list(files[:count]), list(files[count:])


def _join_bytes(files: Sequence[bytes]) -> Text:
    return np.frombuffer(b"".join(files), dtype=np.uint8)


def _split_lines(text: bytes, length: int) -> list[bytes]:
    """Split text at line ends into fragments of at most `length` bytes; longer lines are cut, blank fragments
    dropped."""
    fragments, current = [], b""
    for line in text.splitlines(keepends=True):
        if current and len(current) + len(line) > length:
            fragments.append(current)
            current = b""
        current += line
        while len(current) > length:
            fragments.append(current[:length])
            current = current[length:]
    return [fragment for fragment in (*fragments, current) if fragment.strip()]
