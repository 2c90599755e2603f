"""A Python for jobs whose ranks share one device; takes the arguments of `python`.

tula gives each rank its own GPU. To measure how two ranks on one GPU affect each other, this program changes that: in processes of
ranks (`tula_cli.worker` is among the arguments) torch reports two GPUs, all ranks get the first one and communicate by gloo, which
allows this. Everything else is unchanged. Stage ranks starts it by a script `python`, because tula starts processes with
sys.executable.
"""

import os
import runpy
import sys
from typing import Any

DEVICE = "TULA_GPU_SHARED"
"""The environment variable with the device of all ranks."""


def share_device() -> None:
    """Put all ranks of this process on one device, with gloo as backend."""
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
        # Not torch.cuda's function: torch initialises each GPU that it counts there.
        torch.accelerator.device_count = lambda: 2


def main(words: list[str]) -> None:
    """Run `[-u] -m MODULE ...` and `[-u] -c PROGRAM ...` as python does."""
    sys.executable = os.environ[f"{DEVICE}_PYTHON"]
    words = [word for place, word in enumerate(words) if word != "-u" or "-m" in words[:place] or "-c" in words[:place]]
    kind, what, *rest = words
    if "tula_cli.worker" in " ".join(words):
        share_device()
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
