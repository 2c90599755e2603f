"""What a batch that grows on nodes that grow with it takes, trained with real ranks over shaped links:

    python benchmarks/stages/ramp_on_links.py [--rate 100] [--epochs 40] [--seed 0] [--out build/ramp] [--json]

Debian, root (make slurm-packages). On a SLURM cluster of four nodes on this machine, whose links have so many Mbit/s, tula
profiles a training of digits, recommends, and trains it three times: with `train.method: ramp` and `train.ramp_nodes: auto` up to
batch 512, at the reference batch on the nodes where that takes the fewest node-hours, and at batch 512 throughout. Compute is
slept (slept.py), so that four nodes fit on two cores; gradients go over the links. Told are accuracy, and hours and
node-hours twice: of the steps as each was measured, and of the allocations as SLURM's accounting has them, starts,
evaluations and changes of nodes included, which weigh the more the shorter a training is.

The goal: at least 20 % fewer node-hours than the best fixed batch of the same accuracy, which is the reference batch.
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
REFERENCE, LARGEST = 32, 512
PATIENCE = 3600.0  # seconds of one training

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
class Taken:
    """What a training took: seconds, and seconds of nodes, of its steps and of its allocations."""

    words: str
    top1: float  # per cent
    steps: int
    seconds: float
    node_seconds: float
    allocated: float
    node_allocated: float


def trained(tula: Any, told: str, *arguments: str) -> Taken:
    """Train and return what it took; a configuration that was recommended is taken where no words name one."""
    tula("train", *arguments)
    run = tula.run()
    (signature,) = tula.until(run.list_train_signatures)  # once it has started
    training, job = run.get_training(signature), run.find_job(tula.task().job)
    tula.until(lambda: training.read_summary() is not None and not queue(), seconds=PATIENCE)
    result, nodes, seconds, node_seconds = training.read_result(), 0, 0.0, 0.0
    assert result is not None and job is not None
    for row in training.read_metrics():
        if row["kind"] == "start":
            nodes = row["nodes"]
        elif row["kind"] == "step":
            seconds += row["count"] * row["step_time"]
            node_seconds += nodes * row["count"] * row["step_time"]
    return Taken(told, result.metrics["top1"], result.steps, seconds, node_seconds, *accounted(job.links))


def queue() -> str:
    return subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout.strip()


def accounted(links: Sequence[str]) -> tuple[float, float]:
    """Return the seconds, and the seconds of nodes, that SLURM's accounting has for a chain."""
    command = ["sacct", "-X", "-n", "-P", "-j", ",".join(links), "-o", "ElapsedRaw,NNodes"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split("|"))) for line in output.split()]
    return float(sum(elapsed for elapsed, _ in rows)), float(sum(elapsed * nodes for elapsed, nodes in rows))


def folder(out: Path, name: str, **wishes: Any) -> Any:
    """Return the command line in a new folder with a job of its own."""
    path = out / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    shutil.copy(HERE / "slept.py", path)
    return import_module("driver").Tula(path, JOB.format(name=name, **wishes))


def say(told: str) -> None:
    print(told, file=sys.stderr, flush=True)


def measured(options: argparse.Namespace) -> list[Taken]:
    """Profile, recommend and train on the cluster."""
    wishes = {"epochs": options.epochs, "seed": options.seed}
    ramp = folder(options.out, "ramp", method="ramp", more=", ramp_nodes: auto", largest=LARGEST, **wishes)
    fixed = folder(options.out, "fixed", method="lbt", more="", largest=REFERENCE, **wishes)
    large = folder(options.out, "large", method="lbt", more="", largest=LARGEST, **wishes)
    for tula in (ramp, fixed):
        say(f"{tula.folder.name}: probes")
        tula("profile", "job.yaml", "--wait")
    say("fixed: the nodes where the reference batch takes the fewest node-hours")
    best = fixed("recommend", "--objective", "cost")["data"]["choice"]["nodes"]
    say(json.dumps(ramp("recommend", "--objective", options.objective)["data"]["choice"]))
    taken = []
    for tula, message, arguments in (
        (ramp, "ramp, nodes by stage", ()),
        (
            fixed,
            f"reference batch, {words.format_count(best)}",
            ("--nodes", str(best), "--batch", str(REFERENCE)),
        ),
        (large, "the large batch, 4 nodes", ("job.yaml", "--nodes", "4", "--batch", str(LARGEST))),
    ):
        taken.append(trained(tula, message, *arguments))
        say(json.dumps(asdict(taken[-1])))
    return taken


def table(taken: Sequence[Taken]) -> str:
    """Return a Markdown table, with what each takes of the reference batch."""
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
        taken = measured(options)
    print(json.dumps([asdict(item) for item in taken], indent=1) if options.json else table(taken))
    return 0


if __name__ == "__main__":
    sys.exit(main())
