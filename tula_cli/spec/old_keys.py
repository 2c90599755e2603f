"""Keys of older job files: renamed keys, which are still read, and removed keys, with advice on what to do instead.

In input written by a user (files, variables, `--set`, mappings in Python) the old spelling of a renamed key is reported
with the new one, and a removed key is an error. Runs of older versions stay readable: `drop_removed_values`.
"""

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

RENAMED_KEYS: Mapping[str, str] = {
    "auto.epochs": "auto.branch_epochs",
    "cluster.scheduler.minutes": "cluster.minutes",
    "cluster.scheduler.options": "cluster.options",
    "cluster.scheduler.python": "cluster.python",
    "cluster.scheduler.setup": "cluster.setup",
    "cluster.slurm.minutes": "cluster.minutes",
    "cluster.slurm.python": "cluster.python",
    "cluster.slurm.setup": "cluster.setup",
    "pricing.told": "pricing.slurm_billing",
    "script.probe.args": "script.probe_args",
    "train.best": "train.best_checkpoint",
    "train.oom": "train.oom_policy",
    "train.until": "train.early_stopping",
}
"""New paths of keys; the section of a new path contains the old one."""

NODE_TYPE_SECTIONS = ("cluster", "pricing", "search")
"""Sections that a node type or a site file may give in part. Kept here because the command line imports it without pydantic."""

REMOVED_STRATEGIES: Mapping[str, str] = {
    "five": "set adaptive, which chooses better at the same cost, or partial, which measures the four corners of the search",
    "few": "set partial, which measures the four corners of the search",
    "two": "set partial, which measures the four corners of the search",
}
REMOVED_METHODS: Mapping[str, str] = {
    "adascale": "set ramp, which loses less accuracy, or write your own method (package.module:attribute)"
}
REMOVED_VALUES: Mapping[str, Mapping[str, str]] = {
    "search.strategy": REMOVED_STRATEGIES,
    "train.method": REMOVED_METHODS,
}
"""By key, the values that were removed, and what to use instead."""

_FACTOR_ADVICE = (
    "set pricing.price to the factor of the job's QOS and partition, and pricing.currency: SU if costs are in SU"
)
_ARMS_ADVICE = "an arm of auto.arms has only name, method and lr_factor; train other settings in a separate job"
REMOVED_KEYS: Mapping[str, str] = {
    "ags.exclude": 'set ags.parameters, for example ["*", "!embeddings", "!norms"]',
    "auto.after": "the arms of auto.arms branch off after one epoch at train.reference_batch",
    "cluster.scheduler": "set cluster.options, cluster.minutes, cluster.python and cluster.setup",
    "cluster.slurm.limits": (
        "set cluster.minutes to one of the limits, and search.nodes to the numbers of nodes that have this limit"
    ),
    "cluster.slurm.reservation": "set cluster.slurm.extra: {reservation: NAME}",
    "pricing.date": "write the value as a comment",
    "pricing.partition_factors": _FACTOR_ADVICE,
    "pricing.per_node": (
        "if SLURM cannot be queried, set pricing.kind: node_hour, pricing.price to the billing of a whole node, and pricing.currency: SU"
    ),
    "pricing.qos_factors": _FACTOR_ADVICE,
    "pricing.slurm_billing.charge_factor": _FACTOR_ADVICE,
    "pricing.source": "write the value as a comment",
    "pricing.spot.wait_minutes": "tula does not predict how long it takes to replace a reclaimed node",
    "pricing.unit": "tula shows billing-hours as SU",
    "schedule.args": "set the arguments in the module of the callable, for example with functools.partial",
    "script.probe": (
        "set script.probe_args to the arguments of probes; a probe always sets WANDB_MODE=disabled, and exits after its last step"
    ),
    "script.resume.checkpoint_interval": "tula observes in trainings how often the script saves",
    "script.resume.every": "tula observes in trainings how often the script saves",
    "search.warmup_steps": "set search.min_steps, which also applies to the warm-up",
    "train.channels_last": "tula uses channels-last for models with 2-d convolutions on NVIDIA GPUs with tensor cores",
    "train.fsdp_blocks": "tula gathers each member of an nn.ModuleList or nn.Sequential as one block",
    "train.ramp_noise": "with train.ramp: noise, the batch grows up to the gradient noise scale",
    "train.tf32": "to compute without TF32, set the environment variable NVIDIA_TF32_OVERRIDE=0",
    "ags.consensus": "the gradient norm of rank 0 determines for all ranks whether a step is scaled",
    "ags.eps": "both presets use 1e-8",
    "ags.norm_ewma": "AGS compares the norms of single steps, not averages over steps",
    "ags.s_min": "both presets use 0.001",
    "ags.scale_ema": "set ags.preset, which determines the value: paper uses 0, robust 0.9",
    "auto.arms.ags": "set section ags, which applies to all arms with method: ags",
    "auto.arms.beta1": _ARMS_ADVICE,
    "auto.arms.decay_factor": _ARMS_ADVICE,
    "auto.arms.decay_from": _ARMS_ADVICE,
    "auto.arms.warmup_epochs": _ARMS_ADVICE,
    "auto.holdout": "arms are compared on a tenth of the training samples, but at most 10,000",
    "export.by": "commands that wait for jobs send results; if no command waits, run tula export --follow",
    "export.every": "commands that wait for jobs send results every 30 seconds; tula export --follow --every 60 sets another interval",
    "schedule.peak": "one-cycle reaches the full learning rate after 30 % of the epochs",
    "search.memory_margin": "tula keeps a tenth of the memory free; to limit the memory of a rank, set cluster.memory_per_gpu",
    "search.packing": "tula measures each number of nodes in a separate job",
    "search.sequence": (
        "profile another text length as a separate job, for example --set name=job-512 --set dataset.args.length=512"
    ),
    "search.steps": "set search.min_steps, search.min_seconds or search.max_seconds, which end a probe",
    "search.tolerance": (
        "the adaptive search stops when measuring all configurations would improve the choice by less than 1 %; to limit the"
        " cost of the search, set search.max_node_hours"
    ),
    "train.cudnn_benchmark": "cuDNN uses its fastest algorithms on NVIDIA GPUs, unless train.deterministic is true",
    "train.ghost_batch": "BatchNorm computes its statistics over the samples that a GPU processes at a time",
    "train.early_stopping.at_least": "set train.early_stopping.target to a value of train.best_checkpoint.metric",
    "train.early_stopping.at_most": (
        "set train.early_stopping.target, and train.best_checkpoint.mode: min if lower values are better"
    ),
    "train.early_stopping.metric": "set train.best_checkpoint.metric, which train.early_stopping also uses",
    "train.gradient_noise": "set train.diagnostics: [gradient_noise], which has no settings",
    "train.hessian": "set train.diagnostics: [hessian], which has no settings",
    "train.ramp.samples": "set the key epochs of the stage, which may be fractional",
    "train.tensorboard": "set export: [{to: tensorboard}]",
}
"""Advice on what to do instead of a key that no longer exists."""
_REMOVED_PATHS = [path.split(".") for path in REMOVED_KEYS]


class OldKeyWarning(FutureWarning):
    """Warns of the old spelling of a key in user input."""


def replace_old_keys(content: Any, *, source: str | None = None, prefix: str = "") -> Any:
    """Return a job, or a part of one, with the new names of its keys; if both names are given, validation refuses the old one.

    Args:
        content: the sections by name; not modified.
        source: where a user has written `content`; renamed keys are reported by an `OldKeyWarning`. None: no warnings.
        prefix: path of the sections in the job, ending in a dot: "node_types.NAME.".
    """
    if not isinstance(content, Mapping):
        return content
    replaced = dict(content)
    for old, new in RENAMED_KEYS.items():
        section, _, name = new.rpartition(".")
        keys = _get_section(replaced, section)
        old_name = old.removeprefix(f"{section}.")
        if name in keys or (moved := _move_key(keys, old_name.split("."), name)) is None:
            continue
        replaced[section] = moved
        if source is not None:
            message = (
                f"{source}: {prefix}{old} was renamed to {prefix}{new}; use the new name (the old one still works)"
            )
            warnings.warn(message, OldKeyWarning, stacklevel=2)
    if isinstance(node_types := content.get("node_types"), Mapping):
        replaced["node_types"] = {
            name: replace_old_keys(node_type, source=source, prefix=f"node_types.{name}.")
            for name, node_type in node_types.items()
        }
    return replaced


def _move_key(keys: Mapping[str, Any], old: Sequence[str], new: str) -> dict[str, Any] | None:
    """Return a section with the value at the path `old` under the name `new`; None if there is no such value.

    A section below it that is then empty is left out.
    """
    name, *below = old
    if name not in keys:
        return None
    if not below:
        return {new if key == name else key: value for key, value in keys.items()}
    inner = keys[name]
    if not isinstance(inner, Mapping) or below[0] not in inner:
        return None
    rest = {key: value for key, value in inner.items() if key != below[0]}
    moved = {key: value for key, value in keys.items() if key != name} | ({name: rest} if rest else {})
    return {**moved, new: inner[below[0]]}


def drop_removed_values(content: Any) -> Any:
    """Return a stored job, as plain values, with the new names of its keys and without removed keys and values.

    The results of older runs stay readable; no version continues a training of another format.
    """
    if not isinstance(content, Mapping):
        return content
    updated = replace_old_keys(content)
    stopping = _get_section(_get_section(updated, "train"), "early_stopping")
    for path in _REMOVED_PATHS:
        updated = _remove_path(updated, path)
    search, train = _get_section(updated, "search"), _get_section(updated, "train")
    if str(search.get("strategy")) in REMOVED_STRATEGIES:
        updated["search"] = {**search, "strategy": "auto"}
    if str(train.get("method")) in REMOVED_METHODS:
        train = {**train, "method": "lbt"}
    if train:
        updated["train"] = _drop_ineffective_train_settings(
            train, is_of_other_metric=stopping.get("metric") is not None
        )
    if isinstance(node_types := content.get("node_types"), Mapping):
        updated["node_types"] = {name: drop_removed_values(node_type) for name, node_type in node_types.items()}
    return updated


def _get_section(content: Any, name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def _remove_path(content: Any, keys: Sequence[str]) -> Any:
    """Return content without the value at a path of keys; of a list, without that of each item.

    Content without the value is not copied: a command reads hundreds of stored jobs, few of which have a removed key.
    """
    if isinstance(content, list):
        items = [_remove_path(item, keys) for item in content]
        return content if all(map(operator.is_, items, content)) else items
    if not isinstance(content, Mapping) or keys[0] not in content:
        return content
    if len(keys) == 1:
        return {key: value for key, value in content.items() if key != keys[0]}
    remaining = _remove_path(content[keys[0]], keys[1:])
    return content if remaining is content[keys[0]] else {**content, keys[0]: remaining}


def _drop_ineffective_train_settings(train: Mapping[str, Any], *, is_of_other_metric: bool) -> dict[str, Any]:
    """Return a stored section train without values that have no effect without the removed keys.

    Args:
        is_of_other_metric: whether early stopping had another metric than the best checkpoint.
    """
    complete, stopping, ramp = dict(train), train.get("early_stopping"), train.get("ramp")
    if isinstance(stopping, Mapping):
        remaining_train = {key: value for key, value in stopping.items() if key != "target" or not is_of_other_metric}
        complete["early_stopping"] = (
            remaining_train if any(value is not None for value in remaining_train.values()) else None
        )
    if isinstance(ramp, list) and any(isinstance(stage, Mapping) and stage.get("epochs") is None for stage in ramp):
        complete["ramp"] = "auto"
    if isinstance(train.get("diagnostics"), bool):  # a boolean in earlier versions, now a list
        del complete["diagnostics"]
    return complete


def replace_old_path(path: str) -> str:
    """Return the path of a key, `a.b.c`, with the new name of a renamed key."""
    path_in_job = _strip_node_type_prefix(path)
    for old, new in RENAMED_KEYS.items():
        if f"{path_in_job}.".startswith(f"{old}."):
            return f"{path.removesuffix(path_in_job)}{new}{path_in_job.removeprefix(old)}"
    return path


def make_key_advice(path: str) -> str:
    """Return advice for a key `a.b.c` that no longer exists; empty if there is none."""
    path_in_job = _strip_node_type_prefix(path)
    if path_in_job in RENAMED_KEYS:
        return f"it was renamed to {RENAMED_KEYS[path_in_job]}, which is also set"
    return REMOVED_KEYS.get(path_in_job, "")


def _strip_node_type_prefix(path: str) -> str:
    """Return the path of a key without its prefix node_types.NAME, if it has one; NAME may contain dots."""
    parts = path.split(".")
    if parts[0] != "node_types":
        return path
    start = next((at for at, part in enumerate(parts) if at > 1 and part in NODE_TYPE_SECTIONS), 2)
    return ".".join(parts[start:]) if len(parts) > start else path
