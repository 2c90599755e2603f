"""What takes a GPU's memory beside tensors: libraries' workspaces, connections, DDP's buckets."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from tula_cli.spec.job import JobSpec
from tula_cli.worker.device import tensor_bytes

MIB = 2**20
FIRST_BUCKET, BUCKET = MIB, 25 * MIB
"""Where DDP closes a bucket, by default; the first one is small so that reducing starts early."""

CUDA_CONTEXT = 450 * MIB
"""The driver's context and the kernels that are loaded as they are used (CUDA_MODULE_LOADING=LAZY, the default since
CUDA 12.2): 300 to 550 MiB by driver and architecture."""
CUBLAS_WORKSPACES = 2 * 32 * MIB
"""One a thread that calls cuBLAS, forward and backward: 32 MiB on Hopper, 8.1 MiB before (CUBLAS_WORKSPACE_CONFIG)."""
CUDNN_WORKSPACE = 128 * MIB
"""What cuDNN's chosen algorithms take at a time; from nothing to some hundred MiB by layer and batch."""
NCCL_CONNECTION = 10 * MIB
"""Buffers of one channel to one peer: 4 MiB (NCCL_BUFFSIZE), 4.7 MiB for LL128 and 0.5 MiB for LL, in pieces of 2 MiB."""
NCCL_CHANNELS = {"one GPU a node": 2, "several": 24}
"""Over Ethernet or one InfiniBand card, and over the NVLink of an A100."""
NCCL_PEERS = 3  # a ring's and a tree's connections, on average


def ddp_buckets(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    """Return each parameter's gradient as a view of its DDP bucket.

    tula wraps with `gradient_as_bucket_view`: the buckets are the only copy of the gradients. (Without it there would be
    a second one.) DDP fills them from the last parameter on and closes one when it has reached its size.
    """
    views: dict[nn.Parameter, torch.Tensor] = {}
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        alike = [p for p in reversed(parameters) if p.dtype == dtype]
        for members in _group_into_buckets(alike):
            flat = torch.empty(sum(p.numel() for p in members), dtype=dtype)
            views.update(zip(members, split_flat(flat, members), strict=True))
    return views


def split_flat(flat: torch.Tensor, members: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a flat tensor's pieces in the shapes of its members (`split` and `view` are slow on fake tensors)."""
    offset = 0
    for member in members:
        yield flat.as_strided(member.shape, member.stride(), offset)
        offset += member.numel()


def _group_into_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters bucket by bucket."""
    bucket: list[nn.Parameter] = []
    limit = FIRST_BUCKET
    for parameter in parameters:
        bucket.append(parameter)
        if tensor_bytes(bucket) >= limit:
            yield bucket
            bucket, limit = [], BUCKET
    if bucket:
        yield bucket


def estimate_library_bytes(spec: JobSpec) -> int:
    """Return what libraries hold of a GPU beside the tensors, by rule of thumb: probes measure it. Bytes.

    The CUDA context, the workspaces of cuBLAS and cuDNN, and NCCL's buffers: a connection's, times channels and peers.
    """
    nodes, gpus = max(spec.search.nodes), spec.cluster.gpus_per_node
    channels = 0 if nodes * gpus == 1 else NCCL_CHANNELS["several" if gpus > 1 else "one GPU a node"]
    return CUDA_CONTEXT + CUBLAS_WORKSPACES + CUDNN_WORKSPACE + channels * NCCL_PEERS * NCCL_CONNECTION
