"""A network whose rank 1 runs out of memory in its third step, while rank 0 waits for it in a collective operation."""

import os

import torch
from torch import nn


class Net(nn.Module):
    """One linear layer on the mean of the pixels."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(3, num_classes), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, H, W) to logits (N, num_classes)."""
        self.steps += self.training
        if self.steps == 3 and os.environ.get("RANK") == "1" and os.environ.get("TULA_GPU_SHARED"):
            torch.empty(2**50, dtype=torch.uint8, device=images.device)
        logits: torch.Tensor = self.layer(images.mean(dim=(2, 3)))
        return logits
