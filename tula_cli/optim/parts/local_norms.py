"""Norms of the ranks' own gradients beside those of their average: small and large batch without a second pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from .indicators import norms


@dataclass
class _Bucket:
    params: list[Tensor]
    own: Tensor  # (n,): squared norms of this rank's gradients
    averaged: Tensor | None = None  # the same after the reduction


class NormListener:
    """Listens to a DDP (`reduction.listen`); keeps the squared norms of each gradient before and after the reduction.

    Both are taken before GradScaler unscales the gradients, so that their ratio does not know of the loss scale.

    Args:
        wanted: whether the backward pass that runs now is one to listen to; must not hold the DDP.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._buckets: dict[int, _Bucket] = {}

    def __call__(self, bucket: GradBucket) -> Callable[[], None] | None:
        if not self._wanted() or bucket.buffer().is_sparse:
            return None
        grads = bucket.gradients()
        seen = self._buckets[bucket.index()] = _Bucket(bucket.parameters(), _squares(grads))

        def after() -> None:
            seen.averaged = _squares(grads)

        return after

    def drop(self) -> None:
        """Forget what was seen."""
        self._buckets.clear()

    def take(self) -> tuple[list[Tensor], Tensor, Tensor] | None:
        """Return what was seen since the last call, and forget it; None where there was no reduction.

        One all-reduce of as many numbers as there are tensors, on all ranks alike.

        Returns:
            n parameters, the mean over the ranks of ||g_r||^2 (n,), and ||G||^2 of their average (n,).
        """
        buckets = [self._buckets[index] for index in sorted(self._buckets)]
        self.drop()
        if not buckets:
            return None
        params = [p for bucket in buckets for p in bucket.params]
        device = buckets[0].own.device
        own = torch.cat([bucket.own.to(device) for bucket in buckets])
        averaged = torch.cat([_owned(bucket.averaged).to(device) for bucket in buckets])
        dist.all_reduce(own)
        return params, own / dist.get_world_size(), averaged


def _squares(grads: list[Tensor]) -> Tensor:
    return torch.stack(norms(grads)).square()


def _owned(averaged: Tensor | None) -> Tensor:
    """Tell the allocator that this stream reads what a callback has written in a stream of its own."""
    assert averaged is not None, "DDP ends backward() after its reductions"
    if averaged.is_cuda:
        averaged.record_stream(torch.cuda.current_stream(averaged.device))
    return averaged
