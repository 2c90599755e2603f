"""A job with one rank that computes slowly or waits for data."""

import os
import time
from typing import Any

import torch
from torch import nn

SLOW_RANK = "1"
SLEEP_SECONDS = 0.03


def _sleep_on_slow_rank(kind: str, wanted: str) -> None:
    if kind == wanted and os.environ.get("RANK") == SLOW_RANK:
        time.sleep(SLEEP_SECONDS)


class Model(nn.Module):
    """A linear model; `slow` sleeps in its forward pass on one rank."""

    def __init__(self, slow: str = "") -> None:
        super().__init__()
        self.slow = slow
        self.layer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        _sleep_on_slow_rank(self.slow, "compute")
        return self.layer(x)


class Points(torch.utils.data.Dataset[Any]):
    """Points of two classes; `slow` sleeps once a batch of 16 on one rank."""

    num_classes = 2

    def __init__(self, train: bool, slow: str = "") -> None:
        self.slow = slow
        self.x = torch.randn(512 if train else 64, 8, generator=torch.Generator().manual_seed(int(train)))
        self.y = (self.x.sum(dim=1) > 0).long()
        self.given = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        if self.given % 8 == 0:
            _sleep_on_slow_rank(self.slow, "data")
        return self.x[index], int(self.y[index])
