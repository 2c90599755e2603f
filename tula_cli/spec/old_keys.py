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
    "script.resume.every": "checkpoint_interval",
    "search.sequence.options": "lengths_map_to",
    "train.best": "best_checkpoint",
    "train.oom": "oom_policy",
    "train.until": "early_stopping",
}
"""New names of keys, in the same section."""

MEASUREMENTS: Mapping[str, str] = {
    "train.gradient_noise": "gradient_noise",
    "train.hessian": "hessian",
}
"""Keys that were true or false and are now entries of `train.diagnostics`; `diagnostics` is now `gradient_norms`."""

MOVED: Mapping[str, str] = {
    "train.early_stopping.at_least": "train.early_stopping.target",
    "train.early_stopping.at_most": "train.early_stopping.target",
    "train.early_stopping.metric": "train.best_checkpoint.metric",
}
"""Keys whose value moved to another path."""


@dataclass(frozen=True)
class Removed:
    """A key that no longer exists; it is still accepted with a value that describes what tula now always does."""

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
    "auto.holdout": Removed((0.1,), "a tenth of the training samples compares the arms, at most 10,000"),
    "export.every": Removed(
        (30,), "a waiting command and a job send every 30 seconds, and tula export --every as often as it says"
    ),
    "pricing.date": Removed(("",), 'write it into source: "the provider\'s list, 2025-11-30"'),
    "schedule.peak": Removed((0.3,), "one-cycle has the full learning rate at 0.3 of the epochs"),
    "search.memory_margin": Removed((0.1,), "a tenth is kept free; cluster.memory_per_gpu sets what a rank may use"),
    "search.packing": Removed(("jobs",), "each number of nodes is measured by a job of its own"),
    "search.steps": Removed(
        (), "in its place are min_steps (10), min_seconds (2) and max_seconds (60): a probe ends by itself"
    ),
    "search.tolerance": Removed(
        (0.01,), "adaptive stops where the expected regret is below 1 %; search.max_node_hours bounds its cost"
    ),
    "train.cudnn_benchmark": Removed(
        ("auto",), "cuDNN takes the fastest algorithms on NVIDIA GPUs, unless train.deterministic is true"
    ),
    "train.ghost_batch": Removed((None,), "BatchNorm takes its statistics over the samples that a GPU has at a time"),
    "train.gradient_noise.batches": Removed((32,), "diagnostics: [gradient_noise] takes 32 micro-batches"),
    "train.gradient_noise.every": Removed((1,), "diagnostics: [gradient_noise] measures after each epoch"),
    "train.hessian.every": Removed((1,), "diagnostics: [hessian] measures after each epoch"),
    "train.hessian.samples": Removed((128,), "diagnostics: [hessian] takes 128 samples"),
    "train.ramp.samples": Removed((None,), "give epochs; fractions count"),
    "train.tensorboard": Removed((False,), "export: [{to: tensorboard, by: job}]"),
}

_PARENTS = frozenset(
    ".".join(parts[:count])
    for parts in (path.split(".") for path in (*RENAMED, *MEASUREMENTS, *MOVED, *REMOVED))
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
        table_path, removed = _get_path_in_tables(path), REMOVED.get(_get_path_in_tables(path))
        if removed is not None and value in removed.accepted:
            continue
        name = RENAMED.get(table_path, key)
        if name != key and name in content:  # both are given: validation refuses the old one
            name = key
        elif name != key and source is not None:
            _warn_of_old_key(path, f"{prefix}{name}", source)
        # Nothing else is looked into: the user's own values may hold far more than memory, by anchors that refer to each other.
        is_parent = _is_parent(f"{prefix}{name}")
        replaced[name] = replace_old_keys(value, prefix=f"{prefix}{name}.", source=source) if is_parent else value
    if _get_path_in_tables(prefix) == "pricing.":
        _join_date_to_source(replaced, source)
    if _get_path_in_tables(prefix) == "train.":
        _list_measurements(replaced, source)
        _move_keys(replaced, source)
    return replaced


def _join_date_to_source(pricing: dict[str, Any], source: str | None) -> None:
    """Append the date of a price to its source."""
    date, price_source = pricing.get("date"), pricing.get("source", "")
    if not isinstance(date, str) or not isinstance(price_source, str):
        return
    del pricing["date"]
    if date:
        pricing["source"] = ", ".join(text for text in (price_source, date) if text)
        if source is not None:
            _warn_of_old_key("pricing.date", "part of pricing.source", source)


def _list_measurements(train: dict[str, Any], source: str | None) -> None:
    """Convert measurements that had separate keys to entries of `diagnostics` in section train."""
    listed, given = train.get("diagnostics"), []
    if isinstance(listed, bool):
        train["diagnostics"], given = [], ["diagnostics"] if listed else []
    for path in MEASUREMENTS:
        key = path.rpartition(".")[2]
        value = train.get(key)
        if value in (False, None):
            train.pop(key, None)
        elif value is True or value == {}:  # {}: with settings, which were the default ones
            given.append(key)
            del train[key]
    names = ["gradient_norms" if key == "diagnostics" else MEASUREMENTS[f"train.{key}"] for key in given]
    if names and isinstance(current := train.get("diagnostics") or [], list):
        train["diagnostics"] = [*current, *(name for name in names if name not in current)]
    if source is not None:
        for key, name in zip(given, names, strict=True):
            _warn_of_old_key(f"train.{key}", f"train.diagnostics: [{name}]", source)


def _move_keys(train: dict[str, Any], source: str | None) -> None:
    """Move the metric settings of `early_stopping` to their new paths.

    Nothing is moved if `best_checkpoint` has another metric, or if more than one target is given.
    """
    stopping, best = train.get("early_stopping"), train.get("best_checkpoint") or {}
    if not isinstance(stopping, Mapping) or not isinstance(best, Mapping):
        return
    metric, bounds = stopping.get("metric"), [stopping.get(key) for key in ("at_least", "at_most")]
    targets = [bound for bound in (*bounds, stopping.get("target")) if bound is not None]
    current = best.get("metric", "auto")
    if (metric not in (None, "auto", current) and current != "auto") or len(targets) > 1:
        return
    moved = {path: path.rpartition(".")[2] for path in MOVED}
    kept = {key: value for key, value in stopping.items() if key not in moved.values()}
    train["early_stopping"] = {**kept, "target": targets[0]} if targets else kept
    if metric not in (None, "auto"):
        train["best_checkpoint"] = {**best, "metric": metric}
    if source is not None:
        for path, key in moved.items():
            if stopping.get(key) not in (None, "auto"):
                _warn_of_old_key(path, MOVED[path], source)


def remove_old_keys(content: Any, *, prefix: str = "") -> Any:
    """Return part of a stored job without removed keys, whatever their value.

    Args:
        content: result of `replace_old_keys`.
        prefix: as for `replace_old_keys`.
    """
    if isinstance(content, list):
        return [remove_old_keys(item, prefix=prefix) for item in content]
    if not isinstance(content, Mapping):
        return content
    gone = {key for key in content if _get_path_in_tables(f"{prefix}{key}") in (*REMOVED, *MOVED)}
    remaining = {
        key: remove_old_keys(value, prefix=f"{prefix}{key}.") if _is_parent(f"{prefix}{key}") else value
        for key, value in content.items()
        if key not in gone
    }
    return _without_incomplete_parts(remaining) if _get_path_in_tables(prefix) == "train." else remaining


def _without_incomplete_parts(train: dict[str, Any]) -> dict[str, Any]:
    """Reset `early_stopping` and `ramp` of a stored section train if they are incomplete without removed keys."""
    stopping, ramp = train.get("early_stopping"), train.get("ramp")
    if isinstance(stopping, Mapping) and all(value is None for value in stopping.values()):
        train = {**train, "early_stopping": None}
    if isinstance(ramp, list) and any(isinstance(stage, Mapping) and stage.get("epochs") is None for stage in ramp):
        train = {**train, "ramp": "auto"}
    return train


def _is_parent(path: str) -> bool:
    """Return whether an old key may exist somewhere below a path."""
    is_node_types = path.partition(".")[0] == "node_types" and path.count(".") < 2
    return is_node_types or _get_path_in_tables(path) in _PARENTS


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
        return f"it is now {RENAMED[table_path]}, which is given too"
    if table_path in MEASUREMENTS:
        return f"it is now diagnostics: [{MEASUREMENTS[table_path]}]"
    if table_path in MOVED:
        return f"it is now {MOVED[table_path]}, the same for the best checkpoint and the end; one value is read"
    return ""


def _get_path_in_tables(path: str) -> str:
    """Return a path without node_types.NAME, below which keys are the same as in the job."""
    parts = path.split(".")
    return ".".join(parts[2:] if parts[0] == "node_types" and len(parts) > 2 else parts)


def _warn_of_old_key(old: str, new: str, source: str) -> None:
    warnings.warn(f"{source}: {old} is now {new}; the old name is still read", OldKeyWarning, stacklevel=2)
