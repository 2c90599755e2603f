"""CPU time and peak memory of `tula recommend` with many candidates, compared with an ordinary number.

    python benchmarks/candidates.py [--counts 1000 20000 100000] [--method lbt] [--spot] [--all] [--repeat 3] [--json]

For each count, a run with this number of feasible configurations is created in a temporary folder: nine probes, and numbers of
nodes that divide each of 25 batches (few numbers do, so the largest batches and clusters are larger than any real ones). Then
`tula recommend` runs on it in a separate process, and on an ordinary grid of 32. With --spot there are also spot nodes, and each
configuration is also predicted on these. --method is the training method: with the default, lbt, the batch is constant; with
ramp it grows, and each configuration has stages. With --all, all candidates are printed as JSON and written to results.csv. CPU
seconds (user and system) are the minimum of the repetitions; memory is peak resident memory.
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
from tula_cli.run.records.probes import Components, Environment, GradientStats, Measured, Overheads
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.spec.load import validate_job

ROOT = Path(__file__).resolve().parents[1]
ORDINARY_COUNT = 32
BATCH_COUNT = 25
MIB = 2**20
# It has 5376 divisors, and 2^24 times its value fits into a 64-bit integer.
SMALLEST_BATCH = 2**6 * 3**3 * 5**2 * 7 * 11 * 13 * 17 * 19 * 23
MEASURE_CODE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, done.stdout, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""
"""Runs in a small process, because the peak of a process includes that of the process it was forked from, which may be large."""
SPOT_PRICING = {"discount": 0.6, "interruptions_per_day": 0.5}


@dataclass(frozen=True)
class Cost:
    """The cost of one `tula recommend`."""

    candidates: int
    cpu: float  # in seconds
    memory: float  # peak, in MB


def main() -> None:
    options = _parse_arguments()
    # The files need not survive a crash, and syncing takes time.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):
        costs = [
            measure(
                Path(folder), count, method=options.method, spot=options.spot, every=options.all, repeat=options.repeat
            )
            for count in options.counts
        ]
        ordinary = measure(
            Path(folder),
            ORDINARY_COUNT,
            method=options.method,
            spot=options.spot,
            every=options.all,
            repeat=options.repeat,
        )
    if options.json:
        print(json.dumps([asdict(cost) for cost in (ordinary, *costs)]))
        return
    print(f"{'candidates':>10}{'CPU s':>9}{'beyond':>9}{'peak MB':>9}")
    for cost in (ordinary, *costs):
        print(f"{cost.candidates:10}{cost.cpu:9.2f}{cost.cpu - ordinary.cpu:9.2f}{cost.memory:9.0f}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 20_000, 100_000])
    parser.add_argument("--method", default="lbt")
    parser.add_argument("--spot", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(root: Path, count: int, *, method: str = "lbt", spot: bool, every: bool, repeat: int) -> Cost:
    """Return the lowest cost over some repetitions.

    Args:
        root: folder of the run, which is created.
        count: candidates; above an ordinary grid, the next multiple of 25.
        method: training method.
        spot: whether there are spot nodes.
        every: whether all candidates are printed and written.
        repeat: number of repetitions.
    """
    run = make_run(root / f"{count}", count, method=method, spot=spot)
    results = [measure_recommendation(run, every=every) for _ in range(repeat)]
    return min(results, key=lambda cost: cost.cpu)


def measure_recommendation(run: RunDir, *, every: bool) -> Cost:
    """Return the cost of one recommendation in a separate process.

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
        [sys.executable, "-c", MEASURE_CODE, *command],
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
    """Return a run with `count` feasible configurations and nine probes."""
    few = count <= ORDINARY_COUNT
    nodes = [1, 2, 4, 8] if few else _node_counts(-(-count // BATCH_COUNT))
    smallest, batches = (64, 8) if few else (SMALLEST_BATCH, BATCH_COUNT)
    spec = validate_job(
        {
            "name": "candidates",
            "model": {"name": "resnet18"},
            "dataset": {"name": "digits"},
            "optimizer": {"lr": 0.1},
            "train": {"epochs": 10, "method": method},
            "pricing": {"price": 2.0, **({"spot": SPOT_PRICING} if spot else {})},
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
            run.write_result(make_probe(there, batch // there, scale=smallest))
    return run


def _node_counts(count: int) -> list[int]:
    divisors = list_divisors(SMALLEST_BATCH)
    if count > len(divisors):
        raise SystemExit(f"at most {len(divisors) * BATCH_COUNT} candidates")
    return divisors[:count]


def make_probe(nodes: int, local_batch: int, *, scale: int) -> Measured:
    """Return a probe whose step computes a tenth of a second per `scale` samples and synchronises for the same time."""
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
