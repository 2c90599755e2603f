"""Figures of a report, drawn by matplotlib.

A drawing is 390 units wide, so that its text, 10.5 units high, is readable on a phone. Text is kept as text. With one
version of matplotlib, equal figures give byte-identical SVG.
"""

import html
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tula_cli.errors import SpecError
from tula_cli.services.document import Annotation, Density, Figure, Series

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# --- Colours
#
# Colours of curves after Okabe and Ito (2008), darkened to a contrast of at least 3 with white. Curves also differ in
# their markers, and from the seventh on in their dashes.

COLORS = {
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
"""Colours by role."""
SERIES_COLORS = tuple(role for role in COLORS if role[0] == "s")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours, so that 168 series are distinct
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


# --- Text and numbers

_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LINE_LENGTH = 50  # maximum characters per line of text in a drawing
_MAX_PLOTTED_VALUE = 1e200  # axes overflow at larger values


def replace_invalid_xml_characters(text: str) -> str:
    """Replace characters that are invalid in XML or HTML (control characters, lone surrogates) by U+FFFD."""
    return _CONTROL_CHARACTERS.sub("\ufffd", text)


def wrap_text(text: str, length: int = _LINE_LENGTH, *, max_lines: int = 2) -> str:
    """Wrap a text to at most `max_lines` lines of `length` characters; a longer text ends in an ellipsis."""
    if 3 * sum(character.isupper() or not character.isascii() for character in text) > len(text):
        length = length // 2  # capitals and letters of other scripts are wider
    lines = textwrap.wrap(replace_invalid_xml_characters(text), max(length, 1))
    return "\n".join(
        lines if len(lines) <= max_lines else [*lines[: max_lines - 1], f"{lines[max_lines - 1][: length - 1]}…"]
    )


def format_tick(value: float) -> str:
    """Format a number at a tick: 0.05, 4096, 40k, 1M."""
    from matplotlib.ticker import EngFormatter

    is_power = 1 <= value < 1e6 and math.log2(value).is_integer()
    return EngFormatter(sep="")(value) if abs(value) >= 1e4 and not is_power else f"{value:.4g}".replace("-", "−")


def choose_tick_positions(low: float, high: float, scale: str) -> list[float]:
    """Return round numbers between two bounds, ascending; both are positive on a logarithmic scale."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    subs = (1.0, 2.0, 5.0) if scale == "log" and high < 100 * low else (1.0,)
    evenly = MaxNLocator(6, steps=[1, 2, 5, 10])
    locators = [evenly] if scale == "linear" else [LogLocator(2 if scale == "log2" else 10, subs, numticks=7), evenly]
    choices = [[float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high] for locator in locators]
    return next((ticks for ticks in choices if len(ticks) > 1), choices[-1])


def _convert_to_floats(values: Sequence[float | None], scale: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return values as numbers; nan if one is unknown, too large to draw, or not positive on a logarithmic scale."""
    numbers = np.array([math.nan if value is None else value for value in values], dtype=float)
    numbers[~(np.abs(numbers) < _MAX_PLOTTED_VALUE)] = math.nan
    if scale != "linear":
        numbers[numbers <= 0] = math.nan
    return numbers


# --- Curves, bars and densities

_MAX_MARKERS = 60  # number of points from which on a curve has no markers
_MAX_ERROR_BARS = 15  # number of points from which on the intervals of a curve are drawn as a band
_SHADES = (0.07, 0.17, 0.3, 0.46, 0.63, 0.82, 1.0)
_LEVELS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def _draw_curve(axes: "Axes", figure: Figure, series: Series, style_index: int, *, shift: float) -> "Artist":
    """Draw a curve or points with their intervals, shifted to the right, and return the symbol for the legend."""
    from matplotlib.lines import Line2D

    order = np.argsort(np.array(series.x, dtype=float))  # points in ascending order of x
    x = _convert_to_floats(series.x, _get_x_scale(figure))[order] + shift
    y = _convert_to_floats(series.y, figure.y_scale)[order]
    known = ~np.isnan(x + y)
    measured = np.ones(len(x), dtype=bool) if series.measured is None else np.array(series.measured)[order]
    color, style = COLORS[SERIES_COLORS[style_index % len(SERIES_COLORS)]], series.style
    dashes: Any = "none" if style == "points" else DASHES[style_index // len(SERIES_COLORS) % len(DASHES)]
    has_markers = style == "points" or known.sum() < 2 or (style == "line+points" and len(x) <= _MAX_MARKERS)
    if series.low is not None and series.high is not None:
        low, high = (_convert_to_floats(bounds, figure.y_scale)[order] for bounds in (series.low, series.high))
        low = np.fmin(y, np.where(np.isnan(low), y, low))
        high = np.fmax(y, np.where(np.isnan(high), y, high))
        if style == "line" or (style == "line+points" and len(x) >= _MAX_ERROR_BARS):
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0, zorder=2)
        else:
            uncertain = known & (high > low)
            lengths = (y - low)[uncertain], (high - y)[uncertain]
            bars: dict[str, Any] = {"color": color, "ecolor": color, "elinewidth": 1.1, "capsize": 3}
            axes.errorbar(x[uncertain], y[uncertain], lengths, fmt="none", **bars)
    axes.plot(x, y, color=color, linestyle=dashes, linewidth=1.6, zorder=3)
    marker = {"marker": MARKERS[style_index % len(MARKERS)], "markersize": 5.5, "markeredgecolor": color}
    faces = {True: color, False: COLORS["paper"]}
    for is_plan_measured, face in faces.items():
        shown = known & (measured == is_plan_measured)
        if has_markers and shown.any():
            points: dict[str, Any] = {"linestyle": "none", "color": color, **marker, "markerfacecolor": face}
            axes.plot(x[shown], y[shown], zorder=4, clip_on=False, **points)
    point_style: dict[str, Any] = (
        {**marker, "markerfacecolor": faces[bool(measured[known].any())]} if has_markers else {}
    )
    return Line2D([], [], color=color, linestyle=dashes, linewidth=1.6, label=series.name, **point_style)


def _draw_stack(axes: "Axes", bars: Sequence[tuple[Series, int]]) -> "list[Artist]":
    """Draw series as stacked bars, and return the symbols for the legend."""
    from matplotlib.patches import Patch

    bottoms: dict[float, float] = {}
    symbols: list[Artist] = []
    for series, style_index in bars:
        color = COLORS[SERIES_COLORS[style_index % len(SERIES_COLORS)]]
        heights = np.nan_to_num(_convert_to_floats(series.y, "linear"))
        axes.bar(series.x, heights, 0.62, [bottoms.get(x, 0.0) for x in series.x], color=color, zorder=2)
        bottoms |= {x: bottoms.get(x, 0.0) + height for x, height in zip(series.x, heights, strict=True)}
        symbols.append(Patch(facecolor=color, label=series.name))
    return symbols


def _draw_density(axes: "Axes", density: Density) -> "list[Artist]":
    """Draw shares as shades, one path per shade, and return the symbols for the legend."""
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path

    x, y, shares = np.array(density.x_edges), np.array(density.y_edges), np.array(density.shares)
    symbols: list[Artist] = []
    for shade, (low, high) in zip(_SHADES, itertools.pairwise(_LEVELS), strict=True):
        column, row = np.nonzero((shares > low) & (shares <= high))
        if column.size:
            corners = [(x[column + right], y[row + up]) for right, up in ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))]
            style: dict[str, Any] = {"facecolor": COLORS["s0"], "alpha": shade, "linewidth": 0}
            cells = Path.make_compound_path(*(Path(cell, closed=True) for cell in np.moveaxis(np.array(corners), 2, 0)))
            axes.add_patch(PathPatch(cells, zorder=2, **style))
            label = f"{100 * low:g} to {100 * high:g} %" if low else f"under {100 * high:g} %"
            symbols.append(Patch(**style, label=label))
    axes.autoscale_view()  # adding patches does not rescale the axes
    return symbols


# --- Marks

_POINT_STYLE: dict[str, Any] = {
    "linestyle": "none",
    "marker": "*",
    "markersize": 14,
    "markerfacecolor": COLORS["ink"],
    "markeredgecolor": COLORS["paper"],
}
_LINE_STYLES = {"choice": (0, (1, 1)), "limit": (0, (6, 3)), "event": (0, (1, 2))}


def _draw_marks(axes: "Axes", figure: Figure) -> "list[Artist]":
    """Draw the marks that have a position, and return the symbols for the legend; events are numbered above the axes."""
    from matplotlib.lines import Line2D

    events = list(dict.fromkeys(mark.text for mark in figure.marks if _is_event(mark)))
    symbols: dict[str, Artist] = {}
    for mark in figure.marks:
        (x,), (y,) = _convert_to_floats([mark.x], _get_x_scale(figure)), _convert_to_floats([mark.y], figure.y_scale)
        style: dict[str, Any] = {"linestyle": _LINE_STYLES[mark.kind], "linewidth": 1.2, "color": COLORS["ink"]}
        label = mark.text
        if not math.isnan(x + y):
            style = _POINT_STYLE
            axes.plot([x], [y], zorder=6, clip_on=False, **style)
        elif mark.x is None and not math.isnan(y):
            axes.axhline(y, zorder=5, **style)
        elif mark.y is None and not math.isnan(x):
            if _is_event(mark):
                style["color"] = COLORS["muted"]
            axes.axvline(x, zorder=1.5 if _is_event(mark) else 5, **style)
            if _is_event(mark) and len(events) > 1:
                number = events.index(mark.text) + 1
                label = f"{number}: {mark.text}"
                where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
                axes.text(x, 1.005, str(number), fontsize=10, color=COLORS["muted"], **where)
        else:
            continue
        symbols[label] = Line2D([], [], label=label, **style)
    return list(symbols.values())


def _is_event(mark: Annotation) -> bool:
    return mark.kind == "event" and mark.y is None


# --- Figures

WIDTH, PLOT_HEIGHT = 390.0, 255.0  # width of a drawing, and height without its legend, in points
_LINE_HEIGHT = 15.0  # height of a line of the legend, in points
_NOTEBOOK_DPI = 144
_MATPLOTLIB_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tula",
    "text.parse_math": False,  # dollar signs are literal
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 10.5,
    "figure.dpi": 72.0,
    "savefig.dpi": 72.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLORS["muted"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "figure.facecolor": "none",
    "grid.color": COLORS["grid"],
    "lines.markeredgewidth": 1.3,
    "text.color": COLORS["ink"],
    "axes.labelcolor": COLORS["ink"],
    "xtick.color": COLORS["muted"],
    "xtick.labelcolor": COLORS["ink"],
    "ytick.color": COLORS["muted"],
    "ytick.labelcolor": COLORS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.0,
    "legend.borderaxespad": 0.3,
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
            "figures need the package matplotlib, which is not installed",
            "run pip install 'tula-cli[report]' (in a clone: pip install '.[report]')",
        ) from None


def render_svg(figure: Figure, *, prefix: str = "", style_indices: Mapping[str, int] | None = None) -> str:
    """Return a figure as SVG that can be used on its own or inside a page.

    Args:
        figure: the figure. Values that are not finite, or not positive on a logarithmic scale, are left out.
        prefix: prefix of the ids, by default the figure's key; unique among the figures of a page.
        style_indices: style index of a series by its name, if several figures share it.

    Raises:
        SpecError: matplotlib is not installed.
    """
    require_matplotlib()
    with _use_plot_defaults():
        written = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _draw_figure(figure, style_indices or {}).savefig(written, format="svg", metadata=metadata)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix or figure.key) or "figure"
    root, _, content = written.getvalue().partition("<svg")[2].partition(">")
    title, description = html.escape(replace_invalid_xml_characters(figure.title)), html.escape(describe_figure(figure))
    return (
        f'<svg class="figure" role="img" aria-labelledby="{name}-title {name}-desc"{root}>'
        f'<title id="{name}-title">{title}</title><desc id="{name}-desc">{description}</desc>'
        + _TAG_PATTERN.sub(lambda tag: _REFERENCE_PATTERN.sub(rf"\g<1>{name}-", tag[0]), content)
    )


_TAG_PATTERN = re.compile("<[^>]+>")
_REFERENCE_PATTERN = re.compile(r"""(?:xlink:)?(href="#| id="|url\(#)""")
"""Where matplotlib names an element; two figures of a page may have the same names."""


def draw_figure(figure: Figure) -> "Canvas":
    """Return a figure as one of matplotlib, on a white background, for a notebook or a file.

    Raises:
        SpecError: matplotlib is not installed.
    """
    require_matplotlib()
    with _use_plot_defaults():
        canvas = _draw_figure(figure, {}, dpi=_NOTEBOOK_DPI)
    canvas.set_facecolor(COLORS["paper"])
    return canvas


def describe_figure(figure: Figure) -> str:
    """Describe a figure for screen readers; its numbers are in the accompanying table."""
    names = ", ".join(series.name for series in figure.series if series.name)
    axes = f"{figure.y_label} against {figure.x_label}" + f": {names}" * bool(names)
    sentences = [axes, *(mark.text for mark in figure.marks), figure.caption]
    return replace_invalid_xml_characters(". ".join(text for text in sentences if text))


@contextmanager
def _use_plot_defaults() -> Iterator[None]:
    """Use fixed drawing settings regardless of the user's matplotlib configuration, without warnings about fonts."""
    from matplotlib import style

    with style.context(["default", _MATPLOTLIB_SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")  # browsers have other fonts
        yield


def _get_x_scale(figure: Figure) -> str:
    return "linear" if figure.x_scale == "category" else figure.x_scale


def _draw_figure(figure: Figure, style_indices: Mapping[str, int], *, dpi: int = 72) -> "Canvas":
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH / 72, PLOT_HEIGHT / 72), dpi=dpi, layout="constrained")
    axes = canvas.add_subplot()
    shown = [
        (series, style_indices.get(series.name, index))
        for index, series in enumerate(figure.series)
        if not np.isnan(_convert_to_floats(series.y, figure.y_scale)).all()
    ]
    if not shown and figure.density is None:
        axes.set_axis_off()
        where: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "no values to draw", color=COLORS["muted"], **where)
        return canvas
    axes.margins(0.0 if figure.density is not None else 0.06)
    axes.use_sticky_edges = False  # otherwise the bottom of an empty bar would be a limit of the axis
    axes.set_xscale("linear" if _get_x_scale(figure) == "linear" else "log")
    axes.set_yscale("linear" if figure.y_scale == "linear" else "log")
    symbols = [] if figure.density is None else _draw_density(axes, figure.density)
    symbols += _draw_stack(axes, [(series, style_index) for series, style_index in shown if series.style == "stacked"])
    curves = [(series, style_index) for series, style_index in shown if series.style != "stacked"]
    # Curves over categories are shifted, so that their intervals do not overlap.
    step = min(0.08, 0.5 / len(shown)) if figure.x_scale == "category" and curves == shown != [] else 0.0
    for index, (series, style_index) in enumerate(curves):
        symbols.append(_draw_curve(axes, figure, series, style_index, shift=step * (index - (len(curves) - 1) / 2)))
    symbols += _list_basis_symbols([series for series, _ in shown])
    only = len(symbols) == 1 and symbols[0].get_label() in ("", figure.title, figure.y_label)
    symbols += (marks := _draw_marks(axes, figure))
    _set_axis_limits(axes, figure)
    has_numbers = len({mark.text for mark in figure.marks if _is_event(mark)}) > 1
    axes.set_title(wrap_text(figure.y_label), pad=17 if has_numbers else 8, color=COLORS["ink"])
    axes.set_xlabel(wrap_text(figure.x_label))
    lines = 0 if only and not marks else _draw_legend(canvas, symbols)
    canvas.set_size_inches(WIDTH / 72, (PLOT_HEIGHT + _LINE_HEIGHT * lines) / 72)
    return canvas


def _list_basis_symbols(shown: Sequence[Series]) -> "list[Artist]":
    """Return the symbols of measured (filled) and predicted (open) points; none if nothing is predicted."""
    from matplotlib.lines import Line2D

    if all(all(series.measured) for series in shown if series.measured is not None):
        return []
    point: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5.5, "markeredgecolor": COLORS["muted"]}
    states = {True: ("muted", "measured (filled)"), False: ("paper", "predicted (open)")}
    return [
        Line2D([], [], **point, markerfacecolor=COLORS[face], label=label)
        for state, (face, label) in states.items()
        if any(state in series.measured for series in shown if series.measured is not None)
    ]


def _set_axis_limits(axes: "Axes", figure: Figure) -> None:
    """Set limits and ticks; a linear axis starts at 0 if 0 is near."""
    if figure.y_scale == "linear" and 0 <= axes.dataLim.y0 <= 0.4 * axes.dataLim.y1:
        axes.set_ylim(bottom=0.0)
    if figure.x_scale == "linear" and 0 <= axes.dataLim.x0 <= 0.4 * axes.dataLim.x1:
        axes.set_xlim(left=0.0)
    _set_ticks(axes.yaxis, choose_tick_positions(*axes.get_ylim(), figure.y_scale))
    if figure.x_scale != "category":
        _set_ticks(axes.xaxis, choose_tick_positions(*axes.get_xlim(), figure.x_scale))
        return
    axes.set_xlim(-0.5, max(axes.dataLim.x1, len(figure.categories) - 1) + 0.5)
    axes.grid(visible=False, axis="x")
    length = _LINE_LENGTH // max(len(figure.categories), 1)
    every = -(-len(figure.categories) // 25) or 1
    is_slanted = any(len(word) > length for text in figure.categories for word in text.split())
    limits = {"length": 22, "max_lines": 1} if is_slanted else {"length": length, "max_lines": 3}
    labels = [wrap_text(text, **limits) for text in figure.categories[::every]]
    _set_ticks(axes.xaxis, range(0, len(figure.categories), every), labels)
    if is_slanted:
        for word in axes.get_xticklabels():
            word.set(rotation=38, ha="right", rotation_mode="anchor")


def _set_ticks(axis: Any, positions: Sequence[float], labels: Sequence[str] | None = None) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_ticks(
        list(positions), labels=[format_tick(position) for position in positions] if labels is None else labels
    )


def _draw_legend(canvas: "Canvas", symbols: "Sequence[Artist]") -> int:
    """Draw the legend below the axes, and return the number of its lines."""
    texts = [wrap_text(str(symbol.get_label())) for symbol in symbols]
    longest = max(len(line) for text in texts for line in text.split("\n"))
    columns = min(max(1, 60 // (longest + 8)), 4)
    # matplotlib leaves out labels that start with an underscore
    texts = [f"\N{WORD JOINER}{text}" if text.startswith("_") else text for text in texts]
    canvas.legend(list(symbols), texts, loc="outside lower left", ncols=columns)
    return -(-sum(text.count("\n") + 1 for text in texts) // columns)
