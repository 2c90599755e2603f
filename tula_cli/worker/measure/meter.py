"""The memory of a step by component, and the memory capacity of a rank."""

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tula_cli.optim.sharding import is_sharded
from tula_cli.run.records.probes import Components
from tula_cli.worker.device import count_tensor_bytes, get_gpu_memory
from tula_cli.worker.ranks import Ranks


def split_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch: int,
    factors: int,
    peak: int,
    reserved: int,
    libraries: int = 0,
    accumulate: int = 1,
) -> Components:
    """Split a peak into components as in Eq. 3: tensors are counted, activations are the rest. Bytes.

    The gradients are DDP's buckets (`gradient_as_bucket_view`). With several micro-batches per step, the accumulated
    sum is held in addition until the last micro-batch is reduced: a second copy. For a sharded model the gradient is
    this rank's shard, and each micro-batch is reduced by itself.
    """
    parameters = count_tensor_bytes([*model.parameters(), *model.buffers()])
    gradients = count_tensor_bytes(p.grad if p.grad is not None else p for p in model.parameters() if p.requires_grad)
    gradients *= 1 if is_sharded(model) else min(2, accumulate)
    state = count_tensor_bytes(tree_leaves(list(optimizer.state.values())))
    return Components(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        factors=factors,
        batch=batch,
        activations=max(0, peak - parameters - gradients - state - factors - batch),
        peak=peak,
        reserved=reserved,
        libraries=libraries,
    )


def get_memory_capacity(ranks: Ranks, memory_per_gpu: int | None) -> int | None:
    """Return the bytes that one rank may use: the configured limit, else the GPU's memory; None on an unlimited CPU."""
    if memory_per_gpu is not None:
        return memory_per_gpu
    if ranks.device.type == "cuda":
        return get_gpu_memory(ranks.device)
    return None
