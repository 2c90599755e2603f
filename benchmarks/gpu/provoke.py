"""Makes one error, for its real words: `python -m gpu.provoke KIND`. Nothing here reads or writes memory it has not."""

import sys
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from gpu.rig import alone
from gpu.watch import RAN, fill


def ran(held: "list[torch.Tensor]") -> NoReturn:
    """Say that there was no error."""
    raise SystemExit(f"{RAN} {len(held)} blocks held")


def allocator() -> None:
    torch.empty(2**50, dtype=torch.uint8, device="cuda")


def cublas() -> None:
    """Make the first matrix product when nothing is left for cuBLAS's handle and workspace."""
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    out = torch.empty(64, 64, device="cuda")
    kept = fill()
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    ran(kept)


def cudnn() -> None:
    """Make the first convolution, forward and backward, when nothing is left for cuDNN."""
    layer = nn.Conv2d(64, 64, 3, padding=1, device="cuda")
    images = torch.randn(8, 64, 56, 56, device="cuda", requires_grad=True)
    kept = fill(2**23)
    layer(images).sum().backward()
    torch.cuda.synchronize()
    ran(kept)


def nccl() -> None:
    """Join a group when nothing is left for NCCL, which takes its memory as it joins."""
    numbers = torch.ones(1024, device="cuda")
    kept = fill()
    with alone("cuda"):
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
    ran(kept)


def device_assert() -> None:
    """Look up an index that an embedding has not: the kernel's own check fails."""
    nn.Embedding(4, 4, device="cuda")(torch.tensor([5], device="cuda"))
    torch.cuda.synchronize()


def duplicate() -> None:
    """Join a group of NCCL as one of two ranks on one GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def host_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def host_index() -> None:
    nn.Embedding(4, 4)(torch.tensor([5]))


KINDS = {
    function.__name__: function
    for function in (allocator, cublas, cudnn, nccl, device_assert, duplicate, host_memory, host_index)
}

if __name__ == "__main__":
    KINDS[sys.argv[1]]()
