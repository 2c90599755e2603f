"""Units, notes, tables and series shared by the sections of a report and the paper's figures."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, Protocol, TypeVar

from tula_cli.entry_points import load_extra_if_installed
from tula_cli.run.records.recommendations import CAVEATS, Prediction, get_caveat_kind
from tula_cli.run.step_series import StepSeries
from tula_cli.services.document import Annotation, Cell, Column, Figure, Series, Table
from tula_cli.words import choose_size_unit, choose_time_unit, format_count, is_cost_in_node_hours

# --- Units and notes

MAX_POINTS = 600
"""Largest number of points drawn per curve; more would not be visible and would make the page large."""

T = TypeVar("T")


def choose_hours_unit(hours: Iterable[float | None]) -> tuple[float, str]:
    """Return the factor and name of the unit in which `hours` is displayed."""
    divisor, unit = choose_time_unit(3600 * max((value for value in hours if value is not None), default=0.0))
    return 3600 / divisor, unit


def choose_bytes_unit(sizes: Iterable[float | None]) -> tuple[float, str]:
    """Return the factor and name of the unit in which `sizes` are displayed."""
    divisor, unit = choose_size_unit(max((value for value in sizes if value is not None), default=0.0))
    return 1 / divisor, unit


def convert_unit(value: float | None, factor: float) -> float | None:
    """Convert a value to another unit; None is returned unchanged."""
    return None if value is None else value * factor


def subsample_evenly(items: Sequence[T]) -> list[T]:
    """Return at most `MAX_POINTS` evenly spaced items, always including the last one."""
    step = 1 + (len(items) - 1) // MAX_POINTS if items else 1
    return [*items[: len(items) - 1 : step], *items[-1:]]


def choose_scale(values: Iterable[float | None], *, span: float = 10) -> Literal["linear", "log"]:
    """Return "log" if all finite values are positive and their ratio exceeds `span`, else "linear"."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return "log" if finite and min(finite) > 0 and max(finite) > span * min(finite) else "linear"


def has_prices(rows: Iterable[Prediction], currency: str) -> bool:
    """Return whether costs are prices, rather than the node-hours that are already shown."""
    return not all(is_cost_in_node_hours(row.cost, row.all_node_hours, currency) for row in rows)


NOTE_DESCRIPTIONS = {
    **CAVEATS,
    "efficiency_above_100": "better than linear scaling, because of measurement error or of caches that help on more nodes",
    "interval_unknown": "too few probes for a 90 % interval",
}
"""Descriptions of the notes in tables: the caveats of configurations, and those of the report."""


def describe_notes(names: Sequence[str]) -> str:
    """Format the notes on a configuration as the text of a table cell: "wide interval; time, cost within noise"."""
    noisy = [name.removesuffix("_within_noise") for name in names if name.endswith("_within_noise")]
    texts = [re.sub(r"_above_(\d+)", r" above \1 %", name) for name in names if not name.endswith("_within_noise")]
    return "; ".join(
        [*(text.replace("_", " ") for text in texts), *([f"{', '.join(noisy)} within noise"] if noisy else [])]
    )


def explain_notes(rows: Iterable[Sequence[str]]) -> str:
    """Explain the caveats of some rows as the end of a caption; empty if the rows have none."""
    kinds = {get_caveat_kind(name) for names in rows for name in names}
    explanations = {name: explanation for name, explanation in NOTE_DESCRIPTIONS.items() if name in kinds}
    return "".join(f" {describe_notes([name]).capitalize()}: {text}." for name, text in explanations.items())


def describe_nodes(row: Prediction) -> str:
    """Return the number of nodes of a configuration, and their type if it has one."""
    return f"{format_count(row.nodes)}{f' of type {row.type}' if row.type else ''}"


def make_chosen_mark(row: Prediction, x: float, y: float | None) -> Annotation:
    """Return the mark of the chosen configuration at a point of a figure."""
    return Annotation(x, y, f"chosen: {describe_nodes(row)}, batch {row.batch}", "choice")


# --- Tables


def build_table(
    key: str,
    title: str,
    rows: Sequence[T],
    fields: Sequence[tuple[Column, Callable[[T], Cell]]],
    *,
    caption: str = "",
    marks: Sequence[str] = (),
) -> Table:
    """Build a table with one row per item; columns in which no row has a value are left out.

    Args:
        fields: the columns, and how each gets its value from an item.
        marks: one per row, or empty.
    """
    lines = [[get_cell(row) for _, get_cell in fields] for row in rows]
    shown = [index for index in range(len(fields)) if any(line[index] not in (None, "") for line in lines)]
    cells = tuple(tuple(line[index] for index in shown) for line in lines)
    return Table(key, title, tuple(fields[index][0] for index in shown), cells, caption, tuple(marks))


# --- Rows of a training's metrics

Row = Mapping[str, Any]


def has_position(row: Row) -> bool:
    """Return whether a row has a valid sample count and time; a damaged row may not."""
    return isinstance(row.get("samples"), int | float) and isinstance(row.get("time", 0.0), int | float)


def get_metric_value(row: Row, metric: str) -> float | None:
    """Return a metric of an epoch's row, user-defined ones included; None if missing or not a finite number."""
    user_metrics = row.get("metrics")
    return convert_to_number(row.get(metric, user_metrics.get(metric) if isinstance(user_metrics, Mapping) else None))


def get_value_at_path(row: Any, path: str) -> Any:
    """Return the value of a row under a path such as "ags.mean", or None if there is none."""
    for key in path.split("."):
        if not isinstance(row, Mapping):
            return None
        row = row.get(key)
    return row


def convert_to_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass(frozen=True)
class TrainingCurve:
    """The metrics that one training has logged; curves with the same name are averaged."""

    name: str
    batch: int
    epochs: Sequence[Row]
    curvature: Sequence[Row] = ()
    steps: StepSeries | None = None
    is_reference: bool = False  # whether the row is the small-batch reference of a comparison


def make_mean_series(
    curves: Sequence[TrainingCurve], rows: Callable[[TrainingCurve], Sequence[Row]], path: str, *, name: str = ""
) -> Iterator[Series]:
    """Yield one series per curve name: the mean over trainings of the value under `path`, against samples seen.

    At each sample count the mean covers the trainings that have reached it. `name`, if given, replaces the names of the
    curves, so that all of them are averaged.
    """
    values_by_name: dict[str, dict[float, list[float]]] = {}
    for curve in curves:
        values_by_samples = values_by_name.setdefault(name or curve.name, {})
        for row in rows(curve):
            if has_position(row) and (value := convert_to_number(get_value_at_path(row, path))) is not None:
                values_by_samples.setdefault(float(row["samples"]), []).append(value)
    for series_name, values_by_samples in values_by_name.items():
        points = subsample_evenly(sorted(values_by_samples.items()))
        if points:
            yield Series(series_name, tuple(x for x, _ in points), tuple(fmean(ys) for _, ys in points))


# --- Figures of the paper


class PaperFigures(Protocol):
    """The figures that the optional package `figures` adds to a report."""

    def build_gradient_figures(self, curves: Sequence[TrainingCurve]) -> Iterator[Figure]:
        """Yield a figure per logged quantity against samples seen."""


def find_paper_figures() -> PaperFigures | None:
    """Return the optional package `figures`, or None if it is not installed."""
    package: PaperFigures | None = load_extra_if_installed("figures")
    return package
