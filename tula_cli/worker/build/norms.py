"""Batch normalisation: layers with running statistics, and ghost batches."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tula_cli.errors import SpecError
from tula_cli.models.out_of_memory import batch_norm_limit
from tula_cli.worker.build.finetune import FrozenStatistics

# --- Ghost batches


class GhostBatchNorm(_BatchNorm):
    """BatchNorm that normalises every `ghost_batch` samples of a batch by their own mean and variance.

    Running statistics take the parts one after the other, as if each were a batch. (The paper's formula for their moving
    average has weights that do not add up to 1; this is the one it describes.) In evaluation it is plain BatchNorm. State
    and parameters are those of the module that it replaces.

    Args:
        norm: the module to take the place of.
        ghost_batch: samples in a part; what is left over at the end of a batch is a smaller one.
    """

    def __init__(self, norm: _BatchNorm, *, ghost_batch: int) -> None:
        super().__init__(
            norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
        )
        self.ghost_batch = ghost_batch
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self._buffers[name] = norm._buffers[name]
        self.train(norm.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Take inputs (N, C, ...) of any number of dimensions."""
        if input.dim() < 2:
            raise ValueError(f"expected an input (N, C, ...), got one of {input.dim()} dimensions")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (N, C, ...) to the same shape."""
        if not self.training or len(input) <= self.ghost_batch:
            return super().forward(input)
        return torch.cat([super(GhostBatchNorm, self).forward(ghost) for ghost in input.split(self.ghost_batch)])

    def extra_repr(self) -> str:
        return f"{_BatchNorm.extra_repr(self)}, ghost_batch={self.ghost_batch}"


def apply_ghost_batch_norm(model: nn.Module, ghost_batch: int) -> None:
    """Replace every BatchNorm of a model, in place, but for frozen ones.

    Raises:
        SpecError: there is none, the model itself is one, or it takes its statistics over all ranks.
    """
    refuse_without_batch_norm(model, ghost_batch)
    ghosts: dict[nn.Module, nn.Module] = {}  # a module may stand in several places
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, _BatchNorm) and not isinstance(child, FrozenStatistics):
                ghosts.setdefault(child, GhostBatchNorm(child, ghost_batch=ghost_batch))
                setattr(parent, name, ghosts[child])


def refuse_without_batch_norm(model: nn.Module, ghost_batch: int) -> None:
    """Raise SpecError where there is nothing to replace."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module is not model]
    if any(isinstance(module, nn.SyncBatchNorm) for module in norms):
        raise SpecError(
            f"train.ghost_batch {ghost_batch}: SyncBatchNorm takes its statistics over all GPUs, ghost batches over a part"
            " of one"
        )
    if all(isinstance(module, FrozenStatistics) for module in norms):
        raise SpecError(
            f"train.ghost_batch {ghost_batch}: the model has no BatchNorm that is trained",
            "leave train.ghost_batch out",
        )


def check_ghost_batch(ghost_batch: int, *, micro_batch: int) -> None:
    """Refuse a micro-batch that has a rest; one that is smaller than a ghost batch is taken whole.

    Raises:
        SpecError: it does not divide.
    """
    if micro_batch > ghost_batch and micro_batch % ghost_batch:
        raise SpecError(
            f"train.ghost_batch {ghost_batch} does not divide the {micro_batch} samples that a GPU takes at a time",
            "use a power of two, or another batch",
        )


def check_small_batch(ghost_batch: int, *, shares: Iterable[int]) -> None:
    """Refuse a small batch of which a GPU would normalise one sample alone; a rest of more is a smaller ghost batch.

    Args:
        ghost_batch: samples in a part.
        shares: samples of the small batch that each GPU takes; what is not above a ghost batch is taken whole.

    Raises:
        SpecError: one sample is left over.
    """
    for share in shares:
        if share > ghost_batch and share % ghost_batch == 1:
            raise SpecError(
                f"train.ghost_batch {ghost_batch} leaves 1 sample over of the {share} that a GPU takes of AGS's small batch",
                f"let ags.b_small be a multiple of train.ghost_batch, for example {ghost_batch * (share // ghost_batch)}"
                " for each GPU",
            )


# --- Layers


def count_statistics_batches(model: nn.Module, *, world: int) -> int:
    """Return the micro-batches that statistics are taken over: 1, of SyncBatchNorm alone one of each rank, 0 without either.

    Ghost batches stay what they are in smaller micro-batches.
    """
    norms = batch_norms_of(model)
    if all(isinstance(module, GhostBatchNorm) for module in norms):
        return 0
    return world if all(isinstance(module, nn.SyncBatchNorm) for module in norms) else 1


def micro_batch_limits(model: nn.Module, *, world: int) -> list[tuple[Callable[[int], bool], str]]:
    """Return what a micro-batch has to fulfil for each kind of BatchNorm in the model, and why."""
    norms = batch_norms_of(model)
    ghosts = {norm.ghost_batch for norm in norms if isinstance(norm, GhostBatchNorm)}
    ranks = {
        world if isinstance(norm, nn.SyncBatchNorm) else 1 for norm in norms if not isinstance(norm, GhostBatchNorm)
    }
    return [batch_norm_limit(ghost=ghost) for ghost in ghosts] + [batch_norm_limit(ranks=over) for over in ranks]


def batch_norms_of(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that take statistics of a batch, as frozen ones do not."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [module for module in norms if not isinstance(module, FrozenStatistics)]
