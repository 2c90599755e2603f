"""Method ortho: each matrix's update, with its norm kept, in the nearest orthogonal direction (as in Muon)."""

from collections.abc import Sequence

import torch
from torch import nn

from tula_cli.errors import SpecError
from tula_cli.optim.orthogonal import Ortho
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Configuration, Loop, Memory, Plain
from tula_cli.worker.parallel.sharding import Parallel


class WithOrtho(Plain):
    """Orthogonalises the update of each matrix."""

    def wrap_optimizer(
        self, base: torch.optim.Optimizer, parallel: Parallel, configuration: Configuration
    ) -> torch.optim.Optimizer:
        return Ortho(base, model=parallel, max_grad_norm=configuration.spec.train.max_grad_norm)

    def check_optimizer(self, spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            Ortho(optimizer, model=model)
        except ValueError as error:
            hint = "set optimizer.name: AdamW or SGD, or another train.method"
            raise SpecError(f"train.method {spec.train.method}: {error}", hint) from error

    def estimate_memory(self, spec: JobSpec, parameters: Sequence[nn.Parameter], *, several: bool) -> Memory:
        return Memory(before=[p for p in parameters if p.ndim > 1])

    def get_local_optimizer(self, loop: Loop) -> torch.optim.Optimizer:
        # orthogonalising a step is local work, unless the ranks have to gather the updates for it
        return loop.base if loop.parallel.needs_all_ranks else loop.optimizer


METHOD = WithOrtho
