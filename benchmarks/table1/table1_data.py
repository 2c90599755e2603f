"""CIFAR-10 in memory, and the small network of the reduced table: what benchmarks/table1/table1.py lets tula train.

The workers import this module by its name, as they import a user's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images, by channel
PADDING = 4  # pixels around an image out of which it is cropped


def prepare(
    folder: Path, file: Path, *, size: int = 32, per_class: tuple[int | None, int | None] = (None, None)
) -> Path:
    """Write all images into one file, where it is not there yet: reading 60,000 JPEGs takes longer than a short training.

    Args:
        folder: `train/<class>/*` and `test/<class>/*`, as torchvision's ImageFolder reads them.
        file: the .npz to write.
        size: height and width; larger images are averaged over boxes.
        per_class: images of each class to take for training and for the test; None for all.

    Raises:
        SystemExit: there are no such images, or too few.
    """
    if not file.exists():
        arrays = {}
        for split, count in zip(("train", "test"), per_class, strict=True):
            arrays[f"{split}_images"], arrays[f"{split}_labels"] = _read(folder / split, size=size, per_class=count)
        draft = file.with_name(f".{file.name}.npz")
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(draft, **arrays)
        draft.replace(file)
    return file


def _read(folder: Path, *, size: int, per_class: int | None) -> tuple[Any, Any]:
    classes = sorted(path for path in folder.glob("*") if path.is_dir())
    if len(classes) < 2:
        raise SystemExit(
            f"{folder} holds no folders of classes: --data is a folder with train/<class>/ and test/<class>/"
        )
    images, labels = [], []
    for label, path in enumerate(classes):
        files = sorted(path.iterdir())[:per_class]
        if per_class is not None and len(files) < per_class:
            raise SystemExit(f"{path} holds {len(files)} images, {per_class} are needed")
        for file in files:
            with Image.open(file) as image:
                images.append(np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BOX)))
            labels.append(label)
    return np.stack(images).transpose(0, 3, 1, 2), np.array(labels)


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Normalised images in memory, cropped and mirrored at random.

    Args:
        images: uint8, (N, 3, size, size).
        labels: class of each.
        crop: crop out of an image padded by zeros (as the usual recipe for CIFAR has it).
        mirror: mirror half of the images.
    """

    num_classes = 10

    def __init__(self, images: Any, labels: Any, *, crop: bool, mirror: bool) -> None:
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
        pixels = (torch.from_numpy(images).float().div_(255) - mean) / deviation
        self.size, self.padding, self.mirror = pixels.shape[-1], PADDING if crop else 0, mirror
        self.images = nn.functional.pad(pixels, [self.padding] * 4)
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, size = self.images[index], self.size
        if self.padding:
            top, left = torch.randint(2 * self.padding + 1, (2,)).tolist()
            image = image[:, top : top + size, left : left + size]
        if self.mirror and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


def dataset(train: bool, transform: Callable[[Any], Any], file: str, crop: bool = True) -> Images:  # noqa: ARG001
    """Return one split of what `prepare` wrote; it is tensors already, so the job's transforms are not called."""
    split = "train" if train else "test"
    with np.load(file) as arrays:
        return Images(arrays[f"{split}_images"], arrays[f"{split}_labels"], crop=crop and train, mirror=train)


class SmallNet(nn.Module):
    """Three 3x3 convolutions (16, 32, 64 channels, strides 1, 2, 2) with BatchNorm and a layer of 128: 156k parameters at
    16 x 16 pixels.
    """

    def __init__(self, num_classes: int = 10, size: int = 16) -> None:
        super().__init__()
        widths, layers = (3, 16, 32, 64), list[nn.Module]()
        for place, stride in enumerate((1, 2, 2)):
            layers += [
                nn.Conv2d(widths[place], widths[place + 1], 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(widths[place + 1]),
                nn.ReLU(inplace=True),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, 128), nn.ReLU(inplace=True), nn.Linear(128, num_classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, size, size) to logits (N, num_classes)."""
        logits: torch.Tensor = self.head(self.features(images))
        return logits
