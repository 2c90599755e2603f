"""What stands in for GPUs, and for a GPU that is full, around a script whose files are left alone. For the benchmark only.

SCRIPTS_STAND_IN   empty: nothing; otherwise "cuda" is the CPU where tensors are made, moved and read, and NCCL is gloo
SCRIPTS_FULL       a file; the first rank to take a step some seconds after a newer file that SCRIPTS_SAVED matches was
                   written removes it and runs out of memory
SCRIPTS_RULER      a file: what the shim adds to a step is measured (`ruler.py`) in SCRIPTS_PAIRS pairs, and written there
"""

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

SETTLED = 1.0  # seconds


def stand_in() -> None:
    """Let a script that was written for CUDA and NCCL meet the CPU and gloo."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    def replaced(owner: Any, name: str, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Let a call of `owner.name` have what `change` makes of its arguments."""
        call = getattr(owner, name)

        def instead(*arguments: Any, **named: Any) -> Any:
            return call(*change(arguments, named), **named)

        setattr(owner, name, instead)

    def without_cuda(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        named.update((key, _elsewhere(value)) for key, value in list(named.items()))
        return tuple(_elsewhere(value) for value in arguments)

    def with_gloo(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        named.pop("device_id", None)
        named["backend"] = "gloo"
        return arguments[1:] if arguments else ()

    def on_the_cpu(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        named.update(device_ids=None, output_device=None)
        return arguments[:2]

    for owner, name in ((torch, "tensor"), (torch, "load"), (torch.Tensor, "to"), (torch.nn.Module, "to")):
        replaced(owner, name, without_cuda)
    replaced(distributed, "init_process_group", with_gloo)
    replaced(DistributedDataParallel, "__init__", on_the_cpu)
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _elsewhere(value: Any) -> Any:
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def full_device(mark: Path, saved: str) -> None:
    """Let the first rank that takes a step after a checkpoint run out of memory, once."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(*_: Any) -> None:
        if mark.exists() and _settled(saved, since=mark.stat().st_mtime):
            try:
                mark.unlink()
            except FileNotFoundError:
                return  # another rank was first
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted by the benchmark)")

    register_optimizer_step_pre_hook(look)


def _settled(pattern: str, *, since: float) -> bool:
    """Return whether a file was written since a time, some seconds ago: to its end, as far as one can tell."""
    times = [path.stat().st_mtime for path in Path("/").glob(pattern.lstrip("/"))]
    return any(since < when < time.time() - SETTLED for when in times)


if "LOCAL_RANK" in os.environ or os.environ.get("TULA_PLAN"):
    launcher = any(
        word in " ".join(sys.orig_argv)
        for word in ("torchrun", "torch.distributed.run", "accelerate launch", "bin/accelerate")
    )
    if not launcher and os.environ.get("SCRIPTS_STAND_IN"):
        stand_in()
    if not launcher and os.environ.get("SCRIPTS_FULL"):
        full_device(Path(os.environ["SCRIPTS_FULL"]), os.environ["SCRIPTS_SAVED"])
    if not launcher and os.environ.get("SCRIPTS_RULER"):
        import_module("torch")  # upon which the shim hooks it
        import_module("ruler").Ruler(Path(os.environ["SCRIPTS_RULER"]), int(os.environ["SCRIPTS_PAIRS"]))
