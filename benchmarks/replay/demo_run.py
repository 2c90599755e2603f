"""Write the run of `tula recommend --demo` from published measurements.

    python benchmarks/replay/demo_run.py step_times.csv statistical_efficiency.csv

The tables are those of replay.py and efficiency.py. The run is ResNet-18 on CIFAR-10 with one T4 GPU per node (AWS g4dn.12xlarge has
four). The step times, their exposed synchronisation, and the gradients of a training at the small batch were published. The memory
is an estimate of `tula check`, because it was not published. The start of a job and the evaluation were not published either and
count as no time.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from replay_data import MeasuredSet, Where, load_sets

from tula_cli.cluster.inspection import inspect
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import Environment, Footprint, GradientStats, Measured, Overheads
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job

ROOT = Path(__file__).parents[2] / "tula_cli" / "demo"
NOISE_EPOCHS = range(1, 4)
"""The epochs whose gradients are used: the first ones, because probes measure at the start of a training."""
PUBLISHED = 1634169600.0  # Unix time of 2021-10-14
MIN_BATCH, MAX_BATCH = 128, 4096
JOB: dict[str, Any] = {
    "name": "resnet18-cifar10",
    "model": {"name": "resnet18_cifar"},
    "dataset": {"name": "CIFAR10"},
    "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    "train": {"epochs": 100, "reference_batch": MIN_BATCH},
    "search": {
        "nodes": [1, 2, 4, 8, 16],
        "min_batch": MIN_BATCH,
        "max_batch": MAX_BATCH,
        "strategy": "sweep",
        "max_node_hours": 10,
    },
    "cluster": {"kind": "slurm", "gpus_per_node": 1},
    "pricing": {
        "kind": "gpu_hour",
        "price": 0.978,
        "currency": "USD",
        # a quarter of AWS's list price of g4dn.12xlarge, on demand, us-east-1
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path)
    parser.add_argument("gradients", type=Path)
    arguments = parser.parse_args()
    spec = validate_job(JOB, source="demo_run.py")
    steps = next(
        measured
        for measured in load_sets(arguments.steps)
        if (measured.cluster, measured.app, measured.gpus_per_node) == ("aws", "cifar10", 1)
    )
    shutil.rmtree(ROOT, ignore_errors=True)
    run = RunDir.create(ROOT, spec)
    footprints = estimate_footprints()
    for place, local_batch in select_probes(steps, spec):
        gradients = read_gradients(arguments.gradients, place.replicas * local_batch, local_batch)
        run.write_result(make_result(steps, place, footprints[local_batch], gradients))
    (ROOT / "latest").unlink()
    for path in ROOT.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    print(run.path)


def select_probes(steps: MeasuredSet, spec: JobSpec) -> Iterator[tuple[Where, int]]:
    """Yield the configurations of a sweep with their nominal local batch: the published 129 images stand for 128.

    These are all batches on one node, the smallest one on the others, and the largest one on the largest number of nodes.
    """
    by_nodes: dict[int, list[tuple[Where, int]]] = {}
    for place, batch in sorted(steps.batches.items()):
        if place.nodes in spec.search.nodes and MIN_BATCH <= batch <= MAX_BATCH:
            by_nodes.setdefault(place.nodes, []).append((place, batch // place.replicas))
    fewest, *others = sorted(by_nodes)
    yield from by_nodes[fewest]
    for nodes in others:
        yield by_nodes[nodes][0]
    yield by_nodes[others[-1]][-1]


def estimate_footprints() -> dict[int, Footprint]:
    """Return the memory of each local batch as `tula check` estimates it, with random images, which need no download."""
    images = {"name": "FakeData", "args": {"size": 50_000, "image_size": [3, 32, 32], "num_classes": 10}}
    inspection = inspect(validate_job({**JOB, "dataset": images}, source="demo_run.py"))
    return {footprint.local_batch: footprint for footprint in inspection.footprints}


def read_gradients(path: Path, batch: int, local_batch: int) -> GradientStats | None:
    """Return the squared norms at two batches, for several ranks at the smallest batch (128); otherwise None.

    Published for each epoch are |G|^2 of the whole gradient, and the variance of a gradient of the smallest batch. The result is the
    mean of some epochs; its standard error is that of their scatter.
    """
    table = pd.read_csv(path)
    of_app = table[table.app == "cifar10"]
    reference = int(of_app.global_batch.min())
    if batch != reference or batch == local_batch:
        return None
    epochs = of_app[(of_app.global_batch == reference) & of_app.epoch.isin(NOISE_EPOCHS)]
    norms = np.array([epochs.grad_sqr + epochs.grad_var * reference / size for size in (reference, local_batch)])
    covariance = np.cov(norms) / norms.shape[1]
    return GradientStats(
        norm_sqr=norms[0].mean(),
        local_norm_sqr=norms[1].mean(),
        batch=reference,
        local_batch=local_batch,
        steps=round(len(epochs) * epochs.iteration.max() / epochs.epoch.max()),
        covariance=(covariance[0, 0], covariance[1, 1], covariance[0, 1]),
    )


def make_result(steps: MeasuredSet, place: Where, footprint: Footprint, gradients: GradientStats | None) -> Measured:
    """Return the record of a probe; unpublished values are None, or 0 if the field cannot be None."""
    seen = steps.truth[place]
    local_batch = footprint.local_batch
    return Measured(
        id=make_probe_id(place.nodes, local_batch),
        nodes=place.nodes,
        gpus_per_node=place.gpus_per_node,
        local_batch=local_batch,
        batch=place.replicas * local_batch,
        accumulate=1,
        step_times=seen.step_times,
        warmup_times=(),
        sync_time=seen.step_times[0] - seen.compute_time,
        compute_time=seen.compute_time,
        data_wait=None,
        memory=footprint.memory,
        capacity=15 * 2**30,
        gradients=gradients,
        overheads=Overheads(startup=0.0, eval_batch=None, eval_batch_size=None, checkpoint=None, refresh=None),
        environment=Environment(
            hosts=(), device="cuda", hardware="Tesla T4", driver="", backend="nccl",
            python="", torch="", torchvision="", tula="",
        ),
        dataset_size=50_000,
        eval_size=10_000,
        measured_at=PUBLISHED,
    )  # fmt: skip


if __name__ == "__main__":
    main()
