"""A model whose computation sleeps, so that ranks share a small machine; only the gradients are really reduced."""

import math
import time
from typing import Any

import torch
from torch import nn

FIXED_SECONDS = 0.015  # seconds of a step, independent of the batch
STEP_SAMPLES = 8  # samples that a step computes at once: its time is a step function of the batch, with a plateau up to each multiple
SECONDS_PER_SAMPLE = 0.00025  # additional seconds per such group of samples
MAX_TIMED_SAMPLES = 256  # maximum local batch; larger ones only occur in fake-tensor runs, and sleep no longer
BLOCKS = 4
WIDTH = 320  # of the square matrix of each block: 1.6 MB of gradients in total
FEATURES, CLASSES = 64, 10


def compute_seconds(local_batch: int) -> float:
    """Return the seconds of a training step: one third forward, two thirds backward."""
    return FIXED_SECONDS + SECONDS_PER_SAMPLE * STEP_SAMPLES * math.ceil(
        min(local_batch, MAX_TIMED_SAMPLES) / STEP_SAMPLES
    )


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
    """A matrix whose passes sleep for their share of the model's time."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.matrix.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (N, WIDTH) to the same shape."""
        if type(inputs) is not torch.Tensor:  # fake tensors, for the estimate of memory
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
    """Random samples of CLASSES classes; the same in each process."""

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
