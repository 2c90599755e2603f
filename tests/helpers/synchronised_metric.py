"""A metric in the style of torchmetrics, which gathers its state over the ranks itself."""

import torch
from torchmetrics import Metric


class Errors(Metric):
    """The share of wrong predictions in percent."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("wrong", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("all", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, scores: torch.Tensor, target: torch.Tensor) -> None:
        self.wrong += (scores.argmax(1) != target).sum()
        self.all += len(target)

    def compute(self) -> torch.Tensor:
        return 100 * self.wrong / self.all
