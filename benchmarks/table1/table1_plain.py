"""The small network of the reduced table without BatchNorm; a module of its own, so that either is trained for itself."""

import torch
from torch import nn


class PlainNet(nn.Module):
    """Three 3x3 convolutions (16, 32, 64 channels, strides 1, 2, 2) and a layer of 128: 156k parameters at 16 x 16 pixels.

    As torch initialises layers, which leaves the signal small at first: a learning rate that suits the small batch leaves
    a large one on the plateau it begins on.
    """

    def __init__(self, num_classes: int = 10, size: int = 16) -> None:
        super().__init__()
        widths, layers = (3, 16, 32, 64), list[nn.Module]()
        for place, stride in enumerate((1, 2, 2)):
            layers += [
                nn.Conv2d(widths[place], widths[place + 1], 3, stride=stride, padding=1),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(64 * (size // 4) ** 2, 128),
            nn.ReLU(inplace=True),
            nn.Linear(128, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, size, size) to logits (N, num_classes)."""
        logits: torch.Tensor = self.layers(images)
        return logits
