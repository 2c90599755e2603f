"""Kill a training on a real SLURM cluster again and again, and see that it ends as if nothing had happened.

    python tests/slurm/soak.py [--nodes 16] [--kills 50] [--seed 0] [--epochs 300]

Needs root and Debian's SLURM packages (make slurm-packages). Two trainings of the same job run on a cluster of
namespaces: one is left alone, the other loses ranks, supervisors and whole nodes, and is preempted, at random moments
until all kills are spent. At the end both must have trained every sample once and have the same weights, bit by bit.
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
train: {{epochs: {epochs}, reference_batch: 32, workers: 0, max_attempts: 500, checkpoint_every: 2}}
search: {{nodes: [{nodes}], max_node_hours: 100}}
cluster: {{kind: slurm, device: cpu, slurm: {{minutes: 60, partition: spare, memory: 1000M}}}}
"""


class Soak:
    """A training, the cluster it runs on, and what is done to both."""

    def __init__(self, cluster: SlurmCluster, tula: Tula, nodes: int, random_: random.Random) -> None:
        self.cluster, self.tula, self.nodes, self.random = cluster, tula, nodes, random_
        self.kills: collections.Counter[str] = collections.Counter()
        self.killed_at = 0.0  # Unix time

    def train(self, kills: int) -> None:
        """Run the training to its end, killing so many times on the way."""
        self.tula("train", "job.yaml", "--nodes", str(self.nodes), "--batch", str(BATCH))
        kinds: list[tuple[Callable[[], bool], int]] = [
            (self.kill_rank, 12), (self.kill_supervisor, 4), (self.power_off, 2), (self.preempt, 2),
        ]  # fmt: skip
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
        found = self.processes(text)
        if not found:
            return False
        try:
            os.kill(self.random.choice(found), 9)
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
        options = ("--partition=main", f"--nodes={self.nodes}", "--exclusive", "--time=1", "--output=/dev/null")
        command = ["sbatch", "--wait", *options, "--wrap=true"]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **self.cluster.env})
        return True


def weights_equal(one: Path, other: Path) -> bool:
    code = """
import sys, torch
one, other = (torch.load(path, weights_only=True)["model"] for path in sys.argv[1:])
sys.exit(one.keys() != other.keys() or any(not torch.equal(one[key], other[key]) for key in one))
"""
    return subprocess.run([sys.executable, "-c", code, str(one), str(other)], check=False).returncode == 0


def check(soak: Soak, epochs: int) -> Path:
    """Check that every sample was trained once and every epoch told once; return the last checkpoint."""
    run, name = soak.tula.run(), soak.signature()
    result = run.training(name).result()
    assert result is not None
    assert result.samples == epochs * SAMPLES, f"{result.samples} samples, not {epochs * SAMPLES}"
    told = [row["samples"] for row in run.training(name).metrics() if row["kind"] == "epoch"]
    assert told == [SAMPLES * (epoch + 1) for epoch in range(epochs)], told
    attempts = run.training(name).attempts()
    starts = [attempt.samples or 0 for attempt in attempts]
    assert all(late >= early for early, late in itertools.pairwise(starts)), starts
    causes = collections.Counter(attempt.outcome for attempt in attempts)
    print(f"{len(attempts)} attempts: {dict(causes)}; {len({a.allocation for a in attempts})} allocations")
    return run.training(name).path / "last"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=300)
    arguments = parser.parse_args()
    job = JOB.format(epochs=arguments.epochs, nodes=arguments.nodes)
    began, last = time.monotonic(), []
    with (
        SlurmCluster(arguments.nodes, prefix=f"s{os.getpid()}n", rate="1gbit") as cluster,
        tempfile.TemporaryDirectory(prefix="tula-soak-") as name,
    ):
        for label, kills in (("left alone", 0), ("killed", arguments.kills)):
            folder = Path(name) / label.replace(" ", "-")
            folder.mkdir()
            (folder / "single.py").write_text(MODEL)
            soak = Soak(cluster, Tula(folder, job, **cluster.env), arguments.nodes, random.Random(arguments.seed))
            print(f"{label}: {arguments.nodes} nodes, {arguments.epochs} epochs", flush=True)
            soak.train(kills)
            print(f"done after {time.monotonic() - began:.0f} s; {dict(soak.kills)}", flush=True)
            last.append(check(soak, arguments.epochs))
        assert weights_equal(*last), "the weights differ"
    print("the weights are the same, bit by bit")


if __name__ == "__main__":
    main()
