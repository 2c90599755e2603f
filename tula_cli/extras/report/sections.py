"""The sections of a report in their order; each turns the report's data into text, tables and figures."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tula_cli.errors import BadMeasurements
from tula_cli.extras.report import comparison_document
from tula_cli.extras.report.material import (
    Material,
    RunMaterial,
    TrainingMaterial,
    describe_error,
    list_newest_trainings,
)
from tula_cli.extras.report.values import (
    MAX_CURVES,
    WITHOUT_FIGURES,
    GradientCurve,
    PaperFigures,
    Row,
    as_sentence,
    choose_bytes_unit,
    choose_hours_unit,
    choose_scale,
    convert,
    describe_nodes,
    describe_notes,
    explain_notes,
    find_paper_figures,
    get_metric_value,
    is_priced,
    make_chosen_mark,
    thin_out,
)
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import find_envelope
from tula_cli.models.efficiency import Noise
from tula_cli.models.memory.memory import MemoryModel
from tula_cli.models.observations import as_observation
from tula_cli.models.time import steptime
from tula_cli.models.time.noise import Z90, compute_standard_error, compute_trimmed_mean
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import (
    HIGHEST_EFFICIENCY,
    Caveats,
    Prediction,
    Recommendation,
    SameProgress,
    TradeOff,
)
from tula_cli.run.records.results import EvaluationRecord, Summary
from tula_cli.services.comparison import accuracy
from tula_cli.services.document import Annotation, Cell, Column, Fact, Figure, Section, Series, Style, Table
from tula_cli.services.recommendation.measurements import TypeMeasurements, find_gradient_noise_of_job
from tula_cli.services.recommendation.validation import Validation, cross_validate_measurements
from tula_cli.services.search import STRATEGIES, group_probes_by_nodes
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import (
    choose_time_unit,
    describe_configuration,
    format_count,
    format_duration,
    format_interval_of_hours,
    format_moment,
    format_number,
    format_percent,
    get_first_line,
    is_too_wide,
)

# --- The choice

CHOICE_KEY, CHOICE_TITLE = "choice", "The chosen configuration"


def build_choice_section(material: Material) -> Section:
    """Build the section of the choice: the reason for it, and the table of configurations."""
    recommendation, choice = material.shown_recommendation, material.choice
    if recommendation is None or choice is None:
        return Section(CHOICE_KEY, CHOICE_TITLE, missing=f"no recommendation: {material.unanswered}")
    rows = recommendation.rows if material.answer is None else material.answer.recommendation.rows
    text = [as_sentence(recommendation.reason), *_list_extra_sentences(material, recommendation)]
    if material.has_changed:
        text.append(
            f"With all measurements and trainings so far, the predicted time is {_describe_time(choice)}; tables and figures use it."
        )
    if (moved := material.changed_choice) is not None:
        text.append(
            f"A new recommendation would be {describe_configuration(moved.nodes, moved.batch, moved.local_batch)}. Run tula"
            " recommend to update it."
        )
    if material.answer is None:
        text.append(
            f"The figures are those of the stored recommendation, because a new one is not possible: {material.unanswered}."
        )
    tables = [
        build_configurations_table(rows, choice, recommendation.currency),
        *_build_time_parts_tables(recommendation.choice),
        *_build_length_tables(recommendation),
    ]
    return Section(CHOICE_KEY, CHOICE_TITLE, tuple(text), tuple(_list_choice_facts(recommendation)), tuple(tables))


def _describe_time(row: Prediction) -> str:
    return f"{format_duration(3600 * row.hours)}{format_interval_of_hours(row.hours_low, row.hours_high)}"


def _list_extra_sentences(material: Material, recommendation: Recommendation) -> Iterator[str]:
    """Yield further sentences on the choice: same progress, the other market, OOM fallback and accuracy."""
    progress, other_market, fallback = (
        recommendation.choice.same_progress,
        recommendation.other_market,
        recommendation.fallback,
    )
    accuracy = (
        recommendation.accuracy
        if material.answer is None
        else material.answer.recommendation.accuracy or recommendation.accuracy
    )
    if progress is not None:
        yield (
            f"For the same progress as the small batch: {format_number(progress.epochs)} epochs, {format_duration(3600 * progress.hours)}"
            f"{format_interval_of_hours(progress.hours_low, progress.hours_high)}, {format_number(progress.cost)} {recommendation.currency}."
        )
    if other_market is not None:
        market = "on spot nodes" if other_market.market == "spot" else "on demand"
        yield f"The same {market}: {format_duration(3600 * other_market.hours)}, {format_number(other_market.cost)} {recommendation.currency}."
    if fallback is not None:
        yield (
            f"After an out-of-memory error the training continues with batch {fallback.batch} as micro-batch {fallback.micro_batch} x"
            f" {fallback.micro_batches}: {format_number(1000 * fallback.step_time)} ms per step,"
            f" {format_duration(3600 * fallback.hours)} in total ({fallback.basis})."
        )
    if accuracy is not None:
        yield f"Accuracy: it {accuracy.words}."


def _list_choice_facts(recommendation: Recommendation) -> Iterator[Fact]:
    values = {
        "objective": recommendation.criteria,
        "price": recommendation.price,
        "fit": recommendation.fit,
        "energy": recommendation.power,
        "same progress": recommendation.efficiency,
        "stages": recommendation.ramp,
        "checkpoints": recommendation.interruption,
    }
    yield from (Fact(name, value) for name, value in values.items() if value)
    yield from (Fact("note", text) for text in recommendation.warnings)


def build_configurations_table(rows: Sequence[Prediction], choice: Prediction, currency: str) -> Table:
    """Build the table of configurations: the choice first, the others in the order of `rows`."""
    to_unit, unit = choose_hours_unit(row.hours for row in rows)
    to_size, size = choose_bytes_unit(row.peak_memory for row in rows)
    caveats = Caveats(choice)
    chosen_key = _get_offer_key(choice)
    rows = sorted(rows, key=lambda row: _get_offer_key(row) != chosen_key)
    notes = [[*caveats.caveats_of(row), *["interval_unknown"] * (row.hours_low is None)] for row in rows]
    typed, spot = any(row.type for row in rows), any(row.market == "spot" for row in rows)
    energy, priced = any(row.kwh is not None for row in rows), is_priced(rows, currency)
    columns = [Column("nodes"), *([Column("type", align="left")] if typed else []), Column("batch"), Column("batch/GPU"),
               Column("step", "ms", digits=3), Column("time", unit, digits=3), Column("low", unit, digits=3),
               Column("high", unit, digits=3), Column("node-hours", digits=3),
               *([Column("cost", currency, digits=3)] if priced else []),
               *([Column("energy", "kWh", digits=3)] if energy else []), Column("memory/GPU", size, digits=3),
               Column("free", "%", digits=3), *([Column("market", align="left")] if spot else []),
               Column("source", align="left"), *([Column("note", align="left")] if any(notes) else [])]  # fmt: skip

    def cells(row: Prediction, names: Sequence[str]) -> tuple[Cell, ...]:
        return (
            row.nodes, *([row.type] if typed else []), row.batch, row.local_batch,
            1000 * row.step_time, row.hours * to_unit, convert(row.hours_low, to_unit), convert(row.hours_high, to_unit),
            row.all_node_hours, *([row.cost] if priced else []), *([row.kwh] if energy else []), convert(row.peak_memory, to_size),
            convert(row.headroom, 100), *([row.market.replace("_", " ")] if spot else []), row.source,
            *([describe_notes(names)] if any(notes) else []),
        )  # fmt: skip

    marks = ["chosen" if _get_offer_key(row) == chosen_key else "front" if row.pareto else "" for row in rows]
    return Table(
        "configurations",
        "Configurations",
        tuple(columns),
        tuple(map(cells, rows, notes)),
        f"{'Time, node-hours and cost' if priced else 'Time and node-hours'} of the whole training, the chosen configuration"
        " first; low and high: 90 % interval of the time. Marked besides the choice: Pareto front (no configuration"
        f" is both faster and cheaper).{explain_notes(notes)}",
        tuple(marks),
    )


def _get_offer_key(row: Prediction) -> tuple[str, int, int, str]:
    return row.type, row.nodes, row.batch, row.market


def _build_time_parts_tables(choice: Prediction) -> Iterator[Table]:
    """Yield a table of the predicted training time by component; nothing if there is no such prediction."""
    parts = choice.parts
    if parts is None:
        return
    divisor, unit = choose_time_unit(parts.total)
    names = {"steps": "steps", "data": "data-loader wait, part of steps", "evaluation": "evaluation", "checkpoints": "checkpoints",
             "branches": "branches of self-tuning", "rest": "starting and stopping"}  # fmt: skip
    named_parts = [(name, getattr(parts, field_name)) for field_name, name in names.items()]
    rows = tuple((name, seconds / divisor, 100 * seconds / parts.total) for name, seconds in named_parts if seconds)
    columns = (Column("part", align="left"), Column("time", unit, digits=3), Column("share", "%", digits=3))
    title = f"Time of the chosen configuration by component: {describe_nodes(choice)}, batch {choice.batch}"
    yield Table("training_parts", title, columns, rows)


def _build_length_tables(recommendation: Recommendation) -> Iterator[Table]:
    """Yield a table of batches and throughput at other sequence lengths."""
    if not recommendation.lengths:
        return
    columns = (Column("length"), Column("padding", "%", digits=3), Column("largest batch"), Column("fastest batch"),
               Column("tokens/s", digits=3), Column("note", align="left"))  # fmt: skip
    rows = []
    for length in recommendation.lengths:
        best = length.fastest
        best_cells = (None, None) if best is None else (best.batch, length.tokens_per_second(best))
        rows.append(
            (
                length.length,
                100 * length.padding,
                length.largest_batch,
                *best_cells,
                "this job" if length.own else length.note,
            )
        )
    nodes = recommendation.lengths[0].nodes
    yield Table("lengths", f"Lengths of text, on {nodes} nodes" if nodes > 1 else "Lengths of text, on 1 node", columns, tuple(rows), as_sentence(recommendation.growth))  # fmt: skip


# --- Strong and weak scaling

SCALING_KEY, SCALING_TITLE = "scaling", "Scaling"


@dataclass(frozen=True)
class ScalingPoint:
    """One node count of a scaling study; speed-up and efficiency are relative to its smallest node count."""

    row: Prediction
    gpus: int  # of all nodes
    samples: float  # a second
    samples_low: float | None  # ends of the 90 % interval
    samples_high: float | None
    speedup: float
    efficiency: float  # 1 is ideal


@dataclass(frozen=True)
class ScalingStudy:
    """Throughput against nodes at one global batch (strong) or one local batch (weak), fewest nodes first."""

    fixed: int  # the batch, global or local
    points: tuple[ScalingPoint, ...]


def build_study(rows: Iterable[Prediction], *, fixed: int, gpus_per_node: int) -> ScalingStudy:
    """Build a scaling study from predictions at different node counts.

    Args:
        rows: predictions, all at one global batch or all at one local batch.
        fixed: that batch.
        gpus_per_node: GPUs per node of every prediction.
    """
    sorted_rows = sorted(rows, key=lambda row: row.nodes)
    if not sorted_rows:
        return ScalingStudy(fixed, ())
    first_throughput = sorted_rows[0].batch / sorted_rows[0].step_time
    points = []
    for row in sorted_rows:
        samples = row.batch / row.step_time
        low, high = (row.batch / end if end else None for end in (row.step_high, row.step_low))  # 0: no bound
        speedup = samples / first_throughput
        efficiency = speedup * sorted_rows[0].nodes / row.nodes
        points.append(ScalingPoint(row, row.nodes * gpus_per_node, samples, low, high, speedup, efficiency))
    return ScalingStudy(fixed, tuple(points))


def build_studies_of_choice(material: Material) -> tuple[ScalingStudy, ScalingStudy] | None:
    """Return the strong and the weak scaling study around the choice, over the node counts of the search.

    None if there is no choice or its models are unknown.
    """
    measurements, choice = material.choice_measurements, material.choice
    if measurements is None or choice is None:
        return None
    spec = measurements.run.spec
    nodes, gpus = sorted({*spec.search.nodes, choice.nodes}), spec.cluster.gpus_per_node
    strong = material.forecast([Config(count, choice.batch) for count in nodes])
    weak = material.forecast([Config(count, choice.local_batch * count * gpus) for count in nodes])
    return (
        build_study(strong, fixed=choice.batch, gpus_per_node=gpus),
        build_study(weak, fixed=choice.local_batch, gpus_per_node=gpus),
    )


def build_scaling_section(material: Material) -> Section:
    """Build the scaling section: two tables, and figures of throughput, speed-up and efficiency against nodes."""
    both_studies, choice = build_studies_of_choice(material), material.choice
    if both_studies is None or choice is None:
        return Section(SCALING_KEY, SCALING_TITLE, missing=f"scaling is unknown: {material.unanswered}")
    strong, weak = both_studies
    tables = (
        build_scaling_table(
            strong, "strong_scaling", f"Strong scaling: global batch {strong.fixed}", choice, material.currency
        ),
        build_scaling_table(
            weak, "weak_scaling", f"Weak scaling: batch {weak.fixed} per GPU", choice, material.currency
        ),
    )
    text = []
    if len(strong.points) < 2:
        text.append(
            f"No strong scaling: batch {strong.fixed} is known for {format_count(len(strong.points), 'node count')}. Set search.nodes to"
            " measure more."
        )
    impossible = [point for study in both_studies for point in study.points if point.efficiency > HIGHEST_EFFICIENCY]
    if impossible:
        text.append(
            f"An efficiency of {100 * max(point.efficiency for point in impossible):.0f} % is hardly possible: the step time on the"
            " fewest nodes is too uncertain, or its probe was disturbed. Increase search.min_seconds and profile again."
        )
    figures = () if len(strong.points) < 2 and len(weak.points) < 2 else _build_scaling_figures(strong, weak, choice)
    return Section(SCALING_KEY, SCALING_TITLE, tuple(text), tables=tables, figures=figures)


MARKED_EFFICIENCY = 1.005
"""Efficiency from which on it is shown as above 100 %."""


def _list_scaling_caveats(point: ScalingPoint) -> list[str]:
    """Return the caveats of a scaling point."""
    low, high = point.row.step_low, point.row.step_high
    names = ["interval_unknown"] * (low is None) + ["wide_interval"] * is_too_wide(low, high)
    if point.efficiency > HIGHEST_EFFICIENCY:
        return [*names, "efficiency_above_110"]
    return [*names, *["efficiency_above_100"] * (point.efficiency >= MARKED_EFFICIENCY)]


def build_scaling_table(study: ScalingStudy, key: str, title: str, choice: Prediction, currency: str) -> Table:
    """Build the table of a scaling study, with one row per node count."""
    to_unit, unit = choose_hours_unit(point.row.hours for point in study.points)
    notes = [_list_scaling_caveats(point) for point in study.points]
    priced = is_priced([point.row for point in study.points], currency)
    columns = (Column("nodes"), Column("GPUs"), Column("batch"), Column("batch/GPU"), Column("step", "ms", digits=3),
               Column("low", "ms", digits=3), Column("high", "ms", digits=3), Column("samples/s", digits=4),
               Column("speed-up", digits=3), Column("efficiency", "%", digits=3), Column("time", unit, digits=3),
               Column("node-hours", digits=3), *([Column("cost", currency, digits=3)] if priced else []),
               Column("source", align="left"), *([Column("note", align="left")] if any(notes) else []))  # fmt: skip
    rows = tuple(
        (point.row.nodes, point.gpus, point.row.batch, point.row.local_batch, 1000 * point.row.step_time,
         convert(point.row.step_low, 1000), convert(point.row.step_high, 1000), point.samples, point.speedup,
         100 * point.efficiency, point.row.hours * to_unit, point.row.all_node_hours,
         *([point.row.cost] if priced else []), point.row.source, *([describe_notes(_list_scaling_caveats(point))] if any(notes) else []))
        for point in study.points
    )  # fmt: skip
    fewest = format_count(study.points[0].row.nodes) if study.points else "the fewest nodes"
    caption = (
        f"Speed-up and efficiency are relative to {fewest}; low and high: 90 % interval of the step time; "
        f"{'time, node-hours and cost' if priced else 'time and node-hours'}: whole training.{explain_notes(notes)}"
    )
    at = (choice.nodes, choice.batch)
    marks = tuple("chosen" if (point.row.nodes, point.row.batch) == at else "" for point in study.points)
    return Table(key, title, columns, rows, caption, marks)


def _build_scaling_figures(strong: ScalingStudy, weak: ScalingStudy, choice: Prediction) -> tuple[Figure, ...]:
    named = [(study, name) for study, name in ((strong, f"batch {strong.fixed}"), (weak, f"local batch {weak.fixed}"))
             if len(study.points) > 1]  # fmt: skip
    throughput = [_make_throughput_series(study, name) for study, name in named]
    speedup = [_make_speedup_series(study, name) for study, name in named]
    efficiency = [
        Series(
            name,
            _list_node_counts(study),
            tuple(100 * point.efficiency for point in study.points),
            measured=_list_measured_flags(study),
        )
        for study, name in named
    ]
    counts = sorted({count for study, _ in named for count in _list_node_counts(study)})
    ideal = [
        Series(f"ideal, {name}", _list_node_counts(study), tuple(study.points[0].samples * count / study.points[0].row.nodes for count in _list_node_counts(study)), style="line")
        for study, name in named
    ]  # fmt: skip
    straight = Series("ideal", tuple(counts), tuple(count / counts[0] for count in counts), style="line")
    above = any(point.efficiency >= MARKED_EFFICIENCY for study, _ in named for point in study.points)
    linear = (Annotation(None, 100.0, "linear scaling: 100 %", "limit"),) if above else ()
    chosen_point = next(point for point in (*strong.points, *weak.points) if point.row.nodes == choice.nodes)
    return (
        _build_scaling_figure("throughput", "Throughput against nodes", INTERVALS, "samples/s", (*throughput, *ideal), marks=(make_chosen_mark(choice, choice.nodes, chosen_point.samples),), log=True),
        _build_scaling_figure("speedup", "Speed-up against nodes", f"{INTERVALS} Each curve is relative to its smallest node count.", "speed-up", (*speedup, straight), log=True),
        _build_scaling_figure("efficiency", "Parallel efficiency against nodes", "Throughput relative to linear scaling from the smallest node count. Above 100 % a step time on the fewest nodes is too high, or caches help on more nodes.", "efficiency (%)", tuple(efficiency), marks=linear),
    )  # fmt: skip


def _build_scaling_figure(
    key: str,
    title: str,
    caption: str,
    y: str,
    series: Sequence[Series],
    *,
    marks: tuple[Annotation, ...] = (),
    log: bool = False,
) -> Figure:
    scale: Literal["linear", "log2"] = "log2" if log else "linear"
    return Figure(
        f"scaling_{key}", title, caption, "nodes", y, tuple(series), marks=marks, x_scale="log2", y_scale=scale
    )


def _list_node_counts(study: ScalingStudy) -> tuple[float, ...]:
    return tuple(float(point.row.nodes) for point in study.points)


def _list_measured_flags(study: ScalingStudy) -> tuple[bool, ...]:
    return tuple(point.row.measured for point in study.points)


def _make_throughput_series(study: ScalingStudy, name: str) -> Series:
    return Series(
        name,
        _list_node_counts(study),
        tuple(point.samples for point in study.points),
        tuple(point.samples_low for point in study.points),
        tuple(point.samples_high for point in study.points),
        measured=_list_measured_flags(study),
    )


def _make_speedup_series(study: ScalingStudy, name: str) -> Series:
    first_throughput = study.points[0].samples
    return Series(
        name,
        _list_node_counts(study),
        tuple(point.speedup for point in study.points),
        tuple(convert(point.samples_low, 1 / first_throughput) for point in study.points),
        tuple(convert(point.samples_high, 1 / first_throughput) for point in study.points),
        measured=_list_measured_flags(study),
    )


# --- Time and cost

TIME_AND_COST_KEY, TIME_AND_COST_TITLE = "time_and_cost", "Time and cost by batch"
INTERVALS = "Filled markers: measured; open: predicted; bars: 90 % intervals."


def build_time_and_cost_section(material: Material) -> Section:
    """Build the section of time and cost: time of the training and of an epoch and cost by batch, cost by time."""
    choice, rows = material.choice, material.rows
    if choice is None or not rows:
        return Section(TIME_AND_COST_KEY, TIME_AND_COST_TITLE, missing=f"times are unknown: {material.unanswered}")
    text = []
    if material.knee is not None:
        text.append(
            f"The knee is at batch {material.knee}: on the smoothed fit, doubling the batch saves at least 29 % of the time up to"
            " there, and less beyond it. Single points scatter around that curve."
        )
    else:
        text.append("Time has no knee within the searched batches.")
    figures = [
        _build_time_figure(material, choice),
        *_build_epoch_figure(material, choice),
        _build_cost_figure(material, choice),
        *([build_tradeoff_figure(material.rows, choice, material.currency)] if len(material.rows) > 1 else []),
    ]
    return Section(TIME_AND_COST_KEY, TIME_AND_COST_TITLE, tuple(text), figures=tuple(figures))


Value = Callable[[Prediction], tuple[float, float | None, float | None]]
"""A value of a configuration with the lower and upper end of its 90 % interval."""


def _build_value_curves(rows: Sequence[Prediction], value: Value, choice: Prediction) -> Iterator[Series]:
    """Yield one curve per node type and node count.

    If there are more than `MAX_CURVES`, yield only the best of each batch and the curve of the choice.
    """
    kinds = sorted({(row.type, row.nodes) for row in rows})
    if len(kinds) > MAX_CURVES:
        kinds = [(choice.type, choice.nodes)]
        yield _make_value_curve("best of each batch", find_envelope(rows), value)
    for kind in kinds:
        rows_of_kind = [row for row in rows if (row.type, row.nodes) == kind]
        yield _make_value_curve(describe_nodes(rows_of_kind[0]), sorted(rows_of_kind, key=lambda row: row.batch), value)


def _make_value_curve(name: str, rows: Sequence[Prediction], value: Value) -> Series:
    values = [value(row) for row in rows]
    middle, low, high = zip(*values, strict=True)
    return Series(
        name,
        tuple(float(row.batch) for row in rows),
        middle,
        low,
        high,
        measured=tuple(row.measured or bool(row.trained) for row in rows),
    )


def _list_choice_marks(material: Material, choice: Prediction, y: float) -> tuple[Annotation, ...]:
    knee = (
        ()
        if material.knee is None
        else (Annotation(float(material.knee), None, f"knee: batch {material.knee}", "knee"),)
    )
    return (*knee, make_chosen_mark(choice, choice.batch, y))


def _build_time_figure(material: Material, choice: Prediction) -> Figure:
    factor, unit = choose_hours_unit(row.hours for row in material.rows)

    def value(row: Prediction) -> tuple[float, float | None, float | None]:
        return row.hours * factor, convert(row.hours_low, factor), convert(row.hours_high, factor)

    return Figure(
        "time_by_batch",
        "Time of the training",
        f"Time of the whole training by global batch. {INTERVALS}",
        "global batch",
        f"time ({unit})",
        tuple(_build_value_curves(material.rows, value, choice)),
        marks=_list_choice_marks(material, choice, choice.hours * factor),
        x_scale="log2",
        y_scale=choose_scale([row.hours for row in material.rows]),
        paper="Figure 9",
    )


def _build_epoch_figure(material: Material, choice: Prediction) -> Iterator[Figure]:
    """Yield the figure of the time of an epoch's steps, without evaluation and checkpoints."""
    sizes = (
        {measurements.type: measurements.estimator.dataset_size for measurements in material.answer.all_measurements}
        if material.answer
        else {}
    )
    rows = [row for row in material.rows if sizes.get(row.type, 0) >= row.batch]
    if not rows:
        return
    divisor, unit = choose_time_unit(max(sizes[row.type] // row.batch * row.step_time for row in rows))

    def value(row: Prediction) -> tuple[float, float | None, float | None]:
        steps = sizes[row.type] // row.batch / divisor
        return row.step_time * steps, convert(row.step_low, steps), convert(row.step_high, steps)

    yield Figure(
        "epoch_time",
        "Time of an epoch",
        f"Time of the steps of one epoch by global batch, without evaluation and checkpoints. {INTERVALS}",
        "global batch",
        f"time per epoch ({unit})",
        tuple(_build_value_curves(rows, value, choice)),
        marks=_list_choice_marks(material, choice, value(choice)[0]) if choice.type in sizes else (),
        x_scale="log2",
        y_scale=choose_scale([value(row)[0] for row in rows]),
        paper="Figure 1",
    )


def _build_cost_figure(material: Material, choice: Prediction) -> Figure:
    def value(row: Prediction) -> tuple[float, float | None, float | None]:
        low, high = (end and row.cost * end / row.hours for end in (row.hours_low, row.hours_high))
        return row.cost, low, high

    recommendation = material.shown_recommendation
    price = "" if recommendation is None else f" Price: {recommendation.price.splitlines()[0]}."
    return Figure(
        "cost_by_batch",
        "Cost of the training",
        f"Cost of the whole training by global batch.{price} {INTERVALS}",
        "global batch",
        f"cost ({material.currency})",
        tuple(_build_value_curves(material.rows, value, choice)),
        marks=_list_choice_marks(material, choice, choice.cost),
        x_scale="log2",
        y_scale=choose_scale([row.cost for row in material.rows]),
        paper="Figure 10",
    )


def build_tradeoff_figure(
    rows: Sequence[Prediction], choice: Prediction, currency: str, *, against: TradeOff = "cost"
) -> Figure:
    """Build the figure of the time of every configuration against its cost or its number of nodes.

    Args:
        rows: the configurations, at least one.
        choice: the chosen one, which is marked.
        currency: currency of the costs.
        against: the quantity of the horizontal axis.
    """
    factor, unit = choose_hours_unit(row.hours for row in rows)

    def make_series(name: str, rows: Sequence[Prediction], style: Style) -> Series:
        return Series(
            name,
            tuple(get_x(row) for row in rows),
            tuple(row.hours * factor for row in rows),
            style=style,
            measured=tuple(row.measured or bool(row.trained) for row in rows),
        )

    def get_x(row: Prediction) -> float:
        return row.cost if against == "cost" else float(row.nodes)

    ordered = sorted(rows, key=lambda row: (get_x(row), row.hours))
    if against == "cost":
        best = [row for row in ordered if row.pareto]
        name, label, quantity = "Pareto front", f"cost ({currency})", "cost"
        meaning = "No configuration is both faster and cheaper than one on the Pareto front."
    else:
        fastest = {row.nodes: row for row in reversed(ordered)}
        best = [fastest[nodes] for nodes in sorted(fastest)]
        name, label, quantity = "fastest per number of nodes", "nodes", "number of nodes"
        meaning = "The line connects the fastest configuration of each number of nodes."
    return Figure(
        "front" if against == "cost" else "time_by_nodes",
        f"Time against {against}",
        f"Time of the training against its {quantity}. {meaning} Filled markers: measured; open: predicted.",
        label,
        f"time ({unit})",
        (make_series("configurations", ordered, "points"), *([make_series(name, best, "line+points")] if best else [])),
        marks=(make_chosen_mark(choice, get_x(choice), choice.hours * factor),),
        x_scale="linear" if against == "cost" else "log2",
        y_scale=choose_scale([row.hours for row in rows]),
    )


# --- What was measured

MEASURED, WHERE = ("measured", "Measurements"), ("step_parts", "Step time by component")
MAX_BARS = 24
HOW_TO_MEASURE = "Run tula profile."


def build_measured_section(material: Material) -> Section:
    """Build the table of all probes, including failed ones."""
    tables = [_build_probe_table(run_material) for run_material in material.parts if run_material.look.results]
    if not tables:
        return Section(*MEASURED, missing=f"no probe has a result. {HOW_TO_MEASURE}")
    counts = f"{format_count(len(material.measured), 'probe')} measured"
    waiting = [
        job
        for run_material in material.parts
        for job in run_material.now.jobs
        if job.kind == "probe" and job.done < job.total
    ]
    remaining_text = f", {sum(job.total - job.done for job in waiting)} still to come (tula profile)" * bool(waiting)
    return Section(*MEASURED, (f"{counts}{remaining_text}.",), tables=tuple(tables))


def _build_probe_table(run_material: RunMaterial) -> Table:
    probes = run_material.measured
    to_size, size = choose_bytes_unit(probe.memory.peak for probe in probes)
    columns = (Column("nodes"), Column("batch"), Column("batch/GPU"), Column("step", "ms", digits=3), Column("low", "ms", digits=3),
               Column("high", "ms", digits=3), Column("compute", "ms", digits=3), Column("exposed comm", "ms", digits=3),
               Column("data wait", "ms", digits=3), Column("samples/s", digits=4), Column("memory/GPU", size, digits=3),
               Column("steps"), Column("outcome", align="left"))  # fmt: skip
    rows: list[tuple[int, int, tuple[str | float | int | None, ...]]] = []
    for probe in probes:
        step, (low, high) = compute_trimmed_mean(probe.step_times), _compute_step_interval(probe)
        milliseconds = [None if seconds is None else 1000 * seconds for seconds in _list_step_parts(probe)]
        cells = (
            1000 * step,
            low,
            high,
            *milliseconds,
            probe.batch / step,
            probe.memory.peak * to_size,
            len(probe.step_times),
        )
        rows.append((probe.nodes, probe.local_batch, (probe.nodes, probe.batch, probe.local_batch, *cells, "measured")))
    for result in run_material.ended_otherwise:
        batch, outcome = result.nodes * result.gpus_per_node * result.local_batch, result.kind.replace("_", " ")
        why = "" if result.kind == "out_of_memory" else f": {get_first_line(result.message)}"
        assumed = ", as a smaller one was" if result.kind == "out_of_memory" and result.assumed else ""
        configuration = (result.nodes, batch, result.local_batch)
        rows.append((result.nodes, result.local_batch, (*configuration, *[None] * 9, f"{outcome}{assumed}{why}")))
    ordered = tuple(cells for *_, cells in sorted(rows, key=lambda row: row[:2]))
    caption = (
        "Mean step times without the fastest and the slowest tenth; low and high: 90 % interval of the mean. Exposed"
        " communication does not overlap with computing; compute is the rest of the step; -: not measured."
    )
    return Table(f"probes{f'_{run_material.name}' if run_material.name else ''}", f"Probes{f': {run_material.name}' if run_material.name else ''}", columns, ordered, caption)  # fmt: skip


def _compute_step_interval(probe: Measured) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a probe's step time in ms, or (None, None) if it has too few steps."""
    middle, error = compute_trimmed_mean(probe.step_times), compute_standard_error(probe.step_times)
    if error == float("inf"):
        return None, None
    return 1000 * max(0.0, middle - Z90 * error), 1000 * (middle + Z90 * error)


def _list_step_parts(probe: Measured) -> tuple[float | None, float | None, float | None]:
    """Return compute, exposed synchronisation and input time of a step (seconds), which add up to the step time.

    Unknown parts are None. If synchronisation or input is unknown, so is compute; on a single GPU synchronisation is 0.
    """
    step, wait = compute_trimmed_mean(probe.step_times), probe.data_wait
    sync = 0.0 if probe.sync_time is None and probe.nodes * probe.gpus_per_node == 1 else probe.sync_time
    if sync is None or wait is None:
        return None, sync, wait
    sync, wait = min(sync, step), min(wait, max(0.0, step - min(sync, step)))
    return step - sync - wait, sync, wait


def build_parts_section(material: Material) -> Section:
    """Build the section that shows the parts of a step by configuration."""
    if not material.measured:
        return Section(*WHERE, missing=f"no step was measured. {HOW_TO_MEASURE}")
    figures = [figure for run_material in material.own_runs for figure in _build_parts_figure(material, run_material)]
    if not figures:
        return Section(*WHERE, missing=_NO_PARTS)
    return Section(*WHERE, figures=tuple(figures))


_NO_PARTS = (
    "only total step times were measured. Communication of a script is measured if it uses DistributedDataParallel, data-loader"
    " wait if it uses torch's DataLoader"
)


def _build_parts_figure(material: Material, run_material: RunMaterial) -> Iterator[Figure]:
    complete_probes = [probe for probe in run_material.measured if None not in _list_step_parts(probe)]
    if not complete_probes:
        return
    shown = _select_probes_shown(material, complete_probes)
    parts_by_probe = [_list_step_parts(probe) for probe in shown]
    xs = tuple(float(index) for index in range(len(shown)))
    names = ("compute", "exposed communication", "data-loader wait")
    drawn_text = f" Of {len(complete_probes)} probes {len(shown)} are shown." * (len(shown) < len(complete_probes))
    yield Figure(
        f"step_parts{f'_{run_material.name}' if run_material.name else ''}",
        f"Step time by component{f': {run_material.name}' if run_material.name else ''}",
        f"Measured step time by nodes and batch per GPU.{drawn_text}",
        "nodes x batch per GPU",
        "time per step (ms)",
        tuple(Series(name, xs, tuple(1000 * (step_parts[index] or 0.0) for step_parts in parts_by_probe), style="stacked") for index, name in enumerate(names)),
        x_scale="category",
        categories=tuple(f"{probe.nodes} x {probe.local_batch}" for probe in shown),
    )  # fmt: skip


def _select_probes_shown(material: Material, probes: Sequence[Measured]) -> list[Measured]:
    """Select the probes to draw: all of them up to `MAX_BARS`.

    Of more, those at the choice's node count or local batch come first, then the others in their order.
    """
    if len(probes) <= MAX_BARS:
        return list(probes)
    choice = material.choice
    near = [
        p for p in probes if choice is not None and (p.nodes == choice.nodes or p.local_batch == choice.local_batch)
    ]
    selected = list({probe.id: probe for probe in (*near, *probes)}.values())[:MAX_BARS]
    return [probe for probe in probes if probe in selected]


# --- Memory

MEMORY_KEY, MEMORY_TITLE = "memory", "Memory"
MEMORY_COMPONENTS = ("parameters", "gradients", "optimizer", "factors", "batch", "activations")


def build_memory_section(material: Material) -> Section:
    """Build the section of memory against the local batch on the choice's nodes."""
    measurements, choice = material.choice_measurements, material.choice
    if measurements is None or choice is None:
        why = material.unanswered
        return Section(
            MEMORY_KEY,
            MEMORY_TITLE,
            missing=f"memory is unknown: {why}. tula check --memory estimates it before any probe",
        )
    model = measurements.estimator.memory.for_ranks(choice.nodes * measurements.run.spec.cluster.gpus_per_node)
    sizes = _list_drawn_sizes(measurements, choice.nodes)
    probes = [result for result in measurements.results if isinstance(result, Measured)]
    if measurements.estimator.memory.sharded:  # another number of GPUs holds other shares
        probes = [probe for probe in probes if probe.nodes == choice.nodes]
    text = [_describe_limit(measurements, choice.nodes)]
    if not model.by_component:
        text.append("Of a script only the total peak memory is known, not its components.")
    figure = _build_memory_figure(measurements, model, sizes, probes, choice.local_batch)
    return Section(
        MEMORY_KEY, MEMORY_TITLE, tuple(text), tables=tuple(_build_error_tables(model, probes)), figures=(figure,)
    )


def _list_drawn_sizes(measurements: TypeMeasurements, nodes: int) -> list[int]:
    """Return the local batches to draw: those of the candidates on `nodes` nodes, and the measured ones."""
    gpus = measurements.run.spec.cluster.gpus_per_node
    sizes = {config.local_batch(gpus) for config in measurements.estimator.configurations([nodes])}
    return sorted({*sizes, *(local for _, local in measurements.estimator.probes)})


def _describe_limit(measurements: TypeMeasurements, nodes: int) -> str:
    capacity, largest = measurements.estimator.capacity, measurements.estimator.largest_local_batch(nodes)
    if capacity is None:
        return "The memory per rank has no limit (set one with cluster.memory_per_gpu)."
    factor, unit = choose_bytes_unit([capacity])
    margin = f"{MEMORY_MARGIN:.0%}"
    bound = "every batch fits" if largest is None else f"at most {largest} samples per GPU fit"
    return f"One GPU has {format_number(capacity * factor)} {unit}; with {margin} kept free, {bound}."


def _build_memory_figure(
    measurements: TypeMeasurements, model: MemoryModel, sizes: Sequence[int], probes: Sequence[Measured], chosen: int
) -> Figure:
    capacity = measurements.estimator.capacity
    peaks = [model.peak(size) for size in sizes]
    factor, unit = choose_bytes_unit([*peaks, *(probe.memory.peak for probe in probes)])
    position_by_size = {size: float(at) for at, size in enumerate(sizes)}
    xs = tuple(position_by_size.values())
    libraries = model.libraries > 0
    series = [*_make_stacked_series(model, sizes, xs, factor)] if model.by_component else []
    series.append(Series("peak, model", xs, tuple(peak * factor for peak in peaks), style="line"))
    sorted_probes = sorted(probes, key=lambda probe: probe.local_batch)
    peaked = tuple(probe.memory.peak * factor for probe in sorted_probes)
    positions = tuple(position_by_size[probe.local_batch] for probe in sorted_probes)
    series.append(Series("peak, measured", positions, peaked, style="points", measured=(True,) * len(sorted_probes)))
    marks = (
        [Annotation(position_by_size[chosen], None, f"chosen: {chosen} per GPU", "choice")]
        if chosen in position_by_size
        else []
    )
    if capacity is not None:
        room = capacity - model.libraries
        marks.append(Annotation(None, room * factor, "memory per GPU" + " minus libraries" * libraries, "limit"))
    return Figure(
        "memory",
        "Memory per GPU",
        "Peak memory of a step by batch per GPU, split into components if they are known (Eq. 3 of the paper).",
        "local batch",
        f"memory ({unit})",
        tuple(series),
        marks=tuple(marks),
        x_scale="category",
        categories=tuple(map(str, sizes)),
        paper="Figure 4",
    )


def _make_stacked_series(
    model: MemoryModel, sizes: Sequence[int], xs: tuple[float, ...], factor: float
) -> Iterator[Series]:
    components = [model.footprint(size).memory for size in sizes]
    for name in MEMORY_COMPONENTS:
        values = tuple(getattr(memory, name) * factor for memory in components)
        if any(values):
            title = {"optimizer": "optimizer state", "factors": "scaling factors"}.get(name, name)
            yield Series(title, xs, values, style="stacked")


def _build_error_tables(model: MemoryModel, probes: Sequence[Measured]) -> Iterator[Table]:
    """Yield a table that compares the memory model with each measured peak."""
    if not probes:
        return
    factor, unit = choose_bytes_unit(probe.memory.peak for probe in probes)
    columns = (Column("nodes"), Column("batch/GPU"), Column("measured", unit, digits=4), Column("model", unit, digits=4), Column("error", "%", digits=2))  # fmt: skip
    rows = tuple(
        (p.nodes, p.local_batch, p.memory.peak * factor, model.peak(p.local_batch) * factor, 100 * (model.peak(p.local_batch) / max(p.memory.peak, 1) - 1))
        for p in probes
    )  # fmt: skip
    off = "" if model.error is None else f" Median absolute error: {format_number(100 * model.error, 2)} %."
    count = format_count(len(probes), "probe")
    yield Table(
        "memory_model",
        "Peak memory, measured and modelled",
        columns,
        rows,
        f"The model is fitted to these {count}.{off}",
    )


# --- How well the models foresee

VALIDATION_KEY, VALIDATION_TITLE = "predictions", "Prediction errors"


def build_cross_validation_section(material: Material) -> Section:
    """Build the section of prediction errors: each search strategy judged by the probes that it does not use."""
    measurements = material.choice_measurements
    if measurements is None:
        return Section(VALIDATION_KEY, VALIDATION_TITLE, missing=f"no prediction: {material.unanswered}")
    try:
        validations = cross_validate_measurements(measurements)
    except BadMeasurements as error:
        return Section(VALIDATION_KEY, VALIDATION_TITLE, missing=f"errors are unknown: {describe_error(error)}")
    return Section(
        VALIDATION_KEY,
        VALIDATION_TITLE,
        tables=(_build_validation_table(validations),),
        figures=(_build_validation_figure(validations), *_fit_figures(material, measurements)),
    )


def _make_validation_name(row: Validation) -> str:
    return f"{row.strategy}, leave-one-out" if row.left_out_once else row.strategy


def _build_validation_table(validations: tuple[Validation, ...]) -> Table:
    columns = (Column("search", align="left"), Column("probes"), Column("judged by"), Column("median error", "%", digits=3),
               Column("90th percentile", "%", digits=3), Column("inside 90 % interval", "%", digits=3))  # fmt: skip
    rows = tuple(
        (_make_validation_name(row), row.probes, row.unseen, 100 * row.median, 100 * row.p90, 100 * row.held)
        for row in validations
    )
    caption = (
        "Each search strategy is fitted to its own probes and compared with the other probes. Errors are relative to the measured step"
        " time."
    )
    return Table("validation", "Step-time errors by search strategy", columns, rows, caption)


def _build_validation_figure(validations: tuple[Validation, ...]) -> Figure:
    xs = tuple(float(place) for place in range(len(validations)))
    return Figure(
        "prediction_errors",
        "Step-time errors by search strategy",
        "Relative errors on configurations that the strategy does not measure.",
        "search",
        "error (%)",
        (
            Series("median", xs, tuple(100 * row.median for row in validations), style="bars"),
            Series("90th percentile", xs, tuple(100 * row.p90 for row in validations), style="bars"),
        ),
        x_scale="category",
        categories=tuple(_make_validation_name(row) for row in validations),
        paper="Figure 11",
    )


def _fit_figures(material: Material, type_measurements: TypeMeasurements) -> Iterator[Figure]:
    """Yield measured step times on the choice's nodes, with the fits to all probes and to the partial search's."""
    choice, estimator = material.choice, type_measurements.estimator
    assert choice is not None  # of which `own` is
    spec, gpus, nodes = type_measurements.run.spec, type_measurements.run.spec.cluster.gpus_per_node, choice.nodes
    probes = estimator.probes
    partial = {
        (n, local) for n, locals_ in STRATEGIES["partial"](group_probes_by_nodes(probes)).items() for local in locals_
    }
    here = sorted(local for count, local in probes if count == nodes)
    gaps = [config.local_batch(gpus) for config in estimator.feasible([nodes])]
    known = [size for size in sorted({*here, *gaps}) if not estimator.steps.refusal(nodes, gpus, size)]
    if len(known) < 2 or not here:
        return
    fits = {"fit to all probes": estimator.steps}
    if len(partial) < len(probes):
        few = steptime.fit_step_time([as_observation(probes[place]) for place in sorted(partial)], collective=spec.cluster.collective, priors=estimator.steps.priors)  # fmt: skip
        fits["fit to the partial search"] = few
    series = [_make_measured_series(type_measurements, here, nodes)]
    for name, fit in fits.items():
        sizes = [size for size in known if not fit.refusal(nodes, gpus, size)]
        estimates = [fit.predict(nodes, gpus, size) for size in sizes]
        xs = tuple(float(Config(nodes, size * nodes * gpus).batch) for size in sizes)
        series.append(
            Series(name, xs, tuple(1000 * estimate.seconds for estimate in estimates), tuple(estimate.low and 1000 * estimate.low for estimate in estimates),
                   tuple(estimate.high and 1000 * estimate.high for estimate in estimates), style="line")
        )  # fmt: skip
    trained = " and the trainings" * bool(estimator.trained)
    yield Figure(
        "step_time_fits",
        f"Step time on {format_count(nodes)}, measured and fitted",
        f"Probes, with a fit to all {len(probes)}{trained}, and one to the {len(partial)} of the partial search; bands: 90 %"
        " intervals.",
        "global batch",
        "step time (ms)",
        tuple(series),
        x_scale="log2",
        paper="Figure 9",
    )


def _make_measured_series(type_measurements: TypeMeasurements, sizes: list[int], nodes: int) -> Series:
    gpus, probes = type_measurements.run.spec.cluster.gpus_per_node, type_measurements.estimator.probes
    xs = tuple(float(size * nodes * gpus) for size in sizes)
    ys = tuple(1000 * compute_trimmed_mean(probes[nodes, size].step_times) for size in sizes)
    return Series("measured", xs, ys, style="points", measured=(True,) * len(sizes))


# --- Time to the same progress

PROGRESS_KEY, PROGRESS_TITLE = "same_progress", "Gradient noise and equal progress"


def build_same_progress_section(material: Material) -> Section:
    """Build the section of the gradient noise scale, its course over training, and the time to the same progress."""
    if material.answer is None or material.choice is None:
        return Section(PROGRESS_KEY, PROGRESS_TITLE, missing=f"gradient noise is unknown: {material.unanswered}")
    noise, trained = (
        find_gradient_noise_of_job(material.answer.all_measurements, needed=False),
        _list_noise_rows(material),
    )
    rows = (
        [row for row in find_envelope(material.rows, curve="accuracy-time") if row.same_progress]
        if _has_progress(material.rows)
        else []
    )
    if noise is None and not trained:
        return Section(PROGRESS_KEY, PROGRESS_TITLE, missing=_NO_NOISE)
    facts = [Fact("noise scale", _describe_scale(noise))] if noise is not None else []
    description = material.shown_recommendation.efficiency if material.shown_recommendation is not None else ""
    figures = [*_build_noise_figures(trained), *_build_progress_figures(material, rows, material.choice)]
    return Section(
        PROGRESS_KEY,
        PROGRESS_TITLE,
        (as_sentence(description),) if description else (),
        tuple(facts),
        tuple(_build_progress_tables(material, rows)),
        tuple(figures),
    )


_NO_NOISE = (
    "gradient noise was not measured. Probes measure it on two or more GPUs or with a batch of 2 or more per GPU (scripts: with"
    " DistributedDataParallel); train.diagnostics: [gradient_noise] measures it during training"
)


def _has_progress(rows: Sequence[Prediction]) -> bool:
    return bool(rows) and all(row.same_progress is not None for row in rows)


def _describe_scale(noise: Noise) -> str:
    high = "unknown" if math.isinf(noise.high) else format_number(noise.high)
    at = f"after epoch {noise.epoch:g}" if noise.epoch else "at the start of training"
    return f"{format_number(noise.scale)} samples ({format_number(noise.low)} to {high}), {at}"


def _list_noise_rows(material: Material) -> list[dict[str, Any]]:
    """Return the noise rows of the first part with a training that has measured a positive noise scale."""
    for run_material in material.own_runs:
        if run_material.now.training is not None:
            rows = run_material.look.training(run_material.now.training.signature).sampled_metrics()
            noisy = [row for row in rows if row["kind"] == "noise"]
            if rows_with_scale := [row for row in noisy if (get_metric_value(row, "scale") or 0.0) > 0]:
                return rows_with_scale
    return []


def _build_noise_figures(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    if not rows:
        return
    low, high = (tuple(get_metric_value(row, name) for row in rows) for name in ("low", "high"))
    yield Figure(
        "noise_scale",
        "Gradient noise scale over the training",
        "Measured during the training; bars: 90 % intervals. The line is the batch at that time.",
        "epoch",
        "samples",
        (
            Series("noise scale", tuple(float(row["epoch"]) for row in rows), tuple(row["scale"] for row in rows), low, high),
            Series("batch", tuple(float(row["epoch"]) for row in rows), tuple(float(row["batch"]) for row in rows), style="line"),
        ),
        y_scale="log",
    )  # fmt: skip


def _require_progress(row: Prediction) -> SameProgress:
    assert row.same_progress is not None  # of those that were picked out
    return row.same_progress


def _list_progress_caveats(material: Material, row: Prediction) -> list[str]:
    """Return the caveats on a batch's time to the same progress."""
    names = [] if material.choice is None else Caveats(material.choice).caveats_of(row)
    wide = is_too_wide(_require_progress(row).hours_low, _require_progress(row).hours_high)
    return [*["wide_interval"] * wide, *(name for name in names if name == "progress_within_noise")]


def _build_progress_tables(material: Material, rows: Sequence[Prediction]) -> Iterator[Table]:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row != material.choice)
    to_unit, unit = choose_hours_unit([*(_require_progress(row).hours for row in rows), *(row.hours for row in rows)])
    notes = [_list_progress_caveats(material, row) for row in rows]
    columns = (Column("batch"), Column("nodes"), Column("epochs", digits=3), Column("epochs, low", digits=3), Column("epochs, high", digits=3),
               Column("time to equal progress", unit, digits=3), Column("time, low", unit, digits=3), Column("time, high", unit, digits=3),
               Column("cost", material.currency, digits=3), Column("time for the job's epochs", unit, digits=3),
               *([Column("note", align="left")] if any(notes) else []))  # fmt: skip
    rows_with_progress = [(row, _require_progress(row)) for row in rows]
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (row.batch, row.nodes, progress.epochs, progress.epochs_low, progress.epochs_high, progress.hours * to_unit, progress.hours_low * to_unit,
         progress.hours_high * to_unit, progress.cost, row.hours * to_unit,
         *([describe_notes(names)] if any(notes) else []))
        for (row, progress), names in zip(rows_with_progress, notes, strict=True)
    )  # fmt: skip
    caption = f"Best configuration per batch, the chosen one first, for the progress of the job's epochs at batch {material.spec.train.reference_batch}; low and high: 90 % interval.{explain_notes(notes)}"
    marks = tuple("chosen" if material.choice is not None and row == material.choice else "" for row in rows)
    yield Table("same_progress", "Time to equal progress", columns, cells, caption, marks)


def _build_progress_figures(material: Material, rows: Sequence[Prediction], choice: Prediction) -> Iterator[Figure]:
    if len(rows) < 2:
        return
    progress_by_row = [_require_progress(row) for row in rows]
    factor, unit = choose_hours_unit(
        [*(same_progress.hours for same_progress in progress_by_row), *(row.hours for row in rows)]
    )
    xs = tuple(float(row.batch) for row in rows)
    progress = Series(
        "to equal progress",
        xs,
        tuple(same_progress.hours * factor for same_progress in progress_by_row),
        tuple(same_progress.hours_low * factor for same_progress in progress_by_row),
        tuple(same_progress.hours_high * factor for same_progress in progress_by_row),
    )
    fixed = Series("for the job's epochs", xs, tuple(row.hours * factor for row in rows), style="line")
    y = choice.same_progress.hours if choice.same_progress is not None else choice.hours
    reference = Annotation(float(material.spec.train.reference_batch), None, "reference batch", "event")
    yield Figure(
        "same_progress",
        "Time to equal progress by batch",
        "Best configuration per batch size; bars: 90 % interval from gradient-noise uncertainty.",
        "global batch",
        f"time ({unit})",
        (progress, fixed),
        marks=(make_chosen_mark(choice, choice.batch, y * factor), *([reference] if xs[0] <= (reference.x or 0) <= xs[-1] else [])),
        x_scale="log2",
    )  # fmt: skip


# --- Trainings

TRAINING_KEY, TRAINING_TITLE = "training", "The training"
METRIC_NAMES = {
    "top1": "top-1 (%), last epoch",
    "top5": "top-5 (%), last epoch",
    "eval_loss": "evaluation loss, last epoch",
}
HOW_TO_TRAIN = "nothing was trained yet. Run tula train."
Place = Callable[[Row], float]
METRIC_TITLES = {"top1": "Top-1 accuracy", "eval_loss": "Loss on the evaluation set", "perplexity": "Perplexity"}
METRIC_UNITS = {"top1": "top-1 (%)", "eval_loss": "loss"}


def build_training_section(material: Material) -> Section:
    """Build the section of the newest training of each part."""
    trainings = list_newest_trainings(material)
    if not trainings:
        return Section(TRAINING_KEY, TRAINING_TITLE, missing=HOW_TO_TRAIN)
    return Section(
        TRAINING_KEY,
        TRAINING_TITLE,
        tuple(text for training in trainings for text in _describe_training(training)),
        tuple(fact for training in trainings for fact in _list_training_facts(training)),
        tuple(table for training in trainings for table in _build_training_tables(training)),
        tuple(
            figure
            for training in trainings
            for figure in build_training_figures(training, suffix=_make_figure_suffix(training))
        ),
    )


def _make_figure_suffix(training: TrainingMaterial) -> str:
    return f"_{training.part.name}" if training.part.name else ""


def _describe_training(training: TrainingMaterial) -> Iterator[str]:
    task, end = training.task, training.summary
    where = f"on {format_count(task.own_nodes)}{f' of type {training.part.name}' if training.part.name else ''}"
    others_text = f", the newest of {training.count}" if training.count > 1 else ""
    if end is None:
        batch = f"batch {task.batch}"
        yield f"Training {task.signature}{others_text}, {where}, {batch}: {training.state}{_describe_progress(training)}."
    else:
        changed = f" (started with {end.start_batch})" if end.batch != end.start_batch else ""
        yield f"Training {task.signature}{others_text}, {where}, batch {end.batch}{changed}: done in {format_duration(3600 * end.actual_hours)}."
        if end.ended:
            yield f"It stopped early {end.ended} (train.early_stopping); predictions are for the epochs trained."
    for cause in end.causes if end is not None else ():
        yield f"Relaunched: {get_first_line(cause)}."


def _describe_progress(training: TrainingMaterial) -> str:
    """Describe the progress of an unfinished training; empty if the part's status is about another training."""
    training_status = training.part.now.training
    if training_status is None or training_status.signature != training.task.signature:
        return ""
    epochs = (
        f", epoch {training_status.epoch:.2f} of {training_status.epochs}" if training_status.epochs is not None else ""
    )
    remaining_text = f", {format_duration(training_status.eta)} left" if training_status.eta is not None else ""
    return f"{epochs}, {training_status.samples} samples{remaining_text}"


def _list_training_facts(training: TrainingMaterial) -> Iterator[Fact]:
    task, end = training.task, training.summary
    yield Fact("method", task.spec.train.method)
    yield Fact("attempts", str(len(training.attempts)))
    if (result := training.files.result()) is not None:
        yield Fact("samples", f"{result.samples} in {result.steps} steps")
    if end is not None:
        yield from _list_best_facts(end)
        yield from (Fact(METRIC_NAMES.get(name, name), format_number(value, 4)) for name, value in end.metrics.items())
    for evaluation in training.files.evaluations():
        yield Fact(f"{evaluation.weights} weights", _describe_evaluation(evaluation))
    warnings = dict.fromkeys(row["message"] for row in training.rows_of_kind("warning"))
    yield from (Fact("warning", text) for text in warnings)


def _list_best_facts(end: Summary) -> Iterator[Fact]:
    at = f" at epoch {end.best_epoch}" if end.best_epoch else ""
    if end.best is not None:
        yield Fact(f"best {end.best.metric}", f"{format_number(end.best.value, 4)}{at}")
    elif "top1" in end.metrics:
        yield Fact("best top-1", f"{format_number(end.best_top1, 4)} %{at}")
    elif end.best_loss is not None:
        yield Fact("least loss", f"{format_number(end.best_loss, 4)}{at}")


def _describe_evaluation(evaluation: EvaluationRecord) -> str:
    metrics_text = ", ".join(f"{metric} {format_number(value, 4)}" for metric, value in evaluation.metrics.items())
    return f"on the {'test' if evaluation.test else 'validation'} set: {metrics_text}"


def _build_training_tables(training: TrainingMaterial) -> Iterator[Table]:
    if training.summary is not None:
        yield _build_predicted_against_actual(training, training.summary)
    if training.attempts:
        yield _build_attempts_table(training)
    tuning = training.files.tuning()
    if tuning is not None and tuning.branches:
        columns = (Column("arm", align="left"), Column("rung"), Column("epochs", digits=3), Column("held-out loss", digits=4),
                   Column("top-1", "%", digits=4), Column("", align="left"))  # fmt: skip
        chosen = tuning.chosen.name if tuning.chosen is not None else None
        rows = tuple((b.arm, b.rung, b.epochs, b.loss, b.top1, "diverged" if b.diverged else "chosen" if b.arm == chosen else "") for b in tuning.branches)  # fmt: skip
        yield Table(f"tuning{_make_figure_suffix(training)}", "Branches of the self-tuning", columns, rows)


def _build_predicted_against_actual(training: TrainingMaterial, end: Summary) -> Table:
    """Build the table of predicted and actual values; errors are relative to the actual value."""
    divisor, unit = choose_time_unit(3600 * end.actual_hours)
    comparisons: list[tuple[str, str, float | None, float | None, float]] = [
        ("step time", "ms", end.predicted_step, end.actual_step, 1000),
        ("time", unit, end.predicted_hours, end.actual_hours, 3600 / divisor),
        *((f"time: {name}", unit, predicted, actual, 1 / divisor) for name, predicted, actual in _list_time_parts(end)),
        ("cost", end.currency, end.predicted_cost, end.actual_cost, 1),
        ("energy", "kWh", end.predicted_kwh, end.actual_kwh, 1),
    ]
    rows: list[tuple[Cell, ...]] = []
    for name, quantity_unit, predicted, actual, factor in comparisons:
        if predicted is None and actual is None:
            continue
        error = None if predicted is None or not actual else 100 * (predicted - actual) / actual
        predicted_value, actual_value = (None if value is None else value * factor for value in (predicted, actual))
        rows.append((name, quantity_unit, predicted_value, actual_value, error))
    columns = (Column("", align="left"), Column("unit", align="left"), Column("predicted", digits=3), Column("actual", digits=3), Column("error", "%", digits=3))  # fmt: skip
    counted = "" if end.counted is None else f" Energy was measured over {format_percent(end.counted)} % of the time."
    caption = f"Errors are relative to the actual value.{counted}"
    return Table(
        f"predicted_actual{_make_figure_suffix(training)}", "Predicted and actual", columns, tuple(rows), caption
    )


def _list_time_parts(end: Summary) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield the non-empty parts of the training time (seconds): name, predicted and actual value."""
    if end.actual_parts is None:
        return
    names = {"steps": "steps", "data": "data-loader wait, part of steps", "evaluation": "evaluation", "checkpoints": "checkpoints",
             "branches": "branches of self-tuning", "rest": "starting, stopping, repeated steps"}  # fmt: skip
    for field_name, name in names.items():
        actual, predicted = getattr(end.actual_parts, field_name), getattr(end.predicted_parts, field_name, None)
        if actual or predicted:
            yield name, predicted, actual


def _build_attempts_table(training: TrainingMaterial) -> Table:
    tasks = {task.id: task for task in training.files.tasks()}
    took = [attempt.count_seconds(training.part.now.at) for attempt in training.attempts]
    divisor, unit = choose_time_unit(max(took))
    columns = (Column("attempt", align="left"), Column("started", align="left"), Column("took", unit, digits=3), Column("nodes"),
               Column("batch"), Column("from sample"), Column("ended", align="left"), Column("because", align="left"))  # fmt: skip
    rows = tuple(
        (f"{attempt.task} no. {attempt.number}", format_moment(attempt.started_at), seconds / divisor,
         tasks[attempt.task].nodes if attempt.task in tasks else None, tasks[attempt.task].batch if attempt.task in tasks else None,
         attempt.samples, attempt.outcome or "open", get_first_line(attempt.message))
        for attempt, seconds in zip(training.attempts, took, strict=True)
    )  # fmt: skip
    return Table(f"attempts{_make_figure_suffix(training)}", "Attempts", columns, rows)


def build_training_figures(training_material: TrainingMaterial, *, suffix: str) -> Iterator[Figure]:
    """Yield the figures of a training for the data it has logged; `suffix` is appended to their keys."""
    for axis in _choose_metric_axes(training_material):
        for figure in (*axis.loss(training_material), *axis.metric(training_material)):
            yield _with_suffix(figure, suffix)
    samples = _choose_metric_axes(training_material)[0]
    for figure in (*samples.rate(training_material), *samples.step_time(training_material)):
        yield _with_suffix(figure, suffix)


def _with_suffix(figure: Figure, suffix: str) -> Figure:
    return replace(figure, key=f"{figure.key}{suffix}")


def _choose_metric_axes(training_material: TrainingMaterial) -> "list[_MetricAxis]":
    axes = [_MetricAxis("samples", "samples seen", lambda row: float(row["samples"]))]
    began, times = (
        training_material.began_at,
        [row["time"] for row in training_material.rows if row.get("time") is not None],
    )
    if began is not None and times:
        divisor, unit = choose_time_unit(max(times) - began)
        axes.append(_MetricAxis("time", f"time since the start ({unit})", lambda row: (row["time"] - began) / divisor))
    return axes


class _MetricAxis:
    """Horizontal axis of the figures of a training.

    Args:
        key: name of the axis in figure keys.
        label: label of the axis.
        place: returns the position of a row on the axis.
    """

    def __init__(self, key: str, label: str, place: Place) -> None:
        self.key = key
        self.label = label
        self.place = place

    def series(
        self, name: str, rows: Sequence[Row], value: Callable[[Row], float | None], style: str = "line"
    ) -> Iterator[Series]:
        """Yield the curve of a value over the rows that have it; nothing if no row does."""
        points = thin_out([(self.place(row), number) for row in rows if (number := value(row)) is not None])
        if points:
            xs, ys = zip(*points, strict=True)
            yield Series(name, xs, ys, style=style)  # type: ignore[arg-type]

    def starts(self, training_material: TrainingMaterial) -> tuple[Annotation, ...]:
        """Return marks at the starts of attempts after the first one, and at changes of the batch."""
        marks = [
            Annotation(self.place(row), None, f"attempt {number}", "event")
            for number, row in enumerate(training_material.rows_of_kind("start"), 1)
            if number > 1
        ]
        stages = training_material.rows_of_kind("stage")[1:]
        return (*marks, *(Annotation(self.place(row), None, f"batch {row['batch']}", "event") for row in stages))

    def loss(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        steps, epochs = training_material.rows_of_kind("step"), training_material.rows_of_kind("epoch")
        series = (
            *self.series("training", steps or epochs, lambda row: get_metric_value(row, "loss")),
            *self.series("evaluation", epochs, lambda row: get_metric_value(row, "eval_loss"), "line+points"),
        )
        if series:
            low = min(y for curve in series for y in curve.y if y is not None)
            yield Figure(f"loss_by_{self.key}", f"Loss over {self.key}", "Logged training steps, and the evaluation set at the end of each epoch.",
                         self.label, "loss", series, marks=self.starts(training_material), y_scale="log" if low > 0 else "linear")  # fmt: skip

    def metric(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        name, epochs = training_material.metric, training_material.rows_of_kind("epoch")
        if name == "eval_loss":  # it is in the figure of the loss
            return
        series = [
            *self.series(
                name if name != "top1" else "top-1", epochs, lambda row: get_metric_value(row, name), "line+points"
            )
        ]
        series += (
            self.series("top-5", epochs, lambda row: get_metric_value(row, "top5"), "line+points")
            if name == "top1"
            else []
        )
        if series:
            title = METRIC_TITLES.get(name, name)
            yield Figure(f"metric_by_{self.key}", f"{title} over {self.key}", "On the evaluation set, at the end of each epoch.",
                         self.label, METRIC_UNITS.get(name, name), tuple(series), marks=self.starts(training_material))  # fmt: skip

    def rate(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        rows = training_material.rows_of_kind("step", "epoch")
        series = tuple(self.series("learning rate", rows, lambda row: get_metric_value(row, "lr")))
        if series:
            yield Figure("learning_rate", "Learning rate", "Logged steps.", self.label, "learning rate",
                         series, marks=self.starts(training_material))  # fmt: skip

    def step_time(self, training_material: TrainingMaterial) -> Iterator[Figure]:
        """Yield the logged step time together with the predicted one and its interval."""
        series = [
            *self.series(
                "logged", training_material.rows_of_kind("step"), lambda row: _get_milliseconds(row, "step_time")
            )
        ]
        if not series:
            return
        predicted_rows = [
            row for row in training_material.rows_of_kind("epoch") if row.get("predicted_step") is not None
        ]
        if predicted_rows:
            predicted_rows = thin_out(predicted_rows)
            ends = [
                tuple(_get_milliseconds(row, name) for row in predicted_rows)
                for name in ("predicted_step", "step_low", "step_high")
            ]
            series.append(
                Series(
                    "predicted",
                    tuple(self.place(row) for row in predicted_rows),
                    ends[0],
                    ends[1],
                    ends[2],
                    style="line",
                )
            )
        changes = tuple(
            Annotation(float(change.samples), None, f"changed: {', '.join(change.parts)}", "event")
            for change in training_material.files.changes()
        )
        caption = "Means over the steps between two log entries; the band is the 90 % interval of the prediction."
        yield Figure("step_time", "Step time", caption, self.label, "step time (ms)", tuple(series), marks=(*self.starts(training_material), *changes))  # fmt: skip


def _get_milliseconds(row: Row, name: str) -> float | None:
    value = get_metric_value(row, name)
    return None if value is None else 1000 * value


# --- Gradients

GRADIENTS_KEY, GRADIENTS_TITLE = "gradients", "Gradients and their scaling"


def build_gradients_section(material: Material) -> Section:
    """Build the section of gradient norms and changes, accuracy, scaling factors and curvature, as far as logged."""
    trainings = list_newest_trainings(material)
    if not trainings:
        return Section(GRADIENTS_KEY, GRADIENTS_TITLE, missing=HOW_TO_TRAIN)
    paper_figures = find_paper_figures()
    if paper_figures is None:
        return Section(GRADIENTS_KEY, GRADIENTS_TITLE, missing=WITHOUT_FIGURES)
    drawn = tuple(figure for training in trainings for figure in _build_gradient_figures(training, paper_figures))
    facts = tuple(fact for training in trainings for fact in _list_scaling_facts(training))
    if not drawn:
        return Section(GRADIENTS_KEY, GRADIENTS_TITLE, facts=facts, missing=_describe_why_no_gradients(trainings[0]))
    return Section(GRADIENTS_KEY, GRADIENTS_TITLE, _list_left_out_notes(trainings[0]), facts, figures=drawn)


def _build_gradient_figures(training: TrainingMaterial, paper_figures: PaperFigures) -> Iterator[Figure]:
    prefix = f"{training.part.name}_" if training.part.name else ""
    curve = GradientCurve(
        training.task.spec.train.method, training.rows_of_kind("epoch"), training.rows_of_kind("hessian")
    )
    of_steps = list(paper_figures.build_step_figures(training.files.steps(), name=curve.name, prefix=prefix))
    step_keys = {figure.key for figure in of_steps}  # medians of epochs tell less
    yield from of_steps[:2]
    yield from (
        figure for figure in paper_figures.build_gradient_figures([curve], prefix=prefix) if figure.key not in step_keys
    )
    yield from of_steps[2:]
    title = f"Scaling factors of {curve.name}, batch {training.task.batch}"
    yield from paper_figures.build_factor_density(curve, key=f"{prefix}factors", title=title)


def _list_scaling_facts(training: TrainingMaterial) -> Iterator[Fact]:
    """Yield the mean scaling factor and the share of scaled steps, in the last epoch or in all steps of a script."""
    ags_row: Row = next((row["ags"] for row in reversed(training.rows) if isinstance(row.get("ags"), Mapping)), {})
    mean, scaled = (get_metric_value(ags_row.get("so_far", ags_row), name) for name in ("mean", "scaled"))
    scope = " of the last epoch" if training.task.spec.script is None else ""
    if mean is not None and scaled is not None:
        yield Fact("scaling", f"factor {format_number(mean, 3)} in {format_percent(scaled)} % of the steps{scope}")


def _describe_why_no_gradients(training: TrainingMaterial) -> str:
    if training.task.spec.script is not None:
        return "a script's gradients are not logged; train.diagnostics is for tula's own loop"
    return (
        "this training logged no gradients. To log norms and curvature, train with --set"
        " train.diagnostics=[gradient_norms,hessian]"
    )


def _list_left_out_notes(training: TrainingMaterial) -> tuple[str, ...]:
    if training.rows_of_kind("hessian"):
        return ()
    return (
        "The curvature (largest eigenvalue) was not measured; train with --set train.diagnostics=[hessian] to measure it.",
    )


# --- Methods compared

HOW_TO_COMPARE = "no comparison. tula compare trains the job with several methods and batches and shows their accuracy"


def build_comparison_sections_of_parts(material: Material) -> Iterator[Section]:
    """Yield the sections of each part's comparison, or a single empty one if nothing was compared."""
    compared_parts = [
        (run_material, comparison)
        for run_material in material.own_runs
        if (comparison := run_material.run.comparison()) is not None
    ]
    if not compared_parts:
        yield Section("comparison", "Methods and batches", missing=HOW_TO_COMPARE)
    for run_material, comparison in compared_parts:
        report = accuracy.build_compare_report(run_material.run, comparison, jobs=run_material.now.jobs)
        for section in comparison_document.build_comparison_sections(
            report, accuracy.read_training_curves(run_material.run, comparison)
        ):
            name = f": {run_material.name}" if run_material.name else ""
            yield replace(
                section,
                key=f"{section.key}{f'_{run_material.name}' if run_material.name else ''}",
                title=f"{section.title}{name}",
            )
