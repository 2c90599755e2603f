"""The communication hook of a DistributedDataParallel model, and the norms of single ranks' gradients that it records."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from .gradient_stats import compute_norms

# --- The hook
#
# A DDP has one hook for good, so `get_or_register_reduction_hook` registers it once.
# DDP checks the type hints of its hook: annotations of this module must not be strings (no `from __future__ import annotations`).

Listener = Callable[[GradBucket], Callable[[], None] | None]
"""Called with each bucket before its reduction, when it holds the gradient of this rank over all micro-batches. The function
that it returns is called when the bucket holds the average. It must not refer to the module, which would never be freed."""


@dataclass(eq=False)
class ReductionHook:
    """Averages the gradients over all ranks, as DDP does without a hook, or leaves them unaveraged.

    It does not refer to the module: DDP refers to it from C++, and a cycle through C++ is never collected.
    """

    group: dist.ProcessGroup
    local: bool = False  # whether each rank keeps its gradient, without communication
    listeners: list[Listener] = field(default_factory=list)


_registered: weakref.WeakKeyDictionary[DistributedDataParallel, ReductionHook] = weakref.WeakKeyDictionary()


def get_or_register_reduction_hook(ddp: DistributedDataParallel) -> ReductionHook:
    """Return the DDP module's `ReductionHook`; the first call registers it as communication hook.

    Make the first call between two backward passes, ideally before the first one: torch's manual asks for that; torch
    2.6 to 2.15 accept a later call.

    Raises:
        RuntimeError: the module already has another hook.
    """
    if ddp not in _registered:
        state = ReductionHook(ddp.process_group)
        ddp.register_comm_hook(state, _reduce_bucket)
        _registered[ddp] = state
    return _registered[ddp]


def add_listener(ddp: DistributedDataParallel, listener: Listener) -> None:
    """Call a listener at every reduction from now on.

    Raises:
        RuntimeError: the module already has another hook.
    """
    get_or_register_reduction_hook(ddp).listeners.append(listener)


def _reduce_bucket(state: ReductionHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    gradient = bucket.buffer()
    finishers = [listener(bucket) for listener in state.listeners]
    after = [call for call in finishers if call is not None]
    if state.local:
        return _finish_reduction(gradient, after)
    gradient.div_(state.group.size())
    work = dist.all_reduce(gradient, group=state.group, async_op=True)
    assert work is not None

    def finish_bucket(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        total: Tensor = done.value()[0]
        for call in after:
            call()
        return total

    future: torch.futures.Future[Tensor] = work.get_future().then(finish_bucket)
    return future


def _finish_reduction(gradient: Tensor, after: list[Callable[[], None]]) -> torch.futures.Future[Tensor]:
    for call in after:
        call()
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradient.device] if gradient.is_cuda else None)
    future.set_result(gradient)
    return future


# --- Norms of each rank's gradients


@dataclass
class _PendingBucketNorms:
    params: list[Tensor]
    local: Tensor  # (n,): squared norms of this rank's gradients
    averaged: Tensor | None = None  # the same after the reduction


class NormListener:
    """A listener (`add_listener`) that records the squared norm of each gradient before and after the reduction.

    Both norms include the loss scale of GradScaler, so it cancels in their ratio.

    Args:
        is_wanted: returns whether to record the current backward pass; must not refer to the DDP.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._wanted = is_wanted
        self._buckets: dict[int, _PendingBucketNorms] = {}

    def __call__(self, bucket: GradBucket) -> Callable[[], None] | None:
        if not self._wanted() or bucket.buffer().is_sparse:
            return None
        grads = bucket.gradients()
        seen = self._buckets[bucket.index()] = _PendingBucketNorms(bucket.parameters(), _compute_squared_norms(grads))

        def record_averaged_norms() -> None:
            seen.averaged = _compute_squared_norms(grads)

        return record_averaged_norms

    def clear(self) -> None:
        """Drop the recorded norms."""
        self._buckets.clear()

    def pop_norms(self) -> tuple[list[Tensor], Tensor, Tensor] | None:
        """Return the norms recorded since the last call, and drop them; None if there was no reduction.

        It makes one all-reduce of a number per tensor; every rank must call it.

        Returns:
            n parameters, the mean over the ranks of ||g_r||^2 (n,), and ||G||^2 of their average (n,).
        """
        buckets = [self._buckets[index] for index in sorted(self._buckets)]
        self.clear()
        if not buckets:
            return None
        params = [p for bucket in buckets for p in bucket.params]
        device = buckets[0].local.device
        local_squares = torch.cat([bucket.local.to(device) for bucket in buckets])
        averaged = torch.cat([_record_stream(bucket.averaged).to(device) for bucket in buckets])
        dist.all_reduce(local_squares)
        return params, local_squares / dist.get_world_size(), averaged


def _compute_squared_norms(grads: list[Tensor]) -> Tensor:
    return torch.stack(compute_norms(grads)).square()


def _record_stream(averaged: Tensor | None) -> Tensor:
    """Mark a tensor that a callback has written in another stream as used by the current stream."""
    assert averaged is not None, "DDP finishes its reductions before backward() returns"
    if averaged.is_cuda:
        averaged.record_stream(torch.cuda.current_stream(averaged.device))
    return averaged
