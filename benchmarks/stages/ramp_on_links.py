"""Cost of a training whose batch and nodes grow, measured with real ranks over network links with a bandwidth:

    python benchmarks/stages/ramp_on_links.py [--rate 100] [--epochs 40] [--seed 0] [--out build/ramp] [--json]

Debian, root (make slurm-packages). On a SLURM cluster of four nodes on this machine, whose links have --rate Mbit/s, tula profiles a
training of digits, recommends, and trains it three times: with `train.method: ramp` and `train.ramp_nodes: auto` up to batch 512, at
the reference batch on the nodes with the fewest node-hours, and at batch 512 throughout. Computation sleeps (slept.py), so that four
nodes fit on two cores; gradients are sent over the links. Reported are accuracy, and hours and node-hours twice: of the steps as
measured, and of the allocations by SLURM's accounting, including starts, evaluations and changes of nodes, whose share is larger for
shorter trainings.

The goal: at least 20 % fewer node-hours than the best fixed batch with the same accuracy, which is the reference batch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tula_cli import words

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
REFERENCE_BATCH, LARGEST_BATCH = 32, 512
TIMEOUT_SECONDS = 3600.0  # seconds, time limit of one training

JOB = """
name: {name}
model: {{name: "slept:Slept"}}
dataset: {{name: digits}}
optimizer: {{name: SGD, lr: 0.05, momentum: 0.9, weight_decay: 5e-4}}
schedule: {{kind: cosine}}
train: {{epochs: {epochs}, seed: {seed}, reference_batch: 32, workers: 0, method: {method}{more}}}
search: {{nodes: [1, 2, 4], min_batch: 32, max_batch: {largest}, strategy: sweep, min_steps: 5, min_seconds: 0, max_seconds: 0.001,
         max_minutes: 10, max_node_hours: 5}}
cluster: {{kind: slurm, device: cpu, minutes: 60, slurm: {{memory: 1500M}}}}
"""


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a training: seconds and node-seconds, of its steps and of its allocations."""

    words: str
    top1: float  # percent
    steps: int
    seconds: float
    node_seconds: float
    allocated: float
    node_allocated: float


def train(tula: Any, told: str, *arguments: str) -> TrainingCost:
    """Train and return the cost; without further arguments, use the recommended configuration."""
    tula("train", *arguments)
    run = tula.run()
    (signature,) = tula.wait_until(run.list_train_signatures)  # when the training has started
    training, job = run.get_training(signature), run.find_job(tula.task().job)
    tula.wait_until(lambda: training.read_summary() is not None and not list_queue(), seconds=TIMEOUT_SECONDS)
    result, nodes, seconds, node_seconds = training.read_result(), 0, 0.0, 0.0
    assert result is not None and job is not None
    for row in training.read_metrics():
        if row["kind"] == "start":
            nodes = row["nodes"]
        elif row["kind"] == "step":
            seconds += row["count"] * row["step_time"]
            node_seconds += nodes * row["count"] * row["step_time"]
    return TrainingCost(told, result.metrics["top1"], result.steps, seconds, node_seconds, *read_accounting(job.links))


def list_queue() -> str:
    return subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout.strip()


def read_accounting(links: Sequence[str]) -> tuple[float, float]:
    """Return the seconds and node-seconds of a chain by SLURM's accounting."""
    command = ["sacct", "-X", "-n", "-P", "-j", ",".join(links), "-o", "ElapsedRaw,NNodes"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split("|"))) for line in output.split()]
    return float(sum(elapsed for elapsed, _ in rows)), float(sum(elapsed * nodes for elapsed, nodes in rows))


def make_folder(out: Path, name: str, **wishes: Any) -> Any:
    """Return the command line in a new folder with a job file."""
    path = out / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    shutil.copy(HERE / "slept.py", path)
    return import_module("driver").Tula(path, JOB.format(name=name, **wishes))


def print_line(told: str) -> None:
    print(told, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> list[TrainingCost]:
    """Profile, recommend and train on the cluster."""
    wishes = {"epochs": options.epochs, "seed": options.seed}
    ramp = make_folder(options.out, "ramp", method="ramp", more=", ramp_nodes: auto", largest=LARGEST_BATCH, **wishes)
    fixed = make_folder(options.out, "fixed", method="lbt", more="", largest=REFERENCE_BATCH, **wishes)
    large = make_folder(options.out, "large", method="lbt", more="", largest=LARGEST_BATCH, **wishes)
    for tula in (ramp, fixed):
        print_line(f"{tula.folder.name}: probes")
        tula("profile", "job.yaml", "--wait")
    print_line("fixed: the nodes where the reference batch takes the fewest node-hours")
    best = fixed("recommend", "--objective", "cost")["data"]["choice"]["nodes"]
    print_line(json.dumps(ramp("recommend", "--objective", options.objective)["data"]["choice"]))
    taken = []
    for tula, message, arguments in (
        (ramp, "ramp, nodes by stage", ()),
        (
            fixed,
            f"reference batch, {words.format_count(best)}",
            ("--nodes", str(best), "--batch", str(REFERENCE_BATCH)),
        ),
        (large, "the large batch, 4 nodes", ("job.yaml", "--nodes", "4", "--batch", str(LARGEST_BATCH))),
    ):
        taken.append(train(tula, message, *arguments))
        print_line(json.dumps(asdict(taken[-1])))
    return taken


def format_table(taken: Sequence[TrainingCost]) -> str:
    """Return a Markdown table, with the cost relative to the reference batch."""
    fixed = taken[1]
    lines = [
        "| training | top-1 (%) | steps | steps: s | node-s | of the reference's | allocations: s | node-s | of the reference's |"
    ]
    lines.append("|" + "---|" * 9)
    lines.extend(
        f"| {item.words} | {item.top1:.2f} | {item.steps} | {item.seconds:.0f} | {item.node_seconds:.0f} | "
        f"{item.seconds / fixed.seconds:.2f}, {item.node_seconds / fixed.node_seconds:.2f} | {item.allocated:.0f} | "
        f"{item.node_allocated:.0f} | {item.allocated / fixed.allocated:.2f}, {item.node_allocated / fixed.node_allocated:.2f} |"
        for item in taken
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s of each link")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", default="time", choices=("time", "cost"))
    parser.add_argument("--out", type=Path, default=Path("build/ramp"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.out = options.out.absolute()
    sys.path += [str(TESTS / "slurm"), str(TESTS / "helpers")]
    with import_module("cluster").SlurmCluster(4, prefix=f"b{os.getpid()}n", rate=f"{options.rate}mbit") as cluster:
        os.environ.update(cluster.env)
        taken = measure(options)
    print(json.dumps([asdict(item) for item in taken], indent=1) if options.json else format_table(taken))
    return 0


if __name__ == "__main__":
    sys.exit(main())
