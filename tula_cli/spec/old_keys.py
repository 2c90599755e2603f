"""Keys of older job files: renamed ones, which are still read, and removed ones, with what to do instead.

`JobSpec` takes both by itself, so that the runs of older versions stay readable. Where a user writes keys (files, variables,
`--set`, mappings in Python) the old spelling of a renamed one is reported with the new one.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RENAMED: Mapping[str, str] = {
    "auto.epochs": "branch_epochs",
    "pricing.told": "slurm_billing",
    "script.resume.every": "checkpoint_interval",
    "search.sequence.options": "lengths_map_to",
    "train.best": "best_checkpoint",
    "train.oom": "oom_policy",
    "train.until": "early_stopping",
}
"""New names of keys, in the same section."""


@dataclass(frozen=True)
class Removed:
    """A key that no longer exists: it may still be given with a value that means what tula now always does."""

    accepted: tuple[Any, ...]  # such values, the one that says what tula does last
    advice: str


_ARMS_ADVICE = "an arm has a name, a method and lr_factor; train it as a job of its own"
REMOVED: Mapping[str, Removed] = {
    "ags.consensus": Removed(("broadcast",), "rank 0's norm decides for all ranks"),
    "ags.eps": Removed((None, 1e-8), "both presets have 1e-8"),
    "ags.norm_ewma": Removed((None, 0), "both presets have 0, no average"),
    "ags.s_min": Removed((None, 1e-3), "both presets have 0.001"),
    "ags.scale_ema": Removed((None,), "the preset sets it: paper 0, robust 0.9"),
    "auto.arms.ags": Removed((None,), "arms of method ags have the job's section ags"),
    "auto.arms.beta1": Removed((None,), _ARMS_ADVICE),
    "auto.arms.decay_factor": Removed((1,), _ARMS_ADVICE),
    "auto.arms.decay_from": Removed((None,), _ARMS_ADVICE),
    "auto.arms.warmup_epochs": Removed((0,), _ARMS_ADVICE),
    "export.every": Removed(
        (30,), "a waiting command and a job send every 30 seconds, and tula export --every as often as it says"
    ),
    "train.gradient_noise.batches": Removed((32,), "gradient_noise: true"),
    "train.gradient_noise.every": Removed((1,), "gradient_noise: true"),
    "train.hessian.every": Removed((1,), "hessian: true"),
    "train.hessian.samples": Removed((128,), "hessian: true"),
    "search.memory_margin": Removed((0.1,), "a tenth is kept free; cluster.memory_per_gpu sets what a rank may use"),
    "search.steps": Removed(
        (), "in its place are min_steps (10), min_seconds (2) and max_seconds (60): a probe ends by itself"
    ),
    "search.tolerance": Removed(
        (0.01,), "adaptive stops where the expected regret is below 1 %; search.max_node_hours bounds its cost"
    ),
    "train.tensorboard": Removed((False,), "export: [{to: tensorboard, by: job}]"),
}


_PARENTS = frozenset(
    ".".join(parts[:count])
    for parts in (path.split(".") for path in (*RENAMED, *REMOVED))
    for count in range(1, len(parts))
)
"""Paths of sections that have an old key, or have a section with one."""


class OldKeyWarning(FutureWarning):
    """The old spelling of a key in something that a user wrote."""


def replace_old_keys(content: Any, *, prefix: str = "", source: str | None = None) -> Any:
    """Return part of a job with the new names of its keys, and without removed keys that have their old default.

    Args:
        content: a mapping, a list or a single value; it is not changed.
        prefix: the path of `content` in the job with a dot at its end; empty for the whole job.
        source: where a user has written `content`: renamed keys are reported by an `OldKeyWarning`. None: nothing is reported.
    """
    if isinstance(content, list):
        return [
            replace_old_keys(item, prefix=prefix, source=source) if isinstance(item, Mapping) else item
            for item in content
        ]
    if not isinstance(content, Mapping):
        return content
    replaced = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        table_path, removed = _path_in_tables(path), REMOVED.get(_path_in_tables(path))
        if removed is not None and value in removed.accepted:
            continue
        name = RENAMED.get(table_path, key)
        if name != key and name in content:  # both are given: validation refuses the old one
            name = key
        elif name != key and source is not None:
            _report(path, f"{prefix}{name}", source)
        # Nothing else is looked into: the user's own values may hold far more than memory, by anchors that refer to each other.
        is_parent = _is_parent(f"{prefix}{name}")
        replaced[name] = replace_old_keys(value, prefix=f"{prefix}{name}.", source=source) if is_parent else value
    return replaced


def _is_parent(path: str) -> bool:
    """Return whether an old key may be somewhere below a path."""
    is_node_types = path.partition(".")[0] == "node_types" and path.count(".") < 2
    return is_node_types or _path_in_tables(path) in _PARENTS


def replace_old_path(path: str, *, source: str) -> str:
    """Return the path of a key, `a.b.c`, with the new names of its parts; reports an old one.

    Args:
        path: as a user has written it.
        source: where.
    """
    parts: list[str] = []
    for part in path.split("."):
        name = RENAMED.get(_path_in_tables(".".join((*parts, part))), part)
        parts.append(name)
    current = ".".join(parts)
    if current != path:
        _report(path, current, source)
    return current


def advise_key(path: str) -> str:
    """Return what to do instead of a key that no longer exists, `a.b.c`; empty if there is no such advice for it."""
    table_path = _path_in_tables(path)
    if removed := REMOVED.get(table_path):
        return removed.advice
    return f"it is now {RENAMED[table_path]}, which is given too" if table_path in RENAMED else ""


def _path_in_tables(path: str) -> str:
    """Return a path without node_types.NAME: what follows is laid over the job's own sections."""
    parts = path.split(".")
    return ".".join(parts[2:] if parts[0] == "node_types" and len(parts) > 2 else parts)


def _report(old: str, new: str, source: str) -> None:
    warnings.warn(f"{source}: {old} is now {new}; the old name is still read", OldKeyWarning, stacklevel=2)
