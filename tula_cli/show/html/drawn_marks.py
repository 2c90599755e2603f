"""Marks on a figure: a choice, a knee, limits and events. Their words stand in the legend, where nothing can hide them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tula_cli.services.reporting.document import Mark
from tula_cli.show.html.drawn_series import Entry, Places
from tula_cli.show.html.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS: dict[str, dict[str, Any]] = {
    "choice": {"marker": "*", "markersize": 14, "markerfacecolor": LIGHT["ink"], "markeredgecolor": LIGHT["paper"]},
    "knee": {"marker": "D", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": LIGHT["ink"]},
    "limit": {"marker": "X", "markersize": 9, "markerfacecolor": LIGHT["ink"], "markeredgecolor": LIGHT["paper"]},
    "event": {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": LIGHT["ink"]},
}
_LINES = {"choice": (0, (1, 1)), "knee": (0, (8, 2, 1, 2)), "limit": (0, (6, 3)), "event": (0, (1, 2))}
_MOST_EVENTS = 9  # that the legend tells one by one
_ROOM = 0.05  # of the axis, which a number above an event takes


def draw_marks(axes: "Axes", marks: Sequence[Mark], places: Places) -> list[Entry]:
    """Draw what has a place; return the lines of the legend."""
    at = [(mark, places.of_x(mark.x)) for mark in marks]
    events = sorted(
        ((mark, x) for mark, x in at if mark.kind == "event" and mark.y is None and not math.isnan(x)),
        key=lambda pair: pair[1],
    )
    found = [
        entry
        for mark, x in at
        if not (mark.kind == "event" and mark.y is None) and (entry := _draw_mark(axes, mark, x)) is not None
    ]
    return [*found, *_draw_events(axes, events)]


def _draw_mark(axes: "Axes", mark: Mark, x: float) -> Entry | None:
    from matplotlib.lines import Line2D

    y = math.nan if mark.y is None or not math.isfinite(mark.y) else mark.y
    if axes.get_yscale() != "linear" and y <= 0:
        return None
    if not math.isnan(x) and not math.isnan(y):
        look = {**_POINTS[mark.kind], "markeredgewidth": 1.2, "linestyle": "none"}
        axes.plot([x], [y], zorder=6, clip_on=False, **look)
        return Entry(Line2D([], [], **look), mark.text)
    line: dict[str, Any] = {"color": LIGHT["ink"], "linestyle": _LINES[mark.kind], "linewidth": 1.2}
    if mark.x is None and not math.isnan(y):
        axes.axhline(y, zorder=5, **line)
        # A line of the whole width tells the axes nothing of its height.
        axes.update_datalim([(0.0, y)], updatex=False)
    elif mark.y is None and not math.isnan(x):
        axes.axvline(x, zorder=5, **line)
        axes.update_datalim([(x, 0.0)], updatey=False)
    else:
        return None
    return Entry(Line2D([], [], **line), mark.text)


def _draw_events(axes: "Axes", events: Sequence[tuple[Mark, float]]) -> list[Entry]:
    """Draw a thin line for each event, which is told once where several are the same."""
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {"color": LIGHT["muted"], "linestyle": _LINES["event"], "linewidth": 1.2}
    texts = list(dict.fromkeys(mark.text for mark, _ in events))
    for _, x in events:
        axes.axvline(x, zorder=1.5, **look)
        axes.update_datalim([(x, 0.0)], updatey=False)
    shown = [*texts[:_MOST_EVENTS], *([f"{len(texts) - _MOST_EVENTS} more"] if len(texts) > _MOST_EVENTS else [])]
    if len(texts) == 1:
        return [Entry(Line2D([], [], **look), texts[0])]
    return [Entry(Line2D([], [], **look), f"{place}: {text}") for place, text in enumerate(shown, 1)]


def number_events(axes: "Axes", marks: Sequence[Mark], places: Places) -> bool:
    """Write the numbers of events above their lines, once the axes have their limits; those too close share a word.

    Return whether there are any.
    """
    events = sorted(
        (x, mark.text)
        for mark in marks
        if mark.kind == "event" and mark.y is None and not math.isnan(x := places.of_x(mark.x))
    )
    texts = list(dict.fromkeys(text for _, text in events))
    if len(texts) < 2:
        return False
    groups: list[list[tuple[float, int]]] = []
    for x, text in events:
        share = float(axes.transAxes.inverted().transform(axes.transData.transform((x, 1.0)))[0])
        number = min(texts.index(text), _MOST_EVENTS) + 1
        if groups and share - groups[-1][-1][0] < _ROOM * (2 if len(groups[-1]) > 1 else 1):
            groups[-1].append((share, number))
        else:
            groups.append([(share, number)])
    for group in groups:
        numbers = sorted({number for _, number in group})
        word = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
        middle = min(max((group[0][0] + group[-1][0]) / 2, 0.03), 0.97)
        axes.text(
            middle, 1.005, word, transform=axes.transAxes, ha="center", va="bottom", fontsize=10, color=LIGHT["muted"]
        )
    return True
