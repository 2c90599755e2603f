"""Layers that are not trained (`model.frozen`)."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tula_cli.errors import SpecError
from tula_cli.worker.build.finetune.patterns import is_module_matching, parameters_matching

PATH = "model.frozen"


class FrozenStatistics:
    """Marks a BatchNorm that stays in evaluation: it normalises by its running statistics, which do not change.

    With statistics of the batch a frozen layer would pass on other values than those that its weights were trained with,
    and change them from batch to batch.
    """

    def train(self, mode: bool = True) -> Any:  # noqa: ARG002
        """Stay in evaluation, whatever the model around it does."""
        parent: Any = super()
        return parent.train(False)


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Leave the parameters that patterns name, and the statistics of BatchNorm layers all of whose are, as they are.

    Args:
        model: changed in place, before anything wraps it.
        patterns: of names (`patterns.chosen`).

    Raises:
        SpecError: a pattern names nothing, or nothing is left to train.
    """
    if not patterns:
        return
    for parameter in parameters_matching(model, patterns, path=PATH).values():
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SpecError(f"{PATH}: {', '.join(patterns)} leaves nothing to train", 'a pattern after ! stays: "!head"')
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        still = not any(p.requires_grad for p in parameters) if parameters else is_module_matching(name, patterns)
        if isinstance(module, _BatchNorm) and still:
            kind: Any = type(module)
            module.__class__ = _frozen_class(kind)
            module.train(False)


@functools.cache
def _frozen_class(kind: Any) -> Any:
    return type(f"Frozen{kind.__name__}", (FrozenStatistics, kind), {})


def describe_frozen(model: nn.Module, patterns: Sequence[str]) -> str:
    """Describe what is frozen; empty if nothing is."""
    if not patterns:
        return ""
    sizes = [(p.requires_grad, p.numel()) for p in model.parameters()]
    trained, still = (sum(size for trains, size in sizes if trains is wanted) for wanted in (True, False))
    norms = sum(isinstance(module, FrozenStatistics) for module in model.modules())
    statistics = f"; the statistics of {norms} BatchNorm layers stay" * bool(norms)
    return f"frozen: {still} of {still + trained} parameters ({', '.join(patterns)}){statistics}"
