"""Random images that load slowly, like large images from a busy file system; stage oom trains on them."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

IMAGE_COUNT = 1024


class SlowImages(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images of one size; each takes GPU_IMAGE_SECONDS to load."""

    num_classes = 10

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side
        self.seconds = float(os.environ.get("GPU_IMAGE_SECONDS", "0"))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((3, self.side, self.side), index / self.count), index % 10


def dataset(train: bool, transform: Callable[[Any], Any], count: int = IMAGE_COUNT, side: int = 224) -> SlowImages:  # noqa: ARG001
    """Return one split, whose samples are tensors."""
    return SlowImages(count if train else 32, side)
