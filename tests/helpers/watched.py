"""A training whose ranks poll their steps many times per second, so that changes are reported within seconds.

Importing this module sets the polling interval in the process. Each rank imports it as the user's module. A test copies the
file and never imports it, because the interval would apply to all later tests of the process.
"""

import time
from typing import Any

import torch
from torch import nn

from tula_cli.worker import preemption
from tula_cli.worker.train import training_log

preemption.CHECK_SECONDS = training_log.LOG_SECONDS = 0.2

FEATURES, SIDE = 500, 256


class Loaded(nn.Module):
    """One matrix of 250,000 parameters, 1 MB of gradients, and a forward pass with a given duration.

    Args:
        sleep: seconds per sample without using a core.
        products: number of products of 256 x 256 matrices, which use a core.
    """

    def __init__(self, sleep: float = 0.0, products: int = 0) -> None:
        super().__init__()
        self.sleep, self.products = sleep, products
        self.matrix = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, FEATURES) to scores (N, FEATURES)."""
        time.sleep(self.sleep * min(len(inputs), 64))  # a fake-tensor run has more samples
        square = torch.ones(SIDE, SIDE)
        for _ in range(self.products):
            square = square @ square / SIDE
        scores: torch.Tensor = self.matrix(inputs)
        return scores


def samples(train: bool, transform: Any) -> torch.utils.data.Dataset[Any]:
    """Return 1024 samples to train on, or 64 to evaluate; `transform` is for images."""
    generator = torch.Generator().manual_seed(int(train))
    size = 1024 if train else 64
    inputs = torch.randn(size, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(FEATURES, (size,), generator=generator))
