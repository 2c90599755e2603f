"""Which rank this process is, of how many. Asked without importing torch, which a loop of one's own need not have."""

from __future__ import annotations

import os
import sys
from typing import Any, Mapping


def process_group() -> Any | None:
    """Return torch.distributed where a process group is initialised, else None."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def backend() -> str:
    """Return what the process group talks through; empty without one."""
    group = process_group()
    return "" if group is None else str(group.get_backend())


def own_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process' rank: of its group, else of RANK or SLURM_PROCID; None where nothing tells it."""
    group = process_group()
    if group is not None:
        return int(group.get_rank())
    for name in ("RANK", "SLURM_PROCID"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def world(*, by_hand: bool = False, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks share a step.

    Without a process group that is 1, whatever WORLD_SIZE says, unless the loop told its steps `by_hand`: it may reduce
    with something else than torch.
    """
    group = process_group()
    if group is not None:
        return int(group.get_world_size())
    size = environment.get("WORLD_SIZE", "")
    return int(size) if by_hand and size.isdigit() else 1
