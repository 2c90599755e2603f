"""A comparison of methods, batches and seeds as a report: Table I, accuracy by batch and on the way, and what lies behind it."""

import re
from collections.abc import Iterator, Sequence

from tula_cli.services.comparison.accuracy import CompareReport, Row, Stat, best, differs
from tula_cli.services.comparison.accuracy import Curve as CellCurve
from tula_cli.services.reporting.document import Cell, Column, Document, Fact, Figure, Section, Series, Table
from tula_cli.services.reporting.gradient_figures import Curve, density, figures, means
from tula_cli.services.reporting.units import of_hours, times
from tula_cli.spec.job import JobSpec, train_length
from tula_cli.version import __version__
from tula_cli.words import method_label, moment, plural


def comparison_document(
    report: CompareReport, curves: Sequence[CellCurve], *, spec: JobSpec, run_id: str, at: float
) -> Document:
    """Return a comparison as a report of its own.

    Args:
        report: its table.
        curves: what every training logged at the end of its epochs.
        spec: the job.
        run_id: the name of the run.
        at: Unix time.
    """
    methods = list(dict.fromkeys(row.method for row in report.rows if not row.reference))
    batches = sorted({row.batch for row in report.rows if not row.reference})
    question = (
        f"Does the accuracy of {what(spec)} survive {_listed('batch', 'batches', batches)} with {', '.join(methods)},"
        f" beside batch {report.reference_batch}?"
    )
    facts = (
        Fact("trained", f"{report.finished} of {plural(report.total, 'training')}, on {plural(report.nodes)}"),
        Fact("length", train_length(spec)),
        Fact("run", run_id),
    )
    return Document(
        f"{spec.name}: comparison",
        question,
        report.answer,
        f"{moment(at)}, tula {__version__}",
        facts,
        tuple(sections(report, curves)),
    )


def what(spec: JobSpec) -> str:
    """Return what is trained, in words: a model on a dataset, or a script."""
    if spec.script is not None:
        from tula_cli.spec.scripts.placeholders import program

        return program(spec.script.command)
    assert spec.model is not None and spec.dataset is not None  # where there is no script
    return f"{spec.model.name} on {spec.dataset.name}"


def _listed(one: str, many: str, values: Sequence[int]) -> str:
    return f"{one if len(values) == 1 else many} {', '.join(map(str, values))}"


def sections(report: CompareReport, curves: Sequence[CellCurve]) -> Iterator[Section]:
    """Yield the table, the metric by batch and on the way, and the diagnostics."""
    notes = tuple(Fact("note", text) for text in report.warnings)
    by_batch = tuple(figure for metric in _drawn(report) for figure in _by_batch(report, metric))
    tables = (table(report), *([table(report, first_round=True)] if report.first_round else []))
    yield Section("comparison", "Methods and batches", (report.answer,), notes, tables, by_batch)
    way = tuple(figure for metric in _drawn(report) for figure in _on_the_way(report, metric, curves))
    told = "no training of the comparison has ended an epoch yet: tula compare trains what is missing"
    yield Section("comparison_way", "On the way", figures=way, missing="" if way else told)
    behind = tuple(_diagnostics(curves))
    told = "its trainings have logged no gradients: --set train.diagnostics=true logs norms, train.hessian=true the curvature"
    yield Section("comparison_diagnostics", "Behind it", figures=behind, missing="" if behind else told)


def _drawn(report: CompareReport) -> tuple[str, ...]:
    """Return the metrics that are drawn: the one that is compared, and of a language model its perplexity."""
    return (report.metric, *(metric for metric in report.columns if metric == "perplexity" and not report.of_script))


def table(report: CompareReport, *, first_round: bool = False) -> Table:
    """Return one row a method at a batch, as Table I of the paper; of all epochs, or of the short trainings."""
    to_unit, unit = of_hours(row.hours for row in report.rows)
    titles = {"top1": ("top-1", "%"), "top5": ("top-5", "%")}
    metrics = [column for name in report.columns for title, own in [titles.get(name, (name.replace("_", " "), ""))]
               for column in (Column(title, own, digits=4), Column("sd", own, digits=2))]  # fmt: skip
    columns = (Column("batch"), Column("method", align="left"), Column("seeds"), *metrics, Column("gap", digits=3),
               Column("recovered", "%", digits=3), Column("samples", digits=4), Column("time", unit, digits=3), Column("note", align="left"))  # fmt: skip
    shown = [row for row in (report.first_round if first_round else report.rows) if row.cells]

    def cells(row: Row) -> tuple[Cell, ...]:
        stats = [row.stat(name) for name in report.columns]
        told = [value for found in stats for value in ((None, None) if found is None else (found.mean, found.sd))]
        label = method_label(row.method, reference=row.reference)
        return (
            row.batch,
            label,
            row.seeds,
            *told,
            row.gap,
            times(row.recovered, 100),
            row.samples,
            times(row.hours, to_unit),
            row.note,
        )

    known = [row for row in shown if row.stat(report.metric)]
    first = {
        batch: best([row for row in known if row.batch == batch], report) for batch in {row.batch for row in known}
    }
    marks = tuple(
        "front" if row in known and not row.dropped and not differs(first[row.batch], row, report.metric) else ""
        for row in shown
    )
    worse = "added" if report.less_is_better else "lost"
    moment_words = "the last and the best that was told" if report.of_script else "after the last epoch"
    caption = (
        f"Means and sample standard deviations (sd) over seeds, {moment_words}, on {plural(report.nodes)}. Gap: {report.metric}"
        f" {worse} against lbt at batch {report.reference_batch}. Recovered: the share of lbt's gap at the same batch that a"
        " method wins back, where that gap stands out of the noise of the seeds. Marked: the best of each batch, and what does not"
        " differ from it beyond noise."
    )
    if first_round and report.epochs is not None:
        title = f"First round: {report.epochs[0]} of {report.epochs[1]} epochs"
        caption = "Short trainings with a schedule of that length; only the best were trained in full. Not to be compared with those."
        return Table("methods_first_round", title, columns, tuple(map(cells, shown)), caption)
    return Table("methods", "Methods by batch", columns, tuple(map(cells, shown)), caption, marks)


def _by_batch(report: CompareReport, metric: str) -> Iterator[Figure]:
    batches = sorted({row.batch for row in report.rows})
    found: dict[str, list[tuple[float, Stat]]] = {}
    for row in sorted(report.rows, key=lambda row: row.batch):
        if (value := row.stat(metric)) is not None:
            label = method_label(row.method, reference=row.reference)
            found.setdefault(label, []).append((float(batches.index(row.batch)), value))
    if not found:
        return
    series = tuple(
        Series(name, tuple(x for x, _ in points), tuple(value.mean for _, value in points),
               tuple(value.sd and value.mean - value.sd for _, value in points),
               tuple(value.sd and value.mean + value.sd for _, value in points))
        for name, points in found.items()
    )  # fmt: skip
    yield Figure(
        f"{_key(metric)}_by_batch", f"{_title(metric, report)} by batch", "Means over seeds; bars are one standard deviation.",
        "global batch", _title(metric, report), series, x_scale="category", categories=tuple(map(str, batches)), paper="Figure 2",
    )  # fmt: skip


def _title(metric: str, report: CompareReport) -> str:
    if report.of_script:
        return metric
    return {"top1": "top-1 (%)"}.get(metric, metric)


def _key(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


def _curve(curve: CellCurve) -> Curve:
    name = method_label(curve.cell.method, reference=curve.cell.reference)
    return Curve(name, curve.epochs, curve.curvature)


def _on_the_way(report: CompareReport, metric: str, curves: Sequence[CellCurve]) -> Iterator[Figure]:
    """Yield a figure a batch: means over seeds against samples, the reference in each."""
    path = metric if metric in ("top1", "perplexity") else "eval_loss"
    for batch in sorted({curve.cell.batch for curve in curves if not curve.cell.reference}):
        own = [_curve(curve) for curve in curves if curve.cell.reference or curve.cell.batch == batch]
        if series := tuple(means(own, lambda curve: curve.epochs, path)):
            title = f"{_title(metric, report)} on the way, batch {batch}"
            yield Figure(f"{_key(metric)}_way_{batch}", title, "Means over the seeds that have come so far.", "samples seen", _title(metric, report), series)  # fmt: skip


def _diagnostics(curves: Sequence[CellCurve]) -> Iterator[Figure]:
    """Yield what lies behind Figures 5 to 8 of the paper, at the largest batch and the reference, as far as it is logged."""
    batch = max((curve.cell.batch for curve in curves), default=0)
    own = [curve for curve in curves if curve.cell.batch == batch or curve.cell.reference]
    yield from figures([_curve(curve) for curve in own], prefix="compare_")
    first = min((curve.cell.seed for curve in own), default=0)
    for curve in own:
        if curve.cell.seed == first:
            key = f"factors_{_key(curve.cell.method)}_{curve.cell.batch}"
            yield from density(_curve(curve), key=key, title=f"Scaling factors of {curve.cell.method}, batch {curve.cell.batch}")  # fmt: skip
