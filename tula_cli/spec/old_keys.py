"""Keys of older job files: renamed keys, which are still read, and removed keys, with advice on what to do instead.

`JobSpec` accepts both silently, so that runs of older versions stay readable. In input written by a user (files,
variables, `--set`, mappings in Python) the old spelling of a renamed key is reported with the new one.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RENAMED: Mapping[str, str] = {
    "auto.epochs": "branch_epochs",
    "pricing.told": "slurm_billing",
    "train.best": "best_checkpoint",
    "train.oom": "oom_policy",
    "train.until": "early_stopping",
}
"""New names of keys, in the same section."""

NODE_TYPE_SECTIONS = ("cluster", "pricing", "search")
"""Sections of which a node type, or a site file, may give a part. Kept here because the command line imports it without pydantic."""


@dataclass(frozen=True)
class Removed:
    """A key that no longer exists; it is still accepted with a value that describes what tula now always does."""

    accepted: tuple[Any, ...]  # such values, the one that says what tula does last
    advice: str
    is_note: bool = False  # it changed nothing, so that any value is accepted, and reported where a user writes it


_ARMS_ADVICE = "an arm has a name, a method and lr_factor; train other settings as a separate job"
REMOVED: Mapping[str, Removed] = {
    "ags.exclude": Removed(([],), 'give patterns in parameters, for example ["*", "!embeddings", "!norms"]'),
    "auto.after": Removed((1,), "the arms branch off after one epoch at train.reference_batch"),
    "cluster.slurm.limits": Removed(
        (None, []),
        "set cluster.slurm.minutes to the limit of such a job, and search.nodes to numbers of nodes that have it",
    ),
    "cluster.slurm.reservation": Removed((None, ""), "write cluster.slurm.extra: {reservation: NAME}"),
    "pricing.date": Removed((None, ""), "write it as a comment", is_note=True),
    "pricing.per_node": Removed(
        (None,),
        "if SLURM cannot be queried, set kind: node_hour, with the billing of a whole node as price and currency: SU",
    ),
    "pricing.source": Removed((None, ""), "write it as a comment", is_note=True),
    "pricing.spot.wait_minutes": Removed((None, 0), "the time until a reclaimed node is replaced is not predicted"),
    "pricing.unit": Removed(("SU",), "a billing-hour is called SU", is_note=True),
    "schedule.args": Removed(({},), "give the callable its arguments in its module, for example by functools.partial"),
    "script.probe.environment": Removed(
        ({"WANDB_MODE": "disabled"},),
        "probes set WANDB_MODE=disabled; pass other settings of probes as script.probe.args",
    ),
    "script.probe.stop": Removed(("exit",), "a probe exits at once after its last step"),
    "script.resume.checkpoint_interval": Removed(
        (None,), "how often a script saves is learned from its trainings", is_note=True
    ),
    "script.resume.every": Removed((None,), "how often a script saves is learned from its trainings", is_note=True),
    "search.warmup_steps": Removed(
        (10,), "search.min_steps is the minimum number of steps of the warm-up too", is_note=True
    ),
    "train.channels_last": Removed(
        ("auto",), "channels-last is used for models with 2-d convolutions on NVIDIA GPUs with tensor cores"
    ),
    "train.fsdp_blocks": Removed(
        ("auto",), "the members of every nn.ModuleList and nn.Sequential are gathered one at a time"
    ),
    "train.ramp_noise": Removed((None, 1), "with ramp: noise the batch grows up to the noise scale"),
    "train.tf32": Removed((True,), "set the variable NVIDIA_TF32_OVERRIDE=0 for computing without TF32"),
    "ags.consensus": Removed(("broadcast",), "rank 0's norm decides for all ranks"),
    "ags.eps": Removed((None, 1e-8), "both presets have 1e-8"),
    "ags.norm_ewma": Removed((None, 0), "both presets have 0, no average"),
    "ags.s_min": Removed((None, 1e-3), "both presets have 0.001"),
    "ags.scale_ema": Removed((None,), "the preset sets it: paper 0, robust 0.9"),
    "auto.arms.ags": Removed((None,), "arms of method ags use the job's section ags"),
    "auto.arms.beta1": Removed((None,), _ARMS_ADVICE),
    "auto.arms.decay_factor": Removed((1,), _ARMS_ADVICE),
    "auto.arms.decay_from": Removed((None,), _ARMS_ADVICE),
    "auto.arms.warmup_epochs": Removed((0,), _ARMS_ADVICE),
    "auto.holdout": Removed((0.1,), "a tenth of the training samples compares the arms, at most 10,000"),
    "export.by": Removed(("command",), "a command that waits for jobs sends; without one, tula export --follow does"),
    "export.every": Removed(
        (30,), "commands that wait send every 30 seconds; tula export --every sets another interval"
    ),
    "schedule.peak": Removed((0.3,), "one-cycle reaches the full learning rate after 0.3 of the epochs"),
    "search.memory_margin": Removed((0.1,), "a tenth is kept free; cluster.memory_per_gpu limits the memory of a rank"),
    "search.packing": Removed(("jobs",), "each number of nodes is measured in a separate job"),
    "search.sequence": Removed(
        (None,),
        "profile the job at another text length as a job of its own, for example --set name=job-512 --set"
        " dataset.args.length=512",
    ),
    "search.steps": Removed((), "use min_steps (10), min_seconds (2) and max_seconds (60), which end a probe"),
    "search.tolerance": Removed(
        (0.01,), "adaptive stops if the expected regret is below 1 %; search.max_node_hours limits its cost"
    ),
    "train.cudnn_benchmark": Removed(
        ("auto",), "cuDNN uses its fastest algorithms on NVIDIA GPUs, unless train.deterministic is true"
    ),
    "train.ghost_batch": Removed(
        (None,), "BatchNorm computes its statistics over the samples that a GPU processes at a time"
    ),
    "train.early_stopping.at_least": Removed((None,), "set early_stopping.target, a value of best_checkpoint.metric"),
    "train.early_stopping.at_most": Removed(
        (None,), "set early_stopping.target, and best_checkpoint.mode: min if lower values are better"
    ),
    "train.early_stopping.metric": Removed((None, "auto"), "set best_checkpoint.metric: early_stopping uses the same"),
    "train.gradient_noise": Removed((None, False), "write diagnostics: [gradient_noise]; it has no settings any more"),
    "train.hessian": Removed((None, False), "write diagnostics: [hessian]; it has no settings any more"),
    "train.ramp.samples": Removed((None,), "give epochs; fractions count"),
    "train.tensorboard": Removed((False,), "export: [{to: tensorboard}]"),
}

_PARENTS = frozenset(
    ".".join(parts[:count])
    for parts in (path.split(".") for path in (*RENAMED, *REMOVED))
    for count in range(1, len(parts))
)
"""Paths of sections that contain an old key at any level."""


class OldKeyWarning(FutureWarning):
    """Warns of the old spelling of a key in user input."""


def replace_old_keys(content: Any, *, prefix: str = "", source: str | None = None) -> Any:
    """Return part of a job with the new names of its keys, and without removed keys that have an accepted value.

    Args:
        content: a mapping, a list or a single value; not modified.
        prefix: path of `content` in the job, ending in a dot; empty for the whole job.
        source: where a user has written `content`; renamed keys are reported by an `OldKeyWarning`. None: no warnings.
    """
    return _replace_in_section(content, prefix, _get_path_in_tables(prefix), source)


def _replace_in_section(content: Any, prefix: str, table_prefix: str, source: str | None) -> Any:
    """Replace the old keys of one section, as `replace_old_keys` does.

    `table_prefix` is `prefix` without node_types.NAME, below which keys are the same as in the job.
    """
    if isinstance(content, list | tuple):
        return [
            _replace_in_section(item, prefix, table_prefix, source) if isinstance(item, Mapping) else item
            for item in content
        ]
    if not isinstance(content, Mapping):
        return content
    replaced = {}
    for key, value in content.items():
        removed = REMOVED.get(f"{table_prefix}{key}")
        if removed is not None and (removed.is_note or _is_accepted(value, removed)):
            if removed.is_note and source is not None and not _is_accepted(value, removed):
                warnings.warn(f"{source}: {prefix}{key} was removed: {removed.advice}", OldKeyWarning, stacklevel=2)
            continue
        name = RENAMED.get(f"{table_prefix}{key}", key)
        if name != key and name in content:  # both are given: validation refuses the old one
            name = key
        elif name != key and source is not None:
            _warn_of_old_key(f"{prefix}{key}", f"{prefix}{name}", source)
        inner = f"{table_prefix}{name}."
        if table_prefix == "node_types.":
            inner = ""
        # Nothing else is looked into: the user's own values may hold far more than memory, by anchors that refer to each other.
        elif inner[:-1] not in _PARENTS and inner != "node_types.":
            replaced[name] = value
            continue
        section = _replace_in_section(value, f"{prefix}{name}.", inner, source)
        if section != {} or value == {}:  # a section of removed keys alone goes
            replaced[name] = section
    return replaced


def _is_accepted(value: Any, removed: Removed) -> bool:
    """Return whether a removed key may have a value; true is not 1 here."""
    if not isinstance(value, str | int | float | list | dict | None):
        return False
    return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in removed.accepted)


def remove_old_keys(content: Any, *, table_prefix: str = "") -> Any:
    """Return part of a stored job without removed keys, whatever their value.

    Args:
        content: result of `replace_old_keys`.
        table_prefix: path of `content` in the job without node_types.NAME, ending in a dot; empty for the whole job.
    """
    if isinstance(content, list):
        return [remove_old_keys(item, table_prefix=table_prefix) for item in content]
    if not isinstance(content, Mapping):
        return content
    remaining = {}
    for key, value in content.items():
        path = f"{table_prefix}{key}"
        if path in REMOVED:
            continue
        inner = "" if table_prefix == "node_types." else f"{path}."
        is_parent = inner in ("", "node_types.") or path in _PARENTS
        remaining[key] = remove_old_keys(value, table_prefix=inner) if is_parent else value
    if table_prefix == "train.":
        return _without_incomplete_parts(remaining)
    if table_prefix == "train.early_stopping." and content.get("metric") is not None:
        remaining.pop("target", None)  # of another metric than that of the best checkpoint
    return remaining


def _without_incomplete_parts(train: dict[str, Any]) -> dict[str, Any]:
    """Reset `early_stopping` and `ramp` of a stored section train if they are incomplete without removed keys."""
    stopping, ramp = train.get("early_stopping"), train.get("ramp")
    if isinstance(stopping, Mapping) and all(value is None for value in stopping.values()):
        train = {**train, "early_stopping": None}
    if isinstance(ramp, list) and any(isinstance(stage, Mapping) and stage.get("epochs") is None for stage in ramp):
        train = {**train, "ramp": "auto"}
    return train


def replace_old_path(path: str) -> str:
    """Return the path of a key, `a.b.c`, with the new names of its parts."""
    parts: list[str] = []
    for part in path.split("."):
        name = RENAMED.get(_get_path_in_tables(".".join((*parts, part))), part)
        parts.append(name)
    return ".".join(parts)


def advise_key(path: str) -> str:
    """Return advice for a key `a.b.c` that no longer exists; empty if there is none."""
    table_path = _get_path_in_tables(path)
    if removed := REMOVED.get(table_path):
        return removed.advice
    if table_path in RENAMED:
        return f"it was renamed to {RENAMED[table_path]}, which is also set"
    return ""


def _get_path_in_tables(path: str) -> str:
    """Return a path without node_types.NAME, below which keys are the same as in the job; a name may have dots."""
    parts = path.split(".")
    if parts[0] != "node_types":
        return path
    start = next((at for at, part in enumerate(parts) if at > 1 and part in NODE_TYPE_SECTIONS), 2)
    return ".".join(parts[start:]) if len(parts) > start else path


def _warn_of_old_key(old: str, new: str, source: str) -> None:
    warnings.warn(f"{source}: {old} is now {new}; the old name is still read", OldKeyWarning, stacklevel=2)
