"""Methods lars and lamb: each tensor's step is proportional to its norm (You et al. 2017, You et al. 2020)."""

import torch

from tula_cli.optim.layerwise import Lamb, Lars
from tula_cli.spec.job import JobSpec
from tula_cli.worker.methods.plain import Plain

LAYERWISE_CLASSES: dict[str, type[torch.optim.Optimizer]] = {"SGD": Lars, "Adam": Lamb, "AdamW": Lamb}
"""The classes by the optimizers that they replace."""


class Layerwise(Plain):
    """The plain large batch with the optimizer Lars or Lamb."""

    def get_replacement_class(self, spec: JobSpec) -> type[torch.optim.Optimizer] | None:
        return LAYERWISE_CLASSES.get(spec.optimizer.name)


METHOD = Layerwise
