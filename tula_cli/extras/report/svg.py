"""Figures of a report as SVG, drawn by matplotlib.

A drawing is 390 units wide, so that its text, 10.5 units high, is readable on a phone. Text is kept as text. With one
version of matplotlib, equal figures give byte-identical SVG.
"""

import html
import io
import itertools
import logging
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tula_cli.errors import SpecError
from tula_cli.services.document import Annotation, Density, Figure, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# --- Colours
#
# The curves' colours are after Okabe and Ito (2008), darkened to a contrast of 3 and more with white, and lightened for a dark
# page; each curve has a marker of its own too, and from the seventh on another dash.

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#57606a",
    "grid": "#e3e7ec",
    "s0": "#0072b2",
    "s1": "#c84e00",
    "s2": "#00805f",
    "s3": "#a33a7f",
    "s4": "#8a6a00",
    "s5": "#6b6f76",
}
"""Colours by role; no two roles share a colour, so that a style sheet finds the elements of a role by their colour."""
DARK = {
    "paper": "#14181d",
    "ink": "#e6eaef",
    "muted": "#9aa5b1",
    "grid": "#2d343c",
    "s0": "#58b4ec",
    "s1": "#ff8f4d",
    "s2": "#3fcfa0",
    "s3": "#e78cc6",
    "s4": "#dcb63f",
    "s5": "#b4bac2",
}
SERIES = tuple(role for role in LIGHT if role[0] == "s")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: the looks of 168 series differ
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


def get_series_color(index: int) -> str:
    """Return the light-theme colour of a series by its index."""
    return LIGHT[SERIES[index % len(SERIES)]]


def make_css_variables(colors: dict[str, str]) -> str:
    """Return the colours as CSS variables."""
    return "".join(f"--{role}:{value};" for role, value in colors.items())


def make_css_rules() -> str:
    """Return the CSS rules that give the elements of a drawing the page's colours, so that it follows a dark theme."""
    return "".join(
        f'svg.figure [style*="{name}: {color}"]{{{name}:var(--{role})!important}}'
        for role, color in LIGHT.items()
        for name in ("fill", "stroke")
    )


# --- Text

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LINE_LENGTH = 50  # characters of a line across a drawing


def remove_control_characters(text: str) -> str:
    """Replace characters that are invalid in XML or HTML (control characters, lone surrogates) by U+FFFD."""
    return _UNFIT.sub("\ufffd", text)


def wrap_text(text: str, length: int = _LINE_LENGTH, *, most: int = 2) -> str:
    """Wrap a text to at most `most` lines of `length` characters; a longer text ends in an ellipsis."""
    if 3 * sum(letter.isupper() or not letter.isascii() for letter in text) > len(text):
        length = length // 2  # capitals and letters of other scripts are wide
    lines = textwrap.wrap(remove_control_characters(text), max(length, 1))
    return "\n".join(lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][: length - 1]}…"])


# --- Numbers at ticks

_SUFFIXES = ((1e12, "T", 1e12), (1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3))
_MOST_TICKS = 7


def place_ticks(low: float, high: float, scale: str) -> list[float]:
    """Return round numbers between two bounds, ascending; both are positive on a logarithmic scale."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    evenly = MaxNLocator(_MOST_TICKS - 1, steps=[1, 2, 5, 10])
    if scale == "linear":
        locator: Any = evenly
    elif scale == "log2":
        locator = LogLocator(2, numticks=_MOST_TICKS)
    else:
        locator = LogLocator(10, subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=_MOST_TICKS)
    ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
    return ticks if len(ticks) > 1 else [float(tick) for tick in evenly.tick_values(low, high) if low <= tick <= high]


def format_tick(value: float) -> str:
    """Format a number compactly with at most 4 significant digits: 1.2M, 40k, 0.05; a power of two as 65536 or 1/64."""
    if 1e-6 < value < 1 and math.log2(value).is_integer():
        return f"1/{1 / value:.0f}" if value < 0.1 else f"{value:g}"
    if 1 <= value < 1e6 and math.log2(value).is_integer():
        return f"{value:.0f}"
    size, suffix = next(((size, suffix) for least, suffix, size in _SUFFIXES if abs(value) >= least), (1.0, ""))
    return f"{value / size:.4g}{suffix}".replace("-", "−").replace("e+", "e")


# --- Series

NAN = math.nan
_HUGE = 1e200  # beyond it axes overflow
_MANY = 60  # points, from which on a curve has no markers
_BAND = 15  # points, from which on the intervals of a line with points are a band, as those of a line always are
_BARS = ("bars", "stacked")
_SHADES = (0.07, 0.17, 0.3, 0.46, 0.63, 0.82, 1.0)
_LEVELS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Entry:
    """A line of the legend: symbol and text."""

    handle: Any
    text: str


@dataclass(frozen=True)
class DrawnSeries:
    """A series as drawable numbers; nan is a gap, and `index` determines colour, marker and dash."""

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
        return get_series_color(self.index)

    @property
    def known(self) -> list[bool]:
        return [not math.isnan(value) for value in self.y]


@dataclass
class Positions:
    """Horizontal positions: the x values themselves, or consecutive integers for bars on a numeric axis."""

    figure: Figure
    order: list[float] = field(default_factory=list)  # x values of bars that are no categories

    @classmethod
    def of(cls, figure: Figure) -> "Positions":
        bars = any(series.style in _BARS for series in figure.series)
        if figure.x_scale == "category" or not bars:
            return cls(figure)
        return cls(figure, sorted({x for series in figure.series for x in series.x if _is_drawable(x, "linear")}))

    @property
    def discrete(self) -> bool:
        return bool(self.order) or self.figure.x_scale == "category"

    @property
    def scale(self) -> str:
        return "linear" if self.discrete else self.figure.x_scale

    def of_x(self, x: float | None) -> float:
        """Return the position of an x value; nan if it has none."""
        if x is None or not _is_drawable(x, self.scale):
            return NAN
        return float(self.order.index(x)) if x in self.order else NAN if self.order else x


def _is_drawable(value: float | None, scale: str) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < _HUGE and (scale == "linear" or value > 0)


def list_drawn_series(figure: Figure, places: Positions, looks: Mapping[str, int]) -> list[DrawnSeries]:
    """Return the series with drawable values; `looks` maps a name to a style index, by default the series' index."""
    shown_series = []
    for index, series in enumerate(figure.series):
        series_drawn = _make_drawn_series(series, looks.get(series.name, index), places, figure.y_scale)
        if any(series_drawn.known):
            shown_series.append(series_drawn)
    return shown_series


def _make_drawn_series(series: Series, index: int, places: Positions, scale: str) -> DrawnSeries:
    count = len(series.x)
    measured = series.measured if series.measured is not None else (True,) * count
    rows = []
    for place, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        at = places.of_x(x)
        low, high = (None if bounds is None else bounds[place] for bounds in (series.low, series.high))
        if not math.isnan(at):
            value = float(y) if y is not None and _is_drawable(y, scale) else NAN
            rows.append((at, value, *_clip_interval(low, high, value, scale), measured[place]))
    # A curve goes from left to right.
    rows.sort(key=lambda row: row[0])
    xs, ys, lows, highs, filled = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [], [])
    return DrawnSeries(series.name, series.style, index, xs, ys, lows, highs, filled, series.measured is not None)


def _clip_interval(low: float | None, high: float | None, value: float, scale: str) -> tuple[float, float]:
    """Return bounds that contain the value, or nan if it has none; on a logarithmic axis both bounds are positive."""
    if math.isnan(value) or (low is None and high is None):
        return NAN, NAN
    bottom = value if low is None or not math.isfinite(low) else min(float(low), value)
    top = value if high is None or not math.isfinite(high) else max(float(high), value)
    return (max(bottom, value * 1e-3) if scale != "linear" else bottom), min(top, _HUGE)


# --- curves and points


def draw_curve(axes: "Axes", drawn_series: DrawnSeries, *, shift: float) -> Entry:
    """Draw a curve or points with their intervals, and return the legend entry."""
    from matplotlib.lines import Line2D

    x = [place + shift for place in drawn_series.x]
    line = drawn_series.style != "points"
    lonely = drawn_series.style == "line" or (line and len(x) > _MANY)
    dashes: Any = DASHES[drawn_series.index // len(SERIES) % len(DASHES)] if line else "none"
    _draw_interval(axes, drawn_series, x, band=drawn_series.style == "line" or (line and len(x) >= _BAND))
    if line:
        axes.plot(x, drawn_series.y, color=drawn_series.color, linestyle=dashes, linewidth=1.6, zorder=3)
    dots = _find_isolated_points(drawn_series.known) if lonely else drawn_series.known
    for filled in (True, False):
        shown = [place for place, dot in enumerate(dots) if dot and drawn_series.filled[place] == filled]
        if shown:
            axes.plot(
                [x[place] for place in shown],
                [drawn_series.y[place] for place in shown],
                linestyle="none",
                zorder=4,
                clip_on=False,  # or half of a point on an axis were cut off
                **_make_marker_style(drawn_series, filled=filled),
            )
    look = {} if lonely else _make_marker_style(drawn_series, filled=any(drawn_series.filled))
    return Entry(Line2D([], [], color=drawn_series.color, linestyle=dashes, linewidth=1.6, **look), drawn_series.name)


def _make_marker_style(drawn_series: DrawnSeries, *, filled: bool) -> dict[str, Any]:
    return {
        "marker": MARKERS[drawn_series.index % len(MARKERS)],
        "markersize": 5.5,
        "markeredgewidth": 1.3,
        "markeredgecolor": drawn_series.color,
        "markerfacecolor": drawn_series.color if filled else LIGHT["paper"],
    }


def _find_isolated_points(known: Sequence[bool]) -> list[bool]:
    """Return which points a line would not show because both neighbours are gaps."""
    padded = [False, *known, False]
    return [
        here and not before and not after for before, here, after in zip(padded, padded[1:], padded[2:], strict=False)
    ]


def _draw_interval(axes: "Axes", drawn_series: DrawnSeries, x: Sequence[float], *, band: bool) -> None:
    if all(math.isnan(low) for low in drawn_series.low):
        return
    if band:
        axes.fill_between(
            x, drawn_series.low, drawn_series.high, color=drawn_series.color, alpha=0.16, linewidth=0, zorder=2
        )
    else:
        axes.errorbar(
            x,
            drawn_series.y,
            yerr=_compute_error_lengths(drawn_series),
            fmt="none",
            color=drawn_series.color,
            ecolor=drawn_series.color,
            elinewidth=1.1,
            capsize=3,
            zorder=3,
        )


def _compute_error_lengths(drawn_series: DrawnSeries) -> list[list[float]]:
    return [
        [y - low for y, low in zip(drawn_series.y, drawn_series.low, strict=True)],
        [high - y for y, high in zip(drawn_series.y, drawn_series.high, strict=True)],
    ]


# --- bars


def draw_bars(axes: "Axes", bars: Sequence[DrawnSeries]) -> list[Entry]:
    """Draw grouped and stacked bars, and return their legend entries."""
    grouped = [bar for bar in bars if bar.style == "bars"]
    stacked = [bar for bar in bars if bar.style == "stacked"]
    groups = len(grouped) + bool(stacked)
    wide = 0.8 / max(groups, 1)
    entries = []
    for place, bar in enumerate(grouped):
        shift = wide * (place - (groups - 1) / 2)
        entries.append(_draw_bar(axes, bar, [x + shift for x in bar.x], [0.0] * len(bar.x), wide))
    reached: dict[tuple[float, bool], float] = {}
    stack = []
    for bar in stacked:
        bottoms = []
        for x, y in zip(bar.x, bar.y, strict=True):
            bottoms.append(reached.get((x, y < 0), 0.0))
            if not math.isnan(y):
                reached[x, y < 0] = bottoms[-1] + y
        stack.append((bar, bottoms))
    shift = wide * (len(grouped) - (groups - 1) / 2)
    highest = max(map(abs, reached.values()), default=0.0)
    for bar, bottoms in stack:
        entries.append(_draw_bar(axes, bar, [x + shift for x in bar.x], bottoms, min(wide, 0.62), highest))
    return entries


def _draw_bar(
    axes: "Axes",
    drawn_series: DrawnSeries,
    x: Sequence[float],
    bottoms: Sequence[float],
    wide: float,
    top: float | None = None,
) -> Entry:
    """Draw the bars of a series: filled if measured, outlined if predicted; return the legend entry."""
    from matplotlib.patches import Patch

    for filled in (True, False):
        shown = [
            place for place, known in enumerate(drawn_series.known) if known and drawn_series.filled[place] == filled
        ]
        if shown:
            axes.bar(
                [x[place] for place in shown],
                [drawn_series.y[place] for place in shown],
                wide,
                [bottoms[place] for place in shown],
                zorder=2,
                **{
                    **_make_bar_style(drawn_series, filled=filled),
                    **_compute_bar_edges([drawn_series.y[place] for place in shown], top),
                },
            )
    if not all(math.isnan(low) for low in drawn_series.low):
        middle = [y + bottom for y, bottom in zip(drawn_series.y, bottoms, strict=True)]
        axes.errorbar(
            x,
            middle,
            yerr=_compute_error_lengths(drawn_series),
            fmt="none",
            color=LIGHT["ink"],
            ecolor=LIGHT["ink"],
            elinewidth=1.1,
            capsize=3,
            zorder=3,
        )
    return Entry(Patch(**_make_bar_style(drawn_series, filled=any(drawn_series.filled))), drawn_series.name)


def _compute_bar_edges(heights: Sequence[float], top: float | None) -> dict[str, Any]:
    """Return a style without edges for bars below 2 % of the stack height `top`, which edges would cover."""
    return {} if top is None else {"linewidth": [0.8 if abs(height) > 0.02 * top else 0.0 for height in heights]}


def _make_bar_style(drawn_series: DrawnSeries, *, filled: bool) -> dict[str, Any]:
    if filled:
        return {"facecolor": drawn_series.color, "edgecolor": LIGHT["paper"], "linewidth": 0.8}
    return {"facecolor": LIGHT["paper"], "edgecolor": drawn_series.color, "linewidth": 1.2}


# --- a density


def draw_density(axes: "Axes", density: Density, y_scale: str) -> list[Entry]:
    """Draw shares as shades, one path per shade, and return the legend entries."""
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path

    entries = []
    for place, (low, high) in enumerate(itertools.pairwise(_LEVELS)):
        corners = [
            corner
            for i, shares in enumerate(density.shares)
            for j, share in enumerate(shares)
            if low < share <= high or (share > 1 and high == 1)
            for corner in _compute_cell_corners(density.x_edges[i : i + 2], density.y_edges[j : j + 2], y_scale)
        ]
        if corners:
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(corners) // 5)
            look: dict[str, Any] = {"facecolor": LIGHT["s0"], "alpha": _SHADES[place], "linewidth": 0}
            axes.add_patch(PathPatch(Path(corners, codes), zorder=2, **look))
            entries.append(
                Entry(Patch(**look), f"{100 * low:g} to {100 * high:g} %" if low else f"under {100 * high:g} %")
            )
    return entries


def _compute_cell_corners(x: Sequence[float], y: Sequence[float], y_scale: str) -> list[tuple[float, float]]:
    if not all(_is_drawable(value, "linear") for value in x) or not all(_is_drawable(value, y_scale) for value in y):
        return []
    (left, right), (bottom, top) = x, y
    return [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]


# --- Axes


def set_x_scale(axes: "Axes", figure: Figure, places: Positions) -> None:
    low, high = axes.dataLim.intervalx
    if places.discrete:
        _scale_categories(axes, figure, places, low, high)
    else:
        is_density = places.scale == "linear" and figure.density is not None
        axes.set_xlim(*((low, high) if is_density else _pad_range(low, high, places.scale, zero=False)))
        _set_ticks(axes.xaxis, place_ticks(*axes.get_xlim(), places.scale))


def _scale_categories(axes: "Axes", figure: Figure, places: Positions, low: float, high: float) -> None:
    texts = [format_tick(x) for x in places.order] if places.order else list(figure.categories)
    last = max(len(texts) - 1, round(high))
    texts += [str(place) for place in range(len(texts), last + 1)]
    axes.set_xlim(min(low, -0.5), max(high, last + 0.5))
    axes.grid(visible=False, axis="x")
    length = _LINE_LENGTH // (last + 1)
    every = max(1, -(-(last + 1) // 25))
    is_slanted = any(len(word) > length for text in texts for word in text.split())
    labels = [wrap_text(text, 22, most=1) if is_slanted else wrap_text(text, length, most=3) for text in texts[::every]]
    _set_ticks(axes.xaxis, list(range(0, last + 1, every)), labels)
    if is_slanted:
        for word in axes.get_xticklabels():
            word.set(rotation=38, ha="right", rotation_mode="anchor")


def set_y_scale(axes: "Axes", figure: Figure, *, bars: bool) -> None:
    low, high = axes.dataLim.intervaly
    if figure.y_scale != "linear" and low <= 0:  # bars begin there
        low = axes.dataLim.minposy
    is_density = figure.density is not None and not figure.series
    axes.set_ylim(*((low, high) if is_density else _pad_range(low, high, figure.y_scale, zero=bars)))
    _set_ticks(axes.yaxis, place_ticks(*axes.get_ylim(), figure.y_scale))


def _pad_range(low: float, high: float, scale: str, *, zero: bool) -> tuple[float, float]:
    """Return limits with padding around the values; a linear axis starts at 0 if 0 is near or bars are drawn."""
    if scale != "linear":
        room = max((high / low) ** 0.06, 1.1) if high > low else 2.0
        return low / room, high * room
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    if low >= 0 and (zero or low <= 0.4 * high):
        return 0.0, high + room
    return low - room, 0.0 if zero and high <= 0 else high + room


def _set_ticks(axis: Any, places: Sequence[float], labels: Sequence[str] | None = None) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_ticks(list(places), labels=[format_tick(place) for place in places] if labels is None else labels)


# --- Marks

_POINTS: dict[str, dict[str, Any]] = {
    "choice": {"marker": "*", "markersize": 14, "markerfacecolor": LIGHT["ink"], "markeredgecolor": LIGHT["paper"]},
    "knee": {"marker": "D", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": LIGHT["ink"]},
    "limit": {"marker": "X", "markersize": 9, "markerfacecolor": LIGHT["ink"], "markeredgecolor": LIGHT["paper"]},
    "event": {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": LIGHT["ink"]},
}
_LINES = {"choice": (0, (1, 1)), "knee": (0, (8, 2, 1, 2)), "limit": (0, (6, 3)), "event": (0, (1, 2))}


def draw_marks(axes: "Axes", marks: Sequence[Annotation], places: Positions) -> list[Entry]:
    """Draw the marks that have a position, and return their legend entries."""
    at = [(mark, places.of_x(mark.x)) for mark in marks]
    events = sorted(
        ((mark, x) for mark, x in at if mark.kind == "event" and mark.y is None and not math.isnan(x)),
        key=lambda pair: pair[1],
    )
    entries = [
        entry
        for mark, x in at
        if not (mark.kind == "event" and mark.y is None) and (entry := _draw_mark(axes, mark, x)) is not None
    ]
    return [*entries, *_draw_events(axes, events)]


def _draw_mark(axes: "Axes", mark: Annotation, x: float) -> Entry | None:
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


def _draw_events(axes: "Axes", events: Sequence[tuple[Annotation, float]]) -> list[Entry]:
    """Draw a thin line per event, numbered by its text, and return one legend entry for each distinct text."""
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {"color": LIGHT["muted"], "linestyle": _LINES["event"], "linewidth": 1.2}
    texts = list(dict.fromkeys(mark.text for mark, _ in events))
    for mark, x in events:
        axes.axvline(x, zorder=1.5, **look)
        axes.update_datalim([(x, 0.0)], updatey=False)
        if len(texts) > 1:
            number = str(texts.index(mark.text) + 1)
            where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            axes.text(x, 1.005, number, fontsize=10, color=LIGHT["muted"], **where)
    if len(texts) == 1:
        return [Entry(Line2D([], [], **look), texts[0])]
    return [Entry(Line2D([], [], **look), f"{place}: {text}") for place, text in enumerate(texts, 1)]


# --- Figures

WIDTH, PLOT = 390.0, 255.0  # units: of a drawing, and the height of what is not its legend
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tula",
    "text.parse_math": False,  # a dollar is a dollar
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 10.5,
    "figure.dpi": 72.0,
    "savefig.dpi": 72.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.edgecolor": LIGHT["muted"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "figure.facecolor": "none",
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "xtick.labelcolor": LIGHT["ink"],
    "ytick.color": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["ink"],
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.0,
    "legend.borderaxespad": 0.3,
    "legend.handletextpad": 0.6,
}


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        SpecError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SpecError(
            "Figures need the package matplotlib, which is not installed.",
            "pip install 'tula-cli[report]' (from a clone: pip install '.[report]')",
        ) from None


def render_svg(figure: Figure, *, prefix: str = "", looks: Mapping[str, int] | None = None) -> str:
    """Return a figure as SVG that can be used on its own or inside a page.

    Args:
        figure: the figure. Values that are not finite, or not positive on a logarithmic scale, are left out.
        prefix: prefix of the ids, by default the figure's key; unique among the figures of a page.
        looks: style index of a series by its name, if several figures share it.

    Raises:
        SpecError: matplotlib is not installed.
    """
    require_matplotlib()
    with _use_plot_defaults():
        canvas = _draw_figure(figure, looks or {})
        written = io.StringIO()
        canvas.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix or figure.key) or "figure"
    root, _, content = written.getvalue().partition("<svg")[2].partition(">")
    title, description = html.escape(remove_control_characters(figure.title)), html.escape(describe_figure(figure))
    return (
        f'<svg class="figure" role="img" aria-labelledby="{name}-title {name}-desc"{root}>'
        f'<title id="{name}-title">{title}</title><desc id="{name}-desc">{description}</desc>'
        + _TAG.sub(lambda tag: _REFERENCE.sub(rf"\g<1>{name}-", tag[0]), content)
    )


_TAG = re.compile("<[^>]+>")
_REFERENCE = re.compile(r"""(?:xlink:)?(href="#| id="|url\(#)""")
"""Where matplotlib names an element; two figures of a page may have the same names."""


def draw_figure(figure: Figure) -> "Canvas":
    """Return a figure as one of matplotlib, on a white background, for a notebook or a file.

    Raises:
        SpecError: matplotlib is not installed.
    """
    require_matplotlib()
    with _use_plot_defaults():
        canvas = _draw_figure(figure, {}, dpi=_NOTEBOOK_DPI)
    canvas.set_facecolor(LIGHT["paper"])
    return canvas


_NOTEBOOK_DPI = 144


def describe_figure(figure: Figure) -> str:
    """Describe a figure for screen readers; its numbers are in the accompanying table."""
    names = ", ".join(remove_control_characters(series.name) for series in figure.series if series.name)
    sentences = [
        f"{remove_control_characters(figure.y_label)} against {remove_control_characters(figure.x_label)}"
        + (f": {names}" if names else "")
    ]
    sentences += [remove_control_characters(mark.text) for mark in figure.marks]
    return ". ".join(text for text in [*sentences, remove_control_characters(figure.caption)] if text)


@contextmanager
def _use_plot_defaults() -> Iterator[None]:
    """Use fixed drawing settings regardless of the user's matplotlib configuration, without warnings about fonts."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # it tells that it makes a list of fonts, the first time
    try:
        from matplotlib import style

        with style.context(["default", _RC]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Glyph .* missing from")  # the browser has others
            yield
    finally:
        log.setLevel(level)


def _draw_figure(figure: Figure, looks: Mapping[str, int], *, dpi: int = 72) -> "Canvas":
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH / 72, PLOT / 72), dpi=dpi, layout="constrained")
    axes, places = canvas.add_subplot(), Positions.of(figure)
    shown = list_drawn_series(figure, places, looks)
    axes.set_xscale("linear" if places.scale == "linear" else "log")
    axes.set_yscale("linear" if figure.y_scale == "linear" else "log")
    entries = _draw_series(axes, figure, shown)
    if not shown and not entries:
        _draw_no_data(axes)
        return canvas
    entries = [*entries, *_list_basis_entries(shown)]
    marks = draw_marks(axes, figure.marks, places)
    set_x_scale(axes, figure, places)
    set_y_scale(axes, figure, bars=any(item.style in _BARS for item in shown))
    has_numbers = len({mark.text for mark in figure.marks if mark.kind == "event"}) > 1
    axes.set_title(wrap_text(figure.y_label), pad=17 if has_numbers else 8, color=LIGHT["ink"])
    axes.set_xlabel(wrap_text(figure.x_label))
    only = len(entries) == 1 and not marks and entries[0].text in ("", figure.title, figure.y_label)
    lines = 0 if only else _draw_legend(canvas, [*entries, *marks])
    canvas.set_size_inches(WIDTH / 72, (PLOT + _LINE_HEIGHT * lines) / 72)
    return canvas


def _draw_series(axes: "Axes", figure: Figure, shown: Sequence[DrawnSeries]) -> list[Entry]:
    bars = [bar_series for bar_series in shown if bar_series.style in ("bars", "stacked")]
    curves = [bar_series for bar_series in shown if bar_series not in bars]
    density = [] if figure.density is None else draw_density(axes, figure.density, figure.y_scale)
    # Beside each other, or the intervals of one place hide each other.
    step = min(0.08, 0.5 / len(curves)) if curves and figure.x_scale == "category" and not bars else 0.0
    middle = (len(curves) - 1) / 2
    return [
        *density,
        *draw_bars(axes, bars),
        *(draw_curve(axes, bar_series, shift=step * (place - middle)) for place, bar_series in enumerate(curves)),
    ]


def _list_basis_entries(shown: Sequence[DrawnSeries]) -> list[Entry]:
    """Return legend entries for measured (filled) and predicted (open) values; empty if nothing is predicted."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    with_basis = [series for series in shown if series.told]
    states = {state for series in with_basis for state, known in zip(series.filled, series.known, strict=True) if known}
    if False not in states:
        return []
    bars = all(series.style in ("bars", "stacked") for series in with_basis)
    entries = []
    for state in sorted(states, reverse=True):
        face = LIGHT["muted"] if state else LIGHT["paper"]
        if bars:
            handle: Any = Patch(facecolor=face, edgecolor=LIGHT["muted"], linewidth=1.2)
        else:
            handle = Line2D(
                [],
                [],
                linestyle="none",
                marker="o",
                markersize=5.5,
                markerfacecolor=face,
                markeredgecolor=LIGHT["muted"],
            )
        entries.append(Entry(handle, "measured (filled)" if state else "predicted (open)"))
    return entries


def _draw_no_data(axes: "Axes") -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, "no values to draw", ha="center", va="center", color=LIGHT["muted"], transform=axes.transAxes)


# --- the legend

_LINE_HEIGHT = 15.0  # units


def _draw_legend(canvas: "Canvas", entries: Sequence[Entry]) -> int:
    """Draw the legend below the axes, and return the number of its lines."""
    texts = [wrap_text(entry.text) for entry in entries]
    longest = max(len(line) for text in texts for line in text.split("\n"))
    columns = min(max(1, 60 // (longest + 8)), 4)
    texts = [f"\N{WORD JOINER}{text}" if text.startswith("_") else text for text in texts]  # or it would be left out
    canvas.legend([entry.handle for entry in entries], texts, loc="outside lower left", ncols=columns)
    return -(-sum(text.count("\n") + 1 for text in texts) // columns)
