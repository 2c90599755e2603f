"""Units, marks and words that several parts of a report have in common."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from tula_cli.run.records.recommendations import CAVEATS, Prediction, caveat_kind
from tula_cli.services.reporting.document import Mark
from tula_cli.words import is_cost_in_node_hours, plural, size_unit, time_unit

MOST_CURVES = 8
"""Curves that are told apart in one drawing."""
MOST_POINTS = 600
"""Points of a curve over a training: more are not seen, and make a page heavy."""

Scale = Literal["linear", "log"]
T = TypeVar("T")


def of_hours(hours: Iterable[float | None]) -> tuple[float, str]:
    """Return what hours are multiplied by to be read best, and the name of that unit."""
    divisor, unit = time_unit(3600 * max((value for value in hours if value is not None), default=0.0))
    return 3600 / divisor, unit


def of_bytes(sizes: Iterable[float | None]) -> tuple[float, str]:
    """Return what bytes are multiplied by to be read best, and the name of that unit."""
    divisor, unit = size_unit(max((value for value in sizes if value is not None), default=0.0))
    return 1 / divisor, unit


def times(value: float | None, factor: float) -> float | None:
    """Return a value in another unit; None stays None."""
    return None if value is None else value * factor


def thinned(items: Sequence[T]) -> list[T]:
    """Return at most `MOST_POINTS` of some items, evenly, the last one among them."""
    step = 1 + (len(items) - 1) // MOST_POINTS if items else 1
    return [*items[: len(items) - 1 : step], *items[-1:]]


def scale_of(values: Iterable[float | None], *, span: float = 10) -> Scale:
    """Return a logarithmic scale where values are further apart than a factor, and all above 0."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return "log" if known and min(known) > 0 and max(known) > span * min(known) else "linear"


def is_priced(rows: Iterable[Prediction], currency: str) -> bool:
    """Return whether costs are more than the node-hours that stand beside them."""
    return not all(is_cost_in_node_hours(row.cost, row.all_node_hours, currency) for row in rows)


def note_words(names: Sequence[str]) -> str:
    """Return the caveats of a configuration as the words of a cell."""
    return ", ".join(name.replace("_above_110", " above 110 %").replace("_", " ") for name in names)


def notes_explained(rows: Iterable[Sequence[str]]) -> str:
    """Return what the caveats of some rows mean, as the end of a caption; empty where there are none."""
    kinds = {caveat_kind(name) for names in rows for name in names}
    return "".join(f" {note_words([name]).capitalize()}: {words}." for name, words in CAVEATS.items() if name in kinds)


def sentence(words: str) -> str:
    """Return words with a capital letter and a full stop; empty stays empty."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}." if words else ""


def on(row: Prediction) -> str:
    """Return the nodes of a configuration, in words."""
    return f"{plural(row.nodes)}{f' of type {row.type}' if row.type else ''}"


def chosen_mark(row: Prediction, x: float, y: float | None) -> Mark:
    """Return the mark of the choice at a place of a figure."""
    return Mark(x, y, f"chosen: {on(row)}, batch {row.batch}", "choice")


def software(environment: Mapping[str, Any]) -> str:
    """Return the versions of what steps were measured with, by the fields of a probe's environment; what is not known is left out."""
    names = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver", "python": "Python", "tula": "tula"}
    if environment.get("device") == "cpu":
        names = {key: name for key, name in names.items() if key in ("torch", "python", "tula")}
    told = [f"{name} {environment[key]}" for key, name in names.items() if environment.get(key)]
    return ", ".join([*told, *([str(environment["system"])] if environment.get("system") else [])])
