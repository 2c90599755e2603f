"""What is wrong with a spec, in words, with the nearest valid name."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from tula_cli.errors import Problem
from tula_cli.spec.job import JobSpec
from tula_cli.spec.kinds import Section
from tula_cli.spec.resources import NodeType

REPLACED: Mapping[tuple[str, ...], str] = {
    ("search", "steps"): "in its place are min_steps (10), min_seconds (2) and max_seconds (60): a probe ends by itself"
}
"""Keys that there once were, and what is in their place."""

_SECTION = "must be a section"
_WANTED: Mapping[str, str] = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type"), _SECTION),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    "dict_type": "must be a mapping (name: value)",
    "string_type": "must be text",
}
"""What a value of another type than its key's should have been."""


def problem(item: Any) -> Problem:
    path = _readable_path(item["loc"])
    if item["type"] == "extra_forbidden":
        if hint := REPLACED.get(item["loc"][-2:]):
            return Problem(path, "no such key", hint)
        names = _names_at(item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(names))}"
        return Problem(path, "no such key", hint)
    if item["type"] == "missing":
        return Problem(path, "is required")
    message = _wanted(item)
    if item["type"] == "literal_error":
        expected = item["ctx"]["expected"].replace(" or ", ", ")
        close = difflib.get_close_matches(str(item["input"]), re.findall(r"'([^']+)'", expected), n=1)
        return Problem(path, f"{item['input']!r} is none of {expected}", f"did you mean {close[0]}?" if close else "")
    if item["type"] == "string_pattern_mismatch":
        return Problem(path, f"{item['input']!r} must be letters, digits, '.', '_' or '-', at most 64 of them")
    shown = "" if item["type"] == "value_error" or isinstance(item["input"], dict) else f", got {item['input']!r}"
    return Problem(path, message[:1].lower() + message[1:] + shown)


def _wanted(item: Any) -> str:
    """Say what was expected; of a section also which keys it has."""
    if item["type"] not in _WANTED:
        return str(item["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    names = _names_at(item["loc"]) if _WANTED[item["type"]] == _SECTION else []
    return _WANTED[item["type"]] + (f" of its own (with {', '.join(names)})" if names else "")


def merge_unions(problems: list[Problem]) -> tuple[Problem, ...]:
    """Fold the problems pydantic reports for each branch of a union into one a path."""
    by_path: dict[str, list[Problem]] = {}
    for problem in problems:
        by_path.setdefault(problem.path, []).append(problem)
    for path, found in by_path.items():  # that it is no section says nothing beside what is wrong with the text it is
        by_path[path] = [p for p in found if not p.message.startswith(_SECTION)] or found
    return tuple(
        found[0]
        if len(found) == 1
        else Problem(
            path, "; or ".join(dict.fromkeys(p.message for p in found)), next((p.hint for p in found if p.hint), "")
        )
        for path, found in by_path.items()
    )


_UNION_BRANCHES = re.compile(
    r"^(literal\[|constrained-|function-|float|int$|str$|bool$|dict\[|list\[|\[key\]$|Every$|Hessian$|Rows$)"
)


def _readable_path(location: tuple[Any, ...]) -> str:
    """Return `a.b[2].c` without the names pydantic gives to the branches of a union."""
    parts = [part for part in location if isinstance(part, int) or not _UNION_BRANCHES.match(str(part))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".") or "the spec"


def _names_at(location: tuple[Any, ...]) -> list[str]:
    """Return the keys that the section at `location` knows."""
    section: type[Section] | None = JobSpec
    if len(location) > 1 and location[0] == "node_types":
        section, location = (JobSpec, location[2:]) if len(location) > 2 else (NodeType, ())
    for part in location:
        if section is None or part not in section.model_fields:
            break
        section = _section_of(section.model_fields[part].annotation)
    return [] if section is None else list(section.model_fields)


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the Section in an annotation like `Slurm | None`."""
    return next((kind for kind in (annotation, *get_args(annotation)) if _is_section(kind)), None)


def _is_section(kind: Any) -> bool:
    # list[str] is no class, though Python 3.10 says so
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, Section)
