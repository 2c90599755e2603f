"""How samples become a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.utils.data
from torch.utils._pytree import tree_map

from tula_cli.plugins import load
from tula_cli.spec.job import JobSpec
from tula_cli.worker.build.construct import call_with_arguments

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class UserCollate:
    """The user's own function; a mapping of another kind than dict, as tokenizers return, becomes one."""

    function: Collate

    def __call__(self, items: list[Any]) -> Any:
        return as_dict(self.function(items))


def build_collate(spec: JobSpec) -> Collate | None:
    """Return what makes a batch of samples; None: torch's own.

    Raises:
        SpecError: it cannot be imported, or its arguments are wrong.
    """
    import_string = spec.dataset.collate_fn
    if import_string is None:
        return None
    name, args = (import_string, None) if isinstance(import_string, str) else next(iter(import_string.items()))
    target = load(name, {}, kind="collate_fn")
    if isinstance(target, type):
        return UserCollate(call_with_arguments(target, args or {}, path=f"dataset.collate_fn.{name}", name=name))
    return UserCollate(partial(target, **args) if args else target)


def collate_items(collate: Collate | None, items: Sequence[Any]) -> Any:
    """Return a batch of these samples, as a loader makes it."""
    return (collate or torch.utils.data.default_collate)(list(items))


def as_dict(tree: Any) -> Any:
    """Return a tree in which each mapping that torch does not know is a dict."""
    return tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, tree)
