"""A model that fails in the middle of a training until a file is there that mends it."""

from pathlib import Path
from typing import Any

import tiny
import torch
from torch import nn


class Net(nn.Module):
    """Raises an error in the tenth forward pass of training, unless there is a file `mended`."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.layers, self.calls = tiny.net(num_classes), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += self.training
        if self.calls == 10 and not Path("mended").exists():
            raise ValueError("the file 'mended' is not there")
        return self.layers(x)
