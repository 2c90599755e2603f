"""Rank and world size of this process, and decisions that all ranks share through the store of their process group."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any, Callable, Mapping


def get_process_group() -> Any | None:
    """Return torch.distributed if a process group is initialised, else None."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def get_backend_name() -> str:
    """Return the backend of the process group; empty without one."""
    group = get_process_group()
    return "" if group is None else str(group.get_backend())


def get_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank of this process: in its group, else from RANK or SLURM_PROCID; None if unknown."""
    group = get_process_group()
    if group is not None:
        return int(group.get_rank())
    for name in ("RANK", "SLURM_PROCID"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def count_ranks(*, by_hand: bool = False, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that share a step.

    Without a process group it is 1, whatever WORLD_SIZE says, unless the loop reports its steps (`by_hand`): it may
    reduce gradients without torch.
    """
    group = get_process_group()
    if group is not None:
        return int(group.get_world_size())
    size = environment.get("WORLD_SIZE", "")
    return int(size) if by_hand and size.isdigit() else 1


# --- Shared decisions

DECISION_TIMEOUT = timedelta(minutes=10)
"""Timeout of the other ranks; rank 0 may evaluate alone meanwhile."""


class NoStoreError(RuntimeError):
    """The ranks have no store through which to share a decision."""


def broadcast_decision(name: str, decide: Callable[[], str], *, world: int) -> str:
    """Broadcast the decision of rank 0 and return it; every rank must call this at the same step.

    Args:
        name: of the decision; used once.
        decide: returns the decision; called on rank 0 alone.

    Raises:
        NoStoreError: there are several ranks and no torch process group with a store.
    """
    if world == 1:
        return decide()
    group = get_process_group()
    store = _get_store() if group is not None else None
    if group is None or store is None:
        raise NoStoreError("the script has several ranks but no torch process group, so they cannot agree on a step")
    key = f"tula/{name}"
    if group.get_rank() == 0:
        answer = decide()
        store.set(key, answer)
        return answer
    store.wait([key], DECISION_TIMEOUT)
    stored = store.get(key)
    return str(stored, "utf-8") if isinstance(stored, bytes) else str(stored)


def _get_store() -> Any | None:
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)  # private, but unchanged from torch 2.0 to 2.15
    return find() if find is not None else None
