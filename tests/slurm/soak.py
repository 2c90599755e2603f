"""Kill a training on a real SLURM cluster again and again, and see that it ends as if nothing had happened.

    python tests/slurm/soak.py [--nodes 16] [--kills 50] [--seed 0] [--epochs 300] [--least 1]

Needs root and Debian's SLURM packages (make slurm-packages). Two trainings of the same job run on a cluster of
namespaces: one is left alone, the other loses ranks, supervisors and whole nodes, and is preempted, at random moments
until all kills are spent. At the end both must have trained every sample once and have the same weights, bit by bit.
With --least, the disturbed training takes the nodes that it is granted, from so many up to all, while jobs that have
precedence occupy others; its weights are then the same up to the rounding of sums.
"""

import argparse
import collections
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cluster import SlurmCluster, until

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from driver import Tula

BATCH = 128
SAMPLES = 1437 // BATCH * BATCH  # of an epoch
PATIENCE = 900.0  # seconds without a newer checkpoint
MODEL = """
import time
import torch


class Net(torch.nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes, bias=False)

    def forward(self, x):
        time.sleep(0.02)
        return self.layer(x.flatten(1))
"""
"""Slow, so that few epochs last for many kills. One parameter: DDP lays out its buckets anew after the first step of a process, which with more parameters changes the
order in which more than two ranks are added up there, and so the last bit."""
JOB = """
name: soak
model: {{name: "single:Net"}}
dataset: {{name: digits}}
optimizer: {{name: SGD, lr: 0.05, momentum: 0.9}}
train: {{method: {method}, epochs: {epochs}, reference_batch: 32, workers: 0, max_attempts: 500, checkpoint_every: 2}}
search: {{nodes: [{nodes}], max_node_hours: 100}}
cluster: {{kind: slurm, device: cpu, minutes: 60, slurm: {{partition: spare, memory: 1000M}}}}
"""


class Soak:
    """A training, the cluster it runs on, and what is done to both."""

    def __init__(
        self, cluster: SlurmCluster, tula: Tula, nodes: int, random_: random.Random, *, least: int | None = None
    ) -> None:
        self.cluster, self.tula, self.nodes, self.random, self.least = cluster, tula, nodes, random_, least
        self.occupied = 0  # nodes, by jobs that have precedence
        self.kills: collections.Counter[str] = collections.Counter()
        self.killed_at = 0.0  # Unix time

    def train(self, kills: int) -> None:
        """Run the training to its end, killing so many times on the way."""
        nodes = str(self.nodes) if self.least is None else f"{self.least}-{self.nodes}"
        kinds: list[tuple[Callable[[], bool], int]] = [
            (self.kill_rank, 12), (self.kill_supervisor, 4), (self.power_off, 2), (self.preempt, 2),
        ]  # fmt: skip
        if self.least is not None:  # mostly what ends an allocation, so that the next one may have other nodes
            kinds = [
                (self.kill_rank, 4),
                (self.kill_supervisor, 2),
                (self.power_off, 2),
                (self.preempt, 8),
                (self.occupy, 12),
            ]
            self.occupy()
        self.tula("train", "job.yaml", "--nodes", nodes, "--batch", str(BATCH))
        moved, at = -1, time.monotonic()
        while not self.finished():
            samples = self.samples()
            if samples != moved:
                moved, at = samples, time.monotonic()
            if time.monotonic() - at > PATIENCE:
                raise SystemExit(f"no progress for {PATIENCE:.0f} s\n{self.tula.logs()[-5000:]}")
            if sum(self.kills.values()) < kills and self.running():
                time.sleep(self.random.uniform(0.0, 3.0))
                act = self.random.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
                if act():
                    self.kills[act.__name__] += 1
                    self.killed_at = time.time()
                    print(f"{sum(self.kills.values()):3d} {act.__name__:16s} at {self.samples()} samples", flush=True)
            time.sleep(0.5)
        if sum(self.kills.values()) < kills:
            raise SystemExit(f"it ended before it was killed {kills} times: give it more --epochs")

    # --- what it is doing

    def signature(self) -> str:
        return self.tula.run().train_signatures()[0]

    def samples(self) -> int:
        names = self.tula.run().train_signatures()
        return self.tula.run().training(names[0]).newest_samples() if names else 0

    def finished(self) -> bool:
        names = self.tula.run().train_signatures()
        return bool(names) and self.tula.run().training(names[0]).summary() is not None

    def running(self) -> bool:
        """Return whether the ranks have made steps since the last kill."""
        names = self.tula.run().train_signatures()
        rows = self.tula.run().training(names[0]).metrics() if names else []
        moved = bool(rows) and rows[-1]["kind"] in ("step", "epoch") and rows[-1]["time"] > self.killed_at
        return moved and bool(self.processes("-m tula_cli.worker"))

    def processes(self, text: str) -> list[int]:
        return [pid for node in self.cluster.names for pid in self.cluster.processes(node, text)]

    # --- what is done to it; each returns whether there was something to do it to

    def kill_rank(self) -> bool:
        return self._kill("-m tula_cli.worker")

    def kill_supervisor(self) -> bool:
        return self._kill("-m submitit.core._submit")

    def _kill(self, text: str) -> bool:
        result = self.processes(text)
        if not result:
            return False
        try:
            os.kill(self.random.choice(result), 9)
        except ProcessLookupError:
            return False
        return True

    def power_off(self) -> bool:
        node = self.random.choice(self.cluster.names)
        self.cluster.power_off(node)
        until(lambda: self._state(node).startswith("down"), f"SLURM gives {node} up", seconds=180)
        self.cluster.power_on(node)
        return True

    def _state(self, node: str) -> str:
        return self.cluster.run("login", "sinfo", "--noheader", f"--nodes={node}", "--format=%t").stdout.strip()

    def preempt(self) -> bool:
        self._submit("--wait", f"--nodes={self.nodes - self.occupied}", "--time=1", "--wrap=true")
        return True

    def occupy(self) -> bool:
        """Let other jobs have another number of nodes; return whether the training has to give some to them."""
        subprocess.run(["scancel", "--name=other"], check=True, env={**os.environ, **self.cluster.env})
        until(lambda: not self._count("squeue", "--name=other", "--format=%i"), "the other job is over")
        idle = self._count("sinfo", "--states=idle", "--Node", "--partition=main", "--format=%n")
        self.occupied = self.random.randint(0, self.nodes - (self.least or self.nodes))
        if self.occupied:
            self._submit("--job-name=other", f"--nodes={self.occupied}", "--time=100", "--wrap=sleep 6000")
        return self.occupied > idle

    def _submit(self, *options: str) -> None:
        always = ("--partition=main", "--exclusive", "--no-requeue", "--output=/dev/null")
        environ = {**os.environ, **self.cluster.env}
        subprocess.run(["sbatch", *always, *options], check=True, capture_output=True, env=environ)

    def _count(self, *command: str) -> int:
        return len(self.cluster.run("login", *command, "--noheader").stdout.split())


def weights_equal(one: Path, other: Path, *, tolerance: float) -> bool:
    code = """
import sys, torch
one, other = (torch.load(path, weights_only=True)["model"] for path in sys.argv[1:3])
tolerance = float(sys.argv[3])  # of the largest weight
same = one.keys() == other.keys() and all((one[key] - other[key]).abs().max() <= tolerance * one[key].abs().max() for key in one)
sys.exit(not same)
"""
    return (
        subprocess.run([sys.executable, "-c", code, str(one), str(other), str(tolerance)], check=False).returncode == 0
    )


def check(soak: Soak, epochs: int) -> Path:
    """Check that every sample was trained once and every epoch told once; return the last checkpoint."""
    run, name = soak.tula.run(), soak.signature()
    result = run.training(name).result()
    assert result is not None
    assert result.samples == epochs * SAMPLES, f"{result.samples} samples, not {epochs * SAMPLES}"
    samples = [row["samples"] for row in run.training(name).metrics() if row["kind"] == "epoch"]
    assert samples == [SAMPLES * (epoch + 1) for epoch in range(epochs)], samples
    attempts = run.training(name).attempts()
    starts = [attempt.samples or 0 for attempt in attempts]
    assert all(late >= early for early, late in itertools.pairwise(starts)), starts
    causes = collections.Counter(attempt.outcome for attempt in attempts)
    sizes = {task.id: task.nodes for task in run.training(name).tasks()}
    nodes = [sizes[attempt.task] for attempt in attempts]
    print(
        f"{len(attempts)} attempts: {dict(causes)}; {len({a.allocation for a in attempts})} allocations; nodes {nodes}"
    )
    assert soak.least is None or len({*nodes}) > 1, "it was never granted another number of nodes"
    return run.training(name).path / "last"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--least", type=int, help="nodes that suffice for the disturbed training")
    arguments = parser.parse_args()
    method = "ramp" if arguments.least is None else "lbt"
    job = JOB.format(method=method, epochs=arguments.epochs, nodes=arguments.nodes)
    began, last = time.monotonic(), []
    with (
        SlurmCluster(arguments.nodes, prefix=f"s{os.getpid()}n", rate="1gbit") as cluster,
        tempfile.TemporaryDirectory(prefix="tula-soak-") as name,
    ):
        for label, kills in (("left alone", 0), ("killed", arguments.kills)):
            folder = Path(name) / label.replace(" ", "-")
            folder.mkdir()
            (folder / "single.py").write_text(MODEL)
            least = arguments.least if kills else None
            random_ = random.Random(arguments.seed)
            soak = Soak(cluster, Tula(folder, job, **cluster.env), arguments.nodes, random_, least=least)
            print(f"{label}: {arguments.nodes} nodes, {arguments.epochs} epochs", flush=True)
            soak.train(kills)
            print(f"done after {time.monotonic() - began:.0f} s; {dict(soak.kills)}", flush=True)
            last.append(check(soak, arguments.epochs))
        tolerance = 0.0 if arguments.least is None else 1e-5
        assert weights_equal(*last, tolerance=tolerance), "the weights differ"
    print("the weights are the same, bit by bit" if not tolerance else f"the weights are the same, up to {tolerance:g}")


if __name__ == "__main__":
    main()
