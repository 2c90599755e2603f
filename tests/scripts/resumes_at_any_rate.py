"""A linear classifier on one or more ranks that resumes at the batch and learning rate of its command line."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

SIZE, SAVE_EVERY = 2048, 512  # samples
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)  # of all ranks
parser.add_argument("--samples", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--out", type=Path)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
x = torch.randn(SIZE, 20)
y = (x @ torch.randn(20, 4)).argmax(1)
net: nn.Module = nn.Linear(20, 4)
model = net
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
samples = 0
if args.resume:
    state = torch.load(args.resume)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    samples = state["samples"]
    for group in optimizer.param_groups:
        group["lr"] = args.lr
while samples < args.samples:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(samples))[rank::world]
    for inputs, labels in DataLoader(TensorDataset(x[order], y[order]), args.batch // world):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        samples += len(inputs) * world
        if rank == 0 and samples % SAVE_EVERY == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "samples": samples}
            torch.save(state, args.out / "draft.pt")
            (args.out / "draft.pt").replace(args.out / "last.pt")
        if samples >= args.samples:
            break
if world > 1:
    dist.destroy_process_group()
