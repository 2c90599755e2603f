"""A value that two runs have, and how it is told."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FieldDifference:
    """A thing that is not the same in two runs; None is what a run does not have, or does not tell."""

    about: str
    before: Any
    after: Any
    part: str = ""  # of the run: a type of node, another length of text; empty where there is one


def compare_mappings(
    before: Mapping[str, Any], after: Mapping[str, Any], *, part: str = ""
) -> tuple[FieldDifference, ...]:
    """Return what two mappings do not have alike, in the order of their keys."""
    keys = dict.fromkeys([*before, *after])
    pairs = ((key, before.get(key), after.get(key)) for key in keys)
    return tuple(
        FieldDifference(key, value_before, value_after, part)
        for key, value_before, value_after in pairs
        if value_before != value_after
    )


def join_distinct(values: Iterable[object]) -> str | None:
    """Return different values in words, each once, in their order; None where there are none."""
    distinct = dict.fromkeys(str(value) for value in values if value not in (None, "", ()))
    return ", ".join(distinct) or None
