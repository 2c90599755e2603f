"""A model whose compute is slept, so that ranks share a small machine, and only gradients move for real."""

import math
import time
from typing import Any

import torch
from torch import nn

FLOOR = 0.015  # seconds of a step, whatever its batch
STEP = 8  # samples that a step computes at once: its time grows in stairs, with a plateau up to each
EACH = 0.00025  # seconds more for each of these samples
LARGEST = 256  # samples of a local batch; larger ones are only built without data, and wait no longer
BLOCKS = 4
WIDTH = 320  # of the square matrix of each block: 1.6 MB of gradients in all
FEATURES, CLASSES = 64, 10


def compute_seconds(local_batch: int) -> float:
    """Return the seconds of a training step's compute: one third forward, two thirds backward."""
    return FLOOR + EACH * STEP * math.ceil(min(local_batch, LARGEST) / STEP)


class SleepInBackward(torch.autograd.Function):
    """The identity, whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """A matrix whose passes take their share of the model's time."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.matrix.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, WIDTH) to the same shape."""
        if type(inputs) is not torch.Tensor:  # built on fake tensors, for the estimate of memory
            return torch.relu(self.matrix(inputs))
        seconds = compute_seconds(len(inputs)) / BLOCKS
        time.sleep(seconds / 3)
        outputs = torch.relu(self.matrix(inputs))
        return SleepInBackward.apply(outputs, 2 * seconds / 3)  # type: ignore[no-any-return]


class Net(nn.Module):
    """FEATURES -> WIDTH -> BLOCKS blocks -> CLASSES."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, FEATURES) to scores (N, num_classes)."""
        hidden = torch.relu(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.last(hidden)
        return scores


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Random samples of CLASSES classes; the same every time."""

    classes = tuple(range(CLASSES))

    def __init__(self, train: bool, size: int = 4096) -> None:
        size = size if train else size // 16
        generator = torch.Generator().manual_seed(int(train))
        self.inputs = torch.randn(size, FEATURES, generator=generator)
        self.targets = torch.randint(CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.targets[index])
