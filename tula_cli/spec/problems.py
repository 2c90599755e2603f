"""Descriptions of problems in a spec, with the nearest valid name."""

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from tula_cli.errors import Problem
from tula_cli.spec.job import JobSpec
from tula_cli.spec.kinds import Section, UnexpectedValue
from tula_cli.spec.old_keys import REMOVED_VALUES, make_key_advice
from tula_cli.spec.resources import NodeType
from tula_cli.words import simplify_validation_message

_BATCH_ADVICE = "tula chooses the batch: set train.reference_batch to the batch that optimizer.lr was tuned for, limit the choice with search.min_batch and search.max_batch, or train at one batch with tula train --batch"
_USUAL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("batch", "batch_size", "batchsize", "bs", "local_batch", "local_batch_size", "micro_batch", "micro_batch_size",
         "train_batch_size", "per_device_train_batch_size", "global_batch", "global_batch_size", "mini_batch_size"), _BATCH_ADVICE
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

_SECTION_WORDS = "a section"
_EXPECTED: Mapping[str, str] = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type"), _SECTION_WORDS),
    **dict.fromkeys(("tuple_type", "list_type"), "a list such as [a, b]"),
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "a finite number",
    "dict_type": "a mapping (name: value)",
    "string_type": "text",
}
"""Descriptions of the expected value, by pydantic's error type."""
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "of at most"),
}
"""By pydantic's error type, the name of the bound in the error, and the words before the bound."""


@dataclass(frozen=True)
class _Description:
    """A problem, and what is expected and given as data if the value is not what its key expects; empty otherwise."""

    problem: Problem
    expected: str = ""  # what the value must be
    given: str = ""
    is_section: bool = False  # a section is expected


def list_problems(errors: Iterable[Any], *, is_script: bool) -> tuple[Problem, ...]:
    """Describe pydantic errors, with one problem per path.

    Args:
        is_script: whether the job runs a script, so that keys of scripts are suggested first.
    """
    return _merge_unions([_make_description(item, is_script=is_script) for item in errors])


def _make_description(item: Any, *, is_script: bool) -> _Description:
    path = _format_path(item["loc"])
    if item["type"] == "value_error":
        error = item.get("ctx", {}).get("error")
        is_unexpected = isinstance(error, UnexpectedValue)
        expected, given = (error.expected, error.given) if is_unexpected else ("", "")
        return _Description(_make_value_problem(item, path), expected, given)
    if item["type"] == "invalid_key":
        return _Description(Problem(".".join(map(str, item["loc"])), "a key must be text"))
    if item["type"] == "missing":
        return _Description(Problem(path, "is required"))
    if item["type"] == "extra_forbidden":
        return _Description(_make_unknown_key_problem(item, path, is_script=is_script))
    expected, given = _describe_expected(item), _format_value(item["input"])
    message = f"must be {expected}" if expected else simplify_validation_message(item["msg"])
    if not expected and item["type"] in ("too_short", "string_too_short"):
        message = "must not be empty"
    is_section = _EXPECTED.get(item["type"]) == _SECTION_WORDS
    hint = _find_key_of_name(item) if is_section else ""
    if item["type"] == "literal_error":
        key, value = ".".join(path.split(".")[-2:]), str(item["input"])
        if advice := REMOVED_VALUES.get(key, {}).get(value):
            return _Description(Problem(path, f"{value!r} was removed", advice))
        close = difflib.get_close_matches(value.lower(), _list_choices(item), n=1)
        hint = f"did you mean {close[0]}?" if close else ""
    return _Description(Problem(path, f"{message}, got {given}", hint), expected, given, is_section)


def _make_unknown_key_problem(item: Any, path: str, *, is_script: bool) -> Problem:
    if hint := make_key_advice(re.sub(r"\[\d+\]", "", path)):
        return Problem(path, "this key no longer exists: delete it", hint)
    hint = _suggest_key(str(item["loc"][-1]), _list_keys_of_section(item["loc"][:-1]), is_script=is_script)
    return Problem(path, "no such key", hint)


def _make_value_problem(item: Any, path: str) -> Problem:
    message = simplify_validation_message(item["msg"])
    key, _, reason = message.partition(": ")
    if re.fullmatch(r"[\w.]+", key) and key.split(".")[0] in _list_keys_of_section(item["loc"]):
        # The error of a section's validator starts with the key.
        return Problem(f"{path}.{key}" if item["loc"] else key, reason)
    return Problem(path, message[:1].lower() + message[1:])


def _describe_expected(item: Any) -> str:
    """Describe the expected value, for a section with its keys; empty for rules of another form."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "literal_error":
        *first, last = _list_choices(item)
        return f"{', '.join(first)} or {last}" if first else last
    if kind == "too_short":
        return "" if isinstance(item["input"], str) else "a list with at least 1 entry"
    if kind == "string_pattern_mismatch":
        return _describe_pattern(context["pattern"])
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        return f"{'an integer' if isinstance(bound, int) else 'a number'} {words} {bound:.15g}"
    if kind not in _EXPECTED:
        return ""
    names = _list_keys_of_section(item["loc"]) if _EXPECTED[kind] == _SECTION_WORDS else []
    return _EXPECTED[kind] + (f" (keys: {', '.join(names)})" if names else "")


def _list_choices(item: Any) -> list[str]:
    """Return the values that a pydantic error about a choice lists."""
    return re.findall(r"'([^']+)'", item["ctx"]["expected"])


def _describe_pattern(pattern: str) -> str:
    if max_length := re.search(r"\{0,(\d+)\}", pattern):
        return f"1 to {int(max_length[1]) + 1} letters, digits, '.', '_' or '-', and start with a letter or a digit"
    return "letters, digits, '_', '.' or '-', and start with a letter or '_'"


def _format_value(value: object) -> str:
    """Format a value that a user has set as in YAML, with quotes around text."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _suggest_key(key: str, names: list[str], *, is_script: bool) -> str:
    if close := difflib.get_close_matches(key, names, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    plain = key.lower().replace("-", "_")
    known, paths = _USUAL_NAMES.get(plain, ""), _list_paths_of_keys()
    same_name = paths.get(known.rpartition(".")[2] or plain, [])
    of_scripts = [path for path in same_name if path.startswith("script.")]
    if is_script and known == _BATCH_ADVICE:
        known = known.replace("train.reference_batch", "script.reference.batch").replace(
            "optimizer.lr", "script.reference.lr"
        )
    if is_script and of_scripts:
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
    return f"keys of this section: {', '.join(sorted(names))}"


def _make_sort_key(path: str) -> tuple[bool, int]:
    """Return a sort key that prefers keys outside variants and scripts, and then those near the top level."""
    return path.startswith(("auto.", "node_types.", "script.")), path.count(".")


def _find_key_of_name(item: Any) -> str:
    """Suggest the key for a name that was given in place of its section (`model: resnet18`)."""
    names = _list_keys_of_section(item["loc"]) if isinstance(item["input"], str) else []
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


def _merge_unions(descriptions: list[_Description]) -> tuple[Problem, ...]:
    """Merge the problems that pydantic reports for the branches of a union into one per path.

    Problems inside a value tell which branch was meant, so those of the value itself are not shown beside them.
    """
    by_path: dict[str, list[_Description]] = {}
    for description in descriptions:
        path = description.problem.path
        if not any(other.problem.path.startswith((f"{path}.", f"{path}[")) for other in descriptions):
            by_path.setdefault(path, []).append(description)
    for path, described_here in by_path.items():
        # "must be a section" does not help if the value is a string with another problem.
        by_path[path] = [each for each in described_here if not each.is_section] or described_here
    return tuple(
        described_here[0].problem
        if len(described_here) == 1
        else Problem(
            path,
            _join_alternatives(list({each.problem.message: each for each in described_here}.values())),
            next((each.problem.hint for each in described_here if each.problem.hint), ""),
        )
        for path, described_here in by_path.items()
    )


def _join_alternatives(descriptions: list[_Description]) -> str:
    """Join the descriptions of the kinds of values that a key accepts: "must be auto or an integer, got 'x'"."""
    expected = [description.expected for description in descriptions]
    given = {description.given for description in descriptions}
    if not all(expected) or len(given) > 1:
        return "; or ".join(description.problem.message for description in descriptions)
    return f"must be {(', or ' if ' or ' in expected[0] else ' or ').join(expected)}, got {descriptions[0].given}"


_UNION_BRANCHES = re.compile(
    r"^(literal\[|constrained-|function-|float|int$|str$|bool$|dict\[|list\[|tuple\[|\[key\]$|Every$)"
)


def _format_path(location: tuple[Any, ...]) -> str:
    """Format a location as `a.b[2].c`, without pydantic's names for branches of unions."""
    parts = [part for part in location if isinstance(part, int) or not _UNION_BRANCHES.match(str(part))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".") or "the job file"


def _list_keys_of_section(location: tuple[Any, ...]) -> list[str]:
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
    # In Python 3.10, isinstance(list[str], type) is true.
    classes = (
        kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is None and isinstance(kind, type)
    )
    return next((kind for kind in classes if issubclass(kind, Section)), None)
