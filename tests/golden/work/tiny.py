"""Models, data and a metric of the golden jobs: small, without random numbers of their own, and slow in a known way."""

import os
import time
from typing import Any

import torch
from torch import nn


class Blobs(torch.utils.data.Dataset[Any]):
    """Vectors of 16 numbers around the mean of their class, of three.

    Args:
        train: the training set, or the one that is evaluated.
        size: samples of the training set.
        test: a third set, for `tula evaluate`.
    """

    num_classes = 3

    def __init__(self, train: bool, size: int = 96, test: bool = False) -> None:
        generator = torch.Generator().manual_seed(2 if test else int(train))
        count = size if train else 24
        self.labels = (torch.arange(count) % 3).tolist()
        self.samples = torch.randn(count, 16, generator=generator) + torch.eye(3, 16)[self.labels] * 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.samples[index], self.labels[index]


def net(num_classes: int = 3, norm: bool = False) -> nn.Module:
    """Return a network of 139 parameters, or 155 with BatchNorm."""
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(16, 8, bias=False), *middle, nn.ReLU(), nn.Linear(8, num_classes, bias=False))


class Slow(nn.Module):
    """Takes 2 ms a step, 0.1 ms a sample, and 1 ms for each rank beside the first.

    Args:
        num_classes: of the data.
        fits: samples at a time; more of them are out of memory.
        fails_at: the forward pass of training that raises an error; 0 for none.
    """

    def __init__(self, num_classes: int = 3, fits: int = 10**6, fails_at: int = 0) -> None:
        super().__init__()
        self.layers = net(num_classes)
        self.fits, self.fails_at, self.calls = fits, fails_at, 0

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.calls += 1
            if len(x) > self.fits:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
            if self.calls == self.fails_at:
                raise ValueError(f"a label of class 7 among {len(x)} samples")
            time.sleep(0.002 + 0.0001 * len(x) + 0.001 * (int(os.environ.get("WORLD_SIZE", "1")) - 1))
        return self.layers(x)


def confidence(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the mean share that the likeliest class is given."""
    return outputs.softmax(1).amax(1).mean()
