"""A network for digits whose computation sleeps, so that four nodes share a small machine and only the network is real."""

import time

import torch
from torch import nn

FIXED_SECONDS = 0.2  # seconds of a training step, independent of the batch
SECONDS_PER_SAMPLE = 0.001  # additional seconds per sample of the local batch
MAX_TIMED_SAMPLES = 512  # maximum samples of a local batch that are counted; a fake-tensor run has more
WIDTH = 3334


class Slept(nn.Module):
    """64 -> WIDTH -> 10, 1 MB of gradients; a training step sleeps as long as a GPU would compute."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, 1, 8, 8) to scores (N, num_classes)."""
        if self.training:
            time.sleep(FIXED_SECONDS + SECONDS_PER_SAMPLE * min(len(inputs), MAX_TIMED_SAMPLES))
        scores: torch.Tensor = self.layers(inputs)
        return scores
