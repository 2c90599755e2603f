"""Data sets and small networks of benchmarks/table1/table1.py; jobs import this module by its name."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images, by channel
PADDING = 4  # pixels around an image for random crops


def prepare(
    folder: Path, file: Path, *, size: int = 32, per_class: tuple[int | None, int | None] = (None, None)
) -> Path:
    """Write all images into one file unless it exists: reading 60,000 JPEGs takes longer than a short training.

    Args:
        folder: `train/<class>/*` and `test/<class>/*`, as torchvision's ImageFolder reads them.
        file: the .npz file to write.
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
            top, remaining = torch.randint(2 * self.padding + 1, (2,)).tolist()
            image = image[:, top : top + size, remaining : remaining + size]
        if self.mirror and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


def dataset(train: bool, file: str, crop: bool = True) -> Images:
    """Return one split of the file that `prepare` wrote, as tensors."""
    split = "train" if train else "test"
    with np.load(file) as arrays:
        return Images(arrays[f"{split}_images"], arrays[f"{split}_labels"], crop=crop and train, mirror=train)


TensorDataset = torch.utils.data.TensorDataset


def placed_digits(train: bool, size: int = 12, count: int = 4096) -> TensorDataset:
    """Return scikit-learn's digits at random positions of a larger image, with a quarter of another digit and noise.

    The 1,797 digits are too easy for a comparison; these leave errors to make. Training and evaluation images are
    drawn from different digits.

    Args:
        train: the training images, else half as many evaluation images.
        size: height and width of an image.
        count: training images.
    """
    from sklearn.datasets import load_digits

    digits, labels = load_digits(return_X_y=True)
    digits = digits.reshape(-1, 8, 8).astype("float32") / 16
    rng = np.random.default_rng(0 if train else 1)
    numbers = np.random.default_rng(2).permutation(len(digits))
    numbers = numbers[:1400] if train else numbers[1400:]
    count = count if train else count // 2
    images = rng.normal(0, 0.15, (count, 1, size, size)).astype("float32")
    targets = np.empty(count, dtype="int64")
    for place in range(count):
        digit, distractor = rng.choice(numbers, 2)
        top, remaining = rng.integers(0, size - 3, 2)
        images[place, 0, top : top + 4, remaining : remaining + 4] += digits[distractor, 2:6, 2:6]
        top, remaining = rng.integers(0, size - 7, 2)
        images[place, 0, top : top + 8, remaining : remaining + 8] += digits[digit]
        targets[place] = labels[digit]
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(targets))
    data.num_classes = 10  # type: ignore[attr-defined]
    return data


def heavy_tailed_table(train: bool) -> TensorDataset:
    """Return a regression on a table with a few large entries: 8,192 rows to train on, 4,096 to evaluate."""
    rng = np.random.RandomState(0)
    table = rng.standard_t(2.5, size=(12288, 24)).astype("float32")
    weights = rng.randn(24, 6).astype("float32") / 5
    target = np.tanh(table @ weights).sum(1) + 0.1 * rng.randn(len(table))
    table, target = (table - table.mean(0)) / table.std(0), (target - target.mean()) / target.std()
    rows = slice(0, 8192) if train else slice(8192, None)
    return TensorDataset(torch.tensor(table[rows]), torch.tensor(target[rows, None].astype("float32")))


# --- networks


class SmallNet(nn.Module):
    """Three 3x3 convolutions (16, 32, 64 channels, strides 1, 2, 2) and a layer of 128: 156k parameters at 16 x 16 pixels.

    Without BatchNorm layers start as torch initialises them, with a small signal: a learning rate that suits the small
    batch leaves a large batch on the initial plateau.
    """

    def __init__(self, num_classes: int = 10, size: int = 16, batch_norm: bool = True) -> None:
        super().__init__()
        widths, layers = (3, 16, 32, 64), list[nn.Module]()
        for depth, stride in enumerate((1, 2, 2)):
            layers += [
                nn.Conv2d(widths[depth], widths[depth + 1], 3, stride=stride, padding=1, bias=not batch_norm),
                *([nn.BatchNorm2d(widths[depth + 1])] if batch_norm else []),
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


def small_alexnet(num_classes: int = 10) -> nn.Sequential:
    """Return an AlexNet for digits of 8 x 8 pixels: convolutions without normalisation, dropout before two layers of 128.

    Weights are initialised after He et al.: as torch initialises them, no signal reaches the last layer.
    """
    layers: list[nn.Module] = []
    for inputs, outputs, pools in ((1, 16, True), (16, 32, False), (32, 32, True)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if pools else []
    for _ in range(2):
        layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(inplace=True)]
    network = nn.Sequential(*layers, nn.Linear(128, num_classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return network


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return nn.functional.relu(self.layers(images) + self.shortcut(images))


def resnet_gn(num_classes: int = 10, width: int = 12) -> nn.Sequential:
    """Return a ResNet of three blocks with GroupNorm, for gray images of 12 x 12 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.GroupNorm(4, width),
        nn.ReLU(inplace=True),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


class TransformerBlock(nn.Module):
    """Attention with two heads and a layer of four times the width, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (N, T, width) to the same shape."""
        normalised = self.norms[0](tokens)
        heads = (
            layer(normalised).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        tokens = tokens + self.output(attended)
        mixed: torch.Tensor = tokens + self.mlp(self.norms[1](tokens))
        return mixed


class SmallViT(nn.Module):
    """A vision transformer for digits of 8 x 8 pixels: patches of 2 x 2, two blocks of width 48, mean over tokens."""

    def __init__(self, num_classes: int = 10, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(TransformerBlock(width), TransformerBlock(width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 1, 8, 8) to logits (N, num_classes)."""
        tokens = self.blocks(self.patches(images).flatten(2).transpose(1, 2) + self.positions)
        logits: torch.Tensor = self.head(tokens.mean(1))
        return logits


class ByteLSTM(nn.Module):
    """A language model on bytes: an embedding, one LSTM and a linear layer."""

    def __init__(self, embedding: int = 32, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean cross-entropy of each byte (N, T) given those before it."""
        states, _ = self.lstm(self.embedding(input_ids[:, :-1]))
        return {"loss": nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels[:, 1:].flatten())}


def table_mlp() -> nn.Sequential:
    """Return layers of 24-128-128-64-1."""
    widths = (24, 128, 128, 64)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(64, 1))
