"""Selection of parameters by patterns of their names: frozen parameters and parameter groups."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import SpecError
from tula_cli.optim.muon import split_parameters
from tula_cli.plugins import suggest_nearest
from tula_cli.spec.sections import Optimizer
from tula_cli.worker import messages

# --- Patterns of parameter names

MAX_PATTERN_NAMES_SHOWN = 8
"""Maximum number of module names in an error message."""


def find_parameters(model: nn.Module, patterns: Sequence[str], *, path: str) -> dict[str, nn.Parameter]:
    """Return the parameters whose names match patterns, by name; if several patterns match a name, the last one counts.

    Args:
        model: a shared module counts under each of its names.
        patterns: patterns of names, in which * stands for any text; a pattern that matches a module selects all parameters in
            it. `norms`, `biases` and `embeddings` select those of the whole model. A pattern after ! excludes its
            matches.

    Raises:
        SpecError: a pattern matches nothing.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    kinds = {kind: set(_list_parameters_of_kind(model, kind)) for kind in PARAMETER_KINDS}
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        if not any(_matches_pattern(name, plain, kinds) for name in names):
            raise _make_no_match_error(model, pattern, path)
    return {name: parameter for name, parameter in names.items() if _is_included_by_last_match(name, patterns, kinds)}


PARAMETER_KINDS = {"norms": "normalisation layers", "biases": "biases", "embeddings": "embedding layers"}
"""Words that select the parameters of a kind, with what a model lacks if they match none."""


def _is_included_by_last_match(name: str, patterns: Sequence[str], kinds: dict[str, set[str]]) -> bool:
    matches = [
        not pattern.startswith("!") for pattern in patterns if _matches_pattern(name, pattern.removeprefix("!"), kinds)
    ]
    return bool(matches) and matches[-1]


def _matches_pattern(name: str, pattern: str, kinds: dict[str, set[str]]) -> bool:
    if pattern in kinds:
        return name in kinds[pattern]
    modules_and_name = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(fnmatchcase(prefix, pattern) for prefix in modules_and_name)


def _list_parameters_of_kind(model: nn.Module, kind: str) -> Iterator[str]:
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False):
            is_norm = "norm" in type(module).__name__.lower()  # LayerNorm, RMSNorm of any package ...
            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if {"norms": is_norm, "biases": name.endswith("bias"), "embeddings": is_embedding}[kind]:
                yield f"{module_name}.{name}" if module_name else name


def _make_no_match_error(model: nn.Module, pattern: str, path: str) -> SpecError:
    if parameters := PARAMETER_KINDS.get(pattern.removeprefix("!")):
        return SpecError(f"{path}: {pattern!r}: model {type(model).__name__} has no {parameters}", f"remove {pattern}")
    modules = [name for name, _ in model.named_modules() if name]
    names = [*modules, *(name for name, _ in model.named_parameters())]
    top = [name for name in modules if "." not in name]
    more = " ..." if len(top) > MAX_PATTERN_NAMES_SHOWN else ""
    module_list = f"its modules are {', '.join(top[:MAX_PATTERN_NAMES_SHOWN])}{more}"
    hint = suggest_nearest(pattern.strip("!*.?"), names) or module_list
    return SpecError(f"{path}: {pattern!r} matches no parameter of {type(model).__name__}", hint)


# --- Frozen parameters

FROZEN_KEY = "model.frozen"


class FrozenStatistics:
    """Marks a BatchNorm that remains in evaluation mode: it normalises by its running statistics, which do not change.

    With batch statistics a frozen layer's outputs would differ from those that its weights were trained with, and vary
    from batch to batch.
    """

    def train(self, mode: bool = True) -> Any:  # noqa: ARG002
        """Remain in evaluation mode, whatever mode the surrounding model is set to."""
        parent: Any = super()
        return parent.train(False)


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that patterns select, and the statistics of BatchNorm layers that are frozen completely.

    Args:
        model: changed in place, before anything wraps it.
        patterns: patterns of names (see `find_parameters`).

    Raises:
        SpecError: a pattern matches nothing, or nothing is left to train.
    """
    if not patterns:
        return
    for parameter in find_parameters(model, patterns, path=FROZEN_KEY).values():
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SpecError(
            f"{FROZEN_KEY}: {', '.join(patterns)} freezes all parameters",
            'exclude the parameters to train with !, for example ["*", "!head"]',
        )
    no_kinds: dict[str, set[str]] = {kind: set() for kind in PARAMETER_KINDS}  # a layer without parameters is of none
    for name, module in model.named_modules():
        if parameters := list(module.parameters(recurse=False)):
            is_frozen = not any(p.requires_grad for p in parameters)
        else:
            is_frozen = _is_included_by_last_match(name, patterns, no_kinds)
        if isinstance(module, _BatchNorm) and is_frozen:
            kind: Any = type(module)
            module.__class__ = _make_frozen_class(kind)
            module.train(False)


@functools.cache
def _make_frozen_class(kind: Any) -> Any:
    return type(f"Frozen{kind.__name__}", (FrozenStatistics, kind), {})


def describe_frozen_parameters(model: nn.Module, patterns: Sequence[str]) -> Diagnostic:
    """Describe the parameters and statistics that are frozen by the patterns."""
    sizes = [(p.requires_grad, p.numel()) for p in model.parameters()]
    trained, frozen = (sum(size for trains, size in sizes if trains is is_trained) for is_trained in (True, False))
    norms = sum(isinstance(module, FrozenStatistics) for module in model.modules())
    return messages.frozen_parameters(frozen=frozen, parameters=frozen + trained, patterns=patterns, norms=norms)


# --- Parameter groups

Parameters = Sequence[nn.Parameter] | Sequence[dict[str, Any]]
"""The parameters of an optimizer, or groups of them."""


def make_parameter_groups(section: Optimizer, model: nn.Module) -> Parameters:
    """Return the trainable parameters of a model, in groups if the section defines some.

    Parameters in no group come first, with the section's own values. Parameters for Muon and for AdamW are in separate
    groups, and those with sparse gradients too, which torch's fused SGD cannot update.

    Raises:
        SpecError: a pattern matches nothing, or a group is left without a parameter.
    """
    groups = _build_parameter_groups(section, model)
    if section.name == "SGD":
        return _split_off_sparse_gradients(groups, model)
    return split_parameters(groups, model) if section.name == "Muon" else groups


def _build_parameter_groups(section: Optimizer, model: nn.Module) -> Parameters:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not section.groups:
        return trained
    group_index = dict.fromkeys(trained, -1)
    for index, group in enumerate(section.groups):
        for parameter in find_parameters(model, group.parameters, path=_format_parameters_path(index)).values():
            if parameter in group_index:
                group_index[parameter] = index
    members = {index: [p for p in trained if group_index[p] == index] for index in range(-1, len(section.groups))}
    for index, group in enumerate(section.groups):
        if not members[index]:
            names = ", ".join(group.parameters)
            raise SpecError(
                f"{_format_parameters_path(index)}: all parameters that match {names} are frozen or belong to a later group",
                "remove this group, or change its patterns",
            )
    ungrouped = [{"params": members[-1]}] if members[-1] else []
    return [
        *ungrouped,
        *(_make_parameter_group(section, index, members[index]) for index in range(len(section.groups))),
    ]


def _split_off_sparse_gradients(groups: Parameters, model: nn.Module) -> Parameters:
    """Return the groups with the weights of sparse embeddings in groups of their own, for which `fused` is off."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    sparse = {embedding.weight for embedding in embeddings if embedding.sparse}
    if not sparse.intersection(flatten_parameter_groups(groups)):
        return groups
    split = []
    for group in [group for group in groups if isinstance(group, dict)] or [{"params": groups}]:
        dense = [parameter for parameter in group["params"] if parameter not in sparse]
        updated_by_rows = [parameter for parameter in group["params"] if parameter in sparse]
        split += [{**group, "params": dense}] if dense else []
        split += [{**group, "params": updated_by_rows, "fused": False}] if updated_by_rows else []
    return split


def _make_parameter_group(section: Optimizer, index: int, parameters: list[nn.Parameter]) -> dict[str, Any]:
    group = section.groups[index]
    decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
    return {"params": parameters, "lr": section.lr * group.lr_factor, **decay}


def _format_parameters_path(index: int) -> str:
    return f"optimizer.groups[{index}].parameters"


def flatten_parameter_groups(parameters: Parameters) -> list[nn.Parameter]:
    """Return the parameters of all groups as one list."""
    entries = (entry["params"] if isinstance(entry, dict) else [entry] for entry in parameters)
    return [parameter for entry in entries for parameter in entry]


def describe_parameter_groups(section: Optimizer, model: nn.Module) -> list[Diagnostic]:
    """Return one description per group of the section."""
    groups = [group for group in _build_parameter_groups(section, model) if isinstance(group, dict)]
    return [
        messages.parameter_group(
            parameters=settings.parameters,
            tensors=len(group["params"]),
            lr=group["lr"],
            weight_decay=section.weight_decay if settings.weight_decay is None else settings.weight_decay,
        )
        for settings, group in zip(section.groups, groups[len(groups) - len(section.groups) :], strict=True)
    ]
