"""Axes of a figure: limits, ticks and what they are of."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tula_cli.services.reporting.document import Figure
from tula_cli.show.html.drawn_series import Places
from tula_cli.show.html.fitted_text import clean, fitted, lines, width
from tula_cli.show.html.palette import LIGHT
from tula_cli.show.html.tick_numbers import CHARACTER, fitting, short, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = 13.5  # units of a line of text
_AXIS = 310.0  # units that the horizontal axis has at least
_UPRIGHT = 180.0  # and the vertical one
_TALL = 2.2  # of a vertical tick's room, in its words' width: they stand above each other
_SLANTED = 14  # units between slanted words


def scale_x(axes: "Axes", figure: Figure, places: Places) -> float:
    """Set limits and ticks of the horizontal axis; return how many units more its words take."""
    low, high = axes.dataLim.intervalx
    if places.discrete:
        return _categories(axes, figure, places, low, high)
    if places.scale == "linear" and figure.density is not None:
        axes.set_xlim(low, high)
    else:
        axes.set_xlim(*_padded(low, high, places.scale, zero=False))
    low, high = axes.get_xlim()
    known = sorted({x for series in figure.series for x in series.x if low <= x <= high})
    found = fitting(low, high, places.scale, length=_AXIS)
    if places.scale == "log2" and len(known) <= 7 and _apart(known, low, high):
        found = known  # the batches themselves
    _ticks(axes.xaxis, found, words(found, places.scale))
    return 0.0


def _apart(known: Sequence[float], low: float, high: float) -> bool:
    told = words(known, "log2")
    per = _AXIS / math.log(high / low)
    return all(
        per * math.log(right / left) >= CHARACTER * (len(word) + len(other)) / 2 + 8
        for (left, word), (right, other) in itertools.pairwise(zip(known, told, strict=True))
    )


def _categories(axes: "Axes", figure: Figure, places: Places, low: float, high: float) -> float:
    texts = [short(x) for x in places.order] if places.order else list(figure.categories)
    last = max(len(texts) - 1, round(high))
    texts += [str(place) for place in range(len(texts), last + 1)]
    axes.set_xlim(min(low, -0.5), max(high, last + 0.5))
    axes.grid(visible=False, axis="x")
    room = _AXIS / (last + 1) / CHARACTER - 0.8
    if all(width(part) <= room for text in texts for part in text.split()):
        told = [fitted(text, room, 3) for text in texts]
        _ticks(axes.xaxis, list(range(last + 1)), told)
        return _LINE * max((text.count("\n") for text in told), default=0)
    every = max(1, -(-(last + 1) * _SLANTED // int(_AXIS)))
    told = [lines(text, 22, 1)[0] for text in texts[::every]]
    _ticks(axes.xaxis, list(range(0, last + 1, every)), told)
    for word in axes.get_xticklabels():
        word.set(rotation=38, ha="right", rotation_mode="anchor")
    return 0.62 * CHARACTER * max(map(width, told), default=0)


def scale_y(axes: "Axes", figure: Figure, *, bars: bool) -> None:
    low, high = axes.dataLim.intervaly
    if figure.y_scale != "linear" and low <= 0:  # bars begin there
        low = axes.dataLim.minposy
    if figure.density is not None and not figure.series:
        axes.set_ylim(low, high)
    else:
        axes.set_ylim(*_padded(low, high, figure.y_scale, zero=bars))
    low, high = axes.get_ylim()
    found = fitting(low, high, figure.y_scale, length=_UPRIGHT * _TALL)
    _ticks(axes.yaxis, found, words(found, figure.y_scale))


def _padded(low: float, high: float, scale: str, *, zero: bool) -> tuple[float, float]:
    """Return limits with room around the values; they begin at 0 where that is near, or bars do."""
    if scale != "linear":
        room = max((high / low) ** 0.06, 1.1) if high > low else 2.0
        return low / room, high * room
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    if low >= 0 and (zero or low <= 0.4 * high):
        return 0.0, high + room
    return low - room, 0.0 if zero and high <= 0 else high + room


def _ticks(axis: Any, places: Sequence[float], told: Sequence[str]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_ticks(list(places), labels=[clean(text) for text in told])


def label(axes: "Axes", figure: Figure, *, numbered: bool) -> float:
    """Write what the axes are, that of the vertical one above it; return how many units more they take."""
    above, below = fitted(figure.y_label, 50), fitted(figure.x_label, 50)
    axes.set_title(above, pad=17 if numbered else 8, color=LIGHT["ink"])
    axes.set_xlabel(below)
    return _LINE * (above.count("\n") + below.count("\n"))
