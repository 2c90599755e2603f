"""Training whose compute takes time but no core, so that many ranks share a small machine and only the links are real."""

import time
from typing import Any

import torch
from torch import nn

FIXED = 0.09  # seconds of a forward pass, whatever the batch
EACH = 0.00375  # seconds more for each sample of the local batch
MOST = 256  # samples of a local batch; that of a run with fake tensors is larger, and waits for no more
FEATURES, CLASSES = 500, 500


class Sleeping(nn.Module):
    """One matrix of 250,000 parameters, 1 MB of gradients, and a forward pass that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, FEATURES) to scores (N, CLASSES)."""
        time.sleep(FIXED + EACH * min(len(inputs), MOST))
        scores: torch.Tensor = self.matrix(inputs)
        return scores


class Waiting(nn.Module):
    """One matrix for 8 x 8 images, and forward passes that sleep: a training lasts, whatever it meets meanwhile."""

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
