"""Method ramp: a batch that grows over the first epochs, with ortho's orthogonalised steps.

The training loop implements the growing batch and the learning rate at each size (`train.ramp`), for any method; this
method enables them by default. Muon, which orthogonalises its steps itself, is not wrapped.
"""

from collections.abc import Sequence

import torch
from torch import nn

from tula_cli.optim.orthogonal import REFUSED_OPTIMIZERS, describe_why_not_orthogonalizable
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.ortho import WithOrtho
from tula_cli.worker.methods.plain import Configuration, Memory
from tula_cli.worker.parallel.sharding import Parallel


class WithRamp(WithOrtho):
    """Orthogonalises the update of each matrix, unless the optimizer already does."""

    def wrap_optimizer(
        self, base: torch.optim.Optimizer, parallel: Parallel, configuration: Configuration
    ) -> torch.optim.Optimizer:
        if describe_why_not_orthogonalizable(base):
            return base
        return super().wrap_optimizer(base, parallel, configuration)

    def check_optimizer(self, spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not describe_why_not_orthogonalizable(optimizer):
            super().check_optimizer(spec, model, optimizer)

    def estimate_memory(self, spec: JobSpec, parameters: Sequence[nn.Parameter], *, several: bool) -> Memory:
        if spec.optimizer.name in REFUSED_OPTIMIZERS:
            return Memory()
        return super().estimate_memory(spec, parameters, several=several)


METHOD = WithRamp
