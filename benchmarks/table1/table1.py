"""Table I on CIFAR-10: top-1 and top-5 of every method at large batches, over seeds, with controls.

    python benchmarks/table1/table1.py --data DIR --reduced              # on a CPU: two small networks, an hour each on two cores
    python benchmarks/table1/table1.py --data DIR --budget-minutes 25    # on a GPU: ResNet18 first, then the others
    python benchmarks/table1/table1.py --data DIR --show                 # the tables of what there is

DIR holds `train/<class>/*` and `test/<class>/*` (torchvision's ImageFolder). Everything goes through `tula compare`'s own
service: each model is a job with a run directory under --runs, where `tula compare --run DIR --show` shows the same. What
is done is kept: the same command goes on. Of each model the first seed of every row is trained before the second, and
nothing is started that is not expected to end within the budget.

The learning rates are the paper's (IV-B), for batch 128; epochs, milestones (half and three quarters of the epochs) and
augmentation are not in it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table1_data

from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import TulaError
from tula_cli.run.code import fingerprint
from tula_cli.run.directory import RunDir
from tula_cli.run.files import write_atomic
from tula_cli.services import compare as services_compare
from tula_cli.services import status as services_status
from tula_cli.services.compare import Grid
from tula_cli.services.comparison import accuracy, trainings
from tula_cli.services.comparison.accuracy import CompareReport, Row, Stat
from tula_cli.services.progress import job_status
from tula_cli.show.compare import comparison_note
from tula_cli.show.html import page as show_html_page
from tula_cli.show.screen import plain
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate
from tula_cli.words import duration

HERE = Path(__file__).resolve().parent
REFERENCE_BATCH = 128


@dataclass(frozen=True)
class Recipe:
    """A model and its hyper-parameters."""

    model: str
    lr: float
    weight_decay: float


MODELS = {
    "resnet18": Recipe("resnet18_cifar", 0.05, 5e-4),
    "vgg11": Recipe("vgg11_cifar", 0.01, 5e-4),
    "mobilenet_v3": Recipe("mobilenet_v3_large_cifar", 0.01, 1e-4),
    "alexnet": Recipe("alexnet_cifar", 0.01, 5e-4),
    "resnet50": Recipe("resnet50_cifar", 0.05, 5e-4),
}
"""In the order of what they tell for their time."""
SMALL = {
    "small": Recipe("table1_data:SmallNet", 0.05, 5e-4),
    "plain": Recipe("table1_plain:PlainNet", 0.01, 5e-4),
}
"""With and without BatchNorm."""
METHODS = "lbt,lrs,lars,polo,ags,robust,ortho,auto"
SINGLE = "lbt,lrs,lars,ags,robust,ortho,auto"
"""On one GPU: there is no local SGD with one rank."""


def main() -> None:
    options = arguments()
    os.chdir(HERE)  # the jobs import table1_data from the working directory
    began, reports, failure = time.monotonic(), {}, ""
    for name, recipe in (SMALL if options.reduced else MODELS).items():
        if options.models and name not in options.models:
            continue
        spec = job(name, recipe, options)
        run = RunDir.of(options.runs, spec, code=fingerprint(spec, HERE))
        try:
            if not options.show:
                train(run, spec, options, ends=began + 60 * options.budget_minutes)
        except TulaError as error:  # of this model; the others go on
            failure = f"{name}: {error.message}"
            print(f"error: {failure} {error.hint}", file=sys.stderr)
        if (comparison := run.comparison()) is not None:
            reports[name] = accuracy.report(run, comparison, spec, jobs=states(run, spec))
            if options.html:
                write_page(run, spec, reports[name], options.html)
    if options.show and not reports:
        print(f"nothing trained in {options.runs} yet", file=sys.stderr)
    tell(reports, options)
    raise SystemExit(1 if failure else 0)


def train(
    run: RunDir, spec: JobSpec, options: argparse.Namespace, *, ends: float, launcher: Launcher | None = None
) -> None:
    """Train what is missing of one model's grid, as far as there is time (`ends`, monotonic seconds)."""
    launcher = launcher or cluster_launcher.launcher_for(spec)
    plan = services_compare.plan(run, spec, grid(options), inspect=inspection.inspect, now=time.time())
    run.adopt(spec)
    run.write_comparison(plan.comparison)
    left = ends - time.monotonic()
    for now in trainings.one_by_one(run, plan, launcher, inspect=inspection.inspect, seconds=left):
        if now.ended is not None:
            how = f"failed: {now.problem}" if now.problem else "done"
            rest = f", about {duration(now.left)} left" if now.left else ""
            print(
                f"{spec.name}: {now.done} of {now.total}, {now.ended.words} {how}{rest}",
                file=sys.stderr,
                flush=True,
            )


def grid(options: argparse.Namespace) -> Grid:
    """Return the grid of one model."""
    methods, batches = options.methods.split(","), (int(batch) for batch in options.batch.split(","))
    return Grid(tuple(methods), tuple(batches), options.seeds, nodes=1)


def job(name: str, recipe: Recipe, options: argparse.Namespace) -> JobSpec:
    """Return the job of one model."""
    size, per_class = (16, (options.per_class, options.per_class // 2)) if options.reduced else (32, (None, None))
    file = options.runs / f"cifar10-{size}-{per_class[0] or 'all'}.npz"
    if not options.show:
        table1_data.prepare(options.data, file, size=size, per_class=per_class)
    epochs = options.epochs
    return validate(
        {
            "name": f"table1-{name}",
            "model": {"name": recipe.model},
            "dataset": {"name": "table1_data:dataset", "args": {"file": str(file), "crop": not options.reduced}},
            "optimizer": {"lr": recipe.lr, "momentum": 0.9, "weight_decay": recipe.weight_decay},
            "schedule": {"kind": "multistep", "milestones": [epochs / 2, epochs * 3 / 4]},
            "train": {
                "epochs": epochs,
                "workers": options.workers,
                "reference_batch": REFERENCE_BATCH,
                "precision": "fp32" if options.reduced else options.precision,
            },
            "search": {"nodes": [1]},
            "cluster": {"gpus_per_node": options.ranks, "device": "cpu" if options.reduced else options.device},
        },
        source="table1",
    )


def states(run: RunDir, spec: JobSpec) -> Sequence[job_status.JobStatus]:
    return services_status.snapshot(run, cluster_launcher.launcher_for(spec, submits=False), now=time.time()).jobs


def write_page(run: RunDir, spec: JobSpec, report: CompareReport, folder: Path) -> None:
    comparison = run.comparison()
    assert comparison is not None
    write_atomic(
        folder / f"{spec.name}.html",
        show_html_page.comparison(report, accuracy.curves(run, comparison), title=spec.name),
    )


# --- what is told


def tell(reports: Mapping[str, CompareReport], options: argparse.Namespace) -> None:
    """Print a Markdown table a model, and write the same and more as JSON."""
    for name, report in reports.items():
        print("\n".join(markdown(name, report)), flush=True)
    if options.json:
        content = {"epochs": options.epochs, "models": {name: plain(report) for name, report in reports.items()}}
        write_atomic(options.json, json.dumps(content, indent=1) + "\n")


def markdown(name: str, report: CompareReport) -> Iterator[str]:
    """One row a method at a batch: mean, sample standard deviation and number of seeds."""
    yield f"### {name}: {report.finished} of {report.total} trainings"
    yield ""
    yield "| batch | method | n | top-1 (%) | top-5 (%) | gap | recovered (%) | samples | minutes | note |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in report.rows:
        yield f"| {' | '.join(cells(row))} |"
    yield ""


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        str(row.batch),
        f"{row.method} (reference)" if row.reference else row.method,
        str(row.seeds),
        spread(row.top1),
        spread(row.top5),
        "" if row.gap is None else f"{row.gap:.2f}",
        "" if row.recovered is None else f"{100 * row.recovered:.0f}",
        "" if row.samples is None else f"{row.samples:.0f}",
        "" if row.hours is None else f"{60 * row.hours:.2f}",
        comparison_note(row),
    )


def spread(value: Stat | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.2f}" + ("" if value.sd is None else f" ± {value.sd:.2f}")


# --- the command line


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is not given depends on --reduced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder with train/<class>/ and test/<class>/")
    add("--runs", type=Path, default=Path("table1-runs"), help="where runs are kept (table1-runs)")
    add("--reduced", action="store_true", help="small networks on a part of the images at 16x16, on the CPU, 2 ranks")
    add("--models", type=lambda text: text.split(","), help=f"of {','.join(MODELS)} (all)")
    add("--methods", help=f"{METHODS}; with one rank {SINGLE}; controls are always in the table")
    add("--batch", default=None, help="large batches (1024,4096; reduced: 1024,2048)")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=None, help="30; reduced: 20")
    add("--per-class", type=int, default=1024, help="reduced: training images of each class; half as many for the test")
    add("--ranks", type=int, default=None, help="GPUs, or processes on the CPU (1; reduced: 2)")
    add("--workers", type=int, default=None, help="loader processes a rank (8; reduced: none)")
    add("--precision", default="bf16", choices=("fp32", "bf16", "fp16"), help="on a GPU (bf16); reduced: fp32")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--budget-minutes", type=float, default=float("inf"), help="start nothing that is not expected to end within")
    add("--show", action="store_true", help="train nothing")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--html", type=Path, metavar="DIR", help="write a page with plots for each model")
    options = parser.parse_args(words)
    if options.data is None and not options.show:
        parser.error("--data is required: a folder with train/<class>/ and test/<class>/")
    known = SMALL if options.reduced else MODELS
    if unknown := set(options.models or ()) - set(known):
        parser.error(f"--models: {', '.join(sorted(unknown))} unknown; there are {', '.join(known)}")
    defaults: dict[str, Any] = (
        {"batch": "1024,2048", "epochs": 20, "ranks": 2, "workers": 0}
        if options.reduced
        else {"batch": "1024,4096", "epochs": 30, "ranks": 1, "workers": 8}
    )
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.methods is None:
        options.methods = METHODS if options.ranks > 1 else SINGLE
    if strange := [word for word in options.methods.split(",") if word not in services_compare.known_methods()]:
        parser.error(
            f"--methods: {', '.join(map(repr, strange))} unknown; there are {', '.join(services_compare.known_methods())}"
        )
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1 is needed")
    if any(not word.strip().isdigit() for word in options.batch.split(",")):
        parser.error(f"--batch {options.batch}: must be numbers, with commas between them")
    for name in ("data", "runs", "json", "html"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).absolute())
    return options


if __name__ == "__main__":
    main()
