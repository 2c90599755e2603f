"""An exception that nobody caught becomes a file: which class, on which rank, with its traceback."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Callable

from .plan import Plan, write_json
from .ranks import get_rank

CHILDS_ERRORS = {"subprocess.CalledProcessError"}
"""Errors that launchers raise when a rank has failed, beside all of torch.distributed.elastic."""
LAUNCHERS = "torch.distributed.elastic."
TOLD = "told_by_tula"
"""Attribute of an exception that is written. To keep the exception would keep its frames."""


def listen(plan: Plan, step: Callable[[], int]) -> None:
    """Write failures before the traceback goes where it went before.

    Args:
        plan: whose folder takes them.
        step: steps done.
    """
    before = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        if issubclass(kind, Exception) and not (is_launcher_error(plan.folder, kind) or is_told(value)):
            write_failure(plan, value, step=step(), where="script")
        return before(kind, value, trace)

    sys.excepthook = excepthook


def is_launcher_error(folder: Path, kind: type[BaseException]) -> bool:
    """Return whether this process only tells that one of its children has failed.

    It has no rank of its own then. That of torchrun is told by its class; that of torch.multiprocessing.spawn is the only
    one there is, for the child keeps no hook, unless a rank has told itself.
    """
    if get_rank() is not None:
        return False
    name = get_class_name(kind)
    return name in CHILDS_ERRORS or name.startswith(LAUNCHERS) or any(folder.glob("failure-*.json"))


def is_told(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised for, is written already: as the shim's own."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        if TOLD in vars(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def write_failure(plan: Plan, error: BaseException, *, step: int, where: str) -> None:
    """Write what failed on this rank, in the script or in the shim."""
    rank = get_rank()
    name = str(rank) if rank is not None else f"{socket.gethostname()}-{os.getpid()}"
    content = {
        "version": 1,
        "task": plan.task,
        "attempt": plan.attempt,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "where": where,
        "error": get_class_name(type(error)),
        "text": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "step": step,
        "batch_norm": find_batch_norm(),
        "failed_at": time.time(),
    }
    write_json(plan.folder / f"failure-{name}.json", content)
    vars(error)[TOLD] = True  # a class of the script's may refuse to be set


def find_batch_norm() -> str:
    """Return which BatchNorm this process holds: "batch", "sync" where all take their statistics over the ranks, or "".

    It looks at all objects there are, which takes some 0.1 s: at the end of a process alone.
    """
    norms = sys.modules.get("torch.nn.modules.batchnorm")
    if norms is None:
        return ""
    # By their types: to ask an object of somebody else's what it is may run its code.
    kinds = {kind for kind in map(type, gc.get_objects()) if issubclass(kind, norms._BatchNorm)}
    if not kinds:
        return ""
    return "sync" if all(issubclass(kind, norms.SyncBatchNorm) for kind in kinds) else "batch"


def get_class_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
