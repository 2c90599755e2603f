"""Curves, points and bars of a figure, on matplotlib's axes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tula_cli.services.reporting.document import Density, Figure, Series
from tula_cli.show.html.palette import LIGHT, color, dash, marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAN = math.nan
_HUGE = 1e200  # beyond it axes overflow
_MANY = 60  # points, from which on a curve has no markers
_BAND = 15  # points, from which on the intervals of a line with points are a band, as those of a line always are
_BARS = ("bars", "stacked")
_SHADES = (0.07, 0.17, 0.3, 0.46, 0.63, 0.82, 1.0)
_LEVELS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Entry:
    """A line of the legend: what is drawn in it, and its words."""

    handle: Any
    text: str


@dataclass(frozen=True)
class Drawable:
    """A series as numbers that can be drawn; nan is a gap. `index` is what its looks follow from."""

    name: str
    style: str
    index: int
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    filled: list[bool]
    told: bool  # whether it says what of it was measured

    @property
    def color(self) -> str:
        return color(self.index)

    @property
    def known(self) -> list[bool]:
        return [not math.isnan(value) for value in self.y]


@dataclass
class Places:
    """Where x values lie: at themselves, or side by side where there are bars or categories."""

    figure: Figure
    order: list[float] = field(default_factory=list)  # x values of bars that are no categories

    @classmethod
    def of(cls, figure: Figure) -> "Places":
        bars = any(series.style in _BARS for series in figure.series)
        if figure.x_scale == "category" or not bars:
            return cls(figure)
        return cls(figure, sorted({x for series in figure.series for x in series.x if _drawable(x, "linear")}))

    @property
    def discrete(self) -> bool:
        return bool(self.order) or self.figure.x_scale == "category"

    @property
    def scale(self) -> str:
        return "linear" if self.discrete else self.figure.x_scale

    def of_x(self, x: float | None) -> float:
        """Return the place of a value; nan where it has none."""
        if x is None or not _drawable(x, self.scale):
            return NAN
        return float(self.order.index(x)) if x in self.order else NAN if self.order else x


def _drawable(value: float | None, scale: str) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < _HUGE and (scale == "linear" or value > 0)


def drawables(figure: Figure, places: Places, looks: Mapping[str, int]) -> list[Drawable]:
    """Return the series that have something to draw, in the looks that their names have, else by their places."""
    found = []
    for index, series in enumerate(figure.series):
        one = _drawable_of(series, looks.get(series.name, index), places, figure.y_scale)
        if any(one.known):
            found.append(one)
    return found


def _drawable_of(series: Series, index: int, places: Places, scale: str) -> Drawable:
    count = len(series.x)
    measured = series.measured if series.measured is not None else (True,) * count
    rows = []
    for place, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        at = places.of_x(x)
        low, high = (None if bounds is None else bounds[place] for bounds in (series.low, series.high))
        if not math.isnan(at):
            value = float(y) if y is not None and _drawable(y, scale) else NAN
            rows.append((at, value, *_interval(low, high, value, scale), measured[place]))
    # A curve goes from left to right.
    rows.sort(key=lambda row: row[0])
    xs, ys, lows, highs, filled = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [], [])
    return Drawable(series.name, series.style, index, xs, ys, lows, highs, filled, series.measured is not None)


def _interval(low: float | None, high: float | None, value: float, scale: str) -> tuple[float, float]:
    """Return the bounds that hold the value; nan where nothing is known of it. On a logarithmic axis none is 0 or less."""
    if math.isnan(value) or (low is None and high is None):
        return NAN, NAN
    bottom = value if low is None or not math.isfinite(low) else min(float(low), value)
    top = value if high is None or not math.isfinite(high) else max(float(high), value)
    return (max(bottom, value * 1e-3) if scale != "linear" else bottom), min(top, _HUGE)


# --- curves and points


def draw_curve(axes: "Axes", one: Drawable, *, shift: float) -> Entry:
    """Draw a curve or points, with intervals; return its line of the legend."""
    from matplotlib.lines import Line2D

    x = [place + shift for place in one.x]
    line = one.style != "points"
    lonely = one.style == "line" or (line and len(x) > _MANY)
    dashes: Any = dash(one.index) if line else "none"
    _draw_interval(axes, one, x, band=one.style == "line" or (line and len(x) >= _BAND))
    if line:
        axes.plot(x, one.y, color=one.color, linestyle=dashes, linewidth=1.6, zorder=3)
    dots = _alone(one.known) if lonely else one.known
    for filled in (True, False):
        shown = [place for place, dot in enumerate(dots) if dot and one.filled[place] == filled]
        if shown:
            axes.plot(
                [x[place] for place in shown],
                [one.y[place] for place in shown],
                linestyle="none",
                zorder=4,
                clip_on=False,  # or half of a point on an axis were cut off
                **_marker(one, filled=filled),
            )
    look = {} if lonely else _marker(one, filled=any(one.filled))
    return Entry(Line2D([], [], color=one.color, linestyle=dashes, linewidth=1.6, **look), one.name)


def _marker(one: Drawable, *, filled: bool) -> dict[str, Any]:
    return {
        "marker": marker(one.index),
        "markersize": 5.5,
        "markeredgewidth": 1.3,
        "markeredgecolor": one.color,
        "markerfacecolor": one.color if filled else LIGHT["paper"],
    }


def _alone(known: Sequence[bool]) -> list[bool]:
    """Return which points a line would not show: those between gaps."""
    padded = [False, *known, False]
    return [
        here and not before and not after for before, here, after in zip(padded, padded[1:], padded[2:], strict=False)
    ]


def _draw_interval(axes: "Axes", one: Drawable, x: Sequence[float], *, band: bool) -> None:
    if all(math.isnan(low) for low in one.low):
        return
    if band:
        axes.fill_between(x, one.low, one.high, color=one.color, alpha=0.16, linewidth=0, zorder=2)
    else:
        axes.errorbar(
            x,
            one.y,
            yerr=_lengths(one),
            fmt="none",
            color=one.color,
            ecolor=one.color,
            elinewidth=1.1,
            capsize=3,
            zorder=3,
        )


def _lengths(one: Drawable) -> list[list[float]]:
    return [
        [y - low for y, low in zip(one.y, one.low, strict=True)],
        [high - y for y, high in zip(one.y, one.high, strict=True)],
    ]


# --- bars


def draw_bars(axes: "Axes", bars: Sequence[Drawable]) -> list[Entry]:
    """Draw bars side by side and stacked ones on each other; return their lines of the legend."""
    beside = [one for one in bars if one.style == "bars"]
    stacked = [one for one in bars if one.style == "stacked"]
    groups = len(beside) + bool(stacked)
    wide = 0.8 / max(groups, 1)
    found = []
    for place, one in enumerate(beside):
        shift = wide * (place - (groups - 1) / 2)
        found.append(_draw_bar(axes, one, [x + shift for x in one.x], [0.0] * len(one.x), wide))
    reached: dict[tuple[float, bool], float] = {}
    stack = []
    for one in stacked:
        bottoms = []
        for x, y in zip(one.x, one.y, strict=True):
            bottoms.append(reached.get((x, y < 0), 0.0))
            if not math.isnan(y):
                reached[x, y < 0] = bottoms[-1] + y
        stack.append((one, bottoms))
    shift = wide * (len(beside) - (groups - 1) / 2)
    highest = max(map(abs, reached.values()), default=0.0)
    for one, bottoms in stack:
        found.append(_draw_bar(axes, one, [x + shift for x in one.x], bottoms, min(wide, 0.62), highest))
    return found


def _draw_bar(
    axes: "Axes", one: Drawable, x: Sequence[float], bottoms: Sequence[float], wide: float, top: float | None = None
) -> Entry:
    """Draw the bars of a series: full ones measured, pale ones with an edge predicted."""
    from matplotlib.patches import Patch

    for filled in (True, False):
        shown = [place for place, known in enumerate(one.known) if known and one.filled[place] == filled]
        if shown:
            axes.bar(
                [x[place] for place in shown],
                [one.y[place] for place in shown],
                wide,
                [bottoms[place] for place in shown],
                zorder=2,
                **{**_bar(one, filled=filled), **_edges([one.y[place] for place in shown], top)},
            )
    if not all(math.isnan(low) for low in one.low):
        middle = [y + bottom for y, bottom in zip(one.y, bottoms, strict=True)]
        axes.errorbar(
            x,
            middle,
            yerr=_lengths(one),
            fmt="none",
            color=LIGHT["ink"],
            ecolor=LIGHT["ink"],
            elinewidth=1.1,
            capsize=3,
            zorder=3,
        )
    return Entry(Patch(**_bar(one, filled=any(one.filled))), one.name)


def _edges(heights: Sequence[float], top: float | None) -> dict[str, Any]:
    """Return edges that leave something of the lowest bars of a stack, which is `top` high."""
    return {} if top is None else {"linewidth": [0.8 if abs(height) > 0.02 * top else 0.0 for height in heights]}


def _bar(one: Drawable, *, filled: bool) -> dict[str, Any]:
    if filled:
        return {"facecolor": one.color, "edgecolor": LIGHT["paper"], "linewidth": 0.8}
    return {"facecolor": LIGHT["paper"], "edgecolor": one.color, "linewidth": 1.2}


# --- a density


def draw_density(axes: "Axes", density: Density, y_scale: str) -> list[Entry]:
    """Draw shares as shades, one path a shade; return what the shades mean."""
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path

    found = []
    for place, (low, high) in enumerate(itertools.pairwise(_LEVELS)):
        corners = [
            corner
            for i, shares in enumerate(density.shares)
            for j, share in enumerate(shares)
            if low < share <= high or (share > 1 and high == 1)
            for corner in _corners(density.x_edges[i : i + 2], density.y_edges[j : j + 2], y_scale)
        ]
        if corners:
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(corners) // 5)
            look: dict[str, Any] = {"facecolor": LIGHT["s0"], "alpha": _SHADES[place], "linewidth": 0}
            axes.add_patch(PathPatch(Path(corners, codes), zorder=2, **look))
            found.append(
                Entry(Patch(**look), f"{100 * low:g} to {100 * high:g} %" if low else f"under {100 * high:g} %")
            )
    return found


def _corners(x: Sequence[float], y: Sequence[float], y_scale: str) -> list[tuple[float, float]]:
    if not all(_drawable(value, "linear") for value in x) or not all(_drawable(value, y_scale) for value in y):
        return []
    (left, right), (bottom, top) = x, y
    return [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
