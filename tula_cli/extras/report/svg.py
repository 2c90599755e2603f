"""Figures of a report as SVG, drawn by matplotlib.

A drawing is 390 units wide and as high as its legend requires, so that its text, 10.5 units high, is readable on a
phone. Text is kept as text. With one version of matplotlib, equal figures give byte-identical SVG.
"""

import io
import itertools
import logging
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

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
"""Colours by role; no two roles share a colour, so that a role can be derived from a colour in a drawing."""
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


def get_series_marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def get_series_dash(index: int) -> Any:
    """Return the line style of a series by its index, in matplotlib's notation."""
    return DASHES[index // len(SERIES) % len(DASHES)]


def make_css_variables(colors: dict[str, str]) -> str:
    """Return the colours as CSS variables."""
    return "".join(f"--{role}:{value};" for role, value in colors.items())


def make_css_rules() -> str:
    """Return the CSS rules that give elements of a role the page's colour of that role; see `render_plain`."""
    return "".join(f".fill-{role}{{fill:var(--{role})}}.stroke-{role}{{stroke:var(--{role})}}" for role in LIGHT)


# --- Text that fits a width

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def remove_control_characters(text: str) -> str:
    """Replace characters that are invalid in XML or HTML (control characters, lone surrogates) by U+FFFD."""
    return _UNFIT.sub("\ufffd", text)


def measure_text_width(text: str) -> float:
    """Return an upper bound of a text's width in DejaVu Sans; 1 is the width of an ordinary letter (0.62 em)."""
    return sum(map(_measure_character_width, text))


def _measure_character_width(letter: str) -> float:
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 2.0
    if letter in "mwMW@%…":
        return 1.6
    return 1.0 if letter.isascii() and not letter.isupper() else 1.35


def is_wide_script(text: str) -> bool:
    """Return whether a text has letters that are missing in the font used for measuring."""
    return any(ord(letter) > 0x24FF and letter not in "…★◆−→" for letter in text)


def wrap_lines(text: str, wide: float, most: int) -> list[str]:
    """Wrap a text to lines of width `wide`; text beyond `most` lines is cut and ends in an ellipsis.

    Lines break at spaces, and inside words that are longer than a line.
    """
    wrapped = [""]
    for word in remove_control_characters(text).split():
        joined = f"{wrapped[-1]} {word}".strip()
        if measure_text_width(joined) <= wide:
            wrapped[-1] = joined
            continue
        if wrapped[-1]:
            wrapped.append("")
        for letter in word:
            if measure_text_width(wrapped[-1] + letter) > wide:
                wrapped.append("")
            wrapped[-1] += letter
    if len(wrapped) > most:
        last = wrapped[most - 1]
        while measure_text_width(last) > wide - 1.6:
            last = last[:-1]
        wrapped = [*wrapped[: most - 1], f"{last.rstrip()}…"]
    return wrapped


def fit_text(text: str, wide: float, most: int = 2) -> str:
    """Wrap a text to at most `most` lines of width `wide`."""
    return "\n".join(wrap_lines(text, wide, most))


# --- Numbers at ticks

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
_MOST_DECIMALS = 12
CHARACTER = 6.7  # units of a drawing that a digit takes
_GAP = 12.0  # units between two words


def place_ticks(low: float, high: float, scale: str, *, most: int) -> list[float]:
    """Return round numbers between two bounds, ascending.

    Args:
        low: lower bound; positive on a logarithmic scale.
        high: upper bound, greater than `low`.
        scale: "linear", "log" or "log2".
        most: maximum number of ticks, at least 2.
    """
    if scale == "log2":
        ticks = _list_power_ticks(low, high, 2.0, most)
    elif scale == "log":
        ticks = _list_decade_ticks(low, high, most)
    else:
        return _list_linear_ticks(low, high, most)
    return ticks if len(ticks) > 1 else _list_linear_ticks(low, high, min(most, 4))


def fit_ticks(low: float, high: float, scale: str, *, length: float) -> list[float]:
    """Return as many ticks as fit with their labels side by side on an axis of `length` units."""
    for most in range(10 if scale == "log2" else 7, 2, -1):
        ticks = place_ticks(low, high, scale, most=most)
        if _thin_ticks(ticks, low, high, scale, length):
            return ticks
    return place_ticks(low, high, scale, most=2)


def _thin_ticks(ticks: Sequence[float], low: float, high: float, scale: str, length: float) -> bool:
    place: Callable[[float], float] = float if scale == "linear" else math.log
    per = length / (place(high) - place(low))
    labels = format_ticks(ticks, scale)
    pairs = zip(zip(ticks, labels, strict=True), zip(ticks[1:], labels[1:], strict=True), strict=False)
    return all(
        per * (place(right) - place(left)) >= CHARACTER * (len(word) + len(next_word)) / 2 + _GAP
        for (left, word), (right, next_word) in pairs
    )


def _list_linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    # A sum of steps is off by the last digit; a quotient of whole numbers is not.
    return [count / round(1 / step) if step < 1 else count * step for count in range(first, last + 1)]


def _list_power_ticks(low: float, high: float, base: float, most: int) -> list[float]:
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / most))
    return [base**power for power in range(first, last + 1, every)]


def _list_decade_ticks(low: float, high: float, most: int) -> list[float]:
    for factors in ((1, 2, 5), (1, 3), (1,)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        shown = [value for value in marks if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(shown) <= most:
            return shown
    return _list_power_ticks(low, high, 10.0, most)


def format_ticks(values: Iterable[float], scale: str = "linear") -> list[str]:
    """Format the ticks of one axis; on a linear axis they share a unit and the fewest decimals that are exact."""
    known = list(values)
    if scale != "linear":
        return [_format_plain(value) if scale == "log2" else format_short(value) for value in known]
    largest = max((abs(value) for value in known), default=0.0)
    least = min((abs(value) for value in known if value), default=1.0)
    if largest >= 1e15 or least < 1e-4:
        return [_format_power(value) for value in known]
    size, suffix = _choose_tick_unit(largest)
    decimals = next(count for count in range(_MOST_DECIMALS + 1) if _are_distinct(known, size, count))
    return ["0" if value == 0 else f"{value / size:.{decimals}f}{suffix}".replace("-", "−") for value in known]


def _choose_tick_unit(value: float) -> tuple[float, str]:
    size, suffix = next(((size, suffix) for size, suffix in _SUFFIXES if value >= size), (1.0, ""))
    return (1e3 if suffix == "k" else size), suffix


def _format_plain(value: float) -> str:
    """Format a number of a base-2 axis: batches in full (65536, not 65.5k), scaling factors as fractions (1/64)."""
    if 1e-6 < value < 1 and 1 / value == round(1 / value):
        return f"1/{1 / value:.0f}"
    return f"{value:.0f}" if 1 <= abs(value) < 1e6 and value == round(value) else format_short(value)


def _are_distinct(values: Sequence[float], size: float, decimals: int) -> bool:
    """Return whether `decimals` represent all values exactly, or are the maximum number of decimals."""
    if decimals == _MOST_DECIMALS:
        return True
    return all(math.isclose(float(f"{v / size:.{decimals}f}"), v / size, rel_tol=1e-9, abs_tol=0.0) for v in values)


def format_short(value: float) -> str:
    """Format a number compactly with at most 4 significant digits: 1.2M, 40k, 0.05."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return _format_power(value)
    size, suffix = _choose_tick_unit(abs(value))
    digits = f"{value / size:.4g}" if size > 1 or abs(value) < 1e3 else f"{value:.0f}"
    return f"{digits}{suffix}".replace("-", "−")


def _format_power(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.3g}".partition("e")
    return (f"{mantissa}e{int(power)}" if power else mantissa).replace("-", "−")


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
    dashes: Any = get_series_dash(drawn_series.index) if line else "none"
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
        "marker": get_series_marker(drawn_series.index),
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

_LINE = 13.5  # units of a line of text
_AXIS = 310.0  # units that the horizontal axis has at least
_UPRIGHT = 180.0  # and the vertical one
_TALL = 2.2  # of a vertical tick's room, in its words' width: they stand above each other
_SLANTED = 14  # units between slanted words


def set_x_scale(axes: "Axes", figure: Figure, places: Positions) -> float:
    """Set the limits and ticks of the horizontal axis, and return the additional height of its labels in units."""
    low, high = axes.dataLim.intervalx
    if places.discrete:
        return _scale_categories(axes, figure, places, low, high)
    if places.scale == "linear" and figure.density is not None:
        axes.set_xlim(low, high)
    else:
        axes.set_xlim(*_pad_range(low, high, places.scale, zero=False))
    low, high = axes.get_xlim()
    known = sorted({x for series in figure.series for x in series.x if low <= x <= high})
    ticks = fit_ticks(low, high, places.scale, length=_AXIS)
    if places.scale == "log2" and len(known) <= 7 and _are_apart(known, low, high):
        ticks = known  # the batches themselves
    _set_ticks(axes.xaxis, ticks, format_ticks(ticks, places.scale))
    return 0.0


def _are_apart(known: Sequence[float], low: float, high: float) -> bool:
    labels = format_ticks(known, "log2")
    per = _AXIS / math.log(high / low)
    return all(
        per * math.log(right / left) >= CHARACTER * (len(word) + len(other)) / 2 + 8
        for (left, word), (right, other) in itertools.pairwise(zip(known, labels, strict=True))
    )


def _scale_categories(axes: "Axes", figure: Figure, places: Positions, low: float, high: float) -> float:
    texts = [format_short(x) for x in places.order] if places.order else list(figure.categories)
    last = max(len(texts) - 1, round(high))
    texts += [str(place) for place in range(len(texts), last + 1)]
    axes.set_xlim(min(low, -0.5), max(high, last + 0.5))
    axes.grid(visible=False, axis="x")
    room = _AXIS / (last + 1) / CHARACTER - 0.8
    if all(measure_text_width(part) <= room for text in texts for part in text.split()):
        labels = [fit_text(text, room, 3) for text in texts]
        _set_ticks(axes.xaxis, list(range(last + 1)), labels)
        return _LINE * max((text.count("\n") for text in labels), default=0)
    every = max(1, -(-(last + 1) * _SLANTED // int(_AXIS)))
    labels = [wrap_lines(text, 22, 1)[0] for text in texts[::every]]
    _set_ticks(axes.xaxis, list(range(0, last + 1, every)), labels)
    for word in axes.get_xticklabels():
        word.set(rotation=38, ha="right", rotation_mode="anchor")
    return 0.62 * CHARACTER * max(map(measure_text_width, labels), default=0)


def set_y_scale(axes: "Axes", figure: Figure, *, bars: bool) -> None:
    low, high = axes.dataLim.intervaly
    if figure.y_scale != "linear" and low <= 0:  # bars begin there
        low = axes.dataLim.minposy
    if figure.density is not None and not figure.series:
        axes.set_ylim(low, high)
    else:
        axes.set_ylim(*_pad_range(low, high, figure.y_scale, zero=bars))
    low, high = axes.get_ylim()
    ticks = fit_ticks(low, high, figure.y_scale, length=_UPRIGHT * _TALL)
    _set_ticks(axes.yaxis, ticks, format_ticks(ticks, figure.y_scale))


def _pad_range(low: float, high: float, scale: str, *, zero: bool) -> tuple[float, float]:
    """Return limits with padding around the values; a linear axis starts at 0 if 0 is near or bars are drawn."""
    if scale != "linear":
        room = max((high / low) ** 0.06, 1.1) if high > low else 2.0
        return low / room, high * room
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    if low >= 0 and (zero or low <= 0.4 * high):
        return 0.0, high + room
    return low - room, 0.0 if zero and high <= 0 else high + room


def _set_ticks(axis: Any, places: Sequence[float], labels: Sequence[str]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_ticks(list(places), labels=[remove_control_characters(text) for text in labels])


def label_axes(axes: "Axes", figure: Figure, *, numbered: bool) -> float:
    """Label the axes, the vertical one above it, and return the additional height of the labels in units."""
    above, below = fit_text(figure.y_label, 50), fit_text(figure.x_label, 50)
    axes.set_title(above, pad=17 if numbered else 8, color=LIGHT["ink"])
    axes.set_xlabel(below)
    return _LINE * (above.count("\n") + below.count("\n"))


# --- Marks

_POINTS: dict[str, dict[str, Any]] = {
    "choice": {"marker": "*", "markersize": 14, "markerfacecolor": LIGHT["ink"], "markeredgecolor": LIGHT["paper"]},
    "knee": {"marker": "D", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": LIGHT["ink"]},
    "limit": {"marker": "X", "markersize": 9, "markerfacecolor": LIGHT["ink"], "markeredgecolor": LIGHT["paper"]},
    "event": {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": LIGHT["ink"]},
}
_LINES = {"choice": (0, (1, 1)), "knee": (0, (8, 2, 1, 2)), "limit": (0, (6, 3)), "event": (0, (1, 2))}
_MOST_EVENTS = 9  # that the legend tells one by one
_ROOM = 0.05  # of the axis, which a number above an event takes


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
    """Draw a thin line per event, and return one legend entry for each distinct text."""
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


def number_events(axes: "Axes", marks: Sequence[Annotation], places: Positions) -> bool:
    """Write the numbers of events above their lines, merging those that are too close to each other.

    The axes must have their limits. Return whether there are any numbers.
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


# --- Plain SVG
#
# Nothing in it touches the page around it: no rule of a style sheet, no id that another figure could have, no metadata. Colours
# are attributes, which hold where the drawing stands alone, and classes, by which a page gives them its own (`make_css_rules`).

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_HREF = f"{{{_XLINK}}}href"
_ROLES = {value: role for role, value in LIGHT.items()}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_LONG = re.compile(r"-?\d+\.\d{3,}")
_NUMBERS = ("d", "x", "y", "width", "height", "transform", "points")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def render_plain(drawn: str, *, prefix: str, title: str, description: str) -> str:
    """Convert matplotlib's SVG into SVG for a page.

    Args:
        drawn: SVG written by matplotlib.
        prefix: prefix of the ids; unique on the page.
        title: title for screen readers.
        description: description of the content in a sentence or two, for screen readers.
    """
    root = ElementTree.fromstring(drawn)
    _strip_metadata(root)
    names = _collect_names(root, prefix)
    for element in root.iter():
        _tag_element(element)
        _replace_color(element)
        _rename_ids(element, names)
        for name in _NUMBERS:
            if name in element.attrib:
                element.set(
                    name,
                    _LONG.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), element.get(name, "")),
                )
    _describe(root, prefix, title, description)
    return ElementTree.tostring(root, encoding="unicode")


def _strip_metadata(root: ElementTree.Element) -> None:
    """Remove metadata and style rules, which would apply to the whole page, and the whitespace between elements."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
            child.tail = None
        if parent.tag != f"{{{_SVG}}}text":
            parent.text = None
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}defs" and not len(child):
                parent.remove(child)


def _collect_names(root: ElementTree.Element, prefix: str) -> dict[str, str]:
    """Return new ids for the elements that are referred to."""
    known = [element.get("id", "") for element in root.iter()]
    used = {name for element in root.iter() for name in _find_references(element)}
    return {name: f"{prefix}-{place}" for place, name in enumerate(name for name in known if name in used)}


def _find_references(element: ElementTree.Element) -> Iterator[str]:
    for name, value in element.attrib.items():
        if name == _HREF:
            yield value.removeprefix("#")
        yield from _REFERENCE.findall(value)


def _rename_ids(element: ElementTree.Element, names: dict[str, str]) -> None:
    old_id = element.attrib.pop("id", "")
    if old_id in names:
        element.set("id", names[old_id])
    if (target := element.attrib.pop(_HREF, None)) is not None:
        element.set("href", f"#{names[target.removeprefix('#')]}")
    for name, value in element.attrib.items():
        element.set(name, _REFERENCE.sub(lambda match: f"url(#{names[match[1]]})", value))


def _tag_element(element: ElementTree.Element) -> None:
    """Remove the SVG namespace from a tag; the root declares it."""
    element.tag = element.tag.removeprefix(f"{{{_SVG}}}")


def _replace_color(element: ElementTree.Element) -> None:
    """Convert the style of an element to attributes, and add classes for its colours."""
    for declaration in filter(None, map(str.strip, element.attrib.pop("style", "").split(";"))):
        name, value = (part.strip() for part in declaration.split(":", 1))
        if name in ("font", "font-size"):  # matplotlib has written either
            size = re.search(r"([\d.]+)px", value)
            assert size, declaration
            element.set("font-size", size[1])
        elif name != "font-family":  # which the root has
            element.set(name, value)
    roles = {name: _ROLES.get(element.get(name, "")) for name in ("fill", "stroke")}
    classes = [f"{name}-{role}" for name, role in roles.items() if role is not None]
    if element.tag == "text" and "fill" not in element.attrib:  # it was left black
        element.set("fill", LIGHT["ink"])
        classes.append("fill-ink")
    if classes:
        element.set("class", " ".join(classes))


def _describe(root: ElementTree.Element, prefix: str, title: str, description: str) -> None:
    kept = {"viewBox": root.get("viewBox", ""), "xmlns": _SVG, "role": "img", "class": "figure"}
    root.attrib.clear()
    root.attrib.update({**kept, "stroke-linejoin": "round", "font-family": FONT})
    root.set("aria-labelledby", f"{prefix}-title {prefix}-desc")
    for place, (name, text) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(name, {"id": f"{prefix}-{name}"})
        child.text = text
        root.insert(place, child)


# --- Figures

WIDTH, PLOT = 390.0, 245.0  # units: of a drawing, and the height of what is not its legend
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tula",
    "text.parse_math": False,  # a dollar is a dollar
    "font.family": ["DejaVu Sans"],
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
        canvas.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix or figure.key) or "figure"
    return render_plain(
        written.getvalue(),
        prefix=name,
        title=remove_control_characters(figure.title),
        description=describe_figure(figure),
    )


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
    extra = set_x_scale(axes, figure, places)
    set_y_scale(axes, figure, bars=any(item.style in ("bars", "stacked") for item in shown))
    extra += label_axes(axes, figure, numbered=number_events(axes, figure.marks, places))
    only = len(entries) == 1 and not marks and entries[0].text in ("", figure.title, figure.y_label)
    high = 0.0 if only else _draw_legend(canvas, [*entries, *marks])
    canvas.set_size_inches(WIDTH / 72, (PLOT + extra + high) / 72)
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


def _draw_legend(canvas: "Canvas", entries: Sequence[Entry]) -> float:
    """Draw the legend below the axes in as many columns as fit, and return its height in units."""
    # A name that begins with "_" would be left out.
    named = [(entry.handle, fit_text(entry.text, 50)) for entry in entries]
    named = [(handle, f"\N{WORD JOINER}{text}" if text.startswith("_") else text) for handle, text in named]
    unknown = any(is_wide_script(text) for _, text in named)  # wider than they are taken for
    widest = max(measure_text_width(line) for _, text in named for line in text.split("\n"))
    hoped = 1 if unknown else min(max(round(1.4 * WIDTH / (6.2 * widest + 35)), 1), 4)
    for columns in range(hoped, 0, -1):
        legend = canvas.legend(*zip(*named, strict=True), loc="outside lower left", ncols=min(columns, len(named)))
        box, units = legend.get_window_extent(), 72 / canvas.dpi
        if box.width * units <= WIDTH - 4 or columns == 1:
            return float(box.height * units)
        legend.remove()
    raise AssertionError("one column is the last")
