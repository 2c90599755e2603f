"""A script under DDP that saves after each epoch; its loader worker, or its loss, fails once in epoch 2, as `fault` says."""

import argparse
import errno
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--epochs", type=int)
parser.add_argument("--out", type=Path)
parser.add_argument("--fault")
parser.add_argument("--resume", default="")
args = parser.parse_args()
ERRNOS = ("EIO", "ESTALE", "ESHUTDOWN", "ENOTCONN", "EMFILE")
SIGNALS = ("SIGSEGV", "SIGABRT")


class Samples(Dataset[torch.Tensor]):
    epoch = 0

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.epoch == 2 and index == 200 and is_first_time():
            fail()
        return torch.full((4,), float(index))


def is_first_time() -> bool:
    try:
        (args.out / "failed-once").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fail() -> None:
    if args.fault in ERRNOS:
        number = getattr(errno, args.fault)
        raise OSError(number, os.strerror(number))
    if args.fault in SIGNALS:
        os.kill(os.getpid(), getattr(signal, args.fault))
    if args.fault == "timeout":
        time.sleep(20)
    if args.fault == "KeyError":
        raise KeyError("label")


dist.init_process_group("gloo")
samples = Samples()
sampler: DistributedSampler[torch.Tensor] = DistributedSampler(samples)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer, first = torch.optim.SGD(model.parameters(), lr=1e-6), 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    first = saved["epoch"] + 1
for epoch in range(first, args.epochs):
    samples.epoch = epoch
    sampler.set_epoch(epoch)
    timeout = 4 if args.fault == "timeout" else 0
    for batch in DataLoader(samples, batch_size=args.batch, sampler=sampler, num_workers=1, timeout=timeout):
        loss = model(batch).square().mean()
        if args.fault == "nan" and epoch == 2:
            print("Loss is nan, stopping training", flush=True)
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "epoch": epoch}, args.out / f"e{epoch}.pt")
dist.destroy_process_group()
