"""A data set with a selectable error, and models for it."""

from typing import Any

import numpy as np
import torch
from torch import nn


class Linear(nn.Linear):
    """4 numbers in, 3 scores out."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width, 3)


class One(nn.Module):
    """4 numbers in, 1 score out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layer(numbers)[:, 0]


class Conv(nn.Module):
    """Images (3, 8, 8) in, 3 scores out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def forward(self, images: torch.Tensor) -> Any:
        return self.layers(images)


class Large(nn.Module):
    """A model with more parameters than the limit for a test step in a check: 4 numbers in, 3 scores out."""

    def __init__(self, width: int = 40_000_000) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(width))
        self.layer = nn.Linear(4, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layer(numbers) + self.table[:3]


class NeedsGpu(Linear):
    """A model with an operation that only GPUs have."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        if type(numbers) is torch.Tensor and not numbers.is_cuda:
            raise RuntimeError("this kernel runs on CUDA alone")
        return super().forward(numbers)


class Data(torch.utils.data.Dataset[Any]):
    """20 samples of numbers or of images; `kind` selects the error."""

    def __init__(self, train: bool, kind: str = "") -> None:
        self.train, self.kind = train, kind
        if kind == "float32 and class names":
            self.num_classes = 3

    def __len__(self) -> Any:
        return {"empty": 0, "no evaluation": 20 * self.train, "length of a float": 20.0, "negative length": -1}.get(
            self.kind, 20
        )

    def __getitem__(self, index: int) -> Any:
        kind = self.kind
        if (kind == "length lies" and index >= 15) or (kind == "raises at the end" and index >= 15):
            raise IndexError("list index out of range") if kind == "length lies" else KeyError("no such row")
        if kind == "raises at 0":
            raise KeyError("no such row")
        return self.sample(kind, index)

    def sample(self, kind: str, index: int) -> Any:
        random = np.random.RandomState(index)
        numbers, label = torch.from_numpy(random.randn(4).astype("float32")), index % 3
        image = torch.from_numpy(random.rand(3, 8, 8).astype("float32"))
        return {
            "float64": lambda: (random.randn(4), label),
            "float64 images": lambda: (random.rand(3, 8, 8), label),
            "half": lambda: (numbers.half(), label),
            "uint8 images": lambda: ((255 * image).to(torch.uint8), label),
            "int64 numbers": lambda: (random.randint(9, size=4), label),
            "label of -1": lambda: (numbers, label - 1),
            "label of 3 classes": lambda: (numbers, 3),
            "labels from 1": lambda: (numbers, label + 1),
            "late label": lambda: (numbers, 7 if index > 9 else label),
            "ragged": lambda: (numbers[: 3 + index % 2], label),
            "text targets": lambda: (numbers, "abc"[label]),
            "None targets": lambda: (numbers, None),
            "dictionary targets": lambda: (numbers, {"label": label, "weight": 1}),
            "wide": lambda: (torch.ones(9), label),
            "images": lambda: (image, label),
            "gray images": lambda: (image[:1], label),
            "channels last": lambda: (image.permute(1, 2, 0), label),
            "float labels": lambda: (numbers, torch.tensor(float(label))),
            "int32 labels": lambda: (
                numbers,
                torch.tensor([label], dtype=torch.int32)[0:1].squeeze(0).view(1).expand(1),
            ),
            "labels (1,)": lambda: (numbers, torch.tensor([label])),
            "int targets": lambda: (numbers, label),
            "float64 targets": lambda: (numbers, np.float64(label)),
            "numbers for mse": lambda: (numbers, torch.tensor(float(label))),
            "nan": lambda: (numbers * float("nan"), label),
            "infinite": lambda: (numbers / 0, label),
            "overflow": lambda: (numbers * 3e38, label),
            "arrays of objects": lambda: (np.array([1.0, None, 2.0, 3.0], dtype=object), label),
            "tuple of three": lambda: (numbers, numbers, label),
        }.get(kind, lambda: (numbers, label))()
