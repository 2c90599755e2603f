"""Large-batch training with adaptive gradient scaling (AGS) in a loop of one's own: three lines, marked below.

    python examples/own_loop.py                               # one process
    torchrun --nproc-per-node 2 examples/own_loop.py          # several, on one machine or more
    python examples/own_loop.py --preset robust --batch 512
    python examples/own_loop.py --plain                       # without AGS, to compare

Trains a small network on scikit-learn's handwritten digits (1797 images of 8x8) for a few seconds on the CPU.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tula_cli.optim import PRESETS, TulaOptimizer, explain_small_effect

TRAINING = 1408  # samples; the rest is for testing


def arguments(world: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="AGS in a loop of one's own")
    parser.add_argument("--batch", type=int, default=256, help="samples in a step, over all processes")
    parser.add_argument("--small", type=int, default=16, help="the batch that the learning rate was tuned for")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="paper")
    parser.add_argument("--plain", action="store_true", help="without AGS")
    args = parser.parse_args()
    for name in ("batch", "small", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1 is needed")
    if args.batch > TRAINING:
        parser.error(f"--batch {args.batch}: there are only {TRAINING} training images")
    if args.batch % world:
        parser.error(f"--batch {args.batch}: {world} processes cannot share it equally; take a multiple of {world}")
    return args


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, testing images and labels."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train(args: argparse.Namespace, rank: int, world: int) -> float:
    """Return the accuracy on the testing images, in percent."""
    torch.manual_seed(args.seed)
    images, labels, test_images, test_labels = data()
    module = network()
    model = DistributedDataParallel(module) if world > 1 else module
    loss_fn = nn.CrossEntropyLoss()
    opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    steps = TRAINING // args.batch
    ags: TulaOptimizer | None = None
    if not args.plain:
        opt = ags = TulaOptimizer(  # 1: around the optimizer
            opt, model=model, b_large=args.batch, b_small=args.small, preset=args.preset, steps_per_epoch=steps
        )
    for epoch in range(args.epochs):
        order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
        for step in range(steps):
            mine = order[step * args.batch : (step + 1) * args.batch][rank::world]
            x, y = images[mine], labels[mine]
            opt.zero_grad()
            loss_fn(model(x), y).backward()
            if ags and ags.needs_small_batch:  # 2: between backward() and step(), where it is time
                ags.small_batch(lambda n: loss_fn(module(x[:n]), y[:n]))  # noqa: B023  # 3: on the module inside DDP
            opt.step()
        if ags and rank == 0 and epoch % 5 == 4:
            show(epoch, ags.report())
    with torch.no_grad():
        hits = module(test_images).argmax(dim=1) == test_labels
    return 100 * float(hits.float().mean())


def show(epoch: int, report: dict[str, float]) -> None:
    print(f"epoch {epoch + 1}: {report['scaled']:.0%} of the steps scaled, by {report['mean']:.2f} on average")
    for line in explain_small_effect(report).values():
        print(f"  {line}")


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = arguments(world)
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    accuracy = train(args, rank, world)
    if rank == 0:
        print(f"{'without AGS' if args.plain else 'AGS, ' + args.preset}: {accuracy:.2f} % of the test images")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
