"""A user's training script: plain DDP with gloo on the model of plateau.py, with an evaluation and a checkpoint after each epoch."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from plateau import Net, Samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local-batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = Samples(train=True)
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(samples, drop_last=True)
    loader = DataLoader(samples, options.local_batch, sampler=sampler, drop_last=True)
    held_out = DataLoader(Samples(train=False), options.local_batch)
    checkpoint = options.out / "last.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["epoch"]
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            correct = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in held_out)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {correct / len(held_out.dataset):.3f}", flush=True)  # type: ignore[arg-type]
            options.out.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "epoch": epoch + 1}, checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
