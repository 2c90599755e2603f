"""Method lars: each tensor's step is proportional to its norm; replaces SGD (You et al. 2017)."""

import torch

from tula_cli.optim.layerwise import Lars
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Plain


class WithLars(Plain):
    """The plain large batch with the optimizer Lars."""

    def instead(self, spec: JobSpec) -> type[torch.optim.Optimizer] | None:
        return Lars


METHOD = WithLars()
