"""Turnaround of a training that uses the nodes that it is granted, on a real SLURM cluster with a changing load:

    python benchmarks/moldable/on_cluster.py [--runs 20] [--seed 0] [--json FILE]

Needs root and Debian's SLURM packages (make slurm-packages). In each run, the same jobs are submitted at the same random times, and
the same training among them: once with a range of nodes, and once with each fixed number. A forward pass sleeps for a time per
sample, so that the ranks of all nodes fit on one machine. Turnaround: from `tula train` to the training's summary.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
NODES = 4
BATCH = 64
EPOCHS = 4
LOAD = 0.6  # mean share of the nodes that the other jobs occupy
JOB_NODES = (1, 1, 2, 3)  # nodes of the other jobs, with equal probabilities
JOB_SECONDS = (10.0, 60.0)  # duration of the other jobs, uniform
SECONDS_BEFORE_TRAINING = 20.0  # seconds from the first other job to the training
LAST_SUBMISSION_SECONDS = 400.0  # seconds after which no other job is submitted
NODE_RANGE = f"1-{NODES}"
FIXED_NODES = tuple(str(nodes) for nodes in (1, 2, 4))
MODEL = """
import os
import time
import torch


class Net(torch.nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes, bias=False)

    def forward(self, x):
        if self.training and "RANK" in os.environ:
            time.sleep(0.012 * len(x))
        return self.layer(x.flatten(1))
"""
JOB = f"""
name: moldable
model: {{name: "slow:Net"}}
dataset: {{name: digits}}
optimizer: {{name: SGD, lr: 0.05, momentum: 0.9}}
train: {{method: lbt, epochs: {EPOCHS}, reference_batch: 32, workers: 0}}
search: {{nodes: [{NODES}], max_node_hours: 100}}
cluster: {{kind: slurm, device: cpu, minutes: 15, slurm: {{partition: main, memory: 1000M}}}}
"""


@dataclass(frozen=True)
class OtherJob:
    """Another job of the cluster: seconds from the first one to its submission, nodes and duration."""

    at: float
    nodes: int
    seconds: float


@dataclass(frozen=True)
class ClusterRun:
    """Turnaround in seconds of the training with a range of nodes, and with each fixed number of nodes."""

    seed: int
    moldable: float
    nodes_granted: int  # maximum over the attempts of the moldable training
    fixed: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Turnaround relative to that of the best fixed number of nodes in hindsight."""
        return self.moldable / min(self.fixed.values())


def draw_jobs(random_: random.Random) -> list[OtherJob]:
    """Return random jobs whose mean occupation of the cluster is `LOAD`."""
    gap = statistics.mean(JOB_NODES) * statistics.mean(JOB_SECONDS) / (LOAD * NODES)
    jobs, at = [], 0.0
    while at < LAST_SUBMISSION_SECONDS:
        jobs.append(OtherJob(at, random_.choice(JOB_NODES), random_.uniform(*JOB_SECONDS)))
        at += random_.expovariate(1 / gap)
    return jobs


def submit_jobs(jobs: Sequence[OtherJob], over: threading.Event) -> None:
    """Submit jobs at their times until `over` is set."""
    start = time.monotonic()
    for job in jobs:
        if over.wait(max(0.0, start + job.at - time.monotonic())):
            return
        command = ["sbatch", "--job-name=other", "--partition=main", "--exclusive", "--output=/dev/null", "--time=5"]
        subprocess.run(
            [*command, f"--nodes={job.nodes}", f"--wrap=sleep {job.seconds}"], check=True, capture_output=True
        )


def measure(cluster: Any, folder: Path, jobs: Sequence[OtherJob], nodes: str) -> tuple[float, int]:
    """Return the turnaround of one training among other jobs in seconds, and the maximum number of nodes of an attempt.

    Args:
        cluster: the SlurmCluster of tests/slurm.
        folder: of the job, which is created.
        jobs: the other jobs.
        nodes: number of nodes, or a range.
    """
    folder.mkdir()
    (folder / "slow.py").write_text(MODEL)
    tula, over = import_module("driver").Tula(folder, JOB, **cluster.env), threading.Event()
    others = threading.Thread(target=submit_jobs, args=(jobs, over))
    others.start()
    try:
        time.sleep(SECONDS_BEFORE_TRAINING)
        start = time.time()
        tula("train", "job.yaml", "--nodes", nodes, "--batch", str(BATCH), "--no-wait")
        training = tula.run().get_training(tula.run().list_train_signatures()[0])
        tula.wait_until(training.summary, seconds=1200)
    finally:
        over.set()
        others.join()
        subprocess.run(["scancel", "--name=other"], check=True)
    attempts, sizes = training.read_attempts(), {task.id: task.nodes for task in training.read_tasks()}
    end = max(attempt.ended_at or time.time() for attempt in attempts)
    return end - start, max(sizes[attempt.task] for attempt in attempts)


def run_once(cluster: Any, folder: Path, seed: int) -> ClusterRun:
    """Return the turnarounds of one run."""
    jobs = draw_jobs(random.Random(seed))
    moldable, granted = measure(cluster, folder / f"{seed}-{NODE_RANGE}", jobs, NODE_RANGE)
    fixed = {nodes: measure(cluster, folder / f"{seed}-{nodes}", jobs, nodes)[0] for nodes in FIXED_NODES}
    return ClusterRun(seed, moldable, granted, fixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to which the results are written after each run")
    arguments = parser.parse_args()
    runs: list[ClusterRun] = []
    sys.path += [str(TESTS / "slurm"), str(TESTS / "helpers")]
    with (
        import_module("cluster").SlurmCluster(NODES, prefix=f"m{arguments.seed}n") as cluster,
        tempfile.TemporaryDirectory(prefix="tula-moldable-") as folder,
    ):
        os.environ.update(cluster.env)
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            runs.append(run_once(cluster, Path(folder), seed))
            print(f"{runs[-1]}: {runs[-1].ratio:.2f} times the best fixed number", flush=True)
            if arguments.json is not None:
                ratio = statistics.median(run.ratio for run in runs)
                result = {"median_ratio": ratio, "runs": [asdict(run) for run in runs]}
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
