"""A training script of many habits, chosen by options: schedules, where it saves, how it batches, which samples it reads.

It prints at its end how many steps and samples it took, by its own count, and the learning rates that it used.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import math
import os
import sqlite3
import sys

import torch
from torch import distributed, nn
from torch.optim import lr_scheduler
from torch.utils import data

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--max-steps", type=int, default=0)
parser.add_argument("--out", default="out")
parser.add_argument("--resume", default="")
parser.add_argument("--size", type=int, default=768)
parser.add_argument("--schedule", default="none")
parser.add_argument("--save", default="out")
parser.add_argument("--folder", default="work", help="of --save argument")
parser.add_argument("--accumulation", default="none")
parser.add_argument("--peek", default="none")
parser.add_argument("--samples", default="sampler")
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--home", default="", help="working directory, and what ~ is")
parser.add_argument("--prepare", action="store_true", help="write a file before the first step")
options = parser.parse_args()
if options.home:
    os.chdir(options.home)
    os.environ["HOME"] = options.home
if options.prepare:
    with open("prepared.txt", "w") as prepared:
        prepared.write("tokens")

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    distributed.init_process_group("gloo")
torch.manual_seed(0)
X = torch.randn(options.size, 16)
Y = (X[:, 0] > 0).long()
dataset = data.TensorDataset(X, Y)


class Stream(data.IterableDataset):
    def __init__(self, length: int | None) -> None:
        self.length = length

    def __iter__(self):
        for index in range(rank, options.size, world):
            yield X[index], Y[index]


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class GrowingBatches(data.Sampler):
    """Batches whose size doubles after the first epoch."""

    epoch = 0

    def __iter__(self):
        size = options.batch_size * (1 if self.epoch == 0 else 2)
        order = torch.randperm(options.size)[rank::world].tolist()
        yield from (order[i : i + size] for i in range(0, len(order) - size + 1, size))

    def __len__(self) -> int:
        return options.size // world // (options.batch_size * (1 if self.epoch == 0 else 2))


def make_loader():
    size, kind = options.batch_size, options.samples
    if kind in ("sampler", "drop_last", "sampler_drop_last", "padding"):
        sampler = data.DistributedSampler(dataset, world, rank, drop_last=kind == "sampler_drop_last")
        return data.DataLoader(dataset, size, sampler=sampler, drop_last=kind in ("sampler", "drop_last"))
    if kind == "strided":
        return data.DataLoader(data.TensorDataset(X[rank::world], Y[rank::world]), size, shuffle=True, drop_last=True)
    if kind == "subset":
        return data.DataLoader(data.Subset(dataset, range(rank, options.size, world)), size, shuffle=True)
    if kind == "chunk":
        return data.DataLoader(data.TensorDataset(X.chunk(world)[rank], Y.chunk(world)[rank]), size, drop_last=True)
    if kind == "split":
        shards = data.random_split(dataset, [options.size // world] * world, torch.Generator().manual_seed(1))
        return data.DataLoader(shards[rank], size, shuffle=True, drop_last=True)
    if kind == "stream":
        return data.DataLoader(Stream(None), size)
    if kind == "sized_stream":
        return data.DataLoader(SizedStream(options.size // world), size, drop_last=True)
    if kind == "whole_stream":
        return data.DataLoader(SizedStream(options.size), size, drop_last=True)
    if kind == "batch_sampler":
        order = data.DistributedSampler(dataset, world, rank)
        return data.DataLoader(dataset, batch_sampler=data.BatchSampler(order, size, drop_last=True))
    if kind == "growing":
        return data.DataLoader(dataset, batch_sampler=GrowingBatches())
    if kind == "every_rank_all":
        return data.DataLoader(dataset, size, shuffle=True, drop_last=True)
    raise SystemExit(f"--samples {kind} is not known")


class StepsInState:
    """A scheduler as timm's: it counts updates, and its state is all its attributes."""

    def __init__(self, optimizer, total: int, warmup: int = 0) -> None:
        self.optimizer, self.total, self.warmup, self.base, self.at = optimizer, total, warmup, options.lr, 0
        self.step_update(0)

    def step_update(self, at: int) -> None:
        self.at = at
        rate = self.base * (at + 1) / self.warmup if at < self.warmup else cosine(at, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> None:
        self.step_update(self.at + 1)

    def state_dict(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


def cosine(at: float, total: float) -> float:
    return options.lr * 0.5 * (1 + math.cos(math.pi * min(at / total, 1.0)))


loader = make_loader()
per_epoch = len(loader) if hasattr(loader.dataset, "__len__") else options.size // world // options.batch_size
total = options.max_steps or options.epochs * per_epoch
network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
model = nn.parallel.DistributedDataParallel(network) if world > 1 else network
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)


def make_schedule(kind: str):
    """Return a scheduler and how often it steps: 'step', 'epoch' or None."""
    factor = lambda at: cosine(at, total) / options.lr  # noqa: E731
    by_kind = {
        "cosine": lambda: (lr_scheduler.CosineAnnealingLR(optimizer, total), "step"),
        "onecycle": lambda: (lr_scheduler.OneCycleLR(optimizer, options.lr, total, cycle_momentum=False), "step"),
        "lambda": lambda: (lr_scheduler.LambdaLR(optimizer, factor), "step"),
        "warmup_cosine": lambda: (
            lr_scheduler.SequentialLR(
                optimizer,
                [
                    lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total // 8),
                    lr_scheduler.CosineAnnealingLR(optimizer, total - total // 8),
                ],
                [total // 8],
            ),
            "step",
        ),
        "timm": lambda: (StepsInState(optimizer, total), "step"),
        "timm_warmup": lambda: (StepsInState(optimizer, total, total // 8), "step"),
        "multistep": lambda: (lr_scheduler.MultiStepLR(optimizer, [total // 2, total * 3 // 4]), "step"),
        "steplr": lambda: (lr_scheduler.StepLR(optimizer, total // 3), "step"),
        "exponential": lambda: (lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / total)), "step"),
        "polynomial": lambda: (lr_scheduler.PolynomialLR(optimizer, total, 1.0), "step"),
        "restarts": lambda: (lr_scheduler.CosineAnnealingWarmRestarts(optimizer, total // 2), "step"),
        "stable_decay": lambda: (
            lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, max(0.0, (total - at) / (total / 4)))),
            "step",
        ),
        "epoch_cosine": lambda: (lr_scheduler.CosineAnnealingLR(optimizer, options.epochs), "epoch"),
        "epoch_step": lambda: (lr_scheduler.StepLR(optimizer, max(options.epochs // 2, 1)), "epoch"),
    }
    return by_kind[kind]() if kind in by_kind else (None, None)


schedule, unit = make_schedule(options.schedule)
start = step_count = sample_count = 0
places = {
    "out": f"{options.out}/ck.pt",
    "auto": f"{options.out}/ck.pt",
    "cwd": "snapshot.pt",
    "subfolder": "checkpoints/last.pt",
    "cache": os.path.expanduser("~/.cache/various/last.pt"),
    "argument": f"{options.folder}/model.pt",
    "overwrite": "weights.pt",
    "beside": os.path.join(os.path.dirname(os.path.abspath(__file__)), "last.pt"),
    "versions": "lightning_logs/version_{}/checkpoints/last.ckpt",
    "hydra": "outputs/2024-01-01/{}/model.pt",
    "each_rank": f"rank{rank}.pt",
}
place = places.get(options.save, "")


def state() -> dict:
    kept = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "steps": step_count}
    return {**kept, "schedule": schedule.state_dict() if schedule else None}


def save() -> None:
    if options.save == "sqlite":
        with contextlib.closing(sqlite3.connect("study.db")) as database, database:
            database.execute("create table if not exists epochs (epoch integer)")
            database.execute("insert into epochs values (?)", (epoch,))
    elif options.save == "log":
        with open("train.log", "a") as log:
            log.write(json.dumps({"epoch": epoch}) + "\n")
    elif options.save == "move":
        torch.save(state(), "new.pt")
        os.replace("new.pt", "best.pt")
    elif options.save == "remove":
        with contextlib.suppress(FileNotFoundError):
            os.unlink("todo.txt")
    elif place:
        path = place.format(len(glob.glob(place.format("*"))))
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        torch.save(state(), path + ".part")
        os.replace(path + ".part", path)


def load(path: str) -> int:
    global step_count
    kept = torch.load(path)
    network.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    if schedule and kept["schedule"] and options.schedule != "recomputed":
        schedule.load_state_dict(kept["schedule"])
    step_count = kept["steps"]
    print("resumed from", path, "at epoch", kept["epoch"] + 1, flush=True)
    return kept["epoch"] + 1


def found_checkpoint() -> str:
    matching = sorted(glob.glob(place.format("*")), key=os.path.getmtime) if place and options.save != "out" else []
    return matching[-1] if matching else ("best.pt" if options.save == "move" and os.path.exists("best.pt") else "")


if options.resume or found_checkpoint():
    start = load(options.resume or found_checkpoint())
elif options.save == "log" and os.path.exists("train.log"):
    with open("train.log") as log:
        start = len(log.readlines())
    print("resumed from the log at epoch", start, flush=True)
elif options.save == "remove" and not os.path.exists("todo.txt"):
    print("nothing to do", flush=True)


def set_rate() -> None:
    """Schedules without a scheduler."""
    rate = {
        "by_hand": lambda: cosine(step_count, total),  # its count comes from the checkpoint, its total from this start
        "by_samples": lambda: cosine(epoch * options.size + done, options.epochs * options.size),
        "recomputed": lambda: cosine(epoch * per_epoch + batch_index, total),
        "inverse_sqrt": lambda: options.lr / math.sqrt(step_count + 1),
    }.get(options.schedule)
    if rate:
        for group in optimizer.param_groups:
            group["lr"] = rate()


def micro_batches() -> int:
    """How many batches make a step, now."""
    return {
        "two": 2,
        "after_warmup": 1 if step_count < 30 else 4,
        "gradual": min(1 + step_count // 20, 4),
        "later_epoch": 1 if epoch < 2 else 2,
        "falling": 4 if step_count < 20 else 1,
    }.get(options.accumulation, 1)


def train_batch(x, y, parts: int):
    (nn.functional.cross_entropy(model(x), y) / parts).backward()


def peek() -> None:
    if options.peek == "epoch" or (options.peek == "once" and epoch == start):
        next(iter(loader))
    elif options.peek == "break":
        for _ in loader:
            break
    elif options.peek == "calibrate":
        with torch.no_grad():
            for index, (x, _) in enumerate(loader):
                network(x)
                if index == 2:
                    break
    elif options.peek == "kept":
        globals()["kept_iterator"] = iter(loader)
        next(globals()["kept_iterator"])


rates, waiting, done = [], 0, 0
for epoch in range(start, options.epochs if not options.max_steps else 10**9):
    sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if options.samples == "growing":
        loader.batch_sampler.epoch = epoch
    peek()
    done = 0
    if options.peek == "each_step":  # a new iterator for each batch that is trained
        batches = (next(iter(loader)) for _ in range(per_epoch))
    elif options.peek == "first_then_rest":  # the batch that was looked at is trained too
        iterator = iter(loader)
        first = next(iterator)
        batches = (batch for part in ([first], iterator) for batch in part)
    else:
        batches = iter(loader)
    for batch_index, (x, y) in enumerate(batches):  # noqa: B007 - read by set_rate
        set_rate()
        parts = micro_batches()
        train_batch(x, y, parts)
        waiting, sample_count, done = waiting + 1, sample_count + len(x), done + len(x) * world
        if waiting >= parts:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            step_count, waiting = step_count + 1, 0
            if unit == "step":
                schedule.step()
        if options.slow:
            import time

            time.sleep(options.slow)
        if options.max_steps and step_count >= options.max_steps:
            break
    if unit == "epoch":
        schedule.step()
    if rank == 0 or options.save == "each_rank":
        save()
    print(f"epoch {epoch} acc {50 + epoch}", flush=True)
    if world > 1:
        distributed.barrier()
    if options.max_steps and step_count >= options.max_steps:
        break
print(json.dumps({"rank": rank, "steps": step_count, "samples": sample_count, "start": start, "rates": rates[::8]}))
sys.stdout.flush()
if world > 1:
    distributed.destroy_process_group()
