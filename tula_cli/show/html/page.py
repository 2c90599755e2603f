"""The page of `tula compare --html`: one file with the table and its plots, drawn as SVG; no scripts, nothing to load."""

import dataclasses
import functools
import html
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tula_cli.services.comparison.accuracy import CompareReport, Curve, Row
from tula_cli.show.compare import comparison_note, digits, heads, lost, moment_of, spread, time_column
from tula_cli.show.html.svg import COLORS, Frame, Point, Series, axes, chart, drawing, look, round_numbers, short
from tula_cli.words import method_label, number, plural

REFERENCE_COLOR = "#000000"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; } th { border-bottom: 1px solid #444; vertical-align: bottom; }
th:nth-child(2), td:nth-child(2), th:last-child, td:last-child { text-align: left; }
tr.first td { border-top: 1px solid #ccc; } .charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.legend span { margin-right: 1.2rem; white-space: nowrap; } .note { color: #555; max-width: 75ch; }
svg text { font: 12px system-ui, sans-serif; fill: #333; }
"""


def comparison(report: CompareReport, curves: Sequence[Curve], *, title: str) -> str:
    """Return the page.

    Args:
        report: the table.
        curves: what every training logged at the end of its epochs.
        title: of the page.
    """
    colors = _colors(report.rows)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table(report),
        f'<p class="note">{html.escape(_explained(report))}</p>',
        _legend(colors),
        *(part for metric in _drawn(report) for part in _drawings(report, metric, curves, colors)),
        *_section("Diagnostics", _diagnostics(curves, colors)),
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _drawn(report: CompareReport) -> tuple[str, ...]:
    """Return the metrics that are drawn: the one that is compared, and of a language model its perplexity."""
    return (report.metric, *(metric for metric in report.columns if metric == "perplexity" and not report.of_script))


def _drawings(report: CompareReport, metric: str, curves: Sequence[Curve], colors: Mapping[str, str]) -> Iterator[str]:
    words = _metric_words(report, metric)
    yield from _section(f"{words} by batch", [_by_batch(report, metric, colors)])
    yield from _section(f"{words} on the way", _on_the_way(report, metric, curves, colors))


def _metric_words(report: CompareReport, metric: str) -> str:
    if report.of_script:
        return metric
    return {"top1": "Top-1 accuracy (%)", "perplexity": "Perplexity"}.get(metric, "Loss")


def _colors(rows: Iterable[Row]) -> dict[str, str]:
    """Return a colour for each method; the reference is black."""
    names = dict.fromkeys(row.method for row in rows if not row.reference)
    found = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    reference = [row.method for row in rows if row.reference]
    return {method_label(method, reference=True): REFERENCE_COLOR for method in reference} | found


def _section(title: str, charts: Sequence[str]) -> Iterator[str]:
    drawn = [chart for chart in charts if chart]
    if drawn:
        yield f'<h2>{html.escape(title)}</h2><div class="charts">{"".join(drawn)}</div>'


# --- the table


def _table(report: CompareReport) -> str:
    metrics = (html.escape(head) for head in heads(report))
    divisor, unit = time_column(report)
    columns = ("batch", "method", "n", *metrics, "gap", "recovered (%)", "samples", f"time ({unit})", "note")
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in columns) + "</tr>"]
    batch = None
    for row in report.rows:
        cells = (
            str(row.batch),
            html.escape(method_label(row.method, reference=row.reference)),
            str(row.seeds),
            *(spread(row.stat(metric), digits(report, metric)) for metric in report.columns),
            "-" if row.gap is None else f"{row.gap:.{digits(report, report.metric)}f}",
            "-" if row.recovered is None else f"{100 * row.recovered:.0f}",
            "-" if row.samples is None else f"{row.samples:.0f}",
            "-" if row.hours is None else number(3600 * row.hours / divisor),
            comparison_note(row),
        )
        first = ' class="first"' if row.batch != batch else ""
        lines.append(f"<tr{first}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        batch = row.batch
    return f"<table>{''.join(lines)}</table>"


def _explained(report: CompareReport) -> str:
    controls = any(row.method.startswith("lbt-x") for row in report.rows)
    return (
        f"{report.finished} of {report.total} trainings. Mean ± sample standard deviation over n seeds,"
        f" {moment_of(report)}, on {plural(report.nodes)}. Gap: {lost(report)} against lbt at batch"
        f" {report.reference_batch}. Recovered: the share of lbt's gap at the same batch that a method wins back; - where"
        " that gap is within the noise of the seeds, or not known (one seed, no lbt)."
        + " lbt-x2 and lbt-x4 are controls: the plain large batch with a learning rate raised by hand."
        * controls
    )


def _legend(colors: Mapping[str, str]) -> str:
    marks = (f'<span><b style="color:{color}">&#9632;</b> {html.escape(name)}</span>' for name, color in colors.items())
    return f'<p class="legend">{"".join(marks)}</p>'


# --- what is drawn


def _by_batch(report: CompareReport, metric: str, colors: Mapping[str, str]) -> str:
    """Return a metric at each batch; the batches stand beside each other at even distances."""
    batches = sorted({row.batch for row in report.rows})
    found: dict[str, list[Point]] = {}
    for row in report.rows:
        value = row.stat(metric)
        if value is not None:
            label = method_label(row.method, reference=row.reference)
            found.setdefault(label, []).append(Point(batches.index(row.batch), value.mean, value.sd))
    series = [Series(name, colors[name], tuple(sorted(points, key=lambda p: p.x))) for name, points in found.items()]
    ticks = [(float(place), str(batch)) for place, batch in enumerate(batches)]
    title = f"{_metric_words(report, metric)}, bars: one standard deviation"
    return chart(_spaced(series), title=title, x="global batch", ticks=ticks)


def _spaced(series: Sequence[Series]) -> list[Series]:
    """Move the curves apart by a little, so that error bars at one batch do not hide each other."""
    step = 0.04
    middle = (len(series) - 1) / 2
    return [
        Series(one.name, one.color, tuple(Point(p.x + step * (place - middle), p.y, p.spread) for p in one.points))
        for place, one in enumerate(series)
    ]


def _on_the_way(report: CompareReport, metric: str, curves: Sequence[Curve], colors: Mapping[str, str]) -> list[str]:
    """Return a chart a batch: means over seeds against samples, the reference in each."""
    key = metric if metric in ("top1", "perplexity") else "eval_loss"
    batches = sorted({curve.cell.batch for curve in curves if not curve.cell.reference})
    return [
        chart(
            _means([c for c in curves if c.cell.reference or c.cell.batch == batch], lambda row: row.get(key), colors),
            title=f"{_metric_words(report, metric)}, batch {batch}",
            x="samples seen",
        )
        for batch in batches
    ]


def _means(
    curves: Iterable[Curve], value: Callable[[Mapping[str, Any]], Any], colors: Mapping[str, str]
) -> list[Series]:
    """Return the mean over seeds of what a row holds, against samples; at each place the seeds that have come so far."""
    found: dict[str, dict[float, list[float]]] = {}
    for curve in curves:
        places = found.setdefault(method_label(curve.cell.method, reference=curve.cell.reference), {})
        for row in curve.epochs:
            number = value(row)
            if isinstance(number, int | float) and math.isfinite(number):
                places.setdefault(float(row["samples"]), []).append(float(number))
    return [
        Series(name, colors[name], tuple(Point(x, statistics.fmean(ys)) for x, ys in sorted(places.items())))
        for name, places in found.items()
        if places and name in colors
    ]


@dataclass(frozen=True)
class Diagnostic:
    """A number in the rows of an epoch: where it is, and how it is drawn."""

    path: str  # "ags.mean": mean of the mapping ags
    title: str
    log: bool = False


DIAGNOSTICS = (
    Diagnostic("diagnostics.norm.q50", "Gradient norm, median of an epoch's steps", log=True),
    Diagnostic("diagnostics.delta.q50", "Gradient change Delta(G), median of an epoch's steps", log=True),
    Diagnostic("ags.mean", "Mean scaling factor"),
    Diagnostic("ags.scaled", "Share of steps that are scaled"),
    Diagnostic("ags.at_cap", "Share of factors at their cap"),
    Diagnostic("ags.at_floor", "Share of factors at their floor"),
)
CURVATURE = (
    Diagnostic("eigenvalue", "Largest eigenvalue of the Hessian", log=True),
    Diagnostic("gradient_norm", "Gradient norm on the same samples", log=True),
    Diagnostic("lr_bound", "Lemma 1's bound on the learning rate", log=True),
)


def _diagnostics(curves: Sequence[Curve], colors: Mapping[str, str]) -> list[str]:
    """Return what lies behind the paper's Figures 5 to 8, at the largest batch and the reference, as far as it is logged."""
    batch = max((curve.cell.batch for curve in curves), default=0)
    own = [curve for curve in curves if curve.cell.batch == batch or curve.cell.reference]
    curvature = [dataclasses.replace(curve, epochs=curve.curvature) for curve in own]
    return [
        *_logged(own, DIAGNOSTICS, colors, batch),
        *_logged(curvature, CURVATURE, colors, batch),
        *(density(curve) for curve in own if curve.cell.seed == min(other.cell.seed for other in own)),
    ]


def _logged(
    curves: Sequence[Curve], wanted: Iterable[Diagnostic], colors: Mapping[str, str], batch: int
) -> Iterator[str]:
    for one in wanted:
        series = _means(curves, functools.partial(look, path=one.path), colors)
        if series:
            yield chart(series, title=f"{one.title}, batch {batch}", x="samples seen", log=one.log)


def density(curve: Curve) -> str:
    """Draw how the scaling factors were spread, an epoch a column; empty where none are logged.

    The bins at the ends hold what is beyond all edges; only bins that hold something are drawn.
    """
    logged = [(row["samples"], found) for row in curve.epochs if (found := look(row, "diagnostics.factors"))]
    filled = {place for _, found in logged for place, count in enumerate(found["counts"]) if count}
    if not filled:
        return ""
    edges = [math.log2(edge) for edge in logged[0][1]["edges"]]
    step = edges[1] - edges[0]
    bottoms = [edges[0] - step, *edges]  # of the bins; the first and the last have no other end
    low, high = bottoms[min(filled)] - 1, bottoms[max(filled)] + step + 1  # an octave of room, or few bins fill it all
    frame = Frame(0.0, float(logged[-1][0]), low, high)
    before, cells = 0.0, list[str]()
    for samples, found in logged:
        total = sum(found["counts"])
        for place, count in enumerate(found["counts"]):
            if count:
                cells.append(_cell(frame, (before, samples), (bottoms[place], bottoms[place] + step), count / total))
        before = samples
    across = [(value, short(value)) for value in round_numbers(0.0, frame.high_x)]
    up = [(float(power), short(2.0**power)) for power in range(math.ceil(low), math.floor(high) + 1)]
    title = f"Scaling factors of {curve.cell.method}, batch {curve.cell.batch}, seed {curve.cell.seed} (darker: more)"
    return drawing([*cells, *axes(frame, across, up[:: 1 + len(up) // 10])], title, "samples seen")


def _cell(frame: "Frame", x: tuple[float, float], y: tuple[float, float], share: float) -> str:
    left, right, top, bottom = frame.x(x[0]), frame.x(x[1]), frame.y(y[1]), frame.y(y[0])
    shade = math.sqrt(share)  # or the many small shares could not be told from none
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" fill="#1f4e9c"'
        f' fill-opacity="{shade:.3f}"><title>{100 * share:.1f} %</title></rect>'
    )
