"""Training whose compute takes time but no core, so that many ranks share a small machine and only the links are real."""

import time
from typing import Any

import torch
from torch import nn

FIXED = 0.03  # seconds of a forward pass, whatever the batch
EACH = 0.00125  # seconds more for each sample of the local batch
FEATURES, CLASSES = 500, 500


class Sleeping(nn.Module):
    """One matrix of 250,000 parameters, 1 MB of gradients, and a forward pass that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, FEATURES) to scores (N, CLASSES)."""
        time.sleep(FIXED + EACH * len(inputs))
        scores: torch.Tensor = self.matrix(inputs)
        return scores


def samples(train: bool, transform: Any) -> torch.utils.data.Dataset[Any]:
    """Return 2048 samples to train on, or 64 to evaluate; `transform` is for images."""
    generator = torch.Generator().manual_seed(int(train))
    size = 2048 if train else 64
    inputs = torch.randn(size, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(CLASSES, (size,), generator=generator))
