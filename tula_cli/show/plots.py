"""Plots in the terminal."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tula_cli.show.canvas import Curve, draw
from tula_cli.words import method_label, plural, time_unit

if TYPE_CHECKING:
    from tula_cli.run.records.recommendations import Prediction, Recommendation
    from tula_cli.services.comparison.accuracy import CompareReport


def key(row: "Prediction") -> tuple[str, int, int]:
    return row.type, row.nodes, row.batch


def offer(row: "Prediction") -> tuple[str, int, int, str]:
    return (*key(row), row.market)


MARKERS = "ox+#@%&=~"
COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def plots(found: "Recommendation", *, width: int, color: bool) -> Iterator[str]:
    """Time and cost against the global batch, one curve for each number (and type) of nodes; O marks the choice.

    Of many configurations only some are listed; where these are on more nodes than there are markers, there is one curve of
    the best of each batch instead.
    """
    rows = [row for row in found.rows if row.market == found.choice.market]
    if len({row.batch for row in rows}) < 2:
        return
    divisor, unit = time_unit(3600 * max(row.hours for row in rows))
    curves = sorted({key(row)[:2] for row in rows})
    names = [f"{plural(count)}{f' of type {kind}' if kind else ''}" for kind, count in curves]
    best = len(curves) > len(MARKERS) and found.candidates is not None and found.candidates > len(rows)
    for title, value in ((f"time ({unit})", _hours), (f"cost ({found.currency})", _cost)):
        per = 3600 / divisor if value is _hours else 1.0
        least: dict[tuple[str, int, int], float] = {}
        for row in rows:
            at = ("", 0, row.batch) if best else key(row)
            least[at] = min(least.get(at, math.inf), per * value(row))
        choice = found.choice.batch, per * value(found.choice)
        yield _plot(title, least, choice=choice, width=width, color=color)
    legend = [f"{marker} {name}" for marker, name in zip(_cycle(MARKERS, curves), names, strict=True)]
    yield "   ".join([*([f"{MARKERS[0]} the best of each batch"] if best else legend), "O chosen"])


def _hours(row: "Prediction") -> float:
    return row.hours


def _cost(row: "Prediction") -> float:
    return row.cost


def _cycle(choices: Sequence[str], items: Sequence[Any]) -> list[str]:
    return [choices[index % len(choices)] for index in range(len(items))]


def _plot(
    title: str,
    values: dict[tuple[str, int, int], float],
    *,
    choice: tuple[int, float],
    width: int,
    color: bool,
) -> str:
    """Draw values by (type, nodes, batch) over a binary logarithm of the batch, as text of at most `width` columns."""
    kinds, batches = sorted({key[:2] for key in values}), sorted({key[2] for key in values})
    curves = [
        Curve(sorted((math.log2(key[2]), value) for key, value in values.items() if key[:2] == kind), marker, shade)
        for kind, marker, shade in zip(kinds, _cycle(MARKERS, kinds), _cycle(COLORS, kinds), strict=True)
    ]
    curves.append(Curve([(math.log2(choice[0]), choice[1])], "O"))
    return _over_batches(title, curves, batches, width=width, height=15, color=color)


def _over_batches(
    title: str, curves: Sequence[Curve], batches: Sequence[int], *, width: int, height: int, color: bool
) -> str:
    ticks = {math.log2(batch): str(batch) for batch in batches}
    return draw(title, curves, ticks=ticks, label="global batch", width=min(width, 100), height=height, color=color)


def comparison_plot(found: "CompareReport", *, width: int, color: bool) -> str:
    """Draw the metric against the batch, a curve a method; the reference is a point of its own."""
    values: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(found.rows, key=lambda row: row.batch):
        value = row.stat(found.metric)
        if value is not None:
            label = method_label(row.method, reference=row.reference)
            values.setdefault(label, []).append((math.log2(row.batch), value.mean))
    batches = sorted({row.batch for row in found.rows})
    if len(batches) < 2 or len(values) < 2:
        return ""
    names = list(values)
    curves = [
        Curve(values[name], marker, shade)
        for name, marker, shade in zip(names, _cycle(MARKERS, names), _cycle(COLORS, names), strict=True)
    ]
    title = "top-1 (%)" if found.metric == "top1" and not found.of_script else found.metric
    drawn = _over_batches(title, curves, batches, width=width, height=18, color=color)
    legend = "   ".join(f"{marker} {name}" for marker, name in zip(_cycle(MARKERS, names), names, strict=True))
    return f"{drawn}\n{legend}"
