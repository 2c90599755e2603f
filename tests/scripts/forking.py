"""Starts its rank itself, as scripts do that call torch.multiprocessing. `break`: the rank fails."""

import sys

import torch


def work(rank):
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(100):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if "break" in sys.argv:
            raise MemoryError("no room")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, nprocs=1, start_method="fork")
