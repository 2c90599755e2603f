"""A script that resumes in the middle of an epoch on any number of ranks, and saves which samples its ranks have trained."""

import argparse
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

SIZE, SAVE_EVERY = 256, 6
parser = argparse.ArgumentParser()
parser.add_argument("--local-batch", type=int)
parser.add_argument("--epochs", type=int)
parser.add_argument("--out", type=Path)
parser.add_argument("--pause", type=float, default=0.0)  # seconds per sample of all ranks
parser.add_argument("--resume", type=Path)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
samples = TensorDataset(torch.arange(SIZE), x, x.sum(1).gt(0).long())
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * SIZE // (args.local_batch * world))
epoch, done, trained = 0, 0, []
if args.resume:
    state = torch.load(args.resume, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    epoch, done, trained = state["epoch"], state["done"], state["trained"]
asked: list[int] = []
signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))


def save() -> None:
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**state, "epoch": epoch, "done": done, "trained": trained, "world": world}, args.out / "draft.pt")
    (args.out / "draft.pt").replace(args.out / "state.pt")


step = 0
while epoch < args.epochs:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch))[done:].tolist()
    own = order[rank::world]
    batches = [own[begin : begin + args.local_batch] for begin in range(0, len(own), args.local_batch)]
    for indices, inputs, labels in DataLoader(samples, batch_sampler=batches):
        time.sleep(args.pause * args.local_batch * world)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
        everyone: list[list[int]] = [[] for _ in range(world)]
        dist.all_gather_object(everyone, indices.tolist())
        trained += [index for part in everyone for index in part]
        step, done = step + 1, done + args.local_batch * world
        if rank == 0 and (asked or step % SAVE_EVERY == 0):
            asked.clear()
            save()
    epoch, done = epoch + 1, 0
if rank == 0:
    save()
dist.destroy_process_group()
