"""Start-up time on a SLURM cluster: from the submission to the first training step, for both launchers.

    python benchmarks/startup/startup.py [--nodes 1 2 4] [--repeat 3] [--set cluster.slurm.partition=...] [--json]

Run it on a host with sbatch and in a folder that all nodes share. For each number of nodes it submits in turn, so that slow phases of
a shared machine affect all of them: `srun python` without work, `srun python` that imports torch and torchvision, and a tula training
by srun (ranks forked from a process that has imported torch, or executed, because a wrapper prevents forking) and by torchrun. Shown
are medians in seconds; `ratio` is relative to the bare import. For tula, `supervisor` is the time from the submission until the
supervisor starts the ranks (scheduler, python, submitit), `ranks` the time from there until just before the first step (torch, data,
process group, model), and `again` the same for a relaunch, for which the model kills its process in the middle of the first attempt.
Set a partition or an account of the bare jobs by SBATCH_PARTITION, SBATCH_ACCOUNT, ...
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tula_cli.run.directory import RunDir

JOB = """
name: startup
model: {name: "lost:Net"}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05}
train: {epochs: 1, workers: 0, max_attempts: 2}
search: {nodes: [1], max_node_hours: 1}
cluster: {kind: slurm, device: auto, minutes: 10}
"""
MODEL = """
import os, pathlib, signal, torch

class Net(torch.nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer, self.steps = torch.nn.Linear(64, num_classes), 0

    def forward(self, x):
        self.steps += self.training
        if self.steps == 6 and os.environ.get("RANK") == "0" and not (mark := pathlib.Path("lost")).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x.flatten(1))
"""
T = TypeVar("T")
TIMEOUT_SECONDS = 600.0  # seconds
BASELINE = "srun python, torch"


@dataclass(frozen=True)
class Start:
    """One start, in seconds since the submission."""

    seconds: float
    supervisor: float | None = None  # until the supervisor starts the ranks
    again: float | None = None  # of the relaunch, since the supervisor started its ranks


def start_bare_ranks(nodes: int, code: str, folder: Path) -> Start:
    """Start ranks that run some Python code, and return when the last one has run it."""
    marks = Path(tempfile.mkdtemp(dir=folder))
    program = f"{code}; import os, time; open('{marks}/' + os.environ['SLURM_PROCID'], 'w').write(str(time.time()))"
    script = f'#!/bin/bash\nsrun {sys.executable} -c "{program}"\n'
    options = ["--parsable", f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive", "--time=5", "--output=/dev/null"]
    began = time.time()
    id_ = _read_output(["sbatch", *options], script=script)
    _wait_until_gone([id_.split(";")[0].strip()])
    times = [float(mark.read_text()) for mark in marks.iterdir()]
    if len(times) < nodes:
        raise SystemExit(f"only {len(times)} of {nodes} ranks of a bare job have run")
    return Start(max(times) - began)


def start_training(nodes: int, way: Sequence[str], folder: Path, settings: Sequence[str]) -> Start:
    """Start a training, and return when rank 0 is about to run its first step."""
    work = Path(tempfile.mkdtemp(dir=folder))
    (work / "job.yaml").write_text(JOB)
    (work / "lost.py").write_text(MODEL)
    words = [word for setting in (*way, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "tula_cli", "train", "job.yaml", "--nodes", str(nodes), "--batch", "128", "-y"]
    _read_output([*command, "--no-wait", "-q", *words], folder=work)
    run = RunDir.find_newest(work / "tula-runs")
    (job,) = run.read_jobs()
    _wait_until_gone(job.links or (job.scheduler_id,))
    (signature,) = run.list_train_signatures()
    attempts = run.get_training(signature).read_attempts()
    starts = [float(row["time"]) for row in run.get_training(signature).read_metrics() if row["kind"] == "start"]
    if run.get_training(signature).read_summary() is None or len(attempts) != 2 or len(starts) != 2:
        raise SystemExit(f"a training did not end well: {attempts[-1].outcome}: {attempts[-1].message}")
    first, again = attempts
    return Start(starts[0] - job.submitted_at, first.started_at - job.submitted_at, starts[1] - again.started_at)


def _read_output(command: Sequence[str], *, script: str | None = None, folder: Path | None = None) -> str:
    """Return the output of a command; if it fails, exit with its stderr."""
    done = subprocess.run(command, input=script, cwd=folder, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def _wait_until_gone(ids: Sequence[str]) -> None:
    """Wait until jobs have left the queue and their nodes, so that the next start does not wait for them."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while _is_in_queue(ids):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for jobs {', '.join(ids)}; is the queue full?")
        time.sleep(0.2)


def _is_in_queue(ids: Sequence[str]) -> bool:
    """Return whether squeue lists one of the jobs; it fails if the only requested job is unknown."""
    return bool(subprocess.run(["squeue", "-h", "-j", ",".join(ids)], capture_output=True, text=True).stdout.strip())


def measure(nodes: int, *, repeat: int, settings: Sequence[str], folder: Path) -> dict[str, list[Start]]:
    """Return the starts of each kind on a number of nodes."""
    ways: dict[str, Callable[[], Start]] = {
        "srun python": partial(start_bare_ranks, nodes, "pass", folder),
        BASELINE: partial(start_bare_ranks, nodes, "import torch, torchvision", folder),
        "tula, srun": partial(start_training, nodes, [], folder, settings),
        "tula, srun, executed": partial(start_training, nodes, ["cluster.slurm.wrapper=[env]"], folder, settings),
        "tula, torchrun": partial(start_training, nodes, ["cluster.slurm.launcher=torchrun"], folder, settings),
    }
    rounds = [{way: start() for way, start in ways.items()} for _ in range(repeat)]
    return {way: [starts[way] for starts in rounds] for way in ways}


def make_rows(nodes: int, starts: dict[str, list[Start]]) -> list[dict[str, int | str | float | None]]:
    """Return one table row per kind of start."""
    base = statistics.median(start.seconds for start in starts[BASELINE])
    result: list[dict[str, int | str | float | None]] = []
    for way, each in starts.items():
        median = statistics.median(start.seconds for start in each)
        waits = [start.supervisor for start in each if start.supervisor is not None]
        supervisor = statistics.median(waits) if waits else None
        ranks = None if supervisor is None else statistics.median(s.seconds - (s.supervisor or 0.0) for s in each)
        relaunches = [start.again for start in each if start.again is not None]
        again = statistics.median(relaunches) if relaunches else None
        result.append({
            "nodes": nodes, "way": way, "seconds": median, "least": min(start.seconds for start in each),
            "most": max(start.seconds for start in each), "ratio": median / base, "supervisor": supervisor, "ranks": ranks,
            "again": again,
        })  # fmt: skip
    return result


def print_table(table: Sequence[dict[str, int | str | float | None]]) -> None:
    for row in table:
        parts = "" if row["ranks"] is None else f"{row['supervisor']:>12.2f}{row['ranks']:>7.2f}{row['again']:>7.2f}"
        print(
            f"{row['nodes']:>5}  {row['way']:<21}{row['seconds']:>8.2f}{row['least']:>7.2f}{row['most']:>7.2f}"
            f"{row['ratio']:>7.2f}{parts}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if shutil.which("sbatch") is None:
        raise SystemExit("there is no sbatch here")
    if not arguments.json:
        print("nodes  way                   seconds  least   most  ratio  supervisor  ranks  again")
    table = []
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="startup-") as name:
        for nodes in arguments.nodes:
            starts = measure(nodes, repeat=arguments.repeat, settings=arguments.settings, folder=Path(name))
            table += make_rows(nodes, starts)
            if not arguments.json:
                print_table(make_rows(nodes, starts))  # immediately, because on a large cluster the rest may take hours
    if arguments.json:
        print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
