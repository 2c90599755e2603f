"""How many tokens a batch of text has, and how many of its places are padding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TOKENS = ("input_ids", "ids", "tokens")
"""Keys of a batch that hold the numbers of words."""
MASKS = ("attention_mask", "mask")
"""Keys of a batch that tell which places hold a word."""
LABELS = ("labels", "targets", "target")
"""Keys of a batch that tell the same where there is no mask: by what the loss leaves out."""
IGNORED = -100
"""The label that torch's cross entropy leaves out."""


def named_entries(tree: Any) -> Mapping[str, Any] | None:
    """Return the entries of a dictionary or a named tuple by name; None where there are no names."""
    if isinstance(tree, Mapping):
        return tree
    return tree._asdict() if isinstance(tree, tuple) and hasattr(tree, "_asdict") else None


def sequence_length(batch: Any) -> int | None:
    """Return how many places a sample of a batch has, its padding counted; None where a batch is not known to be text."""
    ids = _token_ids(batch)
    return None if ids is None else ids.shape[1]


@dataclass
class TokenCounter:
    """Counts over batches. What is on a GPU is counted there: the host waits for it only when it asks."""

    samples: int = 0
    places: int = 0  # padding counted
    real: Any = 0  # a number, or a 0-dim tensor

    def add(self, batch: Any) -> None:
        """Count a batch; one that is not known to be text is left out."""
        ids = _token_ids(batch)
        if ids is None:
            return
        mask = _word_mask(batch, ids)
        self.samples += ids.shape[0]
        self.places += ids.numel()
        self.real = self.real + (ids.numel() if mask is None else mask.sum())

    def means_per_sample(self) -> tuple[float, float] | None:
        """Return the mean length of a sample, with and without padding; None if no text was counted."""
        return (self.places / self.samples, float(self.real) / self.samples) if self.samples else None


def _token_ids(batch: Any) -> torch.Tensor | None:
    """Return the ids of a batch, (samples, length).

    Known are the names that ids go by, and a pair of ids and targets of one shape.
    """
    fields = named_entries(batch)
    if fields is not None:
        candidates = [fields[key] for key in TOKENS if key in fields]
    elif type(batch) in (tuple, list) and len(batch) == 2 and all(isinstance(part, torch.Tensor) for part in batch):
        candidates = [batch[0]] if batch[0].shape == batch[1].shape and not batch[1].is_floating_point() else []
    else:
        candidates = []
    ids = next((leaf for leaf in candidates if isinstance(leaf, torch.Tensor) and leaf.ndim == 2), None)
    return None if ids is None or ids.is_floating_point() else ids


def _word_mask(batch: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return which positions hold a word, bool (samples, length); None if the batch does not tell."""
    fields = named_entries(batch)
    fields = {"labels": batch[1]} if fields is None else fields
    for keys, nothing in ((MASKS, 0), (LABELS, IGNORED)):
        for key in keys:
            mask = fields.get(key)
            if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
                return mask.ne(nothing)
    return None
