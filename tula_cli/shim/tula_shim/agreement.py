"""Numbers that all ranks have to share, through the store in which their process group met.

A reduction of the shim's own would have to fit between those of the script, on its device and its stream; the store is a
key and a value over TCP, beside all that. Rank 0 decides, the others read.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable

from .place import process_group

PATIENCE = timedelta(minutes=10)
"""Rank 0 may evaluate alone meanwhile."""


class NoStoreError(RuntimeError):
    """The ranks have no store to agree through."""


def agree(name: str, decide: Callable[[], str], *, world: int) -> str:
    """Return what rank 0 has decided; every rank asks at the same step.

    Args:
        name: of the question; used once.
        decide: the answer, asked on rank 0 alone.
        world: ranks.

    Raises:
        NoStoreError: there are several ranks and no torch process group with a store.
    """
    if world == 1:
        return decide()
    group = process_group()
    store = _store() if group is not None else None
    if group is None or store is None:
        raise NoStoreError("several ranks without a torch process group cannot agree on a step")
    key = f"tula/{name}"
    if group.get_rank() == 0:
        answer = decide()
        store.set(key, answer)
        return answer
    store.wait([key], PATIENCE)
    found = store.get(key)
    return str(found, "utf-8") if isinstance(found, bytes) else str(found)


def _store() -> Any | None:
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)  # the same from torch 2.0 to 2.15
    return find() if find is not None else None
