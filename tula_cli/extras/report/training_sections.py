"""The sections of a report about trainings: their course, their gradients, and the comparison of methods."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tula_cli.extras.report import comparison_document
from tula_cli.extras.report.material import ReportData, TrainingReportData, list_newest_trainings
from tula_cli.extras.report.values import (
    Row,
    TrainingCurve,
    build_table,
    convert_unit,
    find_paper_figures,
    get_metric_value,
    subsample_evenly,
)
from tula_cli.run.records.results import Summary
from tula_cli.services.comparison import accuracy
from tula_cli.services.document import Annotation, Column, Fact, Figure, Section, Series, Style, Table
from tula_cli.show.status import describe_evaluation, describe_training
from tula_cli.show.train import describe_best_epoch, list_time_parts
from tula_cli.words import (
    capitalize_first_letter,
    choose_time_unit,
    format_count,
    format_duration,
    format_local_time,
    format_number,
    format_percent,
    get_first_line,
)

METRIC_NAMES = {
    "top1": "top-1 (%), last epoch",
    "top5": "top-5 (%), last epoch",
    "eval_loss": "evaluation loss, last epoch",
}
METRIC_TITLES = {"top1": "Top-1 accuracy", "perplexity": "Perplexity"}
FIGURES_NOT_INSTALLED = (
    "tula's optional package figures, which draws them, is not installed. Run pip install 'tula-cli[figures]'"
)
HOW_TO_TRAIN = "nothing has been trained yet. Run tula train."


def build_training_section(material: ReportData) -> Section:
    """Build the section of the newest training on each node type."""
    section, trainings = Section("training", "The training"), list_newest_trainings(material)
    if not trainings:
        return replace(section, missing=HOW_TO_TRAIN)
    return replace(
        section,
        text=tuple(text for training in trainings for text in _describe_training(training)),
        facts=tuple(fact for training in trainings for fact in _list_training_facts(training)),
        tables=tuple(table for training in trainings for table in _build_training_tables(training)),
        figures=tuple(figure for training in trainings for figure in _build_training_figures(training)),
    )


def _describe_training(training: TrainingReportData) -> Iterator[str]:
    task, end, now = training.task, training.summary, training.part.status.training
    others_text = f", the newest of {training.count}" if training.count > 1 and not training.newer else ""
    where = f" on {format_count(task.training_nodes)}{f' of type {training.part.name}' if training.part.name else ''}"
    if end is None:
        words = f"training {task.signature}{where}, batch {task.batch}"
        if now is not None and now.signature == task.signature:
            words = describe_training(now)
        yield f"{capitalize_first_letter(words)}: {training.state}{others_text}."
        return
    changed = f" (started with {end.start_batch})" if end.batch != end.start_batch else ""
    done = f"batch {end.batch}{changed}: done in {format_duration(3600 * end.actual_hours)}"
    yield f"Training {task.signature}{others_text},{where}, {done}."
    if end.ended:
        yield f"The training stopped early {end.ended} (train.early_stopping); predictions are for the epochs trained."
    yield from (f"Relaunched: {get_first_line(cause)}." for cause in end.causes)
    yield from (f"The newer training {newer.task.signature} is {newer.state}." for newer in training.newer)


def _list_training_facts(training: TrainingReportData) -> Iterator[Fact]:
    task, end = training.task, training.summary
    yield Fact("method", task.spec.train.method)
    yield Fact("attempts", str(len(training.attempts)))
    if (result := training.files.read_result()) is not None:
        yield Fact("samples", f"{result.samples} in {result.steps} steps")
    if end is not None:
        at = f" at epoch {end.best_epoch}" if end.best_epoch else ""
        # the metrics of a script have no known unit and include the best value
        names = METRIC_NAMES if task.spec.workload.evaluates_held_out_data else {}
        if names:
            yield Fact("result", f"{describe_best_epoch(end)}{at}")
        yield from (Fact(names.get(name, name), format_number(value, 4)) for name, value in end.metrics.items())
    yield from (Fact("weights", describe_evaluation(evaluation)) for evaluation in training.files.read_evaluations())
    warnings = dict.fromkeys(row["message"] for row in training.select_rows_of_kind("warning"))
    yield from (Fact("warning", text) for text in warnings)


def _build_training_tables(training: TrainingReportData) -> Iterator[Table]:
    if training.summary is not None:
        yield _build_predicted_against_actual(training, training.summary)
    if training.attempts:
        yield _build_attempts_table(training)


def _build_predicted_against_actual(training: TrainingReportData, end: Summary) -> Table:
    """Build the table of predicted and actual values; errors are relative to the actual value."""
    divisor, unit = choose_time_unit(3600 * end.actual_hours)
    quantities: list[tuple[str, str, float, float | None, float | None]] = [
        ("step time", "ms", 1000, end.predicted_step, end.actual_step),
        ("time", unit, 3600 / divisor, end.predicted_hours, end.actual_hours),
        *((f"time: {part.strip()}", unit, 1 / divisor, before, after) for part, before, after in list_time_parts(end)),
        ("cost", end.currency, 1, end.predicted_cost, end.actual_cost),
        ("energy", "kWh", 1, end.predicted_kwh, end.actual_kwh),
    ]
    rows = []
    for name, unit_name, factor, predicted, actual in quantities:
        if (predicted, actual) != (None, None):
            error = 100 * (predicted - actual) / actual if predicted is not None and actual else None
            if name == "energy" and not end.has_complete_energy:
                error = None
            rows.append((name, unit_name, convert_unit(predicted, factor), convert_unit(actual, factor), error))
    columns = (
        Column("", align="left"),
        Column("unit", align="left"),
        Column("predicted", digits=3),
        Column("actual", digits=3),
        Column("error", "%", digits=3),
    )
    counted = "" if end.counted is None else f" Energy was measured over {format_percent(end.counted)} % of the time."
    caption = f"Errors are relative to the actual value.{counted}"
    return Table(
        training.part.make_unique_key("predicted_actual"), "Predicted and actual", columns, tuple(rows), caption
    )


def _build_attempts_table(training: TrainingReportData) -> Table:
    tasks = {task.id: task for task in training.files.read_tasks()}
    at = training.part.status.at
    divisor, unit = choose_time_unit(max(attempt.compute_duration_seconds(at) for attempt in training.attempts))
    return build_table(
        training.part.make_unique_key("attempts"),
        "Attempts",
        training.attempts,
        (
            (Column("attempt", align="left"), lambda attempt: f"{attempt.task} no. {attempt.number}"),
            (Column("started", align="left"), lambda attempt: format_local_time(attempt.started_at)),
            (Column("took", unit, digits=3), lambda attempt: attempt.compute_duration_seconds(at) / divisor),
            (Column("nodes"), lambda attempt: tasks[attempt.task].nodes if attempt.task in tasks else None),
            (Column("batch"), lambda attempt: tasks[attempt.task].batch if attempt.task in tasks else None),
            (Column("from sample"), lambda attempt: attempt.samples),
            (Column("ended", align="left"), lambda attempt: attempt.outcome or "open"),
            (Column("because", align="left"), lambda attempt: get_first_line(attempt.message)),
        ),
    )


def _build_training_figures(training: TrainingReportData) -> Iterator[Figure]:
    """Yield the figures of loss, metric and step time against samples seen, as far as they were logged.

    Events are the starts of attempts after the first one, and changes of the batch.
    """
    starts = [
        (row, f"attempt {number}") for number, row in enumerate(training.select_rows_of_kind("start"), 1) if number > 1
    ]
    stages = [(row, f"batch {row['batch']}") for row in training.select_rows_of_kind("stage")[1:]]
    events = tuple(Annotation(float(row["samples"]), None, text, "event") for row, text in (*starts, *stages))
    yield from _build_loss_figure(training, events)
    yield from _build_metric_figure(training, events)
    yield from _build_step_time_figure(training, events)


def _build_loss_figure(training: TrainingReportData, events: tuple[Annotation, ...]) -> Iterator[Figure]:
    steps, epochs = training.select_rows_of_kind("step"), training.select_rows_of_kind("epoch")
    losses = (
        *_make_metric_series("training", steps or epochs, "loss"),
        *_make_metric_series("evaluation", epochs, "eval_loss", style="line+points"),
    )
    if losses:
        is_positive = all(y is not None and y > 0 for series in losses for y in series.y)
        yield Figure(
            training.part.make_unique_key("loss_by_samples"),
            "Loss over samples",
            "Loss of logged training steps, and on the evaluation set at the end of each epoch.",
            "samples seen",
            "loss",
            losses,
            marks=events,
            y_scale="log" if is_positive else "linear",
        )


def _build_metric_figure(training: TrainingReportData, events: tuple[Annotation, ...]) -> Iterator[Figure]:
    """Yield the figure of the metric of the job; nothing if that is eval_loss, which is in the figure of the loss."""
    epochs, name = training.select_rows_of_kind("epoch"), training.metric
    if name == "eval_loss":
        return
    title, label = METRIC_TITLES.get(name, name), name
    if name == "top1" and training.task.spec.workload.evaluates_held_out_data:
        label = "top-1 (%)"
    # always 100 % with five classes
    has_top5 = name == "top1" and any(row.get("top5") not in (None, 100.0) for row in epochs)
    top5 = _make_metric_series("top-5", epochs, "top5", style="line+points") if has_top5 else ()
    values = (*_make_metric_series(label.removesuffix(" (%)"), epochs, name, style="line+points"), *top5)
    if values:
        caption = "On the evaluation set, at the end of each epoch."
        key = training.part.make_unique_key("metric_by_samples")
        yield Figure(key, f"{title} over samples", caption, "samples seen", label, values, marks=events)


def _build_step_time_figure(training: TrainingReportData, events: tuple[Annotation, ...]) -> Iterator[Figure]:
    """Yield the figure of the step time with its prediction; its changes are events too."""
    steps, epochs = training.select_rows_of_kind("step"), training.select_rows_of_kind("epoch")
    times = [*_make_metric_series("logged", steps, "step_time", factor=1000)]
    if predicted := subsample_evenly([row for row in epochs if row.get("predicted_step") is not None]):
        xs = tuple(float(row["samples"]) for row in predicted)
        step, low, high = (
            tuple(convert_unit(get_metric_value(row, name), 1000) for row in predicted)
            for name in ("predicted_step", "step_low", "step_high")
        )
        times.append(Series("predicted", xs, step, low, high, style="line"))
    if steps and times:
        changes = [
            Annotation(float(change.samples), None, f"changed: {', '.join(change.parts)}", "event")
            for change in training.files.read_step_changes()
        ]
        yield Figure(
            training.part.make_unique_key("step_time"),
            "Step time",
            "Means over the steps between two log entries; the band is the 90 % interval of the prediction.",
            "samples seen",
            "step time (ms)",
            tuple(times),
            marks=(*events, *changes),
        )


def _make_metric_series(
    name: str, rows: Sequence[Row], metric: str, *, style: Style = "line", factor: float = 1
) -> Iterator[Series]:
    """Yield the curve of a metric over the rows that have it; nothing if no row does."""
    values = [(float(row["samples"]), get_metric_value(row, metric)) for row in rows]
    points = subsample_evenly([(samples, value * factor) for samples, value in values if value is not None])
    if points:
        xs, ys = zip(*points, strict=True)
        yield Series(name, xs, ys, style=style)


def build_gradients_section(material: ReportData) -> Section:
    """Build the section of gradient norms and changes, accuracy, scaling factors and curvature, as far as logged."""
    section, trainings = Section("gradients", "Gradients and their scaling"), list_newest_trainings(material)
    if not trainings:
        return replace(section, missing=HOW_TO_TRAIN)
    paper_figures = find_paper_figures()
    if paper_figures is None:
        return replace(section, missing=FIGURES_NOT_INSTALLED)
    figures = tuple(
        replace(figure, key=training.part.make_unique_key(figure.key))
        for training in trainings
        for figure in paper_figures.build_gradient_figures([_make_training_curve(training)])
    )
    if figures:
        return replace(section, figures=figures)
    if trainings[0].task.spec.script is not None:
        return replace(
            section,
            missing="the gradients of a script are not logged; train.diagnostics works only with tula's own training loop",
        )
    advice = "To log gradient norms and curvature, train with --set train.diagnostics=[gradient_norms,hessian]"
    return replace(section, missing=f"this training logged no gradients. {advice}")


def _make_training_curve(training: TrainingReportData) -> TrainingCurve:
    return TrainingCurve(
        training.task.spec.train.method,
        training.task.batch,
        training.select_rows_of_kind("epoch"),
        training.select_rows_of_kind("hessian"),
        training.files.read_steps(),
    )


HOW_TO_COMPARE = "nothing has been compared yet. Run tula compare to train the job with several methods and batches"


def build_comparison_sections_of_node_types(material: ReportData) -> Iterator[Section]:
    """Yield the sections of the comparison on each node type, or a single empty one if nothing was compared."""
    compared_parts = [
        (part, comparison) for part in material.parts if (comparison := part.snapshot.comparison) is not None
    ]
    if not compared_parts:
        yield Section("comparison", "Methods and batches", missing=HOW_TO_COMPARE)
    for part, comparison in compared_parts:
        report = accuracy.build_compare_report(part.run, comparison, jobs=part.status.jobs)
        curves = comparison_document.read_training_curves(part.run, comparison)
        for section in comparison_document.build_comparison_sections(report, curves):
            yield replace(section, key=part.make_unique_key(section.key), title=part.make_unique_title(section.title))
