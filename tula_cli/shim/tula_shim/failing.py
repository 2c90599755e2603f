"""Writes an uncaught exception to a file: its class, its rank and its traceback."""

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

LAUNCHER_EXCEPTIONS = {"subprocess.CalledProcessError"}
"""Errors that launchers raise when a rank has failed, in addition to all of torch.distributed.elastic."""
TORCH_ELASTIC_PREFIX = "torch.distributed.elastic."
REPORTED_ATTRIBUTE = "reported_by_tula"
"""Attribute that marks an exception as written. Keeping the exception itself would keep its frames."""


def install_excepthook(plan: Plan, step: Callable[[], int]) -> None:
    """Install an excepthook that writes the failure with the completed `step`, then calls the previous hook."""
    before = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        unknown = issubclass(kind, Exception) and not (is_launcher_error(plan.folder, kind) or is_reported(value))
        if unknown and not plan.is_observing:
            write_failure(plan, value, step=step(), where="script")
        return before(kind, value, trace)

    sys.excepthook = excepthook


def is_launcher_error(folder: Path, kind: type[BaseException]) -> bool:
    """Return whether the exception only reports that a child of this process has failed.

    Such a process has no rank. torchrun's exception is recognised by its class. That of torch.multiprocessing.spawn is
    the only report of a failure, because the child keeps no excepthook, unless a rank has written a failure.
    """
    if get_rank() is not None:
        return False
    name = get_class_name(kind)
    return name in LAUNCHER_EXCEPTIONS or name.startswith(TORCH_ELASTIC_PREFIX) or any(folder.glob("failure-*.json"))


def is_reported(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes or contexts, has already been written."""
    seen: set[int] = set()  # guards against cycles of causes
    while error is not None and id(error) not in seen:
        if REPORTED_ATTRIBUTE in vars(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def write_failure(plan: Plan, error: BaseException, *, step: int, where: str) -> None:
    """Write a failure of this rank, in the script or in the shim."""
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
        "message": str(error),
        "text": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "step": step,
        "batch_norm": find_batch_norm(),
        "failed_at": time.time(),
    }
    write_json(plan.folder / f"failure-{name}.json", content)
    vars(error)[REPORTED_ATTRIBUTE] = True  # through vars, because the script's class may override __setattr__


def find_batch_norm() -> str:
    """Return which BatchNorm this process holds: "batch", "sync" if all compute their statistics over the ranks, or "".

    It inspects all objects of the process, which takes about 0.1 s; to be called only when the process fails.
    """
    norms = sys.modules.get("torch.nn.modules.batchnorm")
    if norms is None:
        return ""
    # By type(), because isinstance may run code of the object (__class__).
    kinds = {kind for kind in map(type, gc.get_objects()) if issubclass(kind, norms._BatchNorm)}
    if not kinds:
        return ""
    return "sync" if all(issubclass(kind, norms.SyncBatchNorm) for kind in kinds) else "batch"


def get_class_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
