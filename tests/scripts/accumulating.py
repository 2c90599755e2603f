"""In the manner of small language model trainers: no DataLoader, micro-batches, an evaluation on rank 0 alone, bare globals as options."""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

batch_size, gradient_accumulation_steps, eval_interval, max_iters = 4, 4, 7, 200
for option in sys.argv[1:]:
    name, value = option[2:].split("=")
    globals()[name] = int(value)

torch.set_num_threads(1)
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if world > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(rank)
gradient_accumulation_steps //= world
text = torch.randint(50, (10_000,))
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
raw = model
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3)


def window():
    starts = torch.randint(len(text) - 9, (batch_size,)).tolist()
    return torch.stack([text[s : s + 8] for s in starts]), torch.stack([text[s + 1 : s + 9] for s in starts])


def loss_of(network):
    x, y = window()
    return nn.functional.cross_entropy(network(x).flatten(0, 1), y.flatten())


for iteration in range(max_iters):
    if iteration and iteration % eval_interval == 0 and rank == 0:
        raw.eval()
        with torch.no_grad():
            loss_of(raw)
            time.sleep(0.05)
        raw.train()
    for micro in range(gradient_accumulation_steps):
        if world > 1:
            model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        (loss_of(model) / gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("FINISHED", file=sys.stderr)
