"""A plain ResNet of torchvision under DistributedDataParallel, on images of noise: takes --local-batch and more."""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 10


class Noise(Dataset):
    """`size` images of `side` x `side`, which lie in memory."""

    def __init__(self, size, side):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(size, 3, side, side, generator=generator)
        self.labels = torch.randint(CLASSES, (size,), generator=generator).tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def noise(train=True, transform=None, size=512, side=32):
    return Noise(size, side)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--fused", action="store_true", help="update and reduce in place, as tula's own loop does")
    arguments = parser.parse_args()
    from torchvision.models import resnet18

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    data = noise(side=arguments.side)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, arguments.local_batch, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(resnet18(num_classes=CLASSES), gradient_as_bucket_view=arguments.fused)
    settings = {"lr": arguments.lr, "momentum": 0.9, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), fused=arguments.fused, **settings)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        print(f"epoch {epoch} done", flush=True)


if __name__ == "__main__":
    main()
