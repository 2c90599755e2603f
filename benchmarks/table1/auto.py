"""What self-tuning is worth: `train.method: auto` against the large batch, the small batch and fixed learning rates.

    python benchmarks/table1/auto.py --runs DIR [--model bn|plain] [--batch 256] [--seeds 3] [--epochs 40] [--json]

Trains scikit-learn's digits with a small network (with BatchNorm, or without), one process, in tula's own training loop;
about a minute a seed on a quiet core; on CIFAR-10 `table1.py --reduced --methods lbt,auto` does it. What is done is kept in
DIR: the same command goes on. The arms are chosen on held-out training samples; the accuracies shown are of the evaluation
set, which no choice has seen.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tula_cli.errors import Diverged
from tula_cli.models import halving
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import TrainResult
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate
from tula_cli.spec.signature import train_signature
from tula_cli.worker.build.datasets import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks

CONTROLS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Row:
    """One way to train, over the seeds. Accuracies in percent."""

    name: str
    top1: tuple[float, ...]
    loss: tuple[float, ...]  # on the same samples: it tells apart what a few hundred accuracies do not
    extra: float  # samples in branches, as a share of those of the training
    chosen: tuple[str, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.top1)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.top1) if len(self.top1) > 1 else 0.0


def plain_net(num_classes: int = 10, width: int = 16) -> nn.Module:
    """Return the layers of small_cnn without BatchNorm, initialised after He et al. so that the signal gets through."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, width), (width, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.MaxPool2d(2)] if inputs == width and outputs > width else []
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, num_classes))
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return net


def main() -> None:
    options = _arguments()
    ranks = _alone()
    rows = [row for name, changes, batch in _ways(options) if (row := _row(name, changes, batch, options, ranks))]
    dist.destroy_process_group()  # its threads would end the process badly
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print("\n".join(_table(rows)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("auto-runs"), help="folder of the runs (auto-runs)")
    parser.add_argument("--model", choices=("bn", "plain"), default="bn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--reference", type=int, default=32, help="the small batch, which the learning rate is for (32)"
    )
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--only", help="names of ways to train, separated by commas")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _alone() -> Ranks:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def _ways(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield (name, changes of the spec, batch)."""
    lr, linear = options.lr, options.batch // options.reference
    yield "small batch", {"train": {"method": "lbt"}}, options.reference
    yield "lbt", {"train": {"method": "lbt"}}, options.batch
    yield "auto", {"train": {"method": "auto"}}, options.batch
    yield "ortho", {"train": {"method": "ortho"}}, options.batch
    yield "ramp", {"train": {"method": "ramp"}}, options.batch
    yield "lrs with a ramp", {"train": {"method": "lrs", "ramp": "auto"}}, options.batch
    yield "small batch, ortho", {"train": {"method": "ortho"}}, options.reference
    for factor in (f for f in CONTROLS if f <= linear):
        yield f"lbt-x{factor}", {"train": {"method": "lbt"}, "optimizer": {"lr": factor * lr}}, options.batch
    yield "ags", {"train": {"method": "ags"}}, options.batch
    yield "robust", {"train": {"method": "ags"}, "ags": {"preset": "robust"}}, options.batch


def _row(name: str, changes: dict[str, Any], batch: int, options: argparse.Namespace, ranks: Ranks) -> Row | None:
    if options.only and name not in options.only.split(","):
        return None
    try:
        found = [_train(_spec(changes, seed, options), batch, options.runs, ranks) for seed in range(options.seeds)]
    except Diverged as diverged:
        print(f"{name}: {diverged}", file=sys.stderr)
        return None
    for seed, result in enumerate(found):
        print(f"{name}, seed {seed}: {result.metrics['top1']:.2f}", file=sys.stderr)
    return Row(
        name=name,
        top1=tuple(result.metrics["top1"] for result in found),
        loss=tuple(result.metrics.get("eval_loss", math.nan) for result in found),  # none where it diverged
        extra=statistics.fmean(result.tuning.samples / result.samples if result.tuning else 0.0 for result in found),
        chosen=tuple(result.tuning.chosen.name for result in found if result.tuning and result.tuning.chosen),
    )


def _spec(changes: dict[str, Any], seed: int, options: argparse.Namespace) -> JobSpec:
    base: dict[str, Any] = {
        "name": "auto",
        "model": {"name": "small_cnn", "args": {"in_channels": 1, "width": 16}}
        if options.model == "bn"
        else {"name": f"{Path(__file__).stem}:plain_net"},
        "dataset": {"name": "digits"},
        "optimizer": {"lr": options.lr, "momentum": 0.9, "weight_decay": 5e-4},
        "schedule": {"kind": "multistep", "milestones": [options.epochs // 2, options.epochs * 3 // 4]},
        "train": {"epochs": options.epochs, "seed": seed, "workers": 0, "reference_batch": options.reference},
        "cluster": {"device": "cpu"},
    }
    merged = {key: {**base.get(key, {}), **value} for key, value in changes.items()}
    return validate({**base, **merged}, source="benchmarks/table1/auto.py")


def _train(spec: JobSpec, batch: int, folder: Path, ranks: Ranks) -> TrainResult:
    name = train_signature(spec, nodes=1, batch=batch)
    task = TrainTask(
        id=f"train-{name}-1",
        job=f"train-{name}",
        spec=spec,
        workdir=".",
        nodes=1,
        signature=name,
        attempt=1,
        ladder=(Rung(batch=batch),),
        workers=0,
    )
    run = RunDir.create(folder, spec)
    if run.training(name).result() is None:
        with contextlib.redirect_stdout(sys.stderr):  # where a job has its log
            run_training(task, run, ranks, build_datasets(spec))
    result = run.training(name).result()
    if result is None:
        raise SystemExit("told to stop: it is saved, and the same command goes on")
    return result


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table: the share of the gap between lbt and the small batch that each way recovers."""
    by_name = {row.name: row for row in rows}
    small, lbt = by_name.get("small batch"), by_name.get(halving.CONTROL)
    yield "| | top-1 (%) | loss | n | against lbt, each seed | of the gap | extra samples | chosen |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        apart = " ".join(f"{a - b:+.2f}" for a, b in zip(row.top1, lbt.top1, strict=True)) if lbt else ""
        gap = small.mean - lbt.mean if small and lbt else 0.0
        share = f"{(row.mean - lbt.mean) / gap:.0%}" if lbt and gap > 0 else "-"
        counts = ", ".join(row.chosen)
        yield (
            f"| {row.name} | {row.mean:.2f} ± {row.deviation:.2f} | {statistics.fmean(row.loss):.3f} | {len(row.top1)} |"
            f" {apart} | {share} |"
            f" {row.extra:.0%} | {counts} |"
        )


if __name__ == "__main__":
    main()
