"""In the manner of reference scripts for images: arguments, batch samplers, a schedule, evaluation, checkpoints and --resume."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--scale-lr", action="store_true", help="the learning rate is for 256 samples")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("-j", "--workers", type=int, default=0)
parser.add_argument("--output-dir", type=Path, default=Path())
parser.add_argument("--resume", type=Path)
parser.add_argument("--keep-arguments", action="store_true", help="in the checkpoint, as torchvision's have them")
parser.add_argument("--list", action="store_true", help="batches are lists of images, as for detection")
arguments = parser.parse_args()


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


def evaluate(model, loader):
    model.eval()
    with torch.inference_mode():
        for x, _ in loader:
            model(x)


def train_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        if arguments.list:
            x, y = torch.stack(x), torch.stack(y)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(160, 3, 8, 8), torch.randint(4, (160,)))
    batches = BatchSampler(RandomSampler(data), arguments.batch_size, drop_last=True)
    loader = DataLoader(
        data, batch_sampler=batches, num_workers=arguments.workers, collate_fn=as_lists if arguments.list else None
    )
    held_out = DataLoader(data, 32)  # that of the training will do here
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    lr = arguments.lr * arguments.batch_size / 256 if arguments.scale_lr else arguments.lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    first = 0
    if arguments.resume is not None:
        state = torch.load(arguments.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"] + 1
    for epoch in range(first, arguments.epochs):
        train_epoch(model, loader, optimizer)
        schedule.step()
        evaluate(model, held_out)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        if arguments.keep_arguments:
            state["args"] = arguments
        torch.save(state | {"epoch": epoch}, arguments.output_dir / "checkpoint.pth")


try:
    main()
finally:
    print("CLEANED UP", file=sys.stderr)
