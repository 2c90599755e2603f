"""The document of a method comparison: Table I, accuracy by batch and over training, and facts about its trainings."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tula_cli.extras.report.values import (
    WITHOUT_FIGURES,
    GradientCurve,
    PaperFigures,
    choose_hours_unit,
    convert,
    describe_software,
    find_paper_figures,
    make_mean_series,
)
from tula_cli.run.directory import Run
from tula_cli.run.records.results import Comparison
from tula_cli.run.secrets import without_secrets
from tula_cli.services.comparison import accuracy
from tula_cli.services.comparison.accuracy import (
    CompareReport,
    ComparisonRow,
    SeedStatistics,
    differs_beyond_noise,
    find_best_row,
)
from tula_cli.services.comparison.accuracy import TrainingCurve as CellCurve
from tula_cli.services.document import Cell, Column, Document, Fact, Figure, Section, Series, Table
from tula_cli.spec.job import JobSpec, describe_train_length
from tula_cli.spec.workload import get_workload
from tula_cli.version import __version__
from tula_cli.words import describe_method_label, format_count, format_moment

# --- Sections


def build_comparison_document(
    report: CompareReport, curves: Sequence[CellCurve], *, spec: JobSpec, run_id: str, at: float
) -> Document:
    """Build the document of a comparison.

    Args:
        report: table of the comparison.
        curves: what every training logged at the end of its epochs.
        spec: the job.
        run_id: name of the run.
        at: time shown as the creation time of the document, in Unix seconds.
    """
    methods = list(dict.fromkeys(row.method for row in report.rows if not row.reference))
    batches = sorted({row.batch for row in report.rows if not row.reference})
    question = (
        f"Does the accuracy of {get_workload(spec).title} survive {_list_values('batch', 'batches', batches)} with {', '.join(methods)},"
        f" compared with batch {report.reference_batch}?"
    )
    facts = (
        Fact(
            "trained", f"{report.finished} of {format_count(report.total, 'training')}, on {format_count(report.nodes)}"
        ),
        Fact("length", describe_train_length(spec)),
        Fact("run", run_id),
    )
    return Document(
        f"{spec.name}: comparison",
        question,
        report.answer,
        f"{format_moment(at)}, tula {__version__}",
        facts,
        tuple(build_comparison_sections(report, curves)),
    )


def _list_values(singular: str, many: str, values: Sequence[int]) -> str:
    return f"{singular if len(values) == 1 else many} {', '.join(map(str, values))}"


def build_comparison_sections(report: CompareReport, curves: Sequence[CellCurve]) -> Iterator[Section]:
    """Yield the sections of a comparison: result tables, metrics during training, and gradient diagnostics."""
    notes = tuple(Fact("note", warning.text) for warning in report.warnings)
    by_batch = tuple(
        figure for metric in _list_drawn_metrics(report) for figure in _build_figure_by_batch(report, metric)
    )
    tables = (
        build_comparison_table(report),
        *([build_comparison_table(report, first_round=True)] if report.first_round else []),
    )
    yield Section("comparison", "Methods and batches", (report.answer,), notes, tables, by_batch)
    figures_on_the_way = tuple(
        figure for metric in _list_drawn_metrics(report) for figure in _build_training_curves(report, metric, curves)
    )
    missing = "no training of the comparison has finished an epoch yet. Run tula compare to continue"
    yield Section(
        "comparison_way", "Training curves", figures=figures_on_the_way, missing="" if figures_on_the_way else missing
    )
    paper_figures = find_paper_figures()
    behind = () if paper_figures is None else tuple(_build_diagnostic_figures(curves, paper_figures))
    missing = (
        WITHOUT_FIGURES
        if paper_figures is None
        else "the trainings logged no gradients. train.diagnostics: [gradient_norms] logs norms, [hessian] the curvature"
    )
    yield Section("comparison_diagnostics", "Diagnostics", figures=behind, missing="" if behind else missing)


def _list_drawn_metrics(report: CompareReport) -> tuple[str, ...]:
    """Return the metrics to draw: the compared metric, and the perplexity if a language model logs it."""
    return (report.metric, *(metric for metric in report.columns if metric == "perplexity" and not report.of_script))


def build_comparison_table(report: CompareReport, *, first_round: bool = False) -> Table:
    """Build the results table (Table I of the paper), with one row per method and batch.

    The table covers the full trainings, or with `first_round` the short trainings of the first round.
    """
    to_unit, unit = choose_hours_unit(row.hours for row in report.rows)
    titles = {"top1": ("top-1", "%"), "top5": ("top-5", "%")}
    metrics = [column for name in report.columns for title, metric_unit in [titles.get(name, (name.replace("_", " "), ""))]
               for column in (Column(title, metric_unit, digits=4), Column("sd", metric_unit, digits=2))]  # fmt: skip
    columns = (Column("batch"), Column("method", align="left"), Column("seeds"), *metrics, Column("gap", digits=3),
               Column("recovered", "%", digits=3), Column("samples", digits=4), Column("time", unit, digits=3), Column("note", align="left"))  # fmt: skip
    shown = [row for row in (report.first_round if first_round else report.rows) if row.cells]

    def cells(row: ComparisonRow) -> tuple[Cell, ...]:
        stats = [row.stat(name) for name in report.columns]
        stat_cells = [value for stat in stats for value in ((None, None) if stat is None else (stat.mean, stat.sd))]
        label = describe_method_label(row.method, reference=row.reference)
        return (
            row.batch,
            label,
            row.seeds,
            *stat_cells,
            row.gap,
            convert(row.recovered, 100),
            row.samples,
            convert(row.hours, to_unit),
            row.note,
        )

    known_rows = [row for row in shown if row.stat(report.metric)]
    best_by_batch = {
        batch: find_best_row([row for row in known_rows if row.batch == batch], report)
        for batch in {row.batch for row in known_rows}
    }
    marks = tuple(
        "front"
        if row in known_rows
        and not row.dropped
        and not differs_beyond_noise(best_by_batch[row.batch], row, report.metric)
        else ""
        for row in shown
    )
    worse = "added" if report.less_is_better else "lost"
    moment_words = "last and best value" if report.of_script else "after the last epoch"
    caption = (
        f"Mean and sample standard deviation (sd) over seeds, {moment_words}, on {format_count(report.nodes)}. Gap: {report.metric}"
        f" {worse} relative to lbt at batch {report.reference_batch}. Recovered: share of lbt's gap at the same batch that the"
        " method recovers, if that gap exceeds the noise of the seeds. Marked: the best of each batch, and rows whose difference from it is"
        " within noise."
    )
    if first_round and report.epochs is not None:
        title = f"First round: {report.epochs[0]} of {report.epochs[1]} epochs"
        caption = "Short trainings with a schedule of that length; only the best were trained in full. Do not compare them with full trainings."
        return Table("methods_first_round", title, columns, tuple(map(cells, shown)), caption)
    return Table("methods", "Methods by batch", columns, tuple(map(cells, shown)), caption, marks)


def _build_figure_by_batch(report: CompareReport, metric: str) -> Iterator[Figure]:
    batches = sorted({row.batch for row in report.rows})
    points_by_method: dict[str, list[tuple[float, SeedStatistics]]] = {}
    for row in sorted(report.rows, key=lambda row: row.batch):
        if (value := row.stat(metric)) is not None:
            label = describe_method_label(row.method, reference=row.reference)
            points_by_method.setdefault(label, []).append((float(batches.index(row.batch)), value))
    if not points_by_method:
        return
    series = tuple(
        Series(name, tuple(x for x, _ in points), tuple(value.mean for _, value in points),
               tuple(value.sd and value.mean - value.sd for _, value in points),
               tuple(value.sd and value.mean + value.sd for _, value in points))
        for name, points in points_by_method.items()
    )  # fmt: skip
    yield Figure(
        f"{_make_figure_key(metric)}_by_batch", f"{_make_metric_title(metric, report)} by batch", "Means over seeds; bars: one standard deviation.",
        "global batch", _make_metric_title(metric, report), series, x_scale="category", categories=tuple(map(str, batches)), paper="Figure 2",
    )  # fmt: skip


def _make_metric_title(metric: str, report: CompareReport) -> str:
    if report.of_script:
        return metric
    return {"top1": "top-1 (%)"}.get(metric, metric)


def _make_figure_key(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


def _make_gradient_curve(curve: CellCurve) -> GradientCurve:
    name = describe_method_label(curve.cell.method, reference=curve.cell.reference)
    return GradientCurve(name, curve.epochs, curve.curvature)


def _build_training_curves(report: CompareReport, metric: str, curves: Sequence[CellCurve]) -> Iterator[Figure]:
    """Yield one figure per batch: the metric averaged over seeds against samples seen, including the reference."""
    path = metric if metric in ("top1", "perplexity") else "eval_loss"
    for batch in sorted({curve.cell.batch for curve in curves if not curve.cell.reference}):
        curves_of_batch = [
            _make_gradient_curve(curve) for curve in curves if curve.cell.reference or curve.cell.batch == batch
        ]
        if series := tuple(make_mean_series(curves_of_batch, lambda curve: curve.epochs, path)):
            title = f"{_make_metric_title(metric, report)} during training, batch {batch}"
            yield Figure(f"{_make_figure_key(metric)}_way_{batch}", title, "Means over the seeds trained so far.", "samples seen", _make_metric_title(metric, report), series)  # fmt: skip


def _build_diagnostic_figures(curves: Sequence[CellCurve], paper_figures: PaperFigures) -> Iterator[Figure]:
    """Yield the figures that correspond to Figures 5 to 8 of the paper, as far as their data was logged.

    Only the trainings at the largest batch and at the reference are drawn.
    """
    batch = max((curve.cell.batch for curve in curves), default=0)
    curves_shown = [curve for curve in curves if curve.cell.batch == batch or curve.cell.reference]
    yield from paper_figures.build_gradient_figures(
        [_make_gradient_curve(curve) for curve in curves_shown], prefix="compare_"
    )
    first_seed = min((curve.cell.seed for curve in curves_shown), default=0)
    for curve in curves_shown:
        if curve.cell.seed == first_seed:
            key = f"factors_{_make_figure_key(curve.cell.method)}_{curve.cell.batch}"
            yield from paper_figures.build_factor_density(_make_gradient_curve(curve), key=key, title=f"Scaling factors of {curve.cell.method}, batch {curve.cell.batch}")  # fmt: skip


# --- The document

Environment = Mapping[str, Any]
"""A row of kind "environment" of a training's log: device, hardware, versions."""


def build_document_of_comparison(run: Run, comparison: Comparison, report: CompareReport, *, at: float) -> Document:
    """Build the document of a comparison, including facts about the job, the seeds, the hardware and the software.

    Args:
        run: the run in which the comparison was trained.
        comparison: trainings of the comparison.
        report: table of the comparison.
        at: time shown as the creation time of the document, in Unix seconds.
    """
    curves = accuracy.read_training_curves(run, comparison)
    document = build_comparison_document(report, curves, spec=run.spec, run_id=run.id, at=at)
    environments = [row for cell in comparison.cells for row in _list_environments(run, cell.signature)]
    facts = [*_list_job_facts(run.spec), *_seed_facts(comparison), *_list_machine_facts(environments, run.spec)]
    fact_names = {fact.name for fact in document.facts}
    return dataclasses.replace(
        document, facts=(*(fact for fact in facts if fact.name not in fact_names), *document.facts)
    )


def _list_environments(run: Run, signature: str) -> Iterator[Environment]:
    yield from run.training(signature).metrics("environment")


def _list_job_facts(spec: JobSpec) -> Iterator[Fact]:
    if spec.script is not None:
        command = spec.script.command
        yield Fact("script", without_secrets(command if isinstance(command, str) else " ".join(command)))
        return
    yield Fact("model", _format_name_with_arguments(spec.model.name, spec.model.args))
    yield Fact("data", _format_name_with_arguments(spec.dataset.name, spec.dataset.args))
    rule = f", {spec.schedule.kind} schedule" if spec.schedule.kind != "constant" else ""
    lr = f"{spec.optimizer.name}, learning rate {spec.optimizer.lr:g} at batch {spec.train.reference_batch}{rule}"
    yield Fact("optimizer", lr)


def _format_name_with_arguments(name: str, args: Mapping[str, Any]) -> str:
    """Format a name with its numeric arguments.

    Text arguments are left out, because reports are shared and a text could be a path or a key.
    """
    arguments = ", ".join(f"{key} {value}" for key, value in args.items() if isinstance(value, int | float))
    return f"{name} ({arguments})" if arguments else name


def _seed_facts(comparison: Comparison) -> Iterator[Fact]:
    if comparison.cells:
        yield Fact("seeds", ", ".join(str(seed) for seed in sorted({cell.seed for cell in comparison.cells})))


def _list_machine_facts(environments: Sequence[Environment], spec: JobSpec) -> Iterator[Fact]:
    """Yield the hardware and software of the trainings, which may have run on several kinds of hardware."""
    devices = {str(row.get("device")) for row in environments} or {spec.cluster.device}
    device = "process" if devices == {"cpu"} else "GPU"
    gpus = spec.cluster.gpus_per_node
    per_node = f"{gpus} processes" if device == "process" and gpus > 1 else format_count(gpus, device)
    names = _join_distinct(str(row.get("hardware", "")) for row in environments)
    yield Fact("hardware", f"{names}; {per_node} per node" if names else f"not recorded yet; {per_node} per node")
    versions = _join_distinct(describe_software(row) for row in environments)
    yield Fact("software", versions or "not recorded yet")


def _join_distinct(texts: Iterator[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))
