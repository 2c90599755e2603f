"""Text that every machine has: the source of Python's standard library, byte by byte, found at run time.

Two datasets: `python_source`, blocks of text for language models, and `python_packages`, fragments whose class is the package
they come from. Both hold out whole files. Which text there is follows from the version of Python alone.
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
from tula_cli.worker.build.construct import construct

LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data")
"""Folders that are not part of the library, that not every installation has, or that are tables rather than programs."""
MOST_OF_A_FILE = 65536
"""Bytes: one long module is not to be half of a set."""
VOCABULARY = 256
PADDING = 0
"""A byte that source text has not."""

Text = np.ndarray[Any, Any]


class Blocks(torch.utils.data.Dataset[Any]):
    """Text in blocks of equal length, each {input_ids, labels}: int64 (length), the same; the model shifts them by one."""

    def __init__(self, text: Text, length: int) -> None:
        count = len(text) // length
        self.blocks = text[: count * length].reshape(count, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


class Fragments(torch.utils.data.Dataset[Any]):
    """Lines of text up to a length, each {input_ids: int64 (bytes), labels: the number of its package}."""

    def __init__(self, fragments: Sequence[bytes], labels: Sequence[int]) -> None:
        self.fragments, self.labels = fragments, labels

    def __len__(self) -> int:
        return len(self.fragments)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = np.frombuffer(self.fragments[index], dtype=np.uint8).astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), "labels": self.labels[index]}


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch as long as its longest fragment: {input_ids, attention_mask: int64 (N, length), labels: int64 (N)}."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [item["input_ids"] for item in items], batch_first=True, padding_value=PADDING
    )
    labels = torch.tensor([item["labels"] for item in items])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


def blocks(spec: JobSpec, *_: Any) -> tuple[Blocks, Blocks, None]:
    """Return `python_source`: training and held-out blocks of `length` bytes of some `size` bytes of source."""

    def settings(length: int = 128, size: int = 1_000_000) -> tuple[int, int]:
        return length, size

    _refuse_transforms(spec)
    length, size = _positive(construct(settings, spec.dataset.args, path="dataset.args", name="python_source"))
    held_out, kept = _parted(_taken(_files(), size), spec.dataset.eval_fraction)
    found = Blocks(_joined(kept), length), Blocks(_joined(held_out), length)
    if not all(map(len, found)):
        raise SpecError(
            f"dataset.args: {size} bytes make no block of length {length} to train on and one to evaluate on",
            "set a larger size or a smaller length",
        )
    return *found, None


def fragments(spec: JobSpec, *_: Any) -> tuple[Fragments, Fragments, int]:
    """Return `python_packages`: fragments of at most `length` bytes of the `classes` packages with most text."""

    def settings(length: int = 128, classes: int = 8, size: int = 100_000) -> tuple[int, ...]:
        return length, classes, size

    _refuse_transforms(spec)
    length, classes, size = _positive(
        construct(settings, spec.dataset.args, path="dataset.args", name="python_packages")
    )
    packages: dict[str, list[tuple[str, bytes]]] = {}
    for name, text in _files():
        if "/" in name:
            packages.setdefault(name.partition("/")[0], []).append((name, text))
    several = {name: files for name, files in packages.items() if len(files) > 1}  # one file to train, one held out
    largest = sorted(several, key=lambda name: (-sum(len(text) for _, text in several[name]), name))[:classes]
    if len(largest) < classes or classes < 2:
        raise SpecError(f"dataset.args.classes: 2 to {len(several)} packages have several files, got {classes}")
    parts: tuple[tuple[list[bytes], list[int]], ...] = (([], []), ([], []))
    for label, name in enumerate(sorted(largest)):
        for (made, labels), files in zip(
            parts, _parted(_taken(several[name], size), spec.dataset.eval_fraction), strict=True
        ):
            new = [fragment for text in files for fragment in _fragments(text, length)]
            made += new
            labels += [label] * len(new)
    held_out, kept = (Fragments(made, labels) for made, labels in parts)
    return kept, held_out, classes


DATASETS: dict[str, Callable[[JobSpec, Any, Any], tuple[Any, Any, int | None]]] = {
    "python_source": blocks,
    "python_packages": fragments,
}
COLLATES: dict[str, Callable[[list[Any]], Any]] = {"python_packages": padded}
"""What makes batches of samples that torch's own function would not stack."""


def _refuse_transforms(spec: JobSpec) -> None:
    for key, given in (("train", spec.transforms.train), ("eval", spec.transforms.eval)):
        if given not in ([], ["ToTensor"]):
            raise SpecError(f"transforms.{key}: dataset {spec.dataset.name} is text, which takes no transform")


def _positive(values: Any) -> Any:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:
            raise SpecError(f"dataset.args: length, size and classes are integers from 2 on, got {value!r}")
    return values


def _files() -> list[tuple[str, bytes]]:
    """Return name and text of each file of the library, in an order of no meaning that is the same everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    kept = [name for name in names if not set(name.split("/")[:-1]) & set(LEFT_OUT)]
    if not kept:
        raise SpecError(
            f"there is no source text of Python's standard library in {root}",
            "run the jobs in a Python that has it, or take a dataset of your own",
        )
    kept.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    texts = ((name, (root / name).read_bytes()[:MOST_OF_A_FILE]) for name in kept)
    return [(name, text.replace(b"\0", b" ")) for name, text in texts if text.strip()]


def _taken(files: Sequence[tuple[str, bytes]], size: int) -> list[bytes]:
    """Return the first files, until they hold so many bytes; of each a fifth of that at most, so that there are several."""
    found: list[bytes] = []
    left = size
    for _, text in files:
        if left > 0:
            found.append(text[: min(left, max(1, size // 5))])
            left -= len(found[-1])
    return found


def _parted(files: Sequence[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Return the files to hold out, about such a share of the bytes and at least one, and the others, at least one."""
    wanted, held, count = fraction * sum(map(len, files)), 0, 0
    while count < len(files) - 1 and (not count or held + len(files[count]) / 2 <= wanted):
        held += len(files[count])
        count += 1
    return list(files[:count]), list(files[count:])


def _joined(files: Sequence[bytes]) -> Text:
    return np.frombuffer(b"".join(files), dtype=np.uint8)


def _fragments(text: bytes, length: int) -> list[bytes]:
    """Cut text where lines end into parts of at most so many bytes; a line that is longer is cut, blank parts are left out."""
    made, current = [], b""
    for line in text.splitlines(keepends=True):
        if current and len(current) + len(line) > length:
            made.append(current)
            current = b""
        current += line
        while len(current) > length:
            made.append(current[:length])
            current = current[length:]
    return [part for part in (*made, current) if part.strip()]
