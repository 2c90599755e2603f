"""Method ramp: a batch that grows over the first epochs, with ortho's turned steps where the optimizer is SGD.

The growing batch and the learning rate at each are of the loop (`train.ramp`), for any method; this one has them by default. Of
an optimizer that divides by the gradient's magnitude the step stays, and has no length that a direction could take over.
"""

from collections.abc import Sequence

import torch
from torch import nn

from tula_cli.optim.orthogonal import is_sgd
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.ortho import WithOrtho
from tula_cli.worker.methods.plain import Configuration, Memory
from tula_cli.worker.parallel.wrapping import Parallel


class WithRamp(WithOrtho):
    """Turns the step of each matrix, where SGD makes it."""

    def wrap(
        self, base: torch.optim.Optimizer, parallel: Parallel, configuration: Configuration
    ) -> torch.optim.Optimizer:
        return super().wrap(base, parallel, configuration) if is_sgd(base) else base

    def check(self, spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if is_sgd(optimizer):
            super().check(spec, model, optimizer)

    def memory(self, spec: JobSpec, parameters: Sequence[nn.Parameter], *, several: bool) -> Memory:
        by_sgd = spec.optimizer.name == "SGD" or ":" in spec.optimizer.name  # of a class of the user's own the most
        return super().memory(spec, parameters, several=several) if by_sgd else Memory()


METHOD = WithRamp()
