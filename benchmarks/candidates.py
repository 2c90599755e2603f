"""What many candidates cost `tula recommend`: CPU seconds and peak memory, beside those of an ordinary answer.

    python benchmarks/candidates.py [--counts 1000 20000 100000] [--method lbt] [--spot] [--all] [--repeat 3] [--json]

For each count a run with so many feasible configurations is made in a temporary folder: nine probes, and numbers of nodes that
divide every one of 25 batches (few numbers do, so the largest batches and clusters are beyond any that there are). Then `tula
recommend` is run on it as a process of its own, and on an ordinary grid of 32. With --spot there are spot nodes as well,
on which each configuration is forecast too. --method is the training method: with the default, lbt, the batch is
constant; with ramp it grows, and each configuration has stages of its own. With --all every candidate is told, as JSON, and written into results.csv. CPU seconds, user and system, are the least of some repetitions; memory is
the peak resident one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from tula_cli.models.out_of_memory import list_divisors
from tula_cli.run.directory import RunDir
from tula_cli.run.records.base import Components
from tula_cli.run.records.probes import Environment, GradientStats, Measured, Overheads
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.spec.load import validate_job

ROOT = Path(__file__).resolve().parents[1]
ORDINARY = 32
BATCHES = 25
MIB = 2**20
# Divides by 5376 numbers, and 2^24 times it is still a 64-bit integer.
SMALLEST = 2**6 * 3**3 * 5**2 * 7 * 11 * 13 * 17 * 19 * 23
WATCH = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, done.stdout, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""
"""Of a small process between: the peak of a process holds that of the one that it was forked from, which may be a large one."""
SPOT = {"discount": 0.6, "interruptions_per_day": 0.5}


@dataclass(frozen=True)
class Cost:
    """What one answer cost."""

    candidates: int
    cpu: float  # seconds
    memory: float  # MB, at its peak


def main() -> None:
    options = _options()
    # What is written here need not outlive a crash, and syncing takes time.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):
        costs = [
            measure(
                Path(folder), count, method=options.method, spot=options.spot, every=options.all, repeat=options.repeat
            )
            for count in options.counts
        ]
        ordinary = measure(
            Path(folder), ORDINARY, method=options.method, spot=options.spot, every=options.all, repeat=options.repeat
        )
    if options.json:
        print(json.dumps([asdict(cost) for cost in (ordinary, *costs)]))
        return
    print(f"{'candidates':>10}{'CPU s':>9}{'beyond':>9}{'peak MB':>9}")
    for cost in (ordinary, *costs):
        print(f"{cost.candidates:10}{cost.cpu:9.2f}{cost.cpu - ordinary.cpu:9.2f}{cost.memory:9.0f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 20_000, 100_000])
    parser.add_argument("--method", default="lbt")
    parser.add_argument("--spot", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(root: Path, count: int, *, method: str = "lbt", spot: bool, every: bool, repeat: int) -> Cost:
    """Return what the cheapest of some answers cost.

    Args:
        root: folder of the run that is made for it.
        count: candidates; beyond an ordinary grid the next multiple of 25.
        method: training method.
        spot: whether there are spot nodes.
        every: whether every candidate is told and written.
        repeat: answers.
    """
    run = make_run(root / f"{count}", count, method=method, spot=spot)
    results = [recommended(run, every=every) for _ in range(repeat)]
    return min(results, key=lambda cost: cost.cpu)


def recommended(run: RunDir, *, every: bool) -> Cost:
    """Return what one answer costs, as a process of its own.

    Raises:
        CalledProcessError: it failed.
    """
    command = [
        sys.executable,
        "-m",
        "tula_cli",
        "recommend",
        "--run",
        str(run.path),
        *(["--all", "--json"] if every else []),
    ]
    watched = subprocess.run(
        [sys.executable, "-c", WATCH, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    status, text, cpu, peak = json.loads(watched.stdout)
    if status:
        raise subprocess.CalledProcessError(status, command, text)
    result = run.read_recommendation()
    assert result is not None and result.candidates is not None
    return Cost(result.candidates, cpu, peak * 1024 / 1e6)


def make_run(root: Path, count: int, *, method: str = "lbt", spot: bool) -> RunDir:
    """Return a run with so many feasible configurations and nine probes."""
    few = count <= ORDINARY
    nodes = [1, 2, 4, 8] if few else _nodes(-(-count // BATCHES))
    smallest, batches = (64, 8) if few else (SMALLEST, BATCHES)
    spec = validate_job(
        {
            "name": "candidates",
            "model": {"name": "resnet18"},
            "dataset": {"name": "digits"},
            "optimizer": {"lr": 0.1},
            "train": {"epochs": 10, "method": method},
            "pricing": {"price": 2.0, **({"spot": SPOT} if spot else {})},
            "search": {
                "nodes": nodes,
                "min_batch": smallest,
                "max_batch": smallest * 2 ** (batches - 1),
                "max_node_hours": 10,
            },
        },
        source="benchmark",
    )
    run = RunDir.create(root, spec)
    sizes = [smallest * 2**k for k in (0, batches // 2, batches - 1)]
    for there in (nodes[0], nodes[len(nodes) // 2], nodes[-1]):
        for batch in sizes:
            run.write_result(probe(there, batch // there, scale=smallest))
    return run


def _nodes(count: int) -> list[int]:
    divisors = list_divisors(SMALLEST)
    if count > len(divisors):
        raise SystemExit(f"at most {len(divisors) * BATCHES} candidates")
    return divisors[:count]


def probe(nodes: int, local_batch: int, *, scale: int) -> Measured:
    """Return a probe whose step takes a tenth of a second for so many samples, and as long to synchronise."""
    compute, sync = 0.05 + 0.1 * local_batch / scale, 0.1 * (1 - 1 / nodes)
    return Measured(
        id=make_probe_id(nodes, local_batch),
        nodes=nodes,
        gpus_per_node=1,
        local_batch=local_batch,
        batch=nodes * local_batch,
        accumulate=1,
        step_times=tuple((compute + sync) * (1 + 0.002 * (step % 5)) for step in range(20)),
        warmup_times=(compute + sync,),
        sync_time=sync,
        compute_time=compute,
        data_wait=0.001,
        memory=Components(
            parameters=100 * MIB, gradients=100 * MIB, optimizer=100 * MIB, factors=0, batch=0, activations=MIB, peak=301 * MIB,
            reserved=310 * MIB,
        ),
        capacity=16 * 1024 * MIB,
        gradients=GradientStats(norm_sqr=1.0, local_norm_sqr=2.0, batch=nodes * local_batch, local_batch=local_batch, steps=20),
        overheads=Overheads(startup=12.0, eval_batch=0.05, eval_batch_size=100, checkpoint=0.5, refresh=0.2),
        environment=Environment(
            hosts=("a",), device="cuda", hardware="GPU", driver="550", backend="nccl", python="3.11", torch="2.6",
            torchvision="0.21", tula="0.1",
        ),
        dataset_size=2**63 - 1,
        eval_size=10_000,
        measured_at=0.0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
