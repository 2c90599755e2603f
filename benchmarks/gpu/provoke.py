"""Provoke one error to record its message: `python -m gpu.provoke KIND`. The program never accesses invalid memory."""

import sys
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from gpu.rig import join_alone
from gpu.watch import NO_ERROR_PREFIX, allocate_until


def exit_without_error(held: "list[torch.Tensor]") -> NoReturn:
    """Report that no error occurred."""
    raise SystemExit(f"{NO_ERROR_PREFIX} {len(held)} blocks held")


def exhaust_allocator() -> None:
    torch.empty(2**50, dtype=torch.uint8, device="cuda")


def exhaust_cublas() -> None:
    """Compute the first matrix product when no memory is left for cuBLAS's handle and workspace."""
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    out = torch.empty(64, 64, device="cuda")
    kept = allocate_until()
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    exit_without_error(kept)


def exhaust_cudnn() -> None:
    """Compute the first convolution, forward and backward, when no memory is left for cuDNN."""
    layer = nn.Conv2d(64, 64, 3, padding=1, device="cuda")
    images = torch.randn(8, 64, 56, 56, device="cuda", requires_grad=True)
    kept = allocate_until(2**23)
    layer(images).sum().backward()
    torch.cuda.synchronize()
    exit_without_error(kept)


def exhaust_nccl() -> None:
    """Join a group when no memory is left for NCCL, which allocates memory when it joins."""
    numbers = torch.ones(1024, device="cuda")
    kept = allocate_until()
    with join_alone("cuda"):
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
    exit_without_error(kept)


def fail_device_assertion() -> None:
    """Look up an index outside of an embedding, so that the assertion of the kernel fails."""
    nn.Embedding(4, 4, device="cuda")(torch.tensor([5], device="cuda"))
    torch.cuda.synchronize()


def share_gpu_in_nccl() -> None:
    """Join an NCCL group as one of two ranks on the same GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def exhaust_host_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def index_out_of_range() -> None:
    nn.Embedding(4, 4)(torch.tensor([5]))


KINDS = {
    "allocator": exhaust_allocator,
    "cublas": exhaust_cublas,
    "cudnn": exhaust_cudnn,
    "nccl": exhaust_nccl,
    "device_assert": fail_device_assertion,
    "duplicate": share_gpu_in_nccl,
    "host_memory": exhaust_host_memory,
    "host_index": index_out_of_range,
}
"""The errors of stage `errors`, which are stored under these names."""

if __name__ == "__main__":
    KINDS[sys.argv[1]]()
