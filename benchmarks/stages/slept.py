"""Digits for a network whose compute takes time but no core: four nodes share a small machine, and only their links are real."""

import time

import torch
from torch import nn

FIXED = 0.2  # seconds of a training step, whatever its batch
EACH = 0.001  # seconds more for each sample of the local batch
MOST = 512  # samples of a local batch; what is rehearsed without data waits for no more
WIDTH = 3334


class Slept(nn.Module):
    """64 -> WIDTH -> 10, 1 MB of gradients; a training step sleeps as long as a GPU would compute."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, 1, 8, 8) to scores (N, num_classes)."""
        if self.training:
            time.sleep(FIXED + EACH * min(len(inputs), MOST))
        scores: torch.Tensor = self.layers(inputs)
        return scores
