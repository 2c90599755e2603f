"""Stand-ins for GPUs, and for a GPU out of memory, for scripts whose files are unchanged. Only for this benchmark.

SCRIPTS_STAND_IN   empty: nothing; otherwise "cuda" means the CPU when tensors are created, moved and read, and NCCL means gloo
SCRIPTS_FULL       a file; the first rank that takes a step some seconds after a newer file that matches SCRIPTS_SAVED was
                   written, removes the file and runs out of memory
SCRIPTS_RULER      a file: the cost of the shim is measured (`ruler.py`) in SCRIPTS_PAIRS pairs, and written there
"""

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

SETTLED_SECONDS = 1.0  # seconds


def replace_cuda() -> None:
    """Make a script for CUDA and NCCL use the CPU and gloo."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    def replaced(owner: Any, name: str, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Change the arguments of calls of `owner.name` by `change`."""
        call = getattr(owner, name)

        def instead(*arguments: Any, **named: Any) -> Any:
            return call(*change(arguments, named), **named)

        setattr(owner, name, instead)

    def without_cuda(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        named.update((key, _is_cuda_device(value)) for key, value in list(named.items()))
        return tuple(_is_cuda_device(value) for value in arguments)

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


def _is_cuda_device(value: Any) -> Any:
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def run_out_of_memory_once(mark: Path, saved: str) -> None:
    """Make the first rank that takes a step after a checkpoint run out of memory, once."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(*_: Any) -> None:
        if mark.exists() and _is_written(saved, since=mark.stat().st_mtime):
            try:
                mark.unlink()
            except FileNotFoundError:
                return  # another rank removed it first
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted by the benchmark)")

    register_optimizer_step_pre_hook(look)


def _is_written(pattern: str, *, since: float) -> bool:
    """Return whether a file was written after a time, and has been unchanged for some seconds, so that it is probably complete."""
    times = [path.stat().st_mtime for path in Path("/").glob(pattern.lstrip("/"))]
    return any(since < when < time.time() - SETTLED_SECONDS for when in times)


if "LOCAL_RANK" in os.environ or os.environ.get("TULA_PLAN"):
    launcher = any(
        word in " ".join(sys.orig_argv)
        for word in ("torchrun", "torch.distributed.run", "accelerate launch", "bin/accelerate")
    )
    if not launcher and os.environ.get("SCRIPTS_STAND_IN"):
        replace_cuda()
    if not launcher and os.environ.get("SCRIPTS_FULL"):
        run_out_of_memory_once(Path(os.environ["SCRIPTS_FULL"]), os.environ["SCRIPTS_SAVED"])
    if not launcher and os.environ.get("SCRIPTS_RULER"):
        import_module("torch")  # so that the shim hooks it
        import_module("ruler").Ruler(Path(os.environ["SCRIPTS_RULER"]), int(os.environ["SCRIPTS_PAIRS"]))
