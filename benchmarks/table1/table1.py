"""Table I on CIFAR-10: top-1 and top-5 of every method at large batches, over seeds, with controls.

    python benchmarks/table1/table1.py --data DIR --reduced --hours 8    # on a CPU: small networks
    python benchmarks/table1/table1.py --data DIR --budget-minutes 25    # on a GPU: ResNet18 first, then the others
    python benchmarks/table1/table1.py --data DIR --reduced --show       # the tables of what there is

DIR holds `train/<class>/*` and `test/<class>/*` (torchvision's ImageFolder). Everything goes through `tula compare`'s own
service: each model is a job with a run directory under --runs, where `tula compare --run DIR --show` shows the same. What
is done is kept, and what was broken off resumes: the same command goes on. Of each model the first seed of every row is
trained before the second, and nothing is started that is not expected to end within the hours.

The learning rates are the paper's (IV-B), for batch 128; epochs, milestones (half and three quarters of the epochs) and
augmentation are not in it.

The reduced table (table1_rows.py) goes by batch (2048, then 1024), of a batch by seed, of a seed by network (with BatchNorm,
without). Between the two batches come digits and a small language model with AdamW at 16 times the batch. At the end a table
of each network tells of every row its seeds, accuracy, steps and minutes, which rows no other row beats in both accuracy and
steps (*), and the share of the gap that is won back, also against the small batch with the same tricks.

On two quiet cores a row takes about a minute (16 to 20 s of a core's arithmetic a rank, the images, the start), one of the
language model about two: some 130 trainings at 2048, 50 with AdamW, 100 at 1024, five hours in all. `--models`, `--methods`,
`--batch` and `--seeds` name a part of it.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table1_data
import table1_kept
import table1_rows
import table1_told

from tula_cli.cluster import inspection
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.cluster.launcher import Launcher
from tula_cli.errors import TulaError
from tula_cli.run.code import fingerprint
from tula_cli.run.directory import RunDir
from tula_cli.run.files import write_atomic
from tula_cli.services import compare as services_compare
from tula_cli.services import status as services_status
from tula_cli.services import train as services_train
from tula_cli.services.compare import Grid
from tula_cli.services.comparison import accuracy, trainings
from tula_cli.services.comparison.accuracy import CompareReport
from tula_cli.services.comparison.rows import known_methods
from tula_cli.services.events import follow
from tula_cli.services.profiling import early_training
from tula_cli.services.progress import job_status
from tula_cli.services.recommendation.gradient_noise_of import trained_noise
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
REDUCED = (*SMALL, *table1_rows.CASES)
METHODS = "lbt,lrs,lars,polo,ags,robust,ortho,ramp,auto"
SINGLE = "lbt,lrs,lars,ags,robust,ortho,ramp,auto"
"""On one GPU: there is no local SGD with one rank."""


def main() -> None:
    options = arguments()
    os.chdir(HERE)  # the jobs import table1_data from the working directory
    with table1_rows.known():
        failure = train_all(options, ends=time.monotonic() + 60 * options.budget_minutes) if not options.show else ""
        reports = {}
        for name in options.models:
            spec = job(name, options)
            run = run_of(spec, options)
            if (comparison := run.comparison()) is not None:
                reports[name] = accuracy.report(run, comparison, spec, jobs=states(run, spec))
                if options.html:
                    write_page(run, spec, reports[name], options.html)
    if options.show and not reports:
        print(f"nothing trained in {options.runs} yet", file=sys.stderr)
    tell(reports, options)
    raise SystemExit(1 if failure else 0)


def train_all(options: argparse.Namespace, *, ends: float) -> str:
    """Train what is missing of all models, as far as there is time; return what failed last."""
    names, failed = options.models, dict[str, str]()
    for name in names if options.reduced else ():  # each has its table from the start
        turn_safely(name, options, failed, ends=0.0)
    turns = table1_rows.turns(names, options) if options.reduced else [table1_rows.Turn(name) for name in names]
    for turn in turns:
        if turn.name not in failed:
            turn_safely(turn.name, options, failed, ends=ends, turn=turn)
    return next(reversed(failed.values()), "")


def turn_safely(
    name: str,
    options: argparse.Namespace,
    failed: dict[str, str],
    *,
    ends: float,
    turn: table1_rows.Turn | None = None,
) -> None:
    """Train a part of one model's table; where it cannot be, say so, and the other models go on."""
    try:
        spec = job(name, options)
        train(run_of(spec, options), spec, options, ends=ends, turn=turn or table1_rows.Turn(name))
    except TulaError as error:
        failed[name] = f"{name}: {error.message}"
        print(f"error: {failed[name]} {error.hint}", file=sys.stderr)


def train(
    run: RunDir,
    spec: JobSpec,
    options: argparse.Namespace,
    *,
    ends: float,
    turn: table1_rows.Turn,
    launcher: Launcher | None = None,
) -> None:
    """Train what is missing of a part of one model's grid, as far as there is time (`ends`, monotonic seconds)."""
    launcher = launcher or cluster_launcher.launcher_for(spec)
    asked = grid(turn.name, options)
    if table1_rows.BY_NOISE in asked.methods and trained_noise([run], spec) is None:
        measure_noise(run, spec, launcher)
    plan = services_compare.plan(run, spec, asked, inspect=inspection.inspect, now=time.time())
    run.adopt(spec)
    run.write_comparison(plan.comparison)
    cells, left = plan.comparison.cells, ends - time.monotonic()
    part = turn.of(plan)
    if options.csv:
        kept = table1_kept.read(options.csv)
        part = dataclasses.replace(part, missing=table1_kept.missing(part.missing, turn.name, kept))
    for now in trainings.one_by_one(run, part, launcher, inspect=inspection.inspect, seconds=left):
        if now.ended is not None:
            how = f"failed: {now.problem}" if now.problem else "done"
            rest = f", about {duration(now.left)} left{turn.words}" if now.left else ""
            done = sum(services_compare.has_ended(run, cell) for cell in cells)
            told = f"{spec.name}: {done} of {len(cells)}, {now.ended.words} {how}{rest}"
            print(told, file=sys.stderr, flush=True)


def measure_noise(run: RunDir, spec: JobSpec, launcher: Launcher) -> None:
    """Train the first tenth of the epochs at the small batch, as `tula profile --progress` does, for the noise there."""
    run.adopt(spec)
    prepared = follow(early_training.prepare(run, spec, inspection.inspect), lambda _: None)
    for _ in services_status.watch(run, launcher, [services_train.start(run, prepared.plan, launcher)]):
        pass
    found = early_training.told(prepared).noise
    scale = "not measured" if found is None else f"{found.scale:.0f}"
    print(f"{spec.name}: gradient noise scale after the first epochs: {scale}", file=sys.stderr, flush=True)


def grid(name: str, options: argparse.Namespace) -> Grid:
    """Return the grid of one model."""
    if options.reduced:
        return table1_rows.grid(name, options, reference=REFERENCE_BATCH)
    methods, batches = options.methods.split(","), (int(batch) for batch in options.batch.split(","))
    return Grid(tuple(methods), tuple(batches), options.seeds, nodes=1)


def run_of(spec: JobSpec, options: argparse.Namespace) -> RunDir:
    return RunDir.of(options.runs, spec, code=fingerprint(spec, HERE))


def job(name: str, options: argparse.Namespace) -> JobSpec:
    """Return the job of one model."""
    case = table1_rows.CASES.get(name) if options.reduced else None
    content = dict(case.content) if case else images(name, options)
    epochs = options.epochs or (case.epochs if case else 20 if options.reduced else 30)
    if not case:
        content["schedule"] = {"kind": "multistep", "milestones": [epochs / 2, epochs * 3 / 4]}
    return validate(
        {
            **content,
            "name": f"table1-{name}",
            "train": {
                **content.get("train", {}),
                "epochs": epochs,
                "workers": options.workers,
                "reference_batch": case.reference if case else REFERENCE_BATCH,
                "precision": "fp32" if options.reduced else options.precision,
            },
            "search": {"nodes": [1]},
            "cluster": {"gpus_per_node": options.ranks, "device": "cpu" if options.reduced else options.device},
        },
        source="table1",
    )


def images(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return model, data and optimizer of a network for CIFAR-10, whose images are read where they were not yet."""
    recipe = (SMALL if options.reduced else MODELS)[name]
    size, per_class = (16, (options.per_class, options.per_class // 2)) if options.reduced else (32, (None, None))
    file = options.runs / f"cifar10-{size}-{per_class[0] or 'all'}.npz"
    if not options.show:
        table1_data.prepare(options.data, file, size=size, per_class=per_class)
    return {
        "model": {"name": recipe.model},
        "dataset": {"name": "table1_data:dataset", "args": {"file": str(file), "crop": not options.reduced}},
        "optimizer": {"lr": recipe.lr, "momentum": 0.9, "weight_decay": recipe.weight_decay},
    }


def states(run: RunDir, spec: JobSpec) -> Sequence[job_status.JobStatus]:
    return services_status.snapshot(run, cluster_launcher.launcher_for(spec, submits=False), now=time.time()).jobs


def write_page(run: RunDir, spec: JobSpec, report: CompareReport, folder: Path) -> None:
    comparison = run.comparison()
    assert comparison is not None
    write_atomic(
        folder / f"{spec.name}.html",
        show_html_page.comparison(report, accuracy.curves(run, comparison), title=spec.name),
    )


def tell(reports: Mapping[str, CompareReport], options: argparse.Namespace) -> None:
    """Print a Markdown table a model, and write the same and more as JSON and CSV."""
    steps = {name: table1_told.steps(run_of(job(name, options), options), found) for name, found in reports.items()}
    for name, report in reports.items():
        print("\n".join(table1_told.markdown(name, report, steps[name])), flush=True)
    if options.json:
        content = {"models": {name: plain(report) for name, report in reports.items()}}
        write_atomic(options.json, json.dumps(content, indent=1) + "\n")
    if options.csv:
        kept = table1_kept.read(options.csv)
        for name, report in reports.items():
            kept.update(table1_kept.of(name, report, steps[name]))
        table1_kept.write(options.csv, kept)
        print("\n".join(table1_kept.markdown(kept)))


# --- the command line


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is not given depends on --reduced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder with train/<class>/ and test/<class>/")
    add("--runs", type=Path, default=Path("table1-runs"), help="where runs are kept (table1-runs)")
    add("--reduced", action="store_true", help="small networks on a part of the images at 16x16, on the CPU, 2 ranks")
    add(
        "--models", type=lambda text: text.split(","), help=f"of {','.join(MODELS)} (all); reduced: {','.join(REDUCED)}"
    )
    add("--methods", help=f"{METHODS}; with one rank {SINGLE}; reduced: {','.join(table1_rows.TABLE)}")
    add("--batch", default=None, help="large batches, in the order of their worth (1024,4096; reduced: 2048,1024)")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=None, help="30; reduced: 20, digits 40, text 6")
    add("--per-class", type=int, default=1024, help="reduced: training images of each class; half as many for the test")
    add("--ranks", type=int, default=None, help="GPUs, or processes on the CPU (1; reduced: 2)")
    add("--workers", type=int, default=None, help="loader processes a rank (8; reduced: none)")
    add("--precision", default="bf16", choices=("fp32", "bf16", "fp16"), help="on a GPU (bf16); reduced: fp32")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    budget = parser.add_mutually_exclusive_group()
    within = "start nothing that is not expected to end within"
    budget.add_argument("--budget-minutes", type=float, default=float("inf"), help=within)
    budget.add_argument("--hours", type=lambda text: 60 * float(text), dest="budget_minutes", help="the same in hours")
    add("--show", action="store_true", help="train nothing")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add(
        "--csv",
        type=Path,
        metavar="FILE",
        help="add each training to it, train none again that it has, and tell its table",
    )
    add("--html", type=Path, metavar="DIR", help="write a page with plots for each model")
    options = parser.parse_args(words)
    known = REDUCED if options.reduced else tuple(MODELS)
    options.models = options.models or known
    if unknown := set(options.models) - set(known):
        parser.error(f"--models: {', '.join(sorted(unknown))} unknown; there are {', '.join(known)}")
    if options.data is None and not options.show and not set(options.models) <= set(table1_rows.CASES):
        parser.error("--data is required: a folder with train/<class>/ and test/<class>/")
    defaults: dict[str, Any] = (
        {"batch": "2048,1024", "ranks": 2, "workers": 0}
        if options.reduced
        else {"batch": "1024,4096", "ranks": 1, "workers": 8}
    )
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.methods is None and not options.reduced:
        options.methods = METHODS if options.ranks > 1 else SINGLE
    there_are = (*known_methods(), *(table1_rows.VARIANTS if options.reduced else ()))
    if options.methods is not None and (strange := [w for w in options.methods.split(",") if w not in there_are]):
        parser.error(f"--methods: {', '.join(map(repr, strange))} unknown; there are {', '.join(there_are)}")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1 is needed")
    if any(not word.strip().isdigit() for word in options.batch.split(",")):
        parser.error(f"--batch {options.batch}: must be numbers, with commas between them")
    for name in ("data", "runs", "json", "csv", "html"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).absolute())
    return options


if __name__ == "__main__":
    main()
