"""A training whose ranks look at their steps many times a second, so that what changes them is told within seconds.

Importing it sets that pace in the process that trains: the user's own module is imported by every rank. A test copies it
and never imports it: the pace would hold for all tests after it in the process.
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
    """One matrix of 250,000 parameters, 1 MB of gradients, and a forward pass of a given length.

    Args:
        sleep: seconds that a sample takes without a core.
        products: of matrices of 256 x 256, which take one.
    """

    def __init__(self, sleep: float = 0.0, products: int = 0) -> None:
        super().__init__()
        self.sleep, self.products = sleep, products
        self.matrix = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, FEATURES) to scores (N, FEATURES)."""
        time.sleep(self.sleep * min(len(inputs), 64))  # that of a run with fake tensors is larger
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
