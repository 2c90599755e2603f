"""Compare `tula compare --learning-rates` with a full grid: python benchmarks/learning_rates/learning_rates.py OUT.jsonl

Each setting is a job at several times its reference batch. A full grid trains it with 1, sqrt(k) and k times the learning rate of
the reference batch, with several seeds; a search by short branches chooses one of them, once per seed. The choice is right if its
mean metric is within the noise of the seeds of the best mean: two standard errors of the difference, or one evaluated sample
(0.5 % of a loss). OUT.jsonl has one line per setting; settings in the file are not trained again.

CIFAR-10 is read from a .npz file with the JPEG files of its images (--cifar), of which a part is trained.
"""

import argparse
import functools
import gc
import io
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tula_cli.models import rate_search
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import RateBranch, RateSearch
from tula_cli.run.records.tasks import RateSearchTask, Rung, TrainTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job
from tula_cli.worker.build.data import _read_digits_table, build_datasets
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.evaluation import Evaluator
from tula_cli.worker.train.loop import build_trainer, run_steps
from tula_cli.worker.train.rate_search import run_rate_search

sys.path.insert(0, str(Path(__file__).parent))

IMAGES_PER_CLASS = {True: 400, False: 100}
JOBS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": {"name": "small_cnn", "args": {"in_channels": 1, "width": 8}},
        "dataset": {"name": "learning_rates:Digits"},
        "train": {"epochs": 40, "reference_batch": 16},
    },
    "perceptron": {
        "model": {"name": "learning_rates:build_perceptron"},
        "dataset": {"name": "learning_rates:Digits"},
        "train": {"epochs": 40, "reference_batch": 16},
    },
    "cifar": {
        "model": {"name": "small_cnn", "args": {"width": 8}},
        "dataset": {"name": "learning_rates:Cifar"},
        "train": {"epochs": 12, "reference_batch": 16},
    },
    "gpt2": {
        "model": {
            "name": "transformers:AutoModelForCausalLM",
            "args": {
                "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 256,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            },
        },
        "dataset": {"name": "python_source", "args": {"length": 32, "size": 80000}},
        "train": {"epochs": 16, "reference_batch": 16, "max_grad_norm": 1.0},
    },
}  # fmt: skip
RATES = {
    "SGD": {"low": 0.01, "tuned": 0.05, "high": 0.2},
    "AdamW": {"low": 5e-4, "tuned": 3e-3, "high": 1e-2},
}
"""Learning rates of the reference batch, by optimizer: too low, about right, and too high."""


class Digits(torch.utils.data.Dataset[Any]):
    """The 8 x 8 digits of scikit-learn in memory: every fifth for evaluation, the others for training."""

    classes = tuple(map(str, range(10)))

    def __init__(self, train: bool) -> None:
        table = _read_digits()
        rows = [table[index] for index in range(len(table)) if (index % 5 > 0) == train]
        self.images = [torch.from_numpy(row[:64]).float().view(1, 8, 8) / 16 for row in rows]
        self.labels = [int(row[64]) for row in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], self.labels[index]


@functools.cache
def _read_digits() -> np.ndarray[Any, Any]:
    return _read_digits_table()


class Cifar(torch.utils.data.Dataset[Any]):
    """A part of CIFAR-10 in memory: the first images of each class, normalised and halved to 16 x 16."""

    classes = tuple(map(str, range(10)))

    def __init__(self, train: bool, file: str) -> None:
        self.images, self.labels = _read_cifar(file, train)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], self.labels[index]


@functools.cache
def _read_cifar(file: str, train: bool) -> tuple[list[torch.Tensor], list[int]]:
    from PIL import Image

    data, split = np.load(file), "train" if train else "test"
    blob, lengths, every_label = data[f"{split}_jpeg"], data[f"{split}_length"], data[f"{split}_label"]
    images, labels, counts = [], [], defaultdict[int, int](int)
    for end, length, label in zip(np.cumsum(lengths).tolist(), lengths.tolist(), every_label.tolist(), strict=True):
        if counts[label] < IMAGES_PER_CLASS[train]:
            counts[label] += 1
            image = Image.open(io.BytesIO(blob[end - length : end].tobytes())).reduce(2)
            images.append((torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - 0.47) / 0.25)
            labels.append(label)
    return images, labels


def build_perceptron(num_classes: int = 10) -> torch.nn.Module:
    """Return a network with one hidden layer for the digits."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, num_classes)
    )


def make_job(
    name: str, method: str, optimizer: str, rate: str, *, seed: int, cifar: str, epochs: int | None
) -> JobSpec:
    """Return the job of a setting with a seed."""
    job = JOBS[name]
    train = {"workers": 0, "method": method, "seed": seed, **job["train"], **({"epochs": epochs} if epochs else {})}
    dataset = {**job["dataset"], **({"args": {"file": cifar}} if name == "cifar" else {})}
    momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
    content = {
        "name": name, "model": job["model"], "dataset": dataset, "train": train, "cluster": {"device": "cpu"},
        "optimizer": {"name": optimizer, "lr": RATES[optimizer][rate], **momentum},
        "schedule": {"kind": "cosine"},
        "search": {"nodes": [1]},
    }  # fmt: skip
    return validate_job(content, source=name)


def train_in_full(job: JobSpec, batch: int, ranks: Ranks) -> float:
    """Return the top-1 accuracy of a training at its end, or its loss without classes; 0 or infinite if it diverged."""
    by_loss, datasets = job.name == "gpt2", build_datasets(job)
    task = TrainTask(
        id="train-0-1", job="train-0", spec=job, workdir=".", nodes=1, signature="0", attempt=1,
        ladder=(Rung(batch=batch),), workers=0,
    )  # fmt: skip
    trainer = build_trainer(task, ranks, datasets, batch=batch, workers=0, refresh=True)
    for _ in run_steps(trainer):
        pass
    result = Evaluator(trainer).evaluate()
    if not math.isfinite(result.loss):
        return math.inf if by_loss else 0.0
    return result.loss if by_loss else result.top1


def search(job: JobSpec, batch: int, ranks: Ranks) -> RateSearch:
    """Search for the learning rate of a batch."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder), job)
        task = RateSearchTask(id="rates-0", job="rates-0", spec=job, workdir=".", nodes=1, key="0", batches=(batch,))
        run_rate_search(task, run, ranks, build_datasets(job))
        record = run.read_rate_search("0")
        assert record is not None
        return record


def measure(settings: Sequence[tuple[Any, ...]], out: Path, options: argparse.Namespace) -> None:
    """Train the grid and the searches of settings that are missing in a file, and append a line for each."""
    lines = out.read_text().splitlines() if out.exists() else []
    known = {tuple(json.loads(line)["setting"]) for line in lines}
    ranks = Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))
    for setting in settings:
        if setting in known:
            continue
        name, method, optimizer, rate, k = setting
        jobs = [
            make_job(name, method, optimizer, rate, seed=seed, cifar=options.cifar, epochs=options.epochs)
            for seed in range(options.first_seed, options.first_seed + options.seeds)
        ]
        batch = k * jobs[0].train.reference_batch
        searches = [search(job, batch, ranks) for job in jobs]
        rules = [arm.rule for arm in rate_search.list_rate_arms(jobs[0], batch)]
        grid = {
            rule: [train_in_full(rate_search.make_job_of_rule(job, rule), batch, ranks) for job in jobs]
            for rule in rules
        }
        line = {"setting": setting, "grid": grid, "searches": [record.model_dump(mode="json") for record in searches]}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(describe(line), flush=True)


# --- the results


def is_within_noise(values: Sequence[float], best: Sequence[float], *, less_is_better: bool) -> bool:
    """Return whether the mean over seeds is within the noise of the best mean."""
    if not all(map(math.isfinite, values)):
        return False
    behind = abs(statistics.fmean(best) - statistics.fmean(values))
    deviation = math.sqrt(statistics.fmean([_variance(values), _variance(best)]))
    least = 0.005 * statistics.fmean(best) if less_is_better else 0.28
    return behind <= max(2 * deviation * math.sqrt(2 / len(best)), least)


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


def judge(line: Mapping[str, Any]) -> Iterator[tuple[bool, bool, float]]:
    """Yield for each search whether the choice and the lowest loss are within the noise, and the relative cost."""
    grid, less_is_better = line["grid"], line["setting"][0] == "gpt2"
    means = {rule: statistics.fmean(values) for rule, values in grid.items()}
    best = grid[(min if less_is_better else max)(means, key=means.__getitem__)]
    for content in line["searches"]:
        record = RateSearch.model_validate(content)
        chosen = rate_search.find_branch_with_highest_lr(record.branches, record.start_loss)
        lowest = min(record.branches, key=_get_loss)
        right = [
            branch is not None and is_within_noise(grid[branch.rule], best, less_is_better=less_is_better)
            for branch in (chosen, lowest)
        ]
        yield right[0], right[1], record.samples / record.total


def _get_loss(branch: RateBranch) -> float:
    return math.inf if branch.diverged or branch.loss is None else branch.loss


def describe(line: Mapping[str, Any]) -> str:
    """Describe a setting in one line."""
    means = {rule: round(statistics.fmean(values), 3) for rule, values in line["grid"].items()}
    losses = [[round(_get_loss(RateBranch.model_validate(b)), 3) for b in s["branches"]] for s in line["searches"]]
    starts = [round(s["start_loss"], 3) for s in line["searches"]]
    return f"{line['setting']} grid {means} start {starts} branches {losses} right {[r[:2] for r in judge(line)]}"


def summarise(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the share of right choices and the cost, in total and by job."""
    groups = {"all": lines} | {name: [line for line in lines if line["setting"][0] == name] for name in JOBS}
    return {name: _summarise_group(group) for name, group in groups.items() if group}


def _summarise_group(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judged = list(itertools.chain.from_iterable(map(judge, lines)))
    always = {
        rule: statistics.fmean(
            is_within_noise(
                line["grid"].get(rule, [math.nan]), _find_best(line), less_is_better=line["setting"][0] == "gpt2"
            )
            for line in lines
        )
        for rule in rate_search.LR_SCALING_RULES
    }
    return {
        "settings": len(lines),
        "searches": len(judged),
        "right": statistics.fmean(right for right, _, _ in judged),
        "lowest_right": statistics.fmean(right for _, right, _ in judged),
        "always": always,
        "cost": statistics.median(cost for *_, cost in judged),
        "max_cost": max(cost for *_, cost in judged),
    }


def _find_best(line: Mapping[str, Any]) -> list[float]:
    means = {rule: statistics.fmean(values) for rule, values in line["grid"].items()}
    best: list[float] = line["grid"][(min if line["setting"][0] == "gpt2" else max)(means, key=means.__getitem__)]
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument(
        "--jobs", default="digits,perceptron,gpt2", help=f"of {','.join(JOBS)} (default: all but cifar)"
    )
    parser.add_argument("--methods", default="lrs", help="values of train.method (default: lrs)")
    parser.add_argument("--optimizers", default="SGD,AdamW")
    parser.add_argument("--rates", default="low,tuned", help="learning rates of the reference batch")
    parser.add_argument("--times", default="4,16", help="the batch as a multiple of the reference batch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--epochs", type=int, help="in place of each job's")
    parser.add_argument("--cifar", default="", metavar="FILE.npz")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, for benchmarks/results")
    parser.add_argument("--summary", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if not options.summary:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            words = (options.jobs, options.methods, options.optimizers, options.rates)
            parts = [text.split(",") for text in words]
            try:
                measure(list(itertools.product(*parts, map(int, options.times.split(",")))), options.out, options)
            finally:
                gc.collect()  # a living DDP object and gloo would wait for each other
                dist.destroy_process_group()
    lines = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    summary = summarise(lines)
    print(
        json.dumps(summary, indent=2) if options.json else "\n".join(f"{name}: {row}" for name, row in summary.items())
    )


if __name__ == "__main__":
    main()
