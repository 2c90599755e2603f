"""Keys of older job files: renamed keys, which are still read, and removed keys, with advice on what to do instead.

`JobSpec` accepts both silently, so that runs of older versions stay readable. In input written by a user (files,
variables, `--set`, mappings in Python) the old spelling of a renamed key is reported with the new one.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tula_cli.errors import SpecError

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
ADVICE_ABOUT_MOVED: Mapping[str, str] = {
    "train.early_stopping.at_least": "set early_stopping.target; values rise to it unless best_checkpoint.mode is min",
    "train.early_stopping.at_most": "set early_stopping.target; values fall to it if best_checkpoint.mode is min",
    "train.early_stopping.metric": "early_stopping.target is a value of best_checkpoint.metric: use the same metric for both",
}
NODE_TYPE_SECTIONS = ("cluster", "pricing", "search")
"""Sections of which a node type, or a site file, may give a part. Kept here because the command line imports it without pydantic."""
FALLING_METRICS = ("loss", "perplexity")
"""Metrics of which less is better."""


@dataclass(frozen=True)
class Removed:
    """A key that no longer exists; it is still accepted with a value that describes what tula now always does."""

    accepted: tuple[Any, ...]  # such values, the one that says what tula does last
    advice: str


_ARMS_ADVICE = "an arm has a name, a method and lr_factor; train other settings as a separate job"
REMOVED: Mapping[str, Removed] = {
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
    "export.every": Removed(
        (30,), "commands that wait and jobs send every 30 seconds; tula export --every sets another interval"
    ),
    "pricing.date": Removed(("",), 'write it into source: "the provider\'s list, 2025-11-30"'),
    "schedule.peak": Removed((0.3,), "one-cycle reaches the full learning rate after 0.3 of the epochs"),
    "search.memory_margin": Removed((0.1,), "a tenth is kept free; cluster.memory_per_gpu limits the memory of a rank"),
    "search.packing": Removed(("jobs",), "each number of nodes is measured in a separate job"),
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

    Keys whose value is read at another path stay: `merge_old_keys` moves them, once the sources of a job are merged.

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
        if removed is not None and _is_accepted(value, removed):
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
        # A section of removed keys alone goes; of a measurement they were its default settings.
        if section != {} or value == {} or inner[:-1] in MEASUREMENTS:
            replaced[name] = section
    if table_prefix == "train.early_stopping." and source is not None:
        _require_one_target(replaced, source)
    return replaced


def _require_one_target(stopping: Mapping[str, Any], source: str) -> None:
    """Refuse a bound of an older version beside a target in one source.

    Raises:
        SpecError: both are given.
    """
    bounds = [key for key in ("at_least", "at_most") if stopping.get(key) is not None]
    if bounds and stopping.get("target") is not None:
        raise SpecError(
            f"{source}: train.early_stopping has target and {bounds[0]}, its old name", f"remove {bounds[0]}"
        )


def _is_accepted(value: Any, removed: Removed) -> bool:
    """Return whether a removed key may have a value; true is not 1 here."""
    if not isinstance(value, str | int | float | None):
        return False
    return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in removed.accepted)


def merge_old_keys(job: dict[str, Any], *, source: str | None = None) -> list[tuple[str, str]]:
    """Move the values of old keys that are read at another path, in a job whose sources are merged so far.

    It is called after each source, so that a later source changes what an earlier one has set, whichever keys they use. What
    cannot be moved, because both keys have different values, stays and is refused by validation.

    Args:
        job: sections of a job, as `replace_old_keys` returns them; modified.
        source: of the old keys, which are reported by an `OldKeyWarning`. None: no warnings.

    Returns:
        The path of each old key that was moved or dropped, and the path that its value has now.
    """
    moved: list[tuple[str, str]] = []
    if isinstance(pricing := job.get("pricing"), Mapping):
        job["pricing"] = pricing = dict(pricing)
        moved += _join_date_to_source(pricing, source)
    if isinstance(types := job.get("node_types"), Mapping):
        job["node_types"] = {name: _with_dated_source(node_type) for name, node_type in types.items()}
    if isinstance(train := job.get("train"), Mapping):
        job["train"] = train = dict(train)
        moved += _list_measurements(train, source)
        moved += _move_stopping(train, source)
    return moved


def _join_date_to_source(pricing: dict[str, Any], source: str | None) -> list[tuple[str, str]]:
    """Append the date of a price to its source."""
    date, price_source = pricing.get("date"), pricing.get("source", "")
    if not isinstance(date, str) or not isinstance(price_source, str):
        return []
    del pricing["date"]
    if not date:
        return [("pricing.date", "")]
    if not price_source.endswith(date):
        pricing["source"] = ", ".join(text for text in (price_source, date) if text)
    if source is not None:
        _warn_of_old_key("pricing.date", "part of pricing.source", source)
    return [("pricing.date", "pricing.source")]


def _with_dated_source(node_type: Any) -> Any:
    """Return a node type with the date of its price in the source, if it gives both; else the date joins the job's source."""
    pricing = node_type.get("pricing") if isinstance(node_type, Mapping) else None
    if not isinstance(pricing, Mapping) or not {"source", "date"} <= pricing.keys():
        return node_type
    pricing = dict(pricing)
    _join_date_to_source(pricing, None)
    return {**node_type, "pricing": pricing}


def _list_measurements(train: dict[str, Any], source: str | None) -> list[tuple[str, str]]:
    """Add measurements that had separate keys to `diagnostics` of section train, or remove them from it."""
    listed, moved = train.get("diagnostics"), []
    if isinstance(listed, bool):
        listed = train["diagnostics"] = ["gradient_norms"] if listed else []
        if listed and source is not None:
            _warn_of_old_key("train.diagnostics", "train.diagnostics: [gradient_norms]", source)
    for path, name in MEASUREMENTS.items():
        key = path.rpartition(".")[2]
        value = train.get(key)
        had_default_settings = value == {}
        is_switch = key in train and (value is None or isinstance(value, bool) or had_default_settings)
        if not is_switch or not isinstance(listed, list | tuple | set | None):
            continue
        del train[key]
        others = [entry for entry in listed or () if entry != name]
        is_on = value is True or had_default_settings
        if listed is not None or is_on:
            listed = train["diagnostics"] = [*others, name] if is_on else others
        moved.append((path, "train.diagnostics" if listed is not None else ""))
        if is_on and source is not None:
            _warn_of_old_key(path, f"train.diagnostics: [{name}]", source)
    return moved


def _move_stopping(train: dict[str, Any], source: str | None) -> list[tuple[str, str]]:
    """Move the metric and the bounds of `early_stopping` to `best_checkpoint.metric`, its `mode`, and `target`.

    A metric without a bound had no effect, and is dropped. A bound that the direction of `best_checkpoint` contradicts stays.
    """
    stopping, best = train.get("early_stopping"), train.get("best_checkpoint")
    if not isinstance(stopping, Mapping) or not isinstance(best, Mapping | None):
        return []
    old = {key: stopping[key] for key in ("metric", "at_least", "at_most") if key in stopping}
    if not old:
        return []
    stopping, best = dict(stopping), dict(best or {})
    bounds = {key: old[key] for key in ("at_least", "at_most") if old.get(key) is not None}
    if len(bounds) > 1:
        return []
    moved = [(f"train.early_stopping.{key}", "train.early_stopping.target") for key in bounds]
    if bounds:
        (bound,) = bounds
        stopping["target"] = bounds[bound]
    elif old.keys() & {"at_least", "at_most"}:
        stopping.pop("target", None)
    metric = old.get("metric")
    has_target = stopping.get("target") is not None
    if has_target and metric not in (None, "auto"):
        if best.get("metric", "auto") not in ("auto", metric):
            return []
        best["metric"] = metric
        moved.append(("train.early_stopping.metric", "train.best_checkpoint.metric"))
    if bounds:
        mode = "min" if "at_most" in bounds else "max"
        by_metric = "min" if best.get("metric") in FALLING_METRICS else "max"
        current = best.get("mode", "auto")
        if current not in ("auto", mode):
            return []
        if current == "auto" and by_metric != mode:
            best["mode"] = mode
            moved.append((f"train.early_stopping.{bound}", "train.best_checkpoint.mode"))
    train["early_stopping"] = {key: value for key, value in stopping.items() if key not in old}
    if best:
        train["best_checkpoint"] = best
    if source is not None:
        for path, target in moved:
            _warn_of_old_key(path, target, source)
        if metric not in (None, "auto") and not has_target:
            text = "train.early_stopping.metric has no effect without a target; patience uses best_checkpoint.metric"
            warnings.warn(f"{source}: {text}", OldKeyWarning, stacklevel=2)
    known = {path for path, _ in moved}
    return [*moved, *((f"train.early_stopping.{key}", "") for key in old if f"train.early_stopping.{key}" not in known)]


def remove_old_keys(content: Any, *, table_prefix: str = "") -> Any:
    """Return part of a stored job without removed keys, whatever their value.

    Args:
        content: result of `replace_old_keys` and `merge_old_keys`.
        table_prefix: path of `content` in the job without node_types.NAME, ending in a dot; empty for the whole job.
    """
    if isinstance(content, list):
        return [remove_old_keys(item, table_prefix=table_prefix) for item in content]
    if not isinstance(content, Mapping):
        return content
    remaining = {}
    for key, value in content.items():
        path = f"{table_prefix}{key}"
        is_joined_later = path == "pricing.date"  # of a node type, with the source of the job
        if (path in REMOVED or path in MOVED) and not is_joined_later:
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
    if table_path in MEASUREMENTS:
        return f"write diagnostics: [{MEASUREMENTS[table_path]}]; its settings were removed"
    return ADVICE_ABOUT_MOVED.get(table_path, "")


def _get_path_in_tables(path: str) -> str:
    """Return a path without node_types.NAME, below which keys are the same as in the job; a name may have dots."""
    parts = path.split(".")
    if parts[0] != "node_types":
        return path
    start = next((at for at, part in enumerate(parts) if at > 1 and part in NODE_TYPE_SECTIONS), 2)
    return ".".join(parts[start:]) if len(parts) > start else path


def _warn_of_old_key(old: str, new: str, source: str) -> None:
    warnings.warn(f"{source}: {old} is now {new}; the old name is still read", OldKeyWarning, stacklevel=2)
