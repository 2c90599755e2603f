"""Plots in the terminal."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tula_cli.words import plural, time_unit

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
    """Time and cost against the global batch, one curve for each number (and type) of nodes; O marks the choice."""
    rows = [row for row in found.rows if row.market == found.choice.market]
    curves = sorted({key(row)[:2] for row in rows})
    if len({row.batch for row in rows}) < 2:
        return
    divisor, unit = time_unit(3600 * max(row.hours for row in rows))
    names = [f"{plural(count, 'node')}{f' of type {kind}' if kind else ''}" for kind, count in curves]
    times = {key(row): 3600 * row.hours / divisor for row in rows}
    costs = {key(row): row.cost for row in rows}
    for title, values in ((f"time ({unit})", times), (f"cost ({found.currency})", costs)):
        yield _plot(title, values, choice=key(found.choice), width=width, color=color)
    legend = [f"{marker} {name}" for marker, name in zip(_cycle(MARKERS, curves), names, strict=True)]
    yield "   ".join([*legend, "O chosen"])


def _cycle(choices: Sequence[str], items: Sequence[Any]) -> list[str]:
    return [choices[index % len(choices)] for index in range(len(items))]


def _plot(
    title: str,
    values: dict[tuple[str, int, int], float],
    *,
    choice: tuple[str, int, int],
    width: int,
    color: bool,
) -> str:
    """Draw values by (type, nodes, batch) over a binary logarithm of the batch, as text of at most `width` columns."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width, 100), 15)
    figure.legend(active=False)
    curves, batches = sorted({key[:2] for key in values}), sorted({key[2] for key in values})
    for curve, marker, shade in zip(curves, _cycle(MARKERS, curves), _cycle(COLORS, curves), strict=True):
        points = sorted((math.log2(key[2]), value) for key, value in values.items() if key[:2] == curve)
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        for symbol, joined in (("·", True), (marker, False)):
            dots = plotext.marker(symbol, plotext.pixel(shade)) if color else symbol
            figure.draw(figure.signal(xs, ys, marker=dots).lines(joined))
    figure.draw(figure.signal([math.log2(choice[2])], [values[choice]], marker="O"))
    figure.ruler("x", "lower").ticks([math.log2(batch) for batch in batches], [str(batch) for batch in batches])
    figure.label("global batch", "x")
    figure.title(title)
    drawn: str = figure.build().string(colorless=not color)
    return "\n".join(line.rstrip() for line in drawn.splitlines())


def comparison_plot(found: "CompareReport", *, width: int, color: bool) -> str:
    """Draw the metric against the batch, a curve a method; the reference is a point of its own."""
    import plotext

    curves: dict[str, list[tuple[float, float]]] = {}
    for row in found.rows:
        value = row.stat(found.metric)
        if value is not None:
            label = f"{row.method} (reference)" if row.reference else row.method
            curves.setdefault(label, []).append((math.log2(row.batch), value.mean))
    batches = sorted({row.batch for row in found.rows})
    if len(batches) < 2 or len(curves) < 2:
        return ""
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width, 100), 18)
    figure.legend(active=False)
    names = list(curves)
    for name, marker, shade in zip(names, _cycle(MARKERS, names), _cycle(COLORS, names), strict=True):
        xs, ys = [point[0] for point in curves[name]], [point[1] for point in curves[name]]
        for symbol, joined in (("·", True), (marker, False)) if len(xs) > 1 else ((marker, False),):
            dots = plotext.marker(symbol, plotext.pixel(shade)) if color else symbol
            figure.draw(figure.signal(xs, ys, marker=dots).lines(joined))
    figure.ruler("x", "lower").ticks([math.log2(batch) for batch in batches], [str(batch) for batch in batches])
    figure.label("global batch", "x")
    figure.title("top-1 (%)" if found.metric == "top1" else "loss")
    drawn: str = figure.build().string(colorless=not color)
    legend = "   ".join(f"{marker} {name}" for marker, name in zip(_cycle(MARKERS, names), names, strict=True))
    return "\n".join([*(line.rstrip() for line in drawn.splitlines()), legend])
