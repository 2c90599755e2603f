"""What a dataset gives: samples as tensors, seeded by their index."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils.data
from torch.utils._pytree import tree_map
from torchvision import tv_tensors

from tula_cli.errors import SpecError
from tula_cli.worker.seeding import seeded

Transform = Callable[[Any], Any]
Samples = torch.utils.data.Dataset[Any]  # a sample by integer index, with a length


@dataclass(frozen=True)
class Datasets:
    """Training and evaluation samples of one job."""

    train: "SeededDataset"  # keys are (epoch, index)
    eval: "EvaluationDataset"  # keys are index
    classes: int | None  # None where an imported dataset does not tell
    collate: Callable[[list[Any]], Any] | None = None  # samples -> batch; None: torch's own


class SeededDataset(torch.utils.data.Dataset[Any]):
    """Samples whose augmentation depends on (seed, epoch, index) alone, whatever process or rank loads them.

    Args:
        samples: a dataset that applies its random transforms in `__getitem__`.
        seed: the job's seed.
    """

    def __init__(self, samples: Samples, *, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return length(self.samples)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with seeded(self.seed, epoch, index):
            item = self.samples[index]
        return as_item(item)


class EvaluationDataset(torch.utils.data.Dataset[Any]):
    """Samples without augmentation, keyed by plain integers."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return length(self.samples)

    def __getitem__(self, index: int) -> Any:
        return as_item(self.samples[index])


def as_item(item: Any) -> Any:
    """Return a sample as batches are made of it: mostly (input, target), else any tree."""
    if type(item) in (tuple, list) and len(item) == 2:
        return as_plain(item[0]), as_label(item[1])
    return tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else as_plain(leaf), item)


def as_plain(sample: Any) -> Any:
    """Return an image tensor of torchvision's as the plain tensor that it is: its own type makes every operation slower."""
    return sample.as_subclass(torch.Tensor) if isinstance(sample, tv_tensors.TVTensor) else sample


def as_label(target: Any) -> Any:
    """Return class numbers as `int`, which collates to int64; leave any other target alone."""
    if isinstance(target, torch.Tensor) and target.ndim == 0 and not target.is_floating_point():
        return int(target)
    return int(target) if isinstance(target, np.integer) else target


def length(samples: Samples) -> int:
    """Return how many samples there are.

    Raises:
        SpecError: an iterable-style dataset, which cannot be resumed mid-epoch.
    """
    if not hasattr(samples, "__len__"):
        raise SpecError(
            f"dataset {type(samples).__name__} has no length",
            "tula needs a map-style dataset: __len__ and __getitem__(index)",
        )
    return len(samples)
