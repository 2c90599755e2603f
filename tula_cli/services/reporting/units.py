"""Units, marks and words that several parts of a report have in common."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from tula_cli.run.records.recommendations import CAVEATS, Prediction, caveat_kind
from tula_cli.services.reporting.document import Mark
from tula_cli.words import is_cost_in_node_hours, plural, size_unit, time_unit

MAX_CURVES = 8
"""Curves that are told apart in one drawing."""
MAX_POINTS = 600
"""Points of a curve over a training: more are not seen, and make a page heavy."""

Scale = Literal["linear", "log"]
T = TypeVar("T")


def hours_unit(hours: Iterable[float | None]) -> tuple[float, str]:
    """Return the factor and name of the unit in which `hours` is displayed."""
    divisor, unit = time_unit(3600 * max((value for value in hours if value is not None), default=0.0))
    return 3600 / divisor, unit


def bytes_unit(sizes: Iterable[float | None]) -> tuple[float, str]:
    """Return the factor and name of the unit in which `sizes` are displayed."""
    divisor, unit = size_unit(max((value for value in sizes if value is not None), default=0.0))
    return 1 / divisor, unit


def convert(value: float | None, factor: float) -> float | None:
    """Return a value in another unit; None stays None."""
    return None if value is None else value * factor


def thin_out(items: Sequence[T]) -> list[T]:
    """Return at most `MAX_POINTS` of some items, evenly, the last one among them."""
    step = 1 + (len(items) - 1) // MAX_POINTS if items else 1
    return [*items[: len(items) - 1 : step], *items[-1:]]


def scale_of(values: Iterable[float | None], *, span: float = 10) -> Scale:
    """Return a logarithmic scale where values are further apart than a factor, and all above 0."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return "log" if finite and min(finite) > 0 and max(finite) > span * min(finite) else "linear"


def is_priced(rows: Iterable[Prediction], currency: str) -> bool:
    """Return whether costs are more than the node-hours that stand beside them."""
    return not all(is_cost_in_node_hours(row.cost, row.all_node_hours, currency) for row in rows)


def describe_notes(names: Sequence[str]) -> str:
    """Return the caveats of a configuration as the words of a cell."""
    return ", ".join(name.replace("_above_110", " above 110 %").replace("_", " ") for name in names)


def explain_notes(rows: Iterable[Sequence[str]]) -> str:
    """Return what the caveats of some rows mean, as the end of a caption; empty where there are none."""
    kinds = {caveat_kind(name) for names in rows for name in names}
    return "".join(
        f" {describe_notes([name]).capitalize()}: {explanation}."
        for name, explanation in CAVEATS.items()
        if name in kinds
    )


def as_sentence(text: str) -> str:
    """Return words with a capital letter and a full stop; empty stays empty."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def describe_nodes(row: Prediction) -> str:
    """Return the nodes of a configuration, in words."""
    return f"{plural(row.nodes)}{f' of type {row.type}' if row.type else ''}"


def chosen_mark(row: Prediction, x: float, y: float | None) -> Mark:
    """Return the mark of the choice at a place of a figure."""
    return Mark(x, y, f"chosen: {describe_nodes(row)}, batch {row.batch}", "choice")


def describe_software(environment: Mapping[str, Any]) -> str:
    """Return the versions of what steps were measured with, by the fields of a probe's environment; what is not known is left out."""
    names = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver", "python": "Python", "tula": "tula"}
    if environment.get("device") == "cpu":
        names = {key: name for key, name in names.items() if key in ("torch", "python", "tula")}
    versions = [f"{name} {environment[key]}" for key, name in names.items() if environment.get(key)]
    return ", ".join([*versions, *([str(environment["system"])] if environment.get("system") else [])])
