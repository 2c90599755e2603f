"""Figures of a report as SVG, drawn by matplotlib.

A drawing is 390 units wide and as high as its legend asks for, so that its words, 10.5 units high, can be read on a telephone.
Text stays text. The same figure is the same SVG, byte for byte, with one version of matplotlib.
"""

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tula_cli.errors import SpecError
from tula_cli.services.reporting.document import Figure
from tula_cli.show.html.drawn_axes import label, scale_x, scale_y
from tula_cli.show.html.drawn_marks import draw_marks, number_events
from tula_cli.show.html.drawn_series import Drawable, Entry, Places, draw_bars, draw_curve, draw_density, drawables
from tula_cli.show.html.fitted_text import clean, fitted, foreign, width
from tula_cli.show.html.palette import LIGHT
from tula_cli.show.html.plain_svg import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

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
    """Refuse to draw where nothing can.

    Raises:
        SpecError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SpecError(
            "a page with figures needs the package matplotlib, which is not installed",
            "pip install 'tula-cli[report]' (from a clone: pip install '.[report]'); the same answer without figures has --json",
        ) from None


def figure_svg(figure: Figure, *, prefix: str = "", looks: Mapping[str, int] | None = None) -> str:
    """Return a figure as SVG that stands alone, also inside a page.

    Args:
        figure: what is drawn. What is not finite, or not above 0 on a logarithmic scale, is left out.
        prefix: of the ids in it; the figure's key unless it is given. Figures of one page must differ in it.
        looks: the place of a series in the palette by its name, where several figures have it.

    Raises:
        SpecError: matplotlib is not installed.
    """
    require_matplotlib()
    with _defaults():
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(WIDTH / 72, PLOT / 72), layout="constrained")
        _draw(canvas, figure, looks or {})
        written = io.StringIO()
        canvas.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix or figure.key) or "figure"
    return plain(written.getvalue(), prefix=name, title=clean(figure.title), description=description(figure))


def description(figure: Figure) -> str:
    """Return what a figure shows, for those who hear it; its numbers stand in the table beside it."""
    names = ", ".join(clean(series.name) for series in figure.series if series.name)
    told = [f"{clean(figure.y_label)} against {clean(figure.x_label)}" + (f": {names}" if names else "")]
    told += [clean(mark.text) for mark in figure.marks]
    return ". ".join(text for text in [*told, clean(figure.caption)] if text)


@contextmanager
def _defaults() -> Iterator[None]:
    """Draw as we do, whatever settings the user has for drawings of their own, and without words about fonts."""
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


def _draw(canvas: "Canvas", figure: Figure, looks: Mapping[str, int]) -> None:
    axes, places = canvas.add_subplot(), Places.of(figure)
    shown = drawables(figure, places, looks)
    axes.set_xscale("linear" if places.scale == "linear" else "log")
    axes.set_yscale("linear" if figure.y_scale == "linear" else "log")
    entries = _series(axes, figure, shown)
    if not shown and not entries:
        _nothing(axes)
        return
    entries = [*entries, *_basis(shown)]
    marks = draw_marks(axes, figure.marks, places)
    extra = scale_x(axes, figure, places)
    scale_y(axes, figure, bars=any(one.style in ("bars", "stacked") for one in shown))
    extra += label(axes, figure, numbered=number_events(axes, figure.marks, places))
    only = len(entries) == 1 and not marks and entries[0].text in ("", figure.title, figure.y_label)
    high = 0.0 if only else _legend(canvas, [*entries, *marks])
    canvas.set_size_inches(WIDTH / 72, (PLOT + extra + high) / 72)


def _series(axes: "Axes", figure: Figure, shown: Sequence[Drawable]) -> list[Entry]:
    bars = [one for one in shown if one.style in ("bars", "stacked")]
    curves = [one for one in shown if one not in bars]
    density = [] if figure.density is None else draw_density(axes, figure.density, figure.y_scale)
    # Beside each other, or the intervals of one place hide each other.
    step = min(0.08, 0.5 / len(curves)) if curves and figure.x_scale == "category" and not bars else 0.0
    middle = (len(curves) - 1) / 2
    return [
        *density,
        *draw_bars(axes, bars),
        *(draw_curve(axes, one, shift=step * (place - middle)) for place, one in enumerate(curves)),
    ]


def _basis(shown: Sequence[Drawable]) -> list[Entry]:
    """Tell what filled and open stand for, where both are drawn or all is open."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    told = [one for one in shown if one.told]
    states = {state for one in told for state, known in zip(one.filled, one.known, strict=True) if known}
    if False not in states:
        return []
    bars = all(one.style in ("bars", "stacked") for one in told)
    found = []
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
        found.append(Entry(handle, "measured (filled)" if state else "predicted (open)"))
    return found


def _nothing(axes: "Axes") -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, "no values to draw", ha="center", va="center", color=LIGHT["muted"], transform=axes.transAxes)


# --- the legend


def _legend(canvas: "Canvas", entries: Sequence[Entry]) -> float:
    """Write the legend below the axes, in as many columns as have room; return its height in units."""
    # A name that begins with "_" would be left out.
    named = [(entry.handle, fitted(entry.text, 50)) for entry in entries]
    named = [(handle, f"\N{WORD JOINER}{text}" if text.startswith("_") else text) for handle, text in named]
    unknown = any(foreign(text) for _, text in named)  # wider than they are taken for
    widest = max(width(line) for _, text in named for line in text.split("\n"))
    hoped = 1 if unknown else min(max(round(1.4 * WIDTH / (6.2 * widest + 35)), 1), 4)
    for columns in range(hoped, 0, -1):
        legend = canvas.legend(*zip(*named, strict=True), loc="outside lower left", ncols=min(columns, len(named)))
        box = legend.get_window_extent()
        if box.width <= WIDTH - 4 or columns == 1:
            return float(box.height)
        legend.remove()
    raise AssertionError("one column is the last")
