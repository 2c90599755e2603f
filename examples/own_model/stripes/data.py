"""The dataset: a callable (train, transform, **args) that returns a torch.utils.data.Dataset of (input, target)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

PIXELS = 16
NOISE = 1.5


class Stripes(Dataset[tuple[Tensor, int]]):
    """Noisy stripes in one of four directions; item `index` is always the same one.

    Args:
        size: number of images.
        first: number of the first one, so that two sets share none.
        transform: what tula makes of section transforms; a tensor goes through it as well as an image does.
    """

    classes = ("0", "45", "90", "135")  # degrees; how tula knows num_classes

    def __init__(self, size: int, *, first: int, transform: Callable[[Any], Any] | None) -> None:
        self.size, self.first, self.transform = size, first, transform

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        label = index % len(self.classes)
        angle = math.pi * label / len(self.classes)
        rows, columns = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
        phase = 2 * math.pi * torch.rand((), generator=generator)
        stripes = torch.sin(1.5 * (columns * math.cos(angle) + rows * math.sin(angle)) + phase)
        image = (stripes + NOISE * torch.randn((PIXELS, PIXELS), generator=generator))[None]
        return (self.transform(image) if self.transform else image), label


def dataset(train: bool, transform: Callable[[Any], Any] | None, size: int) -> Stripes:
    """Return the training set, or a quarter as many other images to evaluate on."""
    return Stripes(size, first=0, transform=transform) if train else Stripes(size // 4, first=size, transform=transform)
