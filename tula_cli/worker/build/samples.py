"""What a dataset gives: samples as tensors, seeded by their index."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data
from torch.utils._pytree import tree_map
from torchvision import tv_tensors

from tula_cli.errors import SpecError
from tula_cli.worker.seeding import seeded

Transform = Callable[[Any], Any]
if TYPE_CHECKING:
    from tula_cli.worker.build.streams import StreamedDataset

Order = Callable[[Any, int], torch.Tensor]
Samples = torch.utils.data.Dataset[Any]  # a sample by integer index, with a length


@dataclass(frozen=True)
class Datasets:
    """Training and evaluation samples of one job."""

    train: "SeededDataset | StreamedDataset"  # keys are (epoch, index)
    eval: "EvaluationDataset | StreamedDataset"  # keys are index
    classes: int | None  # None where an imported dataset does not tell
    collate: Callable[[list[Any]], Any] | None = None  # samples -> batch; None: torch's own


class SeededDataset(torch.utils.data.Dataset[Any]):
    """Samples whose augmentation depends on (seed, epoch, index) alone, whatever process or rank loads them.

    Args:
        samples: a dataset that applies its random transforms in `__getitem__`.
        seed: the job's seed.
        order: (samples, epoch) -> indices of the epoch, as many in each; None: all samples, shuffled.
    """

    def __init__(self, samples: Samples, *, seed: int, order: Order | None = None) -> None:
        self.samples = samples
        self.seed = seed
        self.own_order = order
        self.size = sample_count(samples) if order is None else len(order(samples, 0))

    def __len__(self) -> int:
        """Return the samples of an epoch."""
        return self.size

    def order(self, epoch: int) -> torch.Tensor | None:
        """Return the order of an epoch as the user's own sampler gives it; None where there is none."""
        if self.own_order is None:
            return None
        order = self.own_order(self.samples, epoch)
        if len(order) != self.size:
            raise SpecError(f"dataset.sampler gives {len(order)} samples in epoch {epoch}, and {self.size} in epoch 0")
        return order

    def first_samples(self, count: int) -> list[Any]:
        """Return the first samples."""
        return [self[0, index] for index in range(min(count, sample_count(self.samples)))]

    def spread_samples(self, count: int) -> list[Any]:
        """Return `count` samples from all parts of the dataset, or all where it has fewer."""
        size = sample_count(self.samples)
        samples_taken = min(count, size)
        return [self[0, number * size // samples_taken] for number in range(samples_taken)]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with seeded(self.seed, epoch, index):
            item = self.samples[index]
        return as_sample(item)


class EvaluationDataset(torch.utils.data.Dataset[Any]):
    """Samples without augmentation, keyed by plain integers."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return sample_count(self.samples)

    def __getitem__(self, index: int) -> Any:
        return as_sample(self.samples[index])

    def first_samples(self, count: int) -> list[Any]:
        """Return the first samples."""
        return [self[index] for index in range(min(count, len(self)))]


def as_sample(item: Any) -> Any:
    """Return a sample as batches are made of it: mostly (input, target), else any tree."""
    if type(item) in (tuple, list) and len(item) == 2:
        return as_plain_tensor(item[0]), as_label(item[1])
    return tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else as_plain_tensor(leaf), item)


def as_plain_tensor(sample: Any) -> Any:
    """Return an image tensor of torchvision's as the plain tensor that it is: its own type makes every operation slower."""
    return sample.as_subclass(torch.Tensor) if isinstance(sample, tv_tensors.TVTensor) else sample


def as_label(target: Any) -> Any:
    """Return class numbers as `int`, which collates to int64; leave any other target alone."""
    if isinstance(target, torch.Tensor) and target.ndim == 0 and not target.is_floating_point():
        return int(target)
    return int(target) if isinstance(target, np.integer) else target


def sample_count(samples: Samples) -> int:
    """Return how many samples there are.

    Raises:
        SpecError: it does not tell.
    """
    if not hasattr(samples, "__len__"):
        raise SpecError(
            f"dataset {type(samples).__name__} has no length",
            "a dataset has __len__ and __getitem__(index); an iterable one has __iter__, and dataset.length if it does not tell",
        )
    try:
        return len(samples)
    except TypeError as error:
        raise SpecError(
            f"dataset {type(samples).__name__}: its __len__ fails: {error}", "let __len__ return an int"
        ) from error
