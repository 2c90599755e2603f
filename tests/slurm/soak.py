"""Kill a training on a real SLURM cluster repeatedly, and check that its result equals that of an uninterrupted training.

    python tests/slurm/soak.py [--nodes 16] [--kills 50] [--seed 0] [--epochs 300] [--least 1] [--subject script]

Needs root and Debian's SLURM packages (make slurm-packages). Two trainings of the same job run on a cluster in namespaces: one
without faults; the other one loses ranks, supervisors and whole nodes and is preempted, at random times until the number of
kills is reached. At the end, both must have trained each sample once per epoch, and their weights must be bitwise equal. With
--least, the interrupted training runs on a varying number of nodes, from --least up to all, while jobs with precedence occupy
the others; its weights are then equal up to rounding. With --subject script the job is a script that records how often it
trained each sample; with --subject either, the seed selects.
"""

import argparse
import collections
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import SlurmCluster, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from driver import Tula

CHECKPOINT_TIMEOUT_SECONDS = 900.0  # seconds without a new checkpoint before the program fails
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
"""Slow, so that few epochs last for many kills. It has a single parameter, because DDP rebuilds its buckets after the first step
of a process, which with several parameters changes the order of additions over more than two ranks, and so the last bit.
"""
JOB = """
name: soak
model: {{name: "single:Net"}}
dataset: {{name: digits}}
optimizer: {{name: SGD, lr: 0.05, momentum: 0.9}}
train: {{method: {method}, epochs: {epochs}, reference_batch: 32, workers: 0, max_attempts: 500, checkpoint_every: 2}}
search: {{nodes: [{nodes}], max_node_hours: 100}}
cluster: {{kind: slurm, device: cpu, minutes: 60, slurm: {{partition: spare, memory: 1000M}}}}
"""
SCRIPT = Path(__file__).parents[1] / "scripts" / "on_any_ranks.py"
SCRIPT_JOB = """
name: soak
script:
  command: on_any_ranks.py --local-batch {{local_batch}} --epochs {{epochs}} --out {{out}} --pause 0.01
  length: {{epochs: {epochs}}}
  dataset_size: 256
  reference: {{batch: 32}}
  resume: {{args: "--resume {{checkpoint}}", checkpoint: "{{out}}/state.pt"}}
  save: SIGUSR1
train: {{max_attempts: 500}}
search: {{nodes: [{nodes}], max_node_hours: 100}}
cluster: {{kind: slurm, device: cpu, minutes: 60, slurm: {{partition: spare, memory: 1000M}}}}
"""


@dataclass(frozen=True)
class Subject:
    """The job that is trained."""

    job: str  # job file
    batch: int
    samples: int  # per epoch
    process: str  # part of the command lines of its ranks
    weights: str  # key in its checkpoint
    checkpoint: str  # pattern of the last checkpoint in the folder of the training

    @classmethod
    def make_model(cls, nodes: int, epochs: int, *, method: str) -> "Subject":
        """Return a job that tula's training loop trains."""
        job = JOB.format(method=method, epochs=epochs, nodes=nodes)
        return cls(job, 128, 1437 // 128 * 128, "-m tula_cli.worker", "model", "last")

    @classmethod
    def make_script(cls, nodes: int, epochs: int) -> "Subject":
        """Return a script that records how often it trained each sample; its epochs take ten times as long."""
        return cls(SCRIPT_JOB.format(epochs=epochs, nodes=nodes), 32, 256, SCRIPT.name, "net", "out/state.pt")


class Soak:
    """A training, its cluster, and the faults of both."""

    def __init__(
        self,
        cluster: SlurmCluster,
        tula: Tula,
        subject: Subject,
        nodes: int,
        random_: random.Random,
        *,
        least: int | None = None,
    ) -> None:
        self.cluster, self.tula, self.nodes, self.random, self.least = cluster, tula, nodes, random_, least
        self.subject = subject
        self.occupied = 0  # number of nodes, by jobs with precedence
        self.kills: collections.Counter[str] = collections.Counter()
        self.killed_at = 0.0  # Unix time

    def train(self, kills: int) -> None:
        """Run the training to its end, with `kills` faults on the way."""
        nodes = str(self.nodes) if self.least is None else f"{self.least}-{self.nodes}"
        kinds: list[tuple[Callable[[], bool], int]] = [
            (self.kill_rank, 12), (self.kill_supervisor, 4), (self.power_off, 2), (self.preempt, 2),
        ]  # fmt: skip
        if (
            self.least is not None
        ):  # mostly faults that end an allocation, so that the next allocation may have other nodes
            kinds = [
                (self.kill_rank, 4),
                (self.kill_supervisor, 2),
                (self.power_off, 2),
                (self.preempt, 8),
                (self.occupy, 12),
            ]
            self.occupy(at_least=2)  # the resume test of a script needs two nodes
        self.tula("train", "job.yaml", "--nodes", nodes, "--batch", str(self.subject.batch))
        moved, at = -1, time.monotonic()
        while not self.finished():
            samples = self.samples()
            if samples != moved:
                moved, at = samples, time.monotonic()
            if time.monotonic() - at > CHECKPOINT_TIMEOUT_SECONDS:
                raise SystemExit(f"no progress for {CHECKPOINT_TIMEOUT_SECONDS:.0f} s\n{self.tula.logs()[-5000:]}")
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

    # --- state of the training

    def signature(self) -> str:
        return self.tula.run().list_train_signatures()[0]

    def samples(self) -> int:
        names = self.tula.run().list_train_signatures()
        return self.tula.run().get_training(names[0]).find_newest_checkpoint_samples() if names else 0

    def finished(self) -> bool:
        names = self.tula.run().list_train_signatures()
        return bool(names) and self.tula.run().get_training(names[0]).read_summary() is not None

    def running(self) -> bool:
        """Return whether the ranks have made steps since the last kill."""
        names = self.tula.run().list_train_signatures()
        rows = self.tula.run().get_training(names[0]).read_metrics() if names else []
        moved = bool(rows) and rows[-1]["kind"] in ("step", "epoch") and rows[-1]["time"] > self.killed_at
        return moved and bool(self.processes(self.subject.process))

    def processes(self, text: str) -> list[int]:
        return [pid for node in self.cluster.names for pid in self.cluster.processes(node, text)]

    # --- faults; each function returns whether it could apply the fault

    def kill_rank(self) -> bool:
        return self._kill(self.subject.process)

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
        wait_until(lambda: self._state(node).startswith("down"), f"SLURM gives {node} up", seconds=180)
        self.cluster.power_on(node)
        return True

    def _state(self, node: str) -> str:
        return self.cluster.run("login", "sinfo", "--noheader", f"--nodes={node}", "--format=%t").stdout.strip()

    def preempt(self) -> bool:
        self._submit("--wait", f"--nodes={self.nodes - self.occupied}", "--time=1", "--wrap=true")
        return True

    def occupy(self, *, at_least: int = 1) -> bool:
        """Change the number of nodes occupied by other jobs; return whether the training loses some of its nodes.

        Args:
            at_least: nodes that are left to the training.
        """
        subprocess.run(["scancel", "--name=other"], check=True, env={**os.environ, **self.cluster.env})
        wait_until(lambda: not self._count("squeue", "--name=other", "--format=%i"), "the other job is over")
        idle = self._count("sinfo", "--states=idle", "--Node", "--partition=main", "--format=%n")
        self.occupied = self.random.randint(0, self.nodes - max(at_least, self.least or self.nodes))
        if self.occupied:
            self._submit("--job-name=other", f"--nodes={self.occupied}", "--time=100", "--wrap=sleep 6000")
        return self.occupied > idle

    def _submit(self, *options: str) -> None:
        always = ("--partition=main", "--exclusive", "--no-requeue", "--output=/dev/null")
        environ = {**os.environ, **self.cluster.env}
        subprocess.run(["sbatch", *always, *options], check=True, capture_output=True, env=environ)

    def _count(self, *command: str) -> int:
        return len(self.cluster.run("login", *command, "--noheader").stdout.split())


def are_weights_equal(one: Path, other: Path, *, key: str, tolerance: float) -> bool:
    code = """
import sys, torch
key, tolerance = sys.argv[1], float(sys.argv[2])  # of the largest weight
one, other = (torch.load(path, weights_only=True)[key] for path in sys.argv[3:5])
same = one.keys() == other.keys() and all((one[key] - other[key]).abs().max() <= tolerance * one[key].abs().max() for key in one)
sys.exit(not same)
"""
    command = [sys.executable, "-c", code, key, str(tolerance), str(one), str(other)]
    return subprocess.run(command, check=False).returncode == 0


def count_trained_steps(checkpoint: Path) -> collections.Counter[int]:
    """Return how often a script has trained each sample, from its checkpoint."""
    code = "import json, sys, torch; print(json.dumps(torch.load(sys.argv[1], weights_only=True)['trained']))"
    command = [sys.executable, "-c", code, str(checkpoint)]
    return collections.Counter(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def check_training(soak: Soak, epochs: int) -> Path:
    """Check that each sample was trained once and each epoch recorded once; return the last checkpoint."""
    run, name = soak.tula.run(), soak.signature()
    result = run.get_training(name).read_result()
    assert result is not None
    expected = soak.subject.samples
    assert result.samples == epochs * expected, f"{result.samples} samples, not {epochs * expected}"
    (checkpoint,) = run.get_training(name).path.glob(soak.subject.checkpoint)
    if soak.subject.process == SCRIPT.name:
        trained = count_trained_steps(checkpoint)
        assert trained == collections.Counter(dict.fromkeys(range(expected), epochs)), trained
    else:
        samples = [row["samples"] for row in run.get_training(name).read_metrics() if row["kind"] == "epoch"]
        assert samples == [expected * (epoch + 1) for epoch in range(epochs)], samples
    attempts = run.get_training(name).read_attempts()
    starts = [attempt.samples or 0 for attempt in attempts]
    assert all(late >= early for early, late in itertools.pairwise(starts)), starts
    causes = collections.Counter(attempt.outcome for attempt in attempts)
    sizes = {task.id: task.nodes for task in run.get_training(name).read_tasks()}
    nodes = [sizes[attempt.task] for attempt in attempts]
    print(
        f"{len(attempts)} attempts: {dict(causes)}; {len({a.allocation for a in attempts})} allocations; nodes {nodes}"
    )
    assert soak.least is None or len({*nodes}) > 1, "it was never granted another number of nodes"
    return checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--least", type=int, help="nodes that suffice for the disturbed training")
    parser.add_argument("--subject", choices=("model", "script", "either"), default="model", help="what is trained")
    arguments = parser.parse_args()
    method = "ramp" if arguments.least is None else "lbt"
    kind, epochs = arguments.subject, arguments.epochs
    if kind == "either":
        kind = random.Random(arguments.seed).choice(("model", "script"))
        epochs = epochs if kind == "model" else epochs // 10
    subject = (
        Subject.make_script(arguments.nodes, epochs)
        if kind == "script"
        else Subject.make_model(arguments.nodes, epochs, method=method)
    )
    began, last = time.monotonic(), []
    with (
        SlurmCluster(arguments.nodes, prefix=f"s{os.getpid()}n", rate="1gbit") as cluster,
        tempfile.TemporaryDirectory(prefix="tula-soak-") as name,
    ):
        for label, kills in (("left alone", 0), ("killed", arguments.kills)):
            folder = Path(name) / label.replace(" ", "-")
            folder.mkdir()
            (folder / "single.py").write_text(MODEL)
            shutil.copy(SCRIPT, folder)
            least = arguments.least if kills else None
            random_ = random.Random(arguments.seed)
            tula = Tula(folder, subject.job, **cluster.env)
            soak = Soak(cluster, tula, subject, arguments.nodes, random_, least=least)
            print(f"{label}: a {kind} on {arguments.nodes} nodes, {epochs} epochs", flush=True)
            soak.train(kills)
            print(f"done after {time.monotonic() - began:.0f} s; {dict(soak.kills)}", flush=True)
            last.append(check_training(soak, epochs))
        tolerance = 0.0 if arguments.least is None else 1e-5
        assert are_weights_equal(*last, key=subject.weights, tolerance=tolerance), "the weights differ"
    print("the weights are the same, bit by bit" if not tolerance else f"the weights are the same, up to {tolerance:g}")


if __name__ == "__main__":
    main()
