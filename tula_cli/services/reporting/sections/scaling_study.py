"""Strong and weak scaling: what more nodes bring at the chosen batch, and at the chosen batch of one GPU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tula_cli.models.choice.grid import Config
from tula_cli.run.records.recommendations import HIGHEST_EFFICIENCY, Prediction
from tula_cli.services.reporting.document import Column, Figure, Mark, Section, Series, Table
from tula_cli.services.reporting.figures import (
    chosen_mark,
    convert,
    describe_notes,
    explain_notes,
    hours_unit,
    is_priced,
)
from tula_cli.services.reporting.material import Material
from tula_cli.services.reporting.sections.chosen import describe_basis
from tula_cli.words import is_too_wide, plural

KEY, TITLE = "scaling", "Scaling"


@dataclass(frozen=True)
class ScalingPoint:
    """One number of nodes of a study; speed-up and efficiency are against its fewest nodes, which count as ideal."""

    row: Prediction
    gpus: int  # of all nodes
    samples: float  # a second
    samples_low: float | None  # ends of the 90 % interval
    samples_high: float | None
    speedup: float
    efficiency: float  # 1 is ideal


@dataclass(frozen=True)
class ScalingStudy:
    """Throughput against nodes: of one global batch (strong) or one local batch (weak), fewest nodes first."""

    fixed: int  # the batch, global or local
    points: tuple[ScalingPoint, ...]


def build_study(rows: Iterable[Prediction], *, fixed: int, gpus_per_node: int) -> ScalingStudy:
    """Return a scaling study of forecasts at different numbers of nodes.

    Args:
        rows: all at one global batch, or all at one local batch.
        fixed: that batch.
        gpus_per_node: of each of them.
    """
    sorted_rows = sorted(rows, key=lambda row: row.nodes)
    if not sorted_rows:
        return ScalingStudy(fixed, ())
    first_throughput = sorted_rows[0].batch / sorted_rows[0].step_time
    points = []
    for row in sorted_rows:
        samples = row.batch / row.step_time
        low, high = (None if end is None else row.batch / end for end in (row.step_high, row.step_low))
        speedup = samples / first_throughput
        efficiency = speedup * sorted_rows[0].nodes / row.nodes
        points.append(ScalingPoint(row, row.nodes * gpus_per_node, samples, low, high, speedup, efficiency))
    return ScalingStudy(fixed, tuple(points))


def studies_of_choice(material: Material) -> tuple[ScalingStudy, ScalingStudy] | None:
    """Return the strong and the weak scaling around the choice, over the nodes of the search; None where nothing is known."""
    measurements, choice = material.choice_measurements, material.choice
    if measurements is None or choice is None:
        return None
    spec = measurements.part.spec
    nodes, gpus = sorted({*spec.search.nodes, choice.nodes}), spec.cluster.gpus_per_node
    strong = material.forecast([Config(count, choice.batch) for count in nodes])
    weak = material.forecast([Config(count, choice.local_batch * count * gpus) for count in nodes])
    return (
        build_study(strong, fixed=choice.batch, gpus_per_node=gpus),
        build_study(weak, fixed=choice.local_batch, gpus_per_node=gpus),
    )


def scaling_section(material: Material) -> Section:
    """Return the two tables, and throughput, speed-up and efficiency against nodes."""
    both_studies, choice = studies_of_choice(material), material.choice
    if both_studies is None or choice is None:
        return Section(KEY, TITLE, missing=f"no scaling is known: {material.unanswered}")
    strong, weak = both_studies
    tables = (
        scaling_table(
            strong, "strong_scaling", f"Strong scaling: global batch {strong.fixed} on all", choice, material.currency
        ),
        scaling_table(
            weak, "weak_scaling", f"Weak scaling: local batch {weak.fixed} on every GPU", choice, material.currency
        ),
    )
    text = []
    if len(strong.points) < 2:
        text.append(
            f"Batch {strong.fixed} is known on {plural(len(strong.points), 'number')} of nodes only: there is no strong scaling"
            " to tell; search.nodes names those that are measured."
        )
    impossible = [point for study in both_studies for point in study.points if point.efficiency > HIGHEST_EFFICIENCY]
    if impossible:
        text.append(
            f"An efficiency of {100 * max(point.efficiency for point in impossible):.0f} % is hardly possible: the step time on the"
            " fewest nodes is too uncertain, or was disturbed. Probe it again, and longer (search.min_seconds)."
        )
    figures = () if len(strong.points) < 2 and len(weak.points) < 2 else _scaling_figures(strong, weak, choice)
    return Section(KEY, TITLE, tuple(text), tables=tables, figures=figures)


def _caveats(point: ScalingPoint) -> list[str]:
    """Return what the figures of a point leave open."""
    names = ["wide_interval"] * is_too_wide(point.row.step_low, point.row.step_high)
    return [*names, *["efficiency_above_110"] * (point.efficiency > HIGHEST_EFFICIENCY)]


def scaling_table(study: ScalingStudy, key: str, title: str, choice: Prediction, currency: str) -> Table:
    """Return a study as a table, one row a number of nodes."""
    to_unit, unit = hours_unit(point.row.hours for point in study.points)
    notes = [_caveats(point) for point in study.points]
    priced = is_priced([point.row for point in study.points], currency)
    columns = (Column("nodes"), Column("GPUs"), Column("batch"), Column("local batch"), Column("step", "ms", digits=3),
               Column("from", "ms", digits=3), Column("to", "ms", digits=3), Column("samples/s", digits=4),
               Column("speed-up", digits=3), Column("efficiency", "%", digits=3), Column("time", unit, digits=3),
               Column("node-hours", digits=3), *([Column("cost", currency, digits=3)] if priced else []),
               Column("basis", align="left"), *([Column("note", align="left")] if any(notes) else []))  # fmt: skip
    rows = tuple(
        (point.row.nodes, point.gpus, point.row.batch, point.row.local_batch, 1000 * point.row.step_time,
         convert(point.row.step_low, 1000), convert(point.row.step_high, 1000), point.samples, point.speedup,
         100 * point.efficiency, point.row.hours * to_unit, point.row.all_node_hours,
         *([point.row.cost] if priced else []), describe_basis(point.row), *([describe_notes(_caveats(point))] if any(notes) else []))
        for point in study.points
    )  # fmt: skip
    fewest = plural(study.points[0].row.nodes) if study.points else "the fewest nodes"
    caption = (
        f"Speed-up and efficiency are against {fewest}; from and to are the ends of the 90 % interval of the step time; "
        f"{'time, node-hours and cost' if priced else 'time and node-hours'} are those of the whole training.{explain_notes(notes)}"
    )
    at = (choice.nodes, choice.batch)
    marks = tuple("chosen" if (point.row.nodes, point.row.batch) == at else "" for point in study.points)
    return Table(key, title, columns, rows, caption, marks)


def _scaling_figures(strong: ScalingStudy, weak: ScalingStudy, choice: Prediction) -> tuple[Figure, ...]:
    named = [(study, name) for study, name in ((strong, f"batch {strong.fixed}"), (weak, f"local batch {weak.fixed}"))
             if len(study.points) > 1]  # fmt: skip
    throughput = [_throughput_series(study, name) for study, name in named]
    speedup = [_speedup_series(study, name) for study, name in named]
    efficiency = [
        Series(
            name,
            _node_counts(study),
            tuple(100 * point.efficiency for point in study.points),
            measured=_measured_flags(study),
        )
        for study, name in named
    ]
    counts = sorted({count for study, _ in named for count in _node_counts(study)})
    ideal = [
        Series(f"ideal, {name}", _node_counts(study), tuple(study.points[0].samples * count / study.points[0].row.nodes for count in _node_counts(study)), style="line")
        for study, name in named
    ]  # fmt: skip
    straight = Series("ideal", tuple(counts), tuple(count / counts[0] for count in counts), style="line")
    caption = "Filled markers are measured, open ones predicted; bars are 90 % intervals."
    chosen_point = next(point for point in (*strong.points, *weak.points) if point.row.nodes == choice.nodes)
    return (
        _scaling_figure("throughput", "Throughput against nodes", caption, "samples/s", (*throughput, *ideal), marks=(chosen_mark(choice, choice.nodes, chosen_point.samples),), log=True),
        _scaling_figure("speedup", "Speed-up against nodes", f"{caption} Each against its own fewest nodes.", "speed-up", (*speedup, straight), log=True),
        _scaling_figure("efficiency", "Parallel efficiency against nodes", "Share of the throughput that the fewest nodes of each would have on as many.", "efficiency (%)", tuple(efficiency)),
    )  # fmt: skip


def _scaling_figure(
    key: str,
    title: str,
    caption: str,
    y: str,
    series: Sequence[Series],
    *,
    marks: tuple[Mark, ...] = (),
    log: bool = False,
) -> Figure:
    scale: Literal["linear", "log2"] = "log2" if log else "linear"
    return Figure(
        f"scaling_{key}", title, caption, "nodes", y, tuple(series), marks=marks, x_scale="log2", y_scale=scale
    )


def _node_counts(study: ScalingStudy) -> tuple[float, ...]:
    return tuple(float(point.row.nodes) for point in study.points)


def _measured_flags(study: ScalingStudy) -> tuple[bool, ...]:
    return tuple(point.row.measured for point in study.points)


def _throughput_series(study: ScalingStudy, name: str) -> Series:
    return Series(
        name,
        _node_counts(study),
        tuple(point.samples for point in study.points),
        tuple(point.samples_low for point in study.points),
        tuple(point.samples_high for point in study.points),
        measured=_measured_flags(study),
    )


def _speedup_series(study: ScalingStudy, name: str) -> Series:
    first_throughput = study.points[0].samples
    return Series(
        name,
        _node_counts(study),
        tuple(point.speedup for point in study.points),
        tuple(convert(point.samples_low, 1 / first_throughput) for point in study.points),
        tuple(convert(point.samples_high, 1 / first_throughput) for point in study.points),
        measured=_measured_flags(study),
    )
