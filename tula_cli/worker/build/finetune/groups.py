"""Groups of parameters with a learning rate and a weight decay of their own (`optimizer.groups`)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tula_cli.errors import SpecError
from tula_cli.optim.muon import split_parameters
from tula_cli.spec.sections import Optimizer
from tula_cli.words import number, plural
from tula_cli.worker.build.finetune.patterns import parameters_matching

Parameters = Sequence[nn.Parameter] | Sequence[dict[str, Any]]
"""What an optimizer is built of: parameters, or groups of them."""


def parameter_groups(section: Optimizer, model: nn.Module) -> Parameters:
    """Return what of a model is trained: its parameters, or as groups where the section has some.

    What no group names comes first, with the section's own values. Muon's and AdamW's are different groups.

    Raises:
        SpecError: a pattern names nothing, or a group is left without a parameter.
    """
    groups = _build_groups(section, model)
    return split_parameters(groups, model) if section.name == "Muon" else groups


def _build_groups(section: Optimizer, model: nn.Module) -> Parameters:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not section.groups:
        return trained
    group_index = dict.fromkeys(trained, -1)
    for index, group in enumerate(section.groups):
        for parameter in parameters_matching(model, group.parameters, path=_path(index)).values():
            if parameter in group_index:
                group_index[parameter] = index
    members = {index: [p for p in trained if group_index[p] == index] for index in range(-1, len(section.groups))}
    for index, group in enumerate(section.groups):
        if not members[index]:
            names = ", ".join(group.parameters)
            raise SpecError(
                f"{_path(index)}: {names} leaves nothing to the group", "all is frozen, or in a later group"
            )
    ungrouped = [{"params": members[-1]}] if members[-1] else []
    return [*ungrouped, *(_group(section, index, members[index]) for index in range(len(section.groups)))]


def _group(section: Optimizer, index: int, parameters: list[nn.Parameter]) -> dict[str, Any]:
    group = section.groups[index]
    decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
    return {"params": parameters, "lr": section.lr * group.lr_factor, **decay}


def _path(index: int) -> str:
    return f"optimizer.groups[{index}].parameters"


def flatten_groups(parameters: Parameters) -> list[nn.Parameter]:
    """Return the parameters of whatever groups."""
    entries = (entry["params"] if isinstance(entry, dict) else [entry] for entry in parameters)
    return [parameter for entry in entries for parameter in entry]


def describe_groups(section: Optimizer, model: nn.Module) -> tuple[str, ...]:
    """Return one line per group."""
    groups = [group for group in _build_groups(section, model) if isinstance(group, dict)]
    lines = []
    for settings, group in zip(section.groups, groups[len(groups) - len(section.groups) :], strict=True):
        decay = section.weight_decay if settings.weight_decay is None else settings.weight_decay
        lines.append(
            f"group {', '.join(settings.parameters)}: {plural(len(group['params']), 'tensor')}, lr {number(group['lr'])},"
            f" weight decay {number(decay)}"
        )
    return tuple(lines)
