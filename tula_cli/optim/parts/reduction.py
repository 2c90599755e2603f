"""The one communication hook of a DistributedDataParallel, shared by all who look at gradients before and after it.

DDP takes one hook and keeps it, hence `reduction(ddp)` registers it once and returns the same object ever after.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

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


def reduction(ddp: DistributedDataParallel) -> Reduction:
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


def listen(ddp: DistributedDataParallel, listener: Listener) -> None:
    """Let a listener see every reduction from now on.

    Raises:
        RuntimeError: the module has a hook of someone else's.
    """
    reduction(ddp).listeners.append(listener)


# DDP reads the annotations, so they must not be strings (no `from __future__ import annotations` here)
def _reduce(state: Reduction, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    gradient = bucket.buffer()
    told = [listener(bucket) for listener in state.listeners]
    after = [call for call in told if call is not None]
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
