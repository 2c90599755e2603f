"""Loops that step in their own ways: `gan` (two optimizers), `closure` (backward within the step), `frozen` (a part that is always
set to evaluate), `catching` (goes on when asked to exit)."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
small, large = nn.Linear(4, 4), nn.Linear(4, 64)
first, second = torch.optim.SGD(small.parameters(), lr=0.1), torch.optim.Adam(large.parameters(), lr=0.2)


def gan():
    for optimizer, network in ((first, small), (first, small), (second, large)):
        optimizer.zero_grad()
        network(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def closure():
    def backward():
        large.train(False)  # as Lightning's wrapped modules are while they train
        second.zero_grad()
        loss = large(torch.randn(8, 4)).square().mean()
        loss.backward()
        return loss

    second.step(backward)


def frozen():
    small.eval()
    second.zero_grad()
    large(small(torch.randn(8, 4))).square().mean().backward()
    second.step()


def catching():
    try:
        frozen()
    except SystemExit:
        print("asked to exit", file=sys.stderr)


for _ in range(60):
    {"gan": gan, "closure": closure, "frozen": frozen, "catching": catching}[sys.argv[1]]()
print("FINISHED", file=sys.stderr)
