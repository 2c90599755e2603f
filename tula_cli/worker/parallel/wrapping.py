"""What the ranks' forward passes go through: DistributedDataParallel, or FSDP2's shares (`train.parallel`)."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tula_cli.spec.sections import Train
from tula_cli.worker.parallel.sharded import Sharded

Parallel = DistributedDataParallel | Sharded
"""The model is its `module`; `no_sync()` keeps the gradients of a backward pass on their ranks, where that saves anything."""


def wrap_model(model: nn.Module, train: Train, device: torch.device) -> Parallel:
    """Wrap a model for training; every rank takes part.

    Args:
        model: the same on all ranks but for its values, which become rank 0's; on the device under ddp.
        train: says how.
        device: of this rank.

    Raises:
        SpecError: it has none of the blocks that `train.fsdp_blocks` names.
    """
    if train.sharded:
        return Sharded(model, blocks=train.fsdp_blocks, device=device)
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
