"""Accuracy of training methods at large batches: settings x methods x seeds, trained by tula's training loop in this process.

    python benchmarks/table1/table1.py                            # all settings whose data this machine has, on one core
    python benchmarks/table1/table1.py --settings text,vit --methods small,lbt,ramp --seeds 1 --minutes 20
    python benchmarks/table1/table1.py --data DIR --settings reduced,reduced-plain    # CIFAR-10 at 16 x 16 pixels
    python benchmarks/table1/table1.py --data DIR --settings resnet18-1024 --device cuda    # Table I at full size
    python benchmarks/table1/table1.py --show                     # the tables of existing results, and the goals

Each finished training is a row of --results, identified by setting, method and seed: the same command continues after an
interruption. The same command in a second shell uses another core, and skips trainings that run elsewhere. The settings and methods
are in table1_settings.py; a method that this version of tula does not have is skipped, with its reason.

DIR contains `train/<class>/*` and `test/<class>/*` (torchvision's ImageFolder). All other data come with Python and scikit-learn.
"""

import argparse
import contextlib
import fcntl
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import IO

import table1_networks
import table1_settings
import table1_summary
import torch
import torch.distributed as dist
from table1_settings import METHODS, SETTINGS
from table1_summary import Key, Result

from tula_cli.errors import Diverged, TulaError
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import TrainResult
from tula_cli.run.records.tasks import Rung, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.spec.signature import compute_train_signature
from tula_cli.words import format_duration
from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.entry import run_training
from tula_cli.worker.ranks import Ranks

RESULTS = Path(__file__).resolve().parents[1] / "results" / "table1.csv"
IMAGES_PER_CLASS = (512, 256)
"""CIFAR-10 images per class in the reduced table, for training and for evaluation."""
DEFAULT_SECONDS = 30.0
"""Assumed CPU time of a training before the first one has finished."""


def main() -> None:
    options = parse_arguments()
    keys = list(plan_trainings(options))
    if not options.show:
        ranks = start_process_group(options.device)
        train_all(keys, options, ranks)
        dist.destroy_process_group()  # otherwise its threads would crash at exit
    results = table1_summary.read_results(options.results)
    shown = {key: result for key, result in results.items() if key in keys}
    print("\n".join(table1_summary.format_tables(shown)))


def plan_trainings(options: argparse.Namespace) -> Iterator[Key]:
    """Yield the selected trainings in order: family by family, in each the first seed of all settings first."""
    for family in dict.fromkeys(setting.family for setting in SETTINGS.values()):
        settings = {name: SETTINGS[name] for name in options.settings if SETTINGS[name].family == family}
        seeds = options.seeds or max((setting.seeds for setting in settings.values()), default=0)
        for seed in range(seeds):
            for name, setting in settings.items():
                if seed < (options.seeds or setting.seeds):
                    methods = options.methods or setting.methods
                    yield from ((name, method, seed) for method in methods)


def train_all(keys: Sequence[Key], options: argparse.Namespace, ranks: Ranks) -> None:
    """Train what is missing in --results, until the time is over."""
    started, cpu_started = time.monotonic(), time.process_time()
    skipped = set[tuple[str, str]]()
    for key in keys:
        results = table1_summary.read_results(options.results)
        remaining = [other for other in keys if other not in results and other[:2] not in skipped]
        if key not in remaining:
            continue
        elapsed = time.monotonic() - started
        pace = max(
            1.0, elapsed / max(1.0, time.process_time() - cpu_started)
        )  # wall time per CPU time; above 1 on a shared core
        seconds = pace * estimate_seconds(key, results)
        if elapsed + seconds > 60 * options.minutes:
            print(
                f"{name_training(key)}: not started, it takes about {format_duration(seconds)}",
                file=sys.stderr,
                flush=True,
            )
            continue
        with lock_training(key, options.runs) as is_claimed:
            if not is_claimed or key in table1_summary.read_results(options.results):
                continue
            try:
                result = train(key, options, ranks)
            except TulaError as error:
                skipped.add(key[:2])
                print(f"{name_training(key)}: skipped: {error}", file=sys.stderr, flush=True)
                continue
            table1_summary.append_result(options.results, key, result)
        rest = pace * sum(estimate_seconds(other, results) for other in remaining if other != key)
        print(
            f"{len(keys) - len(remaining) + 1} of {len(keys)}, {name_training(key)}: {result.words};"
            f" about {format_duration(rest)} left for one process",
            file=sys.stderr,
            flush=True,
        )


def name_training(key: Key) -> str:
    """Return the name of a training."""
    return f"{key[0]} {key[1]}, seed {key[2]}"


def estimate_seconds(key: Key, results: dict[Key, Result]) -> float:
    """Return the mean CPU time of the row's other seeds, else of the setting, else of all."""
    for length in (2, 1, 0):
        durations = [result.seconds for other, result in results.items() if other[:length] == key[:length]]
        if durations:
            return fmean(durations)
    return DEFAULT_SECONDS


@contextlib.contextmanager
def lock_training(key: Key, folder: Path) -> Iterator[bool]:
    """Lock a training; yield whether it was free, so that no two processes train it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{'.'.join(map(str, key))}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


# --- one training


def start_process_group(device: str) -> Ranks:
    """Return a process group with only this process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    return Ranks(rank=0, world=1, local_rank=0, device=torch.device(device))


def train(key: Key, options: argparse.Namespace, ranks: Ranks) -> Result:
    """Train, and restart a ramp that diverges once with half its learning rate, as `tula train` does.

    Raises:
        TulaError: this version of tula does not have the method, or refuses it here.
    """
    spec, batch = make_job(key, options), table1_settings.choose_batch(*key[:2])
    signature = compute_train_signature(spec, nodes=1, batch=batch)
    task = TrainTask(
        id=f"train-{signature}-1",
        job=f"train-{signature}",
        spec=spec,
        workdir=".",
        nodes=1,
        signature=signature,
        attempt=1,
        ladder=(Rung(batch=batch),),
        workers=spec.train.workers,
    )
    run = RunDir.create(options.runs, spec)
    started, restarts = time.process_time(), 0
    while True:
        try:
            with contextlib.redirect_stdout(sys.stderr if options.verbose else open_null()):
                run_training(task, run, ranks, build_datasets(spec))
            break
        except Diverged:
            limit = halve_diverged_limit(run, signature) if not restarts else None
            if limit is None:
                return Result(batch, "diverged", math.nan, 0, 0, time.process_time() - started, restarts)
            restarts += 1
            task = task.model_copy(update={"max_lr_factor": limit, "attempt": 2})
    return make_result(run.get_training(signature).read_result(), time.process_time() - started, restarts)


def open_null() -> IO[str]:
    """Return a file that discards its content, instead of a job's log."""
    return Path(os.devnull).open("w")


def halve_diverged_limit(run: RunDir, signature: str) -> float | None:
    """Return half the factor of the learning rate at which a training diverged; None if the rate was not scaled."""
    factors = [row.get("lr_factor") for row in run.get_training(signature).read_metrics() if row["kind"] == "diverged"]
    factor = factors[-1] if factors else None
    return max(1.0, factor / 2) if factor and factor > 1 else None


def make_result(trained: TrainResult | None, seconds: float, restarts: int) -> Result:
    """Return a training's row of the results; steps and samples include those of the branches of `auto`."""
    if trained is None:
        raise SystemExit("interrupted: the same command continues")
    metric = "top1" if "top1" in trained.metrics else "eval_loss"
    extra = trained.tuning.samples if trained.tuning else 0
    return Result(
        batch=trained.batch,
        metric=metric.removeprefix("eval_"),
        value=trained.metrics.get(metric, math.nan),
        steps=trained.steps + extra // trained.batch,
        samples=trained.samples + extra,
        seconds=seconds,
        restarts=restarts,
    )


def make_job(key: Key, options: argparse.Namespace) -> JobSpec:
    """Return the job of a training.

    Raises:
        TulaError: this version of tula refuses it.
    """
    name, method, seed = key
    content = table1_settings.make_job_content(name, method, seed)
    on_gpu = options.device == "cuda"
    content["cluster"] = {"device": options.device}
    content["train"] |= {"workers": 8, "precision": "bf16"} if on_gpu else {"workers": 0, "precision": "fp32"}
    setting = SETTINGS[name]
    if setting.needs_images:
        size, per_class = (16, IMAGES_PER_CLASS) if setting.by_default else (32, (None, None))
        file = options.runs / f"cifar10-{size}.npz"
        table1_networks.prepare(options.data, file, size=size, per_class=per_class)
        content["dataset"] |= {"args": {"file": str(file), "crop": not setting.by_default}}
    return validate_job(content, source="benchmarks/table1")


# --- the command line


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    defaults = [name for name, setting in SETTINGS.items() if setting.by_default]
    add("--settings", type=split_words, help=f"of {', '.join(SETTINGS)} (all but those at full size)")
    add("--methods", type=split_words, help=f"of {', '.join(METHODS)} (those of each setting)")
    add("--seeds", type=int, help="number of seeds (that of each setting, 2 or 3)")
    add("--minutes", type=float, default=math.inf, help="start no training that is not expected to finish within")
    add("--data", type=Path, help="folder with train/<class>/ and test/<class>/ of CIFAR-10")
    add(
        "--results",
        type=Path,
        default=RESULTS,
        help=f"CSV file of the trainings ({RESULTS.name} of benchmarks/results)",
    )
    add("--runs", type=Path, default=Path("table1-runs"), help="folder of the runs (table1-runs)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--show", action="store_true", help="train nothing")
    add("--verbose", action="store_true", help="print the log of each training")
    options = parser.parse_args(words)
    for name, known in (("settings", SETTINGS), ("methods", METHODS)):
        if unknown := [word for word in getattr(options, name) or () if word not in known]:
            parser.error(f"--{name}: {', '.join(map(repr, unknown))} unknown; there are {', '.join(known)}")
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1 is needed")
    if options.data is None and not options.show:
        without = [name for name in options.settings or () if SETTINGS[name].needs_images]
        if without:
            parser.error(f"--data is required for {', '.join(without)}: a folder with train/<class>/ and test/<class>/")
        defaults = [name for name in defaults if not SETTINGS[name].needs_images]
    options.settings = options.settings or defaults
    for name in ("data", "results", "runs"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).absolute())
    return options


def split_words(text: str) -> list[str]:
    """Return the words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    main()
