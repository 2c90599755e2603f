"""Plots for the terminal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tula_cli.show.tables import get_configuration_key
from tula_cli.words import choose_time_unit, describe_method_label, format_count, format_number

if TYPE_CHECKING:
    from tula_cli.run.records.recommendations import Prediction, Recommendation
    from tula_cli.services.comparison.accuracy import CompareReport

# --- Canvas

SHADES = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
"""ANSI numbers of colours."""
Y_STEP = 3
"""Rows between two ticks."""


@dataclass(frozen=True)
class Curve:
    """Points (x, y), ascending by x; consecutive points are connected by dots."""

    points: Sequence[tuple[float, float]]
    marker: str
    shade: str = ""  # of SHADES


def draw_curves(
    title: str,
    curves: Sequence[Curve],
    *,
    ticks: Mapping[float, str],
    label: str,
    width: int,
    height: int,
    color: bool,
) -> str:
    """Return a text plot of curves; later curves are drawn over earlier ones.

    Args:
        title: text above the plot.
        curves: curves to draw.
        ticks: labels by x value.
        label: text below the ticks.
        width: total width in columns.
        height: total height in lines.
        color: whether to colour the curves with ANSI sequences.
    """
    ys = [y for curve in curves for _, y in curve.points]
    low, high, rows = min(ys), max(ys), height - 5
    if low == high:
        low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
    marks = {row: format_number(high - row * (high - low) / (rows - 1)) for row in range(rows - 1, -1, -Y_STEP)}
    margin = max(map(len, marks.values()))
    inner = max(width - margin - 2, len(ticks))
    xs = [x for curve in curves for x, _ in curve.points] + list(ticks)
    grid = _Grid(inner, rows, (min(xs), max(xs)), (low, high))
    for curve in curves:
        grid.add(curve)
    columns = {grid.column(x): text for x, text in ticks.items()}
    lines = [
        f"{'':{margin}} {title:^{inner}}",
        f"{'':{margin}}┌{'─' * inner}┐",
        *(
            f"{marks.get(row, ''):>{margin}}{'┤' if row in marks else '│'}{text}│"
            for row, text in enumerate(grid.lines(color=color))
        ),
        f"{'':{margin}}└{''.join('┬' if column in columns else '─' for column in range(inner))}┘",
        f"{'':{margin}} {_place_labels(columns, inner)}",
        f"{'':{margin}} {label:^{inner}}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _place_labels(columns: Mapping[int, str], width: int) -> str:
    """Return the line of tick labels, each centred on its column and kept inside the frame."""
    line = [" "] * width
    for column, text in columns.items():
        start = max(0, min(column - (len(text) - 1) // 2, width - len(text)))
        line[start : start + len(text)] = text
    return "".join(line)


class _Grid:
    """Characters by row, from the top, and column.

    Args:
        width: number of columns.
        height: number of rows.
        x: values of the first and the last column.
        y: values of the last and the first row.
    """

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.width, self.height, self.x, self.y = width, height, x, y
        self.cells: dict[tuple[int, int], tuple[str, str]] = {}

    def column(self, x: float) -> int:
        low, high = self.x
        return round((x - low) / (high - low) * (self.width - 1)) if high > low else self.width // 2

    def row(self, y: float) -> int:
        low, high = self.y
        return round((high - y) / (high - low) * (self.height - 1))

    def add(self, curve: Curve) -> None:
        """Draw a curve over the current content."""
        places = [(self.row(y), self.column(x)) for x, y in curve.points]
        for start, end in pairwise(places):
            for place in _list_line_cells(start, end):
                self.cells[place] = ("·", curve.shade)
        for place in places:
            self.cells[place] = (curve.marker, curve.shade)

    def lines(self, *, color: bool) -> Iterator[str]:
        for row in range(self.height):
            cells = [self.cells.get((row, column), (" ", "")) for column in range(self.width)]
            yield "".join(f"\x1b[{SHADES[shade]}m{char}\x1b[0m" if color and shade else char for char, shade in cells)


def _list_line_cells(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the cells of a straight line."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for step in range(steps + 1):
        share = step / steps
        yield round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1]))


# --- Plots


MARKERS = "ox+#@%&=~"
COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def render_plots(recommendation: "Recommendation", *, width: int, color: bool) -> Iterator[str]:
    """Yield plots of time and cost against the global batch, with one curve per node count (and type); O is the choice.

    If only some of many configurations are listed and they have more curves than there are markers, one curve of the
    best of each batch is drawn instead.
    """
    rows = [row for row in recommendation.rows if row.market == recommendation.choice.market]
    if len({row.batch for row in rows}) < 2:
        return
    divisor, unit = choose_time_unit(3600 * max(row.hours for row in rows))
    curves = sorted({get_configuration_key(row)[:2] for row in rows})
    names = [f"{format_count(count)}{f' of type {kind}' if kind else ''}" for kind, count in curves]
    best = (
        len(curves) > len(MARKERS) and recommendation.candidates is not None and recommendation.candidates > len(rows)
    )
    for title, value in ((f"time ({unit})", _get_hours), (f"cost ({recommendation.currency})", _get_cost)):
        per = 3600 / divisor if value is _get_hours else 1.0
        least: dict[tuple[str, int, int], float] = {}
        for row in rows:
            at = ("", 0, row.batch) if best else get_configuration_key(row)
            least[at] = min(least.get(at, math.inf), per * value(row))
        choice = recommendation.choice.batch, per * value(recommendation.choice)
        yield _draw_plot(title, least, choice=choice, width=width, color=color)
    legend = [f"{marker} {name}" for marker, name in zip(_cycle_choices(MARKERS, curves), names, strict=True)]
    yield "   ".join([*([f"{MARKERS[0]} the best of each batch"] if best else legend), "O chosen"])


def _get_hours(row: "Prediction") -> float:
    return row.hours


def _get_cost(row: "Prediction") -> float:
    return row.cost


def _cycle_choices(choices: Sequence[str], items: Sequence[Any]) -> list[str]:
    return [choices[index % len(choices)] for index in range(len(items))]


def _draw_plot(
    title: str,
    values: dict[tuple[str, int, int], float],
    *,
    choice: tuple[int, float],
    width: int,
    color: bool,
) -> str:
    """Plot values by (type, nodes, batch) against log2 of the batch, as text of at most `width` columns."""
    kinds, batches = sorted({key[:2] for key in values}), sorted({key[2] for key in values})
    curves = [
        Curve(sorted((math.log2(key[2]), value) for key, value in values.items() if key[:2] == kind), marker, shade)
        for kind, marker, shade in zip(
            kinds, _cycle_choices(MARKERS, kinds), _cycle_choices(COLORS, kinds), strict=True
        )
    ]
    curves.append(Curve([(math.log2(choice[0]), choice[1])], "O"))
    return _draw_curves_over_batches(title, curves, batches, width=width, height=15, color=color)


def _draw_curves_over_batches(
    title: str, curves: Sequence[Curve], batches: Sequence[int], *, width: int, height: int, color: bool
) -> str:
    ticks = {math.log2(batch): str(batch) for batch in batches}
    return draw_curves(
        title, curves, ticks=ticks, label="global batch", width=min(width, 100), height=height, color=color
    )


def draw_comparison_plot(compare_report: "CompareReport", *, width: int, color: bool) -> str:
    """Plot the metric against the batch with one curve per method; the reference is a separate point."""
    values: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(compare_report.rows, key=lambda row: row.batch):
        value = row.stat(compare_report.metric)
        if value is not None:
            label = describe_method_label(row.method, reference=row.reference)
            values.setdefault(label, []).append((math.log2(row.batch), value.mean))
    batches = sorted({row.batch for row in compare_report.rows})
    if len(batches) < 2 or len(values) < 2:
        return ""
    names = list(values)
    curves = [
        Curve(values[name], marker, shade)
        for name, marker, shade in zip(
            names, _cycle_choices(MARKERS, names), _cycle_choices(COLORS, names), strict=True
        )
    ]
    title = "top-1 (%)" if compare_report.metric == "top1" and not compare_report.of_script else compare_report.metric
    drawn = _draw_curves_over_batches(title, curves, batches, width=width, height=18, color=color)
    legend = "   ".join(f"{marker} {name}" for marker, name in zip(_cycle_choices(MARKERS, names), names, strict=True))
    return f"{drawn}\n{legend}"
