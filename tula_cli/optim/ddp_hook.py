"""The communication hook of a DistributedDataParallel model, and the norms of each rank's gradients that it reads."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from .gradient_stats import norms

# --- The hook
#
# DDP takes one hook and keeps it, so `get_reduction(ddp)` registers it once and returns the same object afterwards.
# DDP checks the type hints of its hook: annotations of this module must not be strings (no `from __future__ import annotations`).

Listener = Callable[[GradBucket], Callable[[], None] | None]
"""Called with each bucket before its reduction: this rank's own gradient, accumulated over micro-batches. What it returns
is called when the bucket holds the average. It must not refer to the module, which would never be freed."""


@dataclass(eq=False)
class Reduction:
    """Averages the gradients over all ranks as DDP does without a hook, or leaves each rank its own.

    DDP holds it from C++, and a cycle through that is never collected: it knows nothing of the module.
    """

    group: dist.ProcessGroup
    local: bool = False  # no communication: each rank keeps its own gradient
    listeners: list[Listener] = field(default_factory=list)


_registered: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = weakref.WeakKeyDictionary()


def get_reduction(ddp: DistributedDataParallel) -> Reduction:
    """Return the module's reduction; the first call comes between two backward passes, at best before the first.

    That is what torch's manual asks for; later it is taken too, by torch 2.6 and 2.15, where tests hold what it then sees.

    Raises:
        RuntimeError: the module has a hook of someone else's.
    """
    if ddp not in _registered:
        state = Reduction(ddp.process_group)
        ddp.register_comm_hook(state, _reduce)
        _registered[ddp] = state
    return _registered[ddp]


def add_listener(ddp: DistributedDataParallel, listener: Listener) -> None:
    """Let a listener see every reduction from now on.

    Raises:
        RuntimeError: the module has a hook of someone else's.
    """
    get_reduction(ddp).listeners.append(listener)


# DDP reads the annotations, so they must not be strings (no `from __future__ import annotations` here)
def _reduce(state: Reduction, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    gradient = bucket.buffer()
    finishers = [listener(bucket) for listener in state.listeners]
    after = [call for call in finishers if call is not None]
    if state.local:
        return _done(gradient, after)
    gradient.div_(state.group.size())
    work = dist.all_reduce(gradient, group=state.group, async_op=True)
    assert work is not None

    def reduced(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        total: Tensor = done.value()[0]
        for call in after:
            call()
        return total

    future: torch.futures.Future[Tensor] = work.get_future().then(reduced)
    return future


def _done(gradient: Tensor, after: list[Callable[[], None]]) -> torch.futures.Future[Tensor]:
    for call in after:
        call()
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradient.device] if gradient.is_cuda else None)
    future.set_result(gradient)
    return future


# --- Norms of each rank's gradients


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
        local_squares = torch.cat([bucket.own.to(device) for bucket in buckets])
        averaged = torch.cat([_owned(bucket.averaged).to(device) for bucket in buckets])
        dist.all_reduce(local_squares)
        return params, local_squares / dist.get_world_size(), averaged


def _squares(grads: list[Tensor]) -> Tensor:
    return torch.stack(norms(grads)).square()


def _owned(averaged: Tensor | None) -> Tensor:
    """Tell the allocator that this stream reads what a callback has written in a stream of its own."""
    assert averaged is not None, "DDP finishes its reductions before backward() returns"
    if averaged.is_cuda:
        averaged.record_stream(torch.cuda.current_stream(averaged.device))
    return averaged
