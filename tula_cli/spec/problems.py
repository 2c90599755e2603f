"""Descriptions of problems in a spec, with the nearest valid name."""

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from tula_cli.errors import Problem
from tula_cli.spec.job import JobSpec
from tula_cli.spec.kinds import Section
from tula_cli.spec.old_keys import REMOVED_VALUES, advise_key
from tula_cli.spec.resources import NodeType
from tula_cli.words import describe_expected_value

_BATCH = (
    "tula chooses the batch; see train.reference_batch (the batch that optimizer.lr was tuned for), search.min_batch,"
    " search.max_batch, and tula train --batch"
)
_USUAL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("batch", "batch_size", "batchsize", "bs", "local_batch", "local_batch_size", "micro_batch", "micro_batch_size",
         "train_batch_size", "per_device_train_batch_size", "global_batch", "global_batch_size", "mini_batch_size"), _BATCH
    ),
    **dict.fromkeys(("lr", "learning_rate", "base_lr", "peak_lr"), "optimizer.lr"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "ngpus", "nproc_per_node", "gpus_per_node", "devices"), "cluster.gpus_per_node"),
    **dict.fromkeys(("nodes", "num_nodes", "n_nodes", "nnodes"), "search.nodes"),
    **dict.fromkeys(("epoch", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"), "train.epochs"),
    **dict.fromkeys(("num_workers", "n_workers", "dataloader_num_workers"), "train.workers"),
    **dict.fromkeys(("model_name", "arch", "architecture"), "model.name"),
    **dict.fromkeys(("dataset_name", "data"), "dataset.name"),
    **dict.fromkeys(("optimizer", "optimizer_name", "optim", "opt"), "optimizer.name"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule"), "schedule.kind"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("time", "walltime", "time_limit", "timelimit", "hours"), "cluster.minutes"),
    **dict.fromkeys(("mem", "mem_per_node"), "cluster.slurm.memory"),
    **dict.fromkeys(("cpus", "cpus_per_gpu"), "cluster.slurm.cpus_per_task"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation_steps", "accumulation_steps", "accum_iter"), "train.accumulate"),
    **dict.fromkeys(("precision", "amp", "dtype"), "train.precision"),
    "method": "train.method", "price": "pricing.price", "queue": "cluster.slurm.partition",
}  # fmt: skip
"""Names used by other programs for a key, with its path here or advice."""

_SECTION = "must be a section"
_WANTED: Mapping[str, str] = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type"), _SECTION),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list, as in [a, b]"),
    "dict_type": "must be a mapping (name: value)",
    "string_type": "must be text",
}
"""Descriptions of the expected type, by pydantic's error type."""


def describe_problem(item: Any, *, of_script: bool = False) -> Problem:
    """Describe a pydantic error.

    Args:
        item: the error.
        of_script: whether the job runs a script, so that keys of scripts are suggested first.
    """
    path = _format_path(item["loc"])
    if item["type"] == "extra_forbidden":
        if hint := advise_key(re.sub(r"\[\d+\]", "", path)):
            return Problem(path, "this key was removed", hint)
        return Problem(
            path,
            "no such key",
            _suggest_key(str(item["loc"][-1]), _list_keys_at(item["loc"][:-1]), of_script=of_script),
        )
    if item["type"] == "missing":
        return Problem(path, "is required")
    message = _describe_expected(item)
    key, _, reason = message.partition(": ")
    if (
        item["type"] == "value_error"
        and re.fullmatch(r"[\w.]+", key)
        and key.split(".")[0] in _list_keys_at(item["loc"])
    ):
        return Problem(f"{path}.{key}" if item["loc"] else key, reason)  # the check of a section names the key
    if item["type"] == "literal_error":
        key, value = ".".join(path.split(".")[-2:]), str(item["input"])
        if advice := REMOVED_VALUES.get(key, {}).get(value):
            return Problem(path, f"{value!r} was removed", advice)
        expected = item["ctx"]["expected"].replace(" or ", ", ")
        close = difflib.get_close_matches(str(item["input"]).lower(), re.findall(r"'([^']+)'", expected), n=1)
        choice = f"one of {expected}" if "," in expected else expected
        return Problem(path, f"{item['input']!r} must be {choice}", f"did you mean {close[0]}?" if close else "")
    if item["type"] == "string_pattern_mismatch":
        return Problem(
            path,
            f"{item['input']!r} must have at most 64 letters, digits, '.', '_' or '-', and start with a letter or digit",
        )
    shown = "" if item["type"] == "value_error" or isinstance(item["input"], dict) else f", got {item['input']!r}"
    return Problem(path, message[:1].lower() + message[1:] + shown, _find_key_of_name(item))


def _suggest_key(key: str, names: list[str], *, of_script: bool) -> str:
    """Suggest a key for an unknown one: from the same section, or from another one."""
    if close := difflib.get_close_matches(key, names, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    plain = key.lower().replace("-", "_")
    known, paths = _USUAL_NAMES.get(plain, ""), _list_paths_of_keys()
    same_name = paths.get(known.rpartition(".")[2] or plain, [])
    of_scripts = [path for path in same_name if path.startswith("script.")]
    if of_script and known == _BATCH:
        known = known.replace("train.reference_batch", "script.reference.batch").replace(
            "optimizer.lr", "script.reference.lr"
        )
    if of_script and of_scripts:
        return f"did you mean {of_scripts[0]}?"
    if known:
        return known if " " in known else f"did you mean {known}?"
    if same_name:
        best = min(map(_make_sort_key, same_name))
        return f"did you mean {' or '.join([path for path in same_name if _make_sort_key(path) == best][:3])}?"
    if close := difflib.get_close_matches(key, names, n=1, cutoff=0.6):
        return f"did you mean {close[0]}?"
    if close := difflib.get_close_matches(plain, paths, n=1, cutoff=0.8):
        return f"did you mean {paths[close[0]][0]}?"
    return f"known here: {', '.join(sorted(names))}"


def _make_sort_key(path: str) -> tuple[bool, int]:
    """Return a sort key that prefers keys outside variants and scripts, and then those near the top level."""
    return path.startswith(("auto.", "node_types.", "script.")), path.count(".")


def _find_key_of_name(item: Any) -> str:
    """Suggest the key for a name that was given in place of its section (`model: resnet18`)."""
    names = _list_keys_at(item["loc"]) if isinstance(item["input"], str) else []
    key = next((key for key in ("name", "kind", "method") if key in names), None)
    return f"did you mean {_format_path(item['loc'])}.{key}={item['input']}?" if key else ""


@functools.cache
def _list_paths_of_keys() -> dict[str, list[str]]:
    """Return the paths of all keys of a job by their last part, shallow paths first and those of scripts last."""
    paths: dict[str, list[str]] = {}
    waiting: list[tuple[str, type[Section]]] = [("", JobSpec)]
    for prefix, section in waiting:
        fields = sorted(section.model_fields.items(), key=lambda field: field[0] == "script")
        for name, field in fields:
            paths.setdefault(name, []).append(f"{prefix}{name}")
            inner = _find_section(field.annotation)
            waiting += [(f"{prefix}{name}.", inner)] if inner is not None else []
    return paths


def _describe_expected(item: Any) -> str:
    """Describe the expected value; for a section, list its keys."""
    if item["type"] not in _WANTED:
        return describe_expected_value(item["msg"])
    names = _list_keys_at(item["loc"]) if _WANTED[item["type"]] == _SECTION else []
    return _WANTED[item["type"]] + (f" of that name (with {', '.join(names)})" if names else "")


def merge_unions(problems: list[Problem]) -> tuple[Problem, ...]:
    """Merge the problems that pydantic reports for the branches of a union into one per path.

    Problems inside a value tell which branch was meant, so those of the value itself are not shown beside them.
    """
    by_path: dict[str, list[Problem]] = {}
    for problem in problems:
        if not any(other.path.startswith((f"{problem.path}.", f"{problem.path}[")) for other in problems):
            by_path.setdefault(problem.path, []).append(problem)
    for path, problems_here in by_path.items():
        # "must be a section" helps nobody who wrote a text with another problem
        by_path[path] = [p for p in problems_here if not p.message.startswith(_SECTION)] or problems_here
    return tuple(
        problems_here[0]
        if len(problems_here) == 1
        else Problem(
            path,
            "; or ".join(dict.fromkeys(p.message for p in problems_here)),
            next((p.hint for p in problems_here if p.hint), ""),
        )
        for path, problems_here in by_path.items()
    )


_UNION_BRANCHES = re.compile(
    r"^(literal\[|constrained-|function-|float|int$|str$|bool$|dict\[|list\[|tuple\[|\[key\]$|Every$)"
)


def _format_path(location: tuple[Any, ...]) -> str:
    """Format a location as `a.b[2].c`, without pydantic's names for branches of unions."""
    parts = [part for part in location if isinstance(part, int) or not _UNION_BRANCHES.match(str(part))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".") or "the spec"


def _list_keys_at(location: tuple[Any, ...]) -> list[str]:
    """Return the keys of the section at `location`."""
    section: type[Section] | None = JobSpec
    if len(location) > 1 and location[0] == "node_types":
        section, location = (JobSpec, location[2:]) if len(location) > 2 else (NodeType, ())
    for part in location:
        if section is None or part not in section.model_fields:
            break
        section = _find_section(section.model_fields[part].annotation)
    return [] if section is None else list(section.model_fields)


def _find_section(annotation: Any) -> type[Section] | None:
    """Return the section class in an annotation such as `Slurm | None`."""
    return next((kind for kind in (annotation, *get_args(annotation)) if _is_section(kind)), None)


def _is_section(kind: Any) -> bool:
    # list[str] is no class, though Python 3.10 says so
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, Section)
