"""The sections of a method comparison: Table I, and accuracy by batch and over training."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tula_cli.extras.report.values import (
    Row,
    TrainingCurve,
    build_table,
    choose_hours_unit,
    convert_unit,
    find_paper_figures,
    make_mean_series,
)
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import Comparison
from tula_cli.services.comparison.accuracy import (
    CompareReport,
    ComparisonRow,
    SeedStatistics,
    differs_beyond_noise,
    find_best_row,
)
from tula_cli.services.document import Cell, Column, Fact, Figure, Section, Series, Table
from tula_cli.words import format_count, format_method_label


def read_training_curves(run: RunDir, comparison: Comparison) -> list[TrainingCurve]:
    """Return the curves of all full trainings of a comparison that have finished an epoch."""
    curves = []
    for cell in (cell for cell in comparison.cells if cell.short is None):
        rows: dict[str, list[Row]] = {"epoch": [], "hessian": []}
        for row in run.get_training(cell.signature).read_metrics(*rows):
            rows[row["kind"]].append(row)
        if rows["epoch"]:
            name = format_method_label(cell.method, reference=cell.reference)
            curves.append(TrainingCurve(name, cell.batch, rows["epoch"], rows["hessian"], is_reference=cell.reference))
    return curves


def build_comparison_sections(report: CompareReport, curves: Sequence[TrainingCurve]) -> Iterator[Section]:
    """Yield the sections of a comparison: result tables, metrics during training, and gradient diagnostics."""
    metrics = [report.metric]
    if "perplexity" in report.columns and not report.has_script_metrics:
        metrics.append("perplexity")
    tables = [build_comparison_table(report)]
    if report.first_round:
        tables.append(build_comparison_table(report, first_round=True))
    yield Section(
        "comparison",
        "Methods and batches",
        (report.answer,),
        tuple(Fact("note", warning.text) for warning in report.warnings),
        tuple(tables),
        tuple(figure for metric in metrics for figure in _build_figure_by_batch(report, metric)),
    )
    figures = tuple(figure for metric in metrics for figure in _build_training_curves(report, metric, curves))
    missing = "" if figures else "no training of the comparison has finished an epoch yet. Run tula compare to continue"
    yield Section("comparison_way", "Training curves", figures=figures, missing=missing)
    if diagnostics := tuple(_build_diagnostic_figures(curves)):
        yield Section("comparison_diagnostics", "Diagnostics", figures=diagnostics)


def build_comparison_table(report: CompareReport, *, first_round: bool = False) -> Table:
    """Build the results table (Table I of the paper), with one row per method and batch.

    The table covers the full trainings, or with `first_round` the short trainings of the first round.
    """
    to_unit, unit = choose_hours_unit(row.hours for row in report.rows)
    shown = [row for row in (report.first_round if first_round else report.rows) if row.cells]
    if first_round and report.epochs is not None:
        key, title, marks = "methods_first_round", f"First round: {report.epochs[0]} of {report.epochs[1]} epochs", []
        caption = "Short trainings, each with a schedule for the shorter length; only the best methods were trained in full. Do not compare these values with those of full trainings."
    else:
        best = _select_best_rows(report, shown)
        key, title, marks = "methods", "Methods by batch", ["front" if row in best else "" for row in shown]
        caption = _describe_methods_table(report)
    return build_table(
        key,
        title,
        shown,
        (
            (Column("batch"), lambda row: row.batch),
            (Column("method", align="left"), lambda row: format_method_label(row.method, reference=row.reference)),
            (Column("seeds"), lambda row: row.seeds),
            *(column for metric in report.columns for column in _make_metric_columns(metric)),
            (Column("gap", digits=3), lambda row: row.gap),
            (Column("recovered", "%", digits=3), lambda row: convert_unit(row.recovered, 100)),
            (Column("samples", digits=4), lambda row: row.samples),
            (Column("time", unit, digits=3), lambda row: convert_unit(row.hours, to_unit)),
            (Column("note", align="left"), lambda row: row.note),
        ),
        caption=caption,
        marks=marks,
    )


def _make_metric_columns(metric: str) -> Iterator[tuple[Column, Callable[[ComparisonRow], Cell]]]:
    titles = {"top1": ("top-1", "%"), "top5": ("top-5", "%")}
    title, unit = titles.get(metric, (metric.replace("_", " "), ""))
    yield Column(title, unit, digits=4), lambda row: None if (stat := row.get_statistics(metric)) is None else stat.mean
    yield Column("sd", unit, digits=2), lambda row: None if (stat := row.get_statistics(metric)) is None else stat.sd


def _select_best_rows(report: CompareReport, rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the best row of each batch, and the rows that differ from it only within the noise of the seeds."""
    known_rows = [row for row in rows if row.get_statistics(report.metric)]
    best = {
        row.batch: find_best_row([other for other in known_rows if other.batch == row.batch], report)
        for row in known_rows
    }
    return [
        row
        for row in known_rows
        if row == best[row.batch]
        or (row.seeds > 1 and not row.dropped and not differs_beyond_noise(best[row.batch], row, report.metric))
    ]


def _describe_methods_table(report: CompareReport) -> str:
    worse = "added" if report.less_is_better else "lost"
    moment_words = "last and best value" if report.has_script_metrics else "after the last epoch"
    return (
        f"Mean and sample standard deviation (sd) over seeds, {moment_words}, on {format_count(report.nodes)}. Gap:"
        f" {report.metric} {worse} relative to lbt at batch {report.reference_batch}. Recovered: share of lbt's gap at the"
        " same batch that the method recovers, if that gap exceeds the noise of the seeds. Marked: the best row of each batch,"
        " and rows that differ from it only within noise."
    )


def _build_figure_by_batch(report: CompareReport, metric: str) -> Iterator[Figure]:
    batches = sorted({row.batch for row in report.rows})
    points_by_method: dict[str, list[tuple[float, SeedStatistics]]] = {}
    for row in sorted(report.rows, key=lambda row: row.batch):
        if (value := row.get_statistics(metric)) is not None:
            label = format_method_label(row.method, reference=row.reference)
            points_by_method.setdefault(label, []).append((float(batches.index(row.batch)), value))
    if not points_by_method:
        return
    series = tuple(
        Series(
            name,
            tuple(x for x, _ in points),
            tuple(value.mean for _, value in points),
            tuple(None if value.sd is None else value.mean - value.sd for _, value in points),
            tuple(None if value.sd is None else value.mean + value.sd for _, value in points),
        )
        for name, points in points_by_method.items()
    )
    title = _make_metric_title(metric, report)
    yield Figure(
        f"{_make_figure_key(metric)}_by_batch",
        f"{title} by batch",
        "Means over seeds; bars: one standard deviation.",
        "global batch",
        title,
        series,
        x_scale="category",
        categories=tuple(map(str, batches)),
        paper="Figure 2",
    )


def _make_metric_title(metric: str, report: CompareReport) -> str:
    return "top-1 (%)" if metric == "top1" and not report.has_script_metrics else metric


def _make_figure_key(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


def _build_training_curves(report: CompareReport, metric: str, curves: Sequence[TrainingCurve]) -> Iterator[Figure]:
    """Yield one figure per batch: the metric averaged over seeds against samples seen, including the reference."""
    path = metric if metric in ("top1", "perplexity") else "eval_loss"
    title = _make_metric_title(metric, report)
    for batch in sorted({curve.batch for curve in curves if not curve.is_reference}):
        shown = [curve for curve in curves if curve.is_reference or curve.batch == batch]
        if series := tuple(make_mean_series(shown, lambda curve: curve.epochs, path)):
            yield Figure(
                f"{_make_figure_key(metric)}_way_{batch}",
                f"{title} during training, batch {batch}",
                "Means over the seeds trained so far.",
                "samples seen",
                title,
                series,
            )


def _build_diagnostic_figures(curves: Sequence[TrainingCurve]) -> Iterator[Figure]:
    """Yield the paper's figures of gradients, as far as their data was logged, at the largest batch and the reference."""
    if (paper_figures := find_paper_figures()) is not None:
        batch = max((curve.batch for curve in curves), default=0)
        shown = [curve for curve in curves if curve.batch == batch or curve.is_reference]
        for figure in paper_figures.build_gradient_figures(shown):
            yield replace(figure, key=f"compare_{figure.key}")
