"""CPU time per step of the same ResNet as a script under the shim, compared with tula's training loop.

    python benchmarks/overhead/script_way.py [--pairs 60] [--batch 32] [--side 32] [--fused] [--json]

One process, one rank, no data-loader processes, one thread. The script is the unchanged tests/scripts/resnet.py under the shim in
training mode; tula's training loop has the same network, data, batch and optimizer. Each step of the script is followed by one of
the loop without the shim's hooks, so that other load of the machine affects both equally. Shown is the median over the pairs of the
additional time of the script's step, with a 90 % interval (order statistics). `--fused` adds to the script two settings of torch
that tula's loop has and few scripts have: a fused optimizer, and gradients that are views of DDP's buckets.
"""

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
SCRIPT = BENCHMARKS.parent / "tests" / "scripts" / "resnet.py"
sys.path += [str(path) for path in (BENCHMARKS, BENCHMARKS / "script_cases" / "stand_in", SCRIPT.parent)]

from script_cases.step_cost import summarise_pairs  # noqa: E402

from tula_cli.run.records.scripts import ShimPlan  # noqa: E402
from tula_cli.spec.job import JobSpec  # noqa: E402

SHIM = BENCHMARKS.parent / "tula_cli" / "shim"
WARM_UP_STEPS = 4  # first steps of each that are not counted
EPOCHS = 10_000


class EnoughPairs(Exception):
    """Raised when the requested number of pairs is measured."""


def make_job(*, batch: int, side: int) -> JobSpec:
    """Return the job of tula's training loop that corresponds to the script."""
    return JobSpec.model_validate(
        {
            "name": "own",
            "model": {"name": "resnet18"},
            "dataset": {"name": "resnet:noise", "args": {"side": side}},
            "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
            "train": {"epochs": EPOCHS, "reference_batch": batch, "workers": 0},
            "search": {"nodes": [1], "min_batch": 1},
            "cluster": {"kind": "local", "device": "cpu"},
        }
    )


def install_shim(folder: str) -> None:
    """Install the shim, as its sitecustomize does after `import torch`."""
    plan = ShimPlan(task="script-way", folder=folder, mode="train")
    Path(folder, "plan.json").write_text(plan.model_dump_json())
    os.environ["TULA_PLAN"] = str(Path(folder, "plan.json"))
    sys.path.insert(0, str(SHIM))
    import_module("tula_shim.install").install()


def measure(*, pairs: int, batch: int, side: int, fused: bool) -> dict[str, Any]:
    """Return CPU milliseconds per step of tula's loop, and the additional time of the script's step in percent."""
    import torch
    from gpu import rig
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tula_cli.worker.train import loop as worker_train_loop

    torch.set_num_threads(1)
    result: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder, rig.join_alone("cpu") as me:
        steps = worker_train_loop.run_steps(rig.build_trainer(make_job(batch=batch, side=side), me, batch=batch))
        install_shim(folder)
        switch, busy, began = import_module("ruler").Switch(), False, time.process_time()

        def stepped(*_: object) -> None:
            nonlocal busy, began
            if busy:  # the optimizer of tula's training loop
                return
            script = time.process_time() - began
            switch.put(False)
            busy, began = True, time.process_time()
            next(steps)
            result.append([time.process_time() - began, script])
            busy = False
            if len(result) == pairs + WARM_UP_STEPS:
                raise EnoughPairs
            switch.put(True)
            began = time.process_time()

        register_optimizer_step_post_hook(stepped)
        sys.argv = [str(SCRIPT), "--local-batch", str(batch), "--epochs", str(EPOCHS), "--side", str(side)]
        sys.argv += ["--fused"] if fused else []
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except EnoughPairs:
            steps.close()
    return summarise_pairs(result[WARM_UP_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(pairs=arguments.pairs, batch=arguments.batch, side=arguments.side, fused=arguments.fused)
    if arguments.json:
        print(json.dumps(result))
        return
    percent, low, high = (result[name] for name in ("percent", "low_percent", "high_percent"))
    print(
        f"script {percent:+.2f} % ({low:+.2f} to {high:+.2f}) beside {result['step_cpu_ms']:.0f} ms in tula's own loop"
    )


if __name__ == "__main__":
    main()
