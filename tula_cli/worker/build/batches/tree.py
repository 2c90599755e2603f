"""A batch as a tree (torch's pytree): tensors in tuples, lists, named tuples, dictionaries, and whatever is registered.

Samples come first: each tensor of a batch of n samples has n as its first dimension, or stands in a list with one entry a
sample. Numbers, texts, None and tensors without a dimension belong to the batch as a whole.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from tula_cli.errors import SpecError


def slice_batch(batch: Any, *, samples: int, start: int = 0, stop: int, own: bool = False) -> Any:
    """Return the samples from `start` to `stop` of a batch, as views.

    Args:
        batch: a tree.
        samples: in the whole batch.
        start: of the first one.
        stop: behind the last one.
        own: whether a collate_fn of the user's own has made it: torch's never puts tensors into a list with an entry a sample.

    Raises:
        SpecError: a tensor has not the samples first, or a list may be of samples or of tensors with all of them.
    """

    def part(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return tuple(leaf[start:stop]) if isinstance(leaf, tuple) else leaf[start:stop] if _is_list(leaf) else leaf
        if len(leaf) != samples:
            raise _wrong_first_dimension(path, leaf, samples)
        return leaf[start:stop]

    return tree_map_with_path(part, batch, is_leaf=_sample_list_predicate(batch, samples, own=own))


def allocate_batch(batch: Any, *, samples: int, to: int, own: bool = False) -> Any:
    """Return new, uninitialised tensors for `to` samples, shaped as those of `batch`, which has `samples`.

    Raises:
        SpecError: a tensor has not the samples first.
        TypeError: samples stand in a list.
    """

    def larger(path: Any, leaf: Any) -> Any:
        if _is_list(leaf):
            raise TypeError(f"batch{keystr(path)} is a list with an entry a sample, which is not estimated")
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return leaf
        if len(leaf) != samples:
            raise _wrong_first_dimension(path, leaf, samples)
        return torch.empty((to, *leaf.shape[1:]), dtype=leaf.dtype)

    return tree_map_with_path(larger, batch, is_leaf=_sample_list_predicate(batch, samples, own=own))


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch."""
    return [leaf for _, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, torch.Tensor)]


def describe_tree(tree: Any) -> str:
    """Return what a tree holds: `{ids: int64 (2, 12), labels: int64 (2)}`."""
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} {describe_shape(tree)}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {describe_tree(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        return describe_tree(tree._asdict())
    if isinstance(tree, tuple | list):
        most = 4
        return f"({', '.join([*map(describe_tree, tree[:most]), *(['...'] if len(tree) > most else [])])})"
    return type(tree).__name__


def describe_shape(tensor: torch.Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def _sample_list_predicate(batch: Any, samples: int, *, own: bool) -> Callable[[Any], bool]:
    """Return what tells a list with an entry a sample from one of tensors that hold all samples.

    The batch itself is never one: of two samples (input, target) would be.
    """

    def tell(node: Any) -> bool:
        if node is batch or not _is_list(node) or hasattr(node, "_asdict") or len(node) != samples:
            return False
        inside = [leaf for leaf in tensors_of(node) if leaf.ndim]
        if not inside:
            return True
        if own and samples > 1 and all(len(leaf) == samples for leaf in inside):
            raise SpecError(
                f"a batch of {samples} samples has a list of {samples} tensors with {samples} rows: by sample, or all samples"
                " in each?",
                "take another batch, or let dataset.collate_fn stack them",
            )
        return own and any(len(leaf) != samples for leaf in inside)

    return tell


def _is_list(node: Any) -> bool:
    return isinstance(node, tuple | list)


def _wrong_first_dimension(path: Any, leaf: torch.Tensor, samples: int) -> SpecError:
    return SpecError(
        f"batch{keystr(path)} is {describe_tree(leaf)}, where {samples} samples make the batch: a tensor has them first,"
        f" ({samples}, ...)",
        "let dataset.collate_fn put the samples first, or give a list with an entry a sample",
    )
