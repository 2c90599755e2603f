"""A plain loop under DistributedDataParallel: two data loaders, one worker, a checkpoint each epoch. Takes --epochs and more."""

import argparse
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local-batch", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=320)
parser.add_argument("--half", action="store_true", help="reduce gradients as 16-bit numbers")
parser.add_argument("--scaler", action="store_true", help="scale the loss as for 16-bit numbers")
parser.add_argument("--fail-on", type=int, default=-1)
arguments = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
data = TensorDataset(torch.randn(arguments.samples, 16), torch.randint(4, (arguments.samples,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, arguments.local_batch, sampler=sampler, num_workers=1, drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
if arguments.half:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
scaler = torch.amp.GradScaler("cpu") if arguments.scaler else None  # torch 2.3
for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        if rank == arguments.fail_on and number == 4:
            raise RuntimeError("a sample is broken")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
print("FINISHED", file=sys.stderr)
