"""The BatchNorm layers of a model, and the micro-batch sizes that their statistics require."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tula_cli.models.out_of_memory import make_batch_norm_limit
from tula_cli.worker.build.parameter_groups import FrozenStatistics


def count_batch_norm_micro_batches(model: nn.Module, *, world: int) -> int:
    """Return the micro-batches that statistics cover: one per rank if all layers are SyncBatchNorm, else 1; 0 without
    any."""
    norms = list_batch_norms(model)
    if not norms:
        return 0
    return world if all(isinstance(module, nn.SyncBatchNorm) for module in norms) else 1


def list_micro_batch_limits(model: nn.Module, *, world: int) -> list[tuple[Callable[[int], bool], str]]:
    """Return, for each kind of BatchNorm in the model, the condition that a micro-batch must meet, and its reason."""
    norms = list_batch_norms(model)
    return [
        make_batch_norm_limit(ranks=ranks)
        for ranks in {world if isinstance(norm, nn.SyncBatchNorm) else 1 for norm in norms}
    ]


def list_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that compute batch statistics; frozen ones do not."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [module for module in norms if not isinstance(module, FrozenStatistics)]
