"""Python for a job whose ranks share one device: runs what it is asked to run, with `python`'s own arguments.

The product gives each rank a GPU of its own, as it should; a machine of one GPU can show what two ranks do to each other
only where that is undone. Wherever ranks are about to be started (`tula_cli.worker` is among the arguments), they are
told that there are two GPUs, all get the first one, and talk by gloo, which does not mind. Everything else is the
product's own. Started by a script `python` that stage ranks writes, for what tula starts is started by sys.executable.
"""

import os
import runpy
import sys
from typing import Any

DEVICE = "TULA_GPU_SHARED"
"""The environment variable with the device that all ranks get."""


def share() -> None:
    """Let all ranks of this process be on one device, and talk by gloo."""
    import torch
    import torch.distributed as dist

    from tula_cli.worker import ranks as worker_ranks

    device = torch.device(os.environ[DEVICE])
    join = dist.init_process_group

    def gloo(_: Any = None, **options: Any) -> None:
        join("gloo", **{name: value for name, value in options.items() if name != "device_id"})

    worker_ranks.choose_device = lambda *_, **__: device  # type: ignore[attr-defined]
    dist.init_process_group = gloo  # type: ignore[assignment]
    if device.type == "cuda":
        # Not torch.cuda's: torch looks at every GPU that it counts there.
        torch.accelerator.device_count = lambda: 2


def main(words: list[str]) -> None:
    """Do as python does with `[-u] -m MODULE ...` and `[-u] -c PROGRAM ...`."""
    sys.executable = os.environ[f"{DEVICE}_PYTHON"]
    words = [word for place, word in enumerate(words) if word != "-u" or "-m" in words[:place] or "-c" in words[:place]]
    kind, what, *rest = words
    if "tula_cli.worker" in " ".join(words):
        share()
    if kind == "-m":
        sys.argv = [what, *rest]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(sys.argv[1:])
