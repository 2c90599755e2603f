"""Trainings whose computation sleeps instead of using a core, so that many ranks share a small machine over real network links."""

import time
from typing import Any

import torch
from torch import nn

FIXED_SECONDS = 0.09  # seconds of a forward pass, independent of the batch
SECONDS_PER_SAMPLE = 0.00375  # seconds per sample of the local batch
MAX_TIMED_SAMPLES = 256  # samples of a local batch that cost time; a fake-tensor run has more samples
FEATURES, CLASSES = 500, 500


class Sleeping(nn.Module):
    """One matrix of 250,000 parameters, 1 MB of gradients, and a forward pass that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, FEATURES) to scores (N, CLASSES)."""
        time.sleep(FIXED_SECONDS + SECONDS_PER_SAMPLE * min(len(inputs), MAX_TIMED_SAMPLES))
        scores: torch.Tensor = self.matrix(inputs)
        return scores


class Waiting(nn.Module):
    """One matrix for 8 x 8 images whose forward passes sleep, so that a training lasts long enough for a test to disturb it."""

    def __init__(self, num_classes: int, pause: float) -> None:
        super().__init__()
        self.pause = pause  # seconds
        self.matrix = nn.Linear(64, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, 1, 8, 8) to scores (N, num_classes)."""
        time.sleep(self.pause)
        scores: torch.Tensor = self.matrix(inputs.flatten(1))
        return scores


def samples(train: bool, transform: Any) -> torch.utils.data.Dataset[Any]:
    """Return 2048 samples to train on, or 64 to evaluate; `transform` is for images."""
    generator = torch.Generator().manual_seed(int(train))
    size = 2048 if train else 64
    inputs = torch.randn(size, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(CLASSES, (size,), generator=generator))
