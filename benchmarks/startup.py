"""What starting costs on a SLURM cluster: from the submission to the first training step, for both launchers.

    python benchmarks/startup.py [--nodes 1 2 4] [--repeat 3] [--set cluster.slurm.partition=...] [--json]

Run it where sbatch is found and in a folder that all nodes share. For each number of nodes it submits, one after the
other in turn, so that slow minutes of a shared machine meet all of them: `srun python` that does nothing, `srun python`
that imports torch and torchvision, and a tula training by srun and by torchrun. Medians in seconds; `ratio` is tula over
the bare import.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tula_cli.rundir import RunDir

JOB = """
name: startup
model: {name: small_cnn, args: {in_channels: 1, width: 8}}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05}
train: {epochs: 1, workers: 0}
search: {nodes: [1], max_node_hours: 1}
cluster: {kind: slurm, device: auto, slurm: {minutes: 10}}
"""
T = TypeVar("T")
PATIENCE = 600.0  # seconds


def bare(nodes: int, code: str, folder: Path) -> float:
    """Return the seconds from sbatch to the last rank that has run some Python code."""
    marks = folder / f"marks-{time.time_ns()}"
    marks.mkdir()
    program = f"{code}; import os, time; open('{marks}/' + os.environ['SLURM_PROCID'], 'w').write(str(time.time()))"
    script = f'#!/bin/bash\nsrun {sys.executable} -c "{program}"\n'
    began = time.time()
    options = [f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive", "--time=5", "--output=/dev/null"]
    subprocess.run(["sbatch", *options], input=script, text=True, check=True, capture_output=True)
    _await(lambda: len([mark for mark in marks.iterdir() if mark.read_text()]) == nodes)
    return max(float(mark.read_text()) for mark in marks.iterdir()) - began


def tula(nodes: int, launcher: str, folder: Path, settings: list[str]) -> float:
    """Return the seconds from the submission of a training to its first step."""
    work = folder / f"tula-{time.time_ns()}"
    work.mkdir()
    (work / "job.yaml").write_text(JOB)
    words = [word for setting in (f"cluster.slurm.launcher={launcher}", *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "tula_cli", "train", "job.yaml", "--nodes", str(nodes), "--batch", "128", "-y"]
    subprocess.run([*command, "--no-wait", *words], cwd=work, check=True, capture_output=True)
    run = RunDir.newest(work / "tula-runs")
    (signature,) = _await(run.train_signatures)
    rows = _await(lambda: [row for row in run.metrics(signature) if row["kind"] == "start"])
    _await(lambda: run.summary(signature))
    return float(rows[0]["time"]) - run.jobs()[0].submitted_at


def _await(true: Callable[[], T]) -> T:
    deadline = time.monotonic() + PATIENCE
    while not (found := true()):
        if time.monotonic() > deadline:
            raise SystemExit("waited in vain; is the queue full?")
        time.sleep(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if shutil.which("sbatch") is None:
        raise SystemExit("there is no sbatch here")
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="startup-") as name:
        folder = Path(name)
        for nodes in arguments.nodes:
            ways: dict[str, Callable[[], float]] = {
                "srun python": partial(bare, nodes, "pass", folder),
                "srun python, torch": partial(bare, nodes, "import torch, torchvision", folder),
                "tula, srun": partial(tula, nodes, "srun", folder, arguments.settings),
                "tula, torchrun": partial(tula, nodes, "torchrun", folder, arguments.settings),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(arguments.repeat):
                for way, measure in ways.items():
                    times[way].append(measure())
            medians = {way: statistics.median(found) for way, found in times.items()}
            rows += [
                {"nodes": nodes, "way": way, "seconds": round(median, 2), "all": [round(t, 2) for t in times[way]],
                 "ratio": round(median / medians["srun python, torch"], 2)}
                for way, median in medians.items()
            ]  # fmt: skip
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'nodes':>5}  {'way':<20}{'seconds':>9}{'ratio':>7}")
    for row in rows:
        print(f"{row['nodes']:>5}  {row['way']:<20}{row['seconds']:>9.2f}{row['ratio']:>7.2f}")


if __name__ == "__main__":
    main()
