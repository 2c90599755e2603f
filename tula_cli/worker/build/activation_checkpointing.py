"""Activation checkpointing: blocks keep only their inputs and are recomputed in the backward pass."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tula_cli.errors import SpecError

_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.MaxPool1d, nn.AvgPool1d, nn.MaxPool3d, nn.AvgPool3d)
_MIN_FLAT_LAYERS = 8
"""A plain chain of fewer layers without pooling (such as a classifier's head) is not worth recomputing."""


def apply_activation_checkpointing(model: nn.Module) -> None:
    """Make the model's blocks recompute their activations; outputs, gradients, names and buffers are unchanged.

    Blocks are the composite members of every Sequential or ModuleList (a residual block, a transformer layer). A plain
    chain of layers is cut after its pooling layers, or into about sqrt(n) parts if it has none.

    Raises:
        SpecError: the model has no such block, so that the setting would have no effect.
    """
    units = list(_list_units_to_wrap(model))
    for unit in units:
        if isinstance(unit, _CheckpointedChain):
            unit.chain.forward = unit  # type: ignore[method-assign]
        else:
            unit.forward = _CheckpointedForward(unit.forward, _list_running_norms([unit]))
    if not units:
        raise SpecError(
            f"train.activation_checkpointing: {type(model).__name__} has no blocks to checkpoint",
            "put the blocks in an nn.Sequential or nn.ModuleList, or call torch.utils.checkpoint in your model",
        )


class _CheckpointedForward:
    """A forward pass, checkpointed if gradients are enabled (an object, so that copying a model copies it)."""

    def __init__(self, forward: Callable[..., Any], norms: list[nn.Module]) -> None:
        self.forward, self.norms = forward, norms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # compiled code updates the statistics only once
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self._make_contexts, **kwargs)

    def _make_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _FrozenRunningStatistics(self.norms)


class _CheckpointedChain:
    """The forward pass of a plain chain of layers, checkpointed part by part."""

    def __init__(self, chain: nn.Sequential, cuts: Sequence[int]) -> None:
        self.chain = chain
        layers = list(chain)
        segments = [layers[start:end] for start, end in itertools.pairwise([0, *cuts, len(layers)])]
        self.parts = [
            _CheckpointedForward(_LayerSequence(segment), _list_running_norms(segment)) for segment in segments
        ]

    def __call__(self, value: Any) -> Any:
        for segment in self.parts:
            value = segment(value)
        return value


class _LayerSequence:
    """Calls layers one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers

    def __call__(self, value: Any) -> Any:
        for layer in self.layers:
            value = layer(value)
        return value


def list_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks: the composite members of every Sequential or ModuleList, outermost first."""
    return [unit for unit in _list_units_to_wrap(model) if isinstance(unit, nn.Module)]


def _list_units_to_wrap(module: nn.Module) -> Iterator[nn.Module | _CheckpointedChain]:
    """Yield blocks to wrap whole and plain chains to cut, outermost first; the inside of a block is not searched."""
    for child in [module] if isinstance(module, nn.Sequential) else module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _list_checkpointed_modules(child)
        else:
            yield from _list_units_to_wrap(child)


def _list_checkpointed_modules(group: nn.Sequential | nn.ModuleList) -> Iterator[nn.Module | _CheckpointedChain]:
    members = list(group)
    if isinstance(group, nn.Sequential) and not any(_is_composite(member) for member in members):
        cuts = _choose_cut_positions(members)
        if cuts:
            yield _CheckpointedChain(group, cuts)
        return
    for member in members:
        if isinstance(member, nn.Sequential | nn.ModuleList) and any(_is_composite(child) for child in member):
            yield from _list_checkpointed_modules(member)
        elif _is_composite(member) and not isinstance(member, nn.ModuleList | nn.ModuleDict):
            yield member


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _choose_cut_positions(layers: Sequence[nn.Module]) -> list[int]:
    """Return the start positions of the parts; never an in-place layer, which would change the stored input."""
    behind_pools = [position + 1 for position, layer in enumerate(layers[:-1]) if isinstance(layer, _POOLS)]
    if behind_pools:
        starts = behind_pools
    elif len(layers) < _MIN_FLAT_LAYERS:
        return []
    else:
        stride = math.isqrt(len(layers))
        starts = list(range(stride, len(layers), stride))
    return sorted({position for start in starts if (position := _find_next_with_parameters(layers, start)) is not None})


def _find_next_with_parameters(layers: Sequence[nn.Module], start: int) -> int | None:
    return next((p for p in range(start, len(layers)) if any(True for _ in layers[p].parameters())), None)


def _list_running_norms(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that keep running statistics."""
    return [m for module in modules for m in module.modules() if getattr(m, "num_batches_tracked", None) is not None]


class _FrozenRunningStatistics:
    """Keeps running statistics unchanged during a second forward pass over the same batch.

    Uses a momentum of 0 instead of disabling track_running_stats: the recomputation must save the same tensors as the
    first pass. A class, because a double backward enters the context a second time to compute the block a third time.
    """

    def __init__(self, norms: Sequence[Any]) -> None:
        self.norms = norms

    def __enter__(self) -> None:
        self._settings = [(norm.momentum, norm.num_batches_tracked) for norm in self.norms]
        for norm in self.norms:
            norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, count) in zip(self.norms, self._settings, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
