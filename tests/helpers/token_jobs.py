"""Jobs of tokens: sentences of different lengths, and models that take them by name, in order, or with their own loss."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate_job

WORDS, CLASSES = 30, 3
JOB: dict[str, Any] = {
    "name": "tokens",
    "model": {"name": "token_jobs:Classifier"},
    "dataset": {"name": "token_jobs:Sentences", "collate_fn": "token_jobs:padded"},
    "optimizer": {"lr": 0.3, "momentum": 0.9},
    "train": {"epochs": 2, "workers": 0, "method": "lbt", "reference_batch": 8, "seed": 3},
    "search": {"nodes": [1], "min_batch": 8},
    "cluster": {"device": "cpu"},
}


def make_token_job(**changes: dict[str, Any]) -> JobSpec:
    """Return a job of tokens; `changes` are merged into its sections."""
    return validate_job({**JOB, **{k: {**JOB.get(k, {}), **v} for k, v in changes.items()}}, source="test")


class Sentences(torch.utils.data.Dataset[Any]):
    """Sentences of 3 to 9 words with one class each; most words of a sentence belong to its class.

    Args:
        form: of a sample: `dict`, `pair` (ids, label), `nested` ({ids, mask}, label) or `three` (ids, mask, label).
        even: all sentences have 6 words.
    """

    num_classes = CLASSES

    def __init__(self, train: bool, form: str = "dict", even: bool = False, size: int = 64) -> None:
        generator = torch.Generator().manual_seed(int(train))
        self.form = form
        self.labels = torch.randint(CLASSES, (size if train else 10,), generator=generator).tolist()
        lengths = torch.randint(3, 10, (len(self.labels),), generator=generator).tolist()
        self.ids = [
            1 + 3 * torch.randint(9, (6 if even else length,), generator=generator) + label
            for length, label in zip(lengths, self.labels, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        ids, label = self.ids[index], self.labels[index]
        mask = torch.ones_like(ids, dtype=torch.bool)
        forms = {
            "dict": {"ids": ids, "mask": mask, "label": label},
            "pair": (ids, label),
            "nested": ({"ids": ids, "mask": mask}, label),
            "three": (ids, mask, label),
        }
        return forms[self.form]


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch padded to its longest sentence."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "ids": pad([item["ids"] for item in items], batch_first=True),
        "mask": pad([item["mask"] for item in items], batch_first=True),
        "label": torch.tensor([item["label"] for item in items]),
    }


def packed(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch without a dimension of samples."""
    return {"ids": torch.cat([item["ids"] for item in items]), "label": torch.tensor([i["label"] for i in items])}


class Classifier(nn.Module):
    """Mean of the word vectors, followed by one linear layer."""

    def __init__(self, num_classes: int = CLASSES, width: int = 8) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, num_classes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        weight = (torch.ones_like(ids) if mask is None else mask)[..., None].float()
        mean = (self.words(ids) * weight).sum(1) / weight.sum(1)
        result: torch.Tensor = self.head(mean)
        return result


class WithLoss(Classifier):
    """A classifier that takes labels and returns its own loss, as models of transformers do."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, label: torch.Tensor | None = None) -> Any:
        scores = super().forward(ids, mask)
        return {"loss": None if label is None else nn.functional.cross_entropy(scores, label), "logits": scores}


class Whole(Classifier):
    """A classifier that takes the dictionary itself."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch["ids"], batch["mask"])


class First(Classifier):
    """A classifier that takes no mask."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids)


class NextWord(nn.Module):
    """Scores of the next word, for each position and word."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.words(ids))
        return result


class OfBytes(nn.Module):
    """A language model of bytes with its own loss, with the arguments and results of models of transformers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.head(self.words(input_ids))
        if labels is None:
            return {"logits": scores}
        return {
            "loss": nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "logits": scores,
        }


def next_word_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over all words that have a successor."""
    ids = batch["ids"].masked_fill(~batch["mask"], -100)
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100)


def of_ids(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return an arbitrary loss."""
    return outputs.square().mean() + batch["mask"].float().mean()


class Stream(torch.utils.data.IterableDataset[Any]):
    """Numbers 0, 1, 2 ... of an epoch with different noise, as (numbers (2), class); `reads` counts them.

    Args:
        size: number of samples.
        shuffled: by a buffer of four, with torch's random numbers.
    """

    num_classes = CLASSES

    def __init__(self, train: bool, size: int = 40, shuffled: bool = False) -> None:
        self.size, self.train, self.shuffled, self.epoch, self.reads = size, train, shuffled, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        ready: list[Any] = []
        for number in range(self.size):
            self.reads += 1
            value = torch.tensor([float(100 * (self.epoch % 10) + number), float(torch.rand(()))])
            ready.append((value, number % CLASSES))
            if len(ready) > (3 if self.shuffled else 0):
                yield ready.pop(int(torch.randint(len(ready), ())))
        yield from ready


class Shares(Stream):
    """A stream in which each rank has different samples."""

    ranks = (0, 2)  # rank, world

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(super().__iter__(), self.ranks[0], None, self.ranks[1])


def linear(num_classes: int = CLASSES) -> nn.Module:
    """Return a model for the numbers of a stream."""
    return nn.Linear(2, num_classes)


def rare_first(samples: Any, epoch: int, seed: int, times: int = 1) -> list[int]:
    """Return the indices of one class first, `times` as often, and then those of the other classes shuffled by the seed."""
    labels = samples.labels
    rare = [index for index, label in enumerate(labels) if label == epoch % CLASSES]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return (rare * times + order)[: len(labels)]
