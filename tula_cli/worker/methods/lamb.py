"""Method lamb: each tensor's step is proportional to its norm; replaces Adam or AdamW (You et al. 2020)."""

import torch

from tula_cli.optim.layerwise import Lamb
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Plain


class WithLamb(Plain):
    """The plain large batch with the optimizer Lamb."""

    def instead(self, spec: JobSpec) -> type[torch.optim.Optimizer] | None:
        return Lamb


METHOD = WithLamb()
