"""Additional CPU time of the shim per step of a script with a minimal step.

    python benchmarks/overhead/shim_overhead.py [--pairs 100] [--json]

One process per mode of the shim runs steps of one layer with a DataLoader, in pairs of blocks of 50 steps: one block with the hooks,
one with torch's original functions, in a random order. The modes: a probe that times all its steps, a training (one heartbeat per
second, one row per ten seconds), and an observed job. Shown are the CPU time of a step without the hooks, and the median over the
pairs of the additional time with them, with a 90 % interval of that median (order statistics). Pairs are used because other
processes on the machine increase also CPU time, for both blocks of a pair equally.
"""

import argparse
import importlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tula_cli.run.records.scripts import ShimPlan

ROOT = Path(__file__).parents[2]
MODES = ("probe", "train", "observe")
BLOCK_STEPS = 50  # steps


def install_shim(mode: str, folder: str, steps: int) -> Callable[[bool], None]:
    """Install the shim; return a function that enables or disables its hooks."""
    import torch
    from torch.optim.optimizer import _global_optimizer_post_hooks as after_step
    from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

    places: list[tuple[Any, str]] = [(Batches, "__next__"), (torch.autograd, "backward"), (torch.nn.Module, "train")]
    before = [getattr(owner, name) for owner, name in places]
    plan = ShimPlan.model_validate(
        {"task": "overhead", "folder": folder, "mode": mode, "min_steps": 2 * steps, "max_steps": 2 * steps}
    )
    Path(folder, "plan.json").write_text(plan.model_dump_json())
    os.environ["TULA_PLAN"] = str(Path(folder, "plan.json"))
    sys.path.insert(0, str(ROOT / "tula_cli" / "shim"))
    importlib.import_module("tula_shim.install").install()
    hooked = [getattr(owner, name) for owner, name in places]
    hooks = dict(after_step)

    def put(ours: bool) -> None:
        for (owner, name), value in zip(places, hooked if ours else before, strict=True):
            setattr(owner, name, value)
        after_step.clear()
        after_step.update(hooks if ours else {})

    return put


def measure(mode: str, *, pairs: int) -> dict[str, float]:
    """Return CPU seconds per step: `plain`, and the additional time `more` of the hooks, with an interval from `low` to `high`."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    steps = BLOCK_STEPS * 2 * (pairs + 1)
    with tempfile.TemporaryDirectory() as folder:
        put = install_shim(mode, folder, steps)
        network = torch.nn.Linear(32, 32)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        batches = iter(DataLoader(TensorDataset(torch.randn(steps * 4, 32)), 4))

        def block(ours: bool) -> float:
            put(ours)
            began = time.process_time()
            for _ in range(BLOCK_STEPS):
                (x,) = next(batches)
                optimizer.zero_grad()
                network(x).square().mean().backward()
                optimizer.step()
            return (time.process_time() - began) / BLOCK_STEPS

        results = []
        for _ in range(pairs + 1):
            order = random.sample((True, False), 2)
            results.append({ours: block(ours) for ours in order})
    del results[0]  # the first steps allocate and import
    more = sorted(pair[True] - pair[False] for pair in results)
    reach = 1.645 * math.sqrt(pairs) / 2  # the ranks around the median that contain it in 90 % of cases
    low, high = (more[min(pairs - 1, max(0, round(pairs / 2 + side * reach)))] for side in (-1, 1))
    plain = statistics.median(pair[False] for pair in results)
    return {"plain": plain, "more": statistics.median(more), "low": low, "high": high}


def measure_in_process(mode: str, *, pairs: int) -> dict[str, float]:
    """Run `measure` in a separate process and return its result."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, json.dumps(measure(mode, pairs=pairs)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text, f"the process of mode {mode} failed"
    data: dict[str, float] = json.loads(text)
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in ("torch", "torch._dynamo"):  # optimizers import the latter with the first of them
        importlib.import_module(name)
    results = {mode: measure_in_process(mode, pairs=arguments.pairs) for mode in MODES}
    if arguments.json:
        print(json.dumps(results))
        return
    for mode, figures in results.items():
        plain, more, low, high = (figures[name] * 1e6 for name in ("plain", "more", "low", "high"))
        print(f"{mode:6} {more:+6.1f} us of CPU a step ({low:+.1f} to {high:+.1f}) beside {plain:.0f} us")


if __name__ == "__main__":
    main()
