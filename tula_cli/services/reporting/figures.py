"""Figures of the gradients and steps of a training, and the units and marks shared by the sections."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal, TypeVar

from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.recommendations import CAVEATS, Prediction, get_caveat_kind
from tula_cli.run.records.results import Summary
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.step_series import StepSeries
from tula_cli.run.training_run import TrainingRun
from tula_cli.services.reporting.document import Annotation, Density, Figure, Series
from tula_cli.services.reporting.material import Material, PartMaterial
from tula_cli.spec.workload import get_workload
from tula_cli.words import choose_size_unit, choose_time_unit, format_count, is_cost_in_node_hours

# --- Units and marks

MAX_CURVES = 8
"""Largest number of curves that can be distinguished in one figure."""
MAX_POINTS = 600
"""Largest number of points drawn per curve; more would not be visible and would make the page large."""

Scale = Literal["linear", "log"]
T = TypeVar("T")


def choose_hours_unit(hours: Iterable[float | None]) -> tuple[float, str]:
    """Return the factor and name of the unit in which `hours` is displayed."""
    divisor, unit = choose_time_unit(3600 * max((value for value in hours if value is not None), default=0.0))
    return 3600 / divisor, unit


def choose_bytes_unit(sizes: Iterable[float | None]) -> tuple[float, str]:
    """Return the factor and name of the unit in which `sizes` are displayed."""
    divisor, unit = choose_size_unit(max((value for value in sizes if value is not None), default=0.0))
    return 1 / divisor, unit


def convert(value: float | None, factor: float) -> float | None:
    """Convert a value to another unit; None is returned unchanged."""
    return None if value is None else value * factor


def thin_out(items: Sequence[T]) -> list[T]:
    """Return at most `MAX_POINTS` evenly spaced items, always including the last one."""
    step = 1 + (len(items) - 1) // MAX_POINTS if items else 1
    return [*items[: len(items) - 1 : step], *items[-1:]]


def choose_scale(values: Iterable[float | None], *, span: float = 10) -> Scale:
    """Return "log" if all finite values are positive and their ratio exceeds `span`, else "linear"."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return "log" if finite and min(finite) > 0 and max(finite) > span * min(finite) else "linear"


def is_priced(rows: Iterable[Prediction], currency: str) -> bool:
    """Return whether costs are prices, rather than the node-hours that are already shown."""
    return not all(is_cost_in_node_hours(row.cost, row.all_node_hours, currency) for row in rows)


def describe_notes(names: Sequence[str]) -> str:
    """Format the caveats of a configuration as the text of a table cell."""
    return ", ".join(name.replace("_above_110", " above 110 %").replace("_", " ") for name in names)


def explain_notes(rows: Iterable[Sequence[str]]) -> str:
    """Explain the caveats of some rows as the end of a caption; empty if the rows have none."""
    kinds = {get_caveat_kind(name) for names in rows for name in names}
    return "".join(
        f" {describe_notes([name]).capitalize()}: {explanation}."
        for name, explanation in CAVEATS.items()
        if name in kinds
    )


def as_sentence(text: str) -> str:
    """Return `text` with a capital letter and a full stop; an empty text is returned unchanged."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def describe_nodes(row: Prediction) -> str:
    """Return the number of nodes of a configuration, and their type if it has one."""
    return f"{format_count(row.nodes)}{f' of type {row.type}' if row.type else ''}"


def make_chosen_mark(row: Prediction, x: float, y: float | None) -> Annotation:
    """Return the mark of the chosen configuration at a point of a figure."""
    return Annotation(x, y, f"chosen: {describe_nodes(row)}, batch {row.batch}", "choice")


def describe_software(environment: Mapping[str, Any]) -> str:
    """Return the software versions recorded in a probe's environment; unknown ones are left out."""
    names = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver", "python": "Python", "tula": "tula"}
    if environment.get("device") == "cpu":
        names = {key: name for key, name in names.items() if key in ("torch", "python", "tula")}
    versions = [f"{name} {environment[key]}" for key, name in names.items() if environment.get(key)]
    return ", ".join([*versions, *([str(environment["system"])] if environment.get("system") else [])])


# --- One training

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingMaterial:
    """A training of a part; `count` trainings of the part exist outside its comparison, this one is the newest.

    If all trainings belong to the comparison, `count` is their number.
    """

    part: PartMaterial
    files: TrainingRun
    task: TrainTask
    count: int

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Rows of the training's metrics; the steps of a long training are subsampled."""
        return [row for row in self.files.sampled_metrics() if is_placed(row)]

    def rows_of_kind(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] in kinds]

    @cached_property
    def summary(self) -> Summary | None:
        return self.files.summary()

    @cached_property
    def attempts(self) -> list[Attempt]:
        return self.files.attempts()

    @property
    def began_at(self) -> float | None:
        """Unix time of the first row or attempt; None if there is neither."""
        moments = [row["time"] for row in self.rows[:1]] + [attempt.started_at for attempt in self.attempts[:1]]
        return min(moments, default=None)

    @property
    def state(self) -> str:
        """State of the training's job, as in `tula status`; "done" if the training has a summary."""
        if self.summary is not None:
            return "done"
        return next((job.state for job in self.part.now.jobs if job.id == self.task.job), "not submitted")

    @property
    def metric(self) -> str:
        """The metric that judges the training; the loss on the evaluation set if no preferred metric was logged.

        Preferred are `train.best_checkpoint`, top1 and perplexity, in this order, or the metrics of a script.
        """
        requested_metric = self.task.spec.train.best_checkpoint.metric
        epochs = self.rows_of_kind("epoch")
        names = get_workload(self.task.spec).own_metrics or (requested_metric, "top1", "perplexity")
        return next(
            (name for name in names if any(get_metric_value(row, name) is not None for row in epochs)), "eval_loss"
        )


def is_placed(row: Row) -> bool:
    """Return whether a row has a valid sample count and time; a damaged row may not."""
    return isinstance(row.get("samples"), int | float) and isinstance(row.get("time", 0.0), int | float)


def get_metric_value(row: Row, metric: str) -> float | None:
    """Return a metric of an epoch's row, user-defined ones included; None if missing or not a finite number."""
    user_metrics = row.get("metrics")
    value = row.get(metric, user_metrics.get(metric) if isinstance(user_metrics, Mapping) else None)
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None


def get_value_at(row: Any, path: str) -> Any:
    """Return the value of a row under a path such as "ags.mean", or None if there is none."""
    for key in path.split("."):
        if not isinstance(row, Mapping):
            return None
        row = row.get(key)
    return row


def list_newest_trainings(material: Material) -> list[TrainingMaterial]:
    """Return the newest training of each part; one that belongs to a comparison only if there is no other."""
    return [training for part_material in material.own_parts for training in _find_newest_training(part_material)]


def _find_newest_training(part_material: PartMaterial) -> Iterator[TrainingMaterial]:
    comparison = part_material.part.run.comparison()
    compared = {cell.signature for cell in comparison.cells} if comparison is not None else set()
    tasks = part_material.look.train_tasks
    own_tasks = [task for task in tasks if task.signature not in compared] or tasks
    submitted = {job.id: job.submitted_at for job in part_material.look.jobs}
    newest = max(own_tasks, key=lambda task: (submitted.get(task.job, 0.0), task.attempt), default=None)
    if newest is not None:
        count = len({task.signature for task in own_tasks})
        yield TrainingMaterial(part_material, part_material.look.training(newest.signature), newest, count)


# --- Figures of gradients


@dataclass(frozen=True)
class GradientCurve:
    """The rows one training logged per epoch and for the Hessian; curves with the same name are averaged."""

    name: str
    epochs: Sequence[Row]
    curvature: Sequence[Row] = ()


@dataclass(frozen=True)
class Quantity:
    """A number in the rows of a training: its path ("ags.mean": key mean of the mapping ags) and how to draw it."""

    key: str
    path: str
    title: str
    label: str
    caption: str = ""
    log: bool = False
    paper: str = ""
    ends: tuple[str, str] | None = None  # names of its spread beside it, of one training


OF_EPOCHS = (
    Quantity("gradient_norm", "diagnostics.norm.q50", "Gradient norm", "norm of the gradient",
             "Median of an epoch's steps; of one training the bars are the 5 and 95 % quantiles.", True, "Figure 5", ("q05", "q95")),
    Quantity("gradient_change", "diagnostics.delta.q50", "Change of the gradient, Delta(G)", "Delta(G)",
             "Eq. 5, median of an epoch's steps; of one training the bars are the 5 and 95 % quantiles.", True, "Figure 6", ("q05", "q95")),
    Quantity("factor_mean", "ags.mean", "Mean scaling factor", "factor"),
    Quantity("factor_steps", "ags.scaled", "Share of the steps that are scaled", "share of steps"),
    Quantity("factor_at_cap", "ags.at_cap", "Share of factors at their cap", "share of factors"),
    Quantity("factor_at_floor", "ags.at_floor", "Share of factors at their floor", "share of factors"),
)  # fmt: skip
OF_CURVATURE = (
    Quantity("lr_bound", "lr_bound", "Lemma 1's bound on the learning rate", "learning rate", "With the curvature as measured.", True),
)  # fmt: skip


def build_gradient_figures(curves: Sequence[GradientCurve], *, prefix: str = "") -> Iterator[Figure]:
    """Yield a figure per logged quantity against samples seen; `prefix` is put before the figure keys."""
    for quantity in OF_EPOCHS:
        yield from _draw_quantity(quantity, curves, lambda curve: curve.epochs, prefix)
        if quantity.key == "gradient_change":
            yield from _build_accuracy_figure(curves, prefix)
    yield from _build_eigenvalue_figure(curves, prefix)
    for quantity in OF_CURVATURE:
        yield from _draw_quantity(quantity, curves, lambda curve: curve.curvature, prefix)


def _build_accuracy_figure(curves: Sequence[GradientCurve], prefix: str) -> Iterator[Figure]:
    """Yield the accuracy against samples seen, if Delta(G) is drawn as well."""
    if not any(make_mean_series(curves, lambda curve: curve.epochs, OF_EPOCHS[1].path)):
        return
    quantity = Quantity("change_accuracy", "top1", "Accuracy beside it", "top-1 (%)", "On the evaluation set, over the same samples as Delta(G).", paper="Figure 6")  # fmt: skip
    yield from _draw_quantity(quantity, curves, lambda curve: curve.epochs, prefix)


def _draw_quantity(
    quantity: Quantity, curves: Sequence[GradientCurve], rows: Callable[[GradientCurve], Sequence[Row]], prefix: str
) -> Iterator[Figure]:
    series = list(make_mean_series(curves, rows, quantity.path))
    if quantity.ends is not None and len(curves) == 1 and series:
        series = [_with_spread(series[0], rows(curves[0]), quantity)]
    if series:
        scale = choose_scale((y for one_series in series for y in one_series.y), span=1) if quantity.log else "linear"
        yield Figure(f"{prefix}{quantity.key}", quantity.title, quantity.caption, "samples seen", quantity.label, tuple(series), y_scale=scale, paper=quantity.paper)  # fmt: skip


def _with_spread(series: Series, rows: Sequence[Row], quantity: Quantity) -> Series:
    assert quantity.ends is not None
    folder = quantity.path.rpartition(".")[0]
    at = {float(row["samples"]): row for row in rows if is_placed(row)}
    low, high = (tuple(_as_number(get_value_at(at[x], f"{folder}.{name}")) for x in series.x) for name in quantity.ends)
    return replace(series, low=low, high=high)


def make_mean_series(
    curves: Sequence[GradientCurve], rows: Callable[[GradientCurve], Sequence[Row]], path: str, *, name: str = ""
) -> Iterator[Series]:
    """Yield one series per curve name: the mean over trainings of the value under `path`, against samples seen.

    At each sample count the mean covers the trainings that have reached it. `name`, if given, replaces the names of the
    curves, so that all of them are averaged.
    """
    values_by_name: dict[str, dict[float, list[float]]] = {}
    for curve in curves:
        values_by_samples = values_by_name.setdefault(name or curve.name, {})
        for row in rows(curve):
            if is_placed(row) and (value := _as_number(get_value_at(row, path))) is not None:
                values_by_samples.setdefault(float(row["samples"]), []).append(value)
    for series_name, values_by_samples in values_by_name.items():
        points = thin_out(sorted(values_by_samples.items()))
        if points:
            yield Series(series_name, tuple(x for x, _ in points), tuple(fmean(ys) for _, ys in points))


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _build_eigenvalue_figure(curves: Sequence[GradientCurve], prefix: str) -> Iterator[Figure]:
    """Yield the largest eigenvalue of the Hessian together with the gradient norm on the same samples."""
    named = {"largest eigenvalue": "eigenvalue", "gradient norm": "gradient_norm"}
    several = len({curve.name for curve in curves}) > 1
    series = [
        one_series
        for name, path in named.items()
        for curve_name in dict.fromkeys(curve.name for curve in curves)
        for one_series in make_mean_series([c for c in curves if c.name == curve_name], lambda c: c.curvature, path, name=f"{curve_name}: {name}" if several else name)
    ]  # fmt: skip
    if series:
        scale = choose_scale((y for one_series in series for y in one_series.y), span=1)
        yield Figure(
            f"{prefix}eigenvalue", "Largest Hessian eigenvalue and gradient norm", "Both on the same training samples (train.diagnostics: hessian).",
            "samples seen", "eigenvalue, norm", tuple(series), y_scale=scale, paper="Figure 5",
        )  # fmt: skip


def build_factor_density(curve: GradientCurve, *, key: str, title: str) -> Iterator[Figure]:
    """Yield the distribution of the scaling factors, with one column per epoch; nothing if no factors are logged.

    The outer bins hold the values beyond all edges. Only the range between the first and last non-empty bins is drawn.
    """
    logged = [
        (float(row["samples"]), bin_counts)
        for row in curve.epochs
        if is_placed(row) and (bin_counts := _read_bin_counts(row))
    ]
    logged = [
        entry for entry in logged if entry[1][0] == logged[0][1][0]
    ]  # of other edges nothing can be drawn beside them
    filled = {bin_index for _, (_, counts) in logged for bin_index, count in enumerate(counts) if count}
    if not filled:
        return
    edges = logged[0][1][0]
    step = edges[1] / edges[0]
    all_edges = (edges[0] / step, *edges, edges[-1] * step)  # of the bins; the first and the last have no other end
    low, high = min(filled), max(filled)
    columns = tuple(tuple(count / max(sum(counts), 1) for count in counts[low : high + 1]) for _, (_, counts) in logged)
    yield Figure(
        key, title, "Share of the elements (or tensors) whose factor lies in a bin, at the end of each epoch; the outer bins hold"
        " what is beyond.", "samples seen", "scaling factor",
        density=Density((0.0, *(samples for samples, _ in logged)), all_edges[low : high + 2], columns),
        y_scale="log2", paper="Figure 7",
    )  # fmt: skip


def _read_bin_counts(row: Row) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    edges, counts = (get_value_at(row, f"diagnostics.factors.{name}") for name in ("edges", "counts"))
    if (
        not _are_numbers(edges)
        or not _are_numbers(counts)
        or len(counts) != len(edges) + 1
        or min(edges) <= 0
        or not any(counts)
    ):
        return None
    return tuple(edges), tuple(counts)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 1 and all(_as_number(value) is not None for value in values)


# --- Figures of steps

Spreads = Sequence[tuple[float, float, float, float]]
"""Rows of samples seen, mean, minimum and maximum."""

CAPTION = (
    "Of every step; of a long training a point is the mean of neighbouring steps, the band their least and largest."
)


def build_step_figures(steps: StepSeries, *, name: str, prefix: str = "") -> Iterator[Figure]:
    """Yield figures of the recorded steps of a training against samples seen; nothing if no steps were recorded.

    Args:
        steps: recorded steps.
        name: name of the curves.
        prefix: prefix of the figure keys.
    """
    quantities = (
        ("gradient_norm", "Gradient norm", "norm of the gradient", "Figure 5", (steps.norm, steps.norm_low, steps.norm_high)),
        ("gradient_change", "Change of the gradient, Delta(G)", "Delta(G), Eq. 5", "Figure 6", (steps.delta, steps.delta_low, steps.delta_high)),
        ("factor_of_steps", "Scaling factor of the steps that are scaled", "factor", "", (steps.factor,) * 3),
    )  # fmt: skip
    for key, title, label, paper, columns in quantities:
        rows = [
            (float(at), mean, low, high)
            for at, mean, low, high in zip(steps.samples, *columns, strict=True)
            if mean is not None and low is not None and high is not None
        ]
        if rows:
            yield _build_step_figure(f"{prefix}{key}", title, label, paper, name, join_neighbours(rows))


def join_neighbours(rows: Spreads) -> Spreads:
    """Return at most `MAX_POINTS` rows by merging neighbours.

    A merged row keeps the minimum and maximum of its group, so that no spike is lost.
    """
    size = -(-len(rows) // MAX_POINTS)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [(group[-1][0], fmean(row[1] for row in group), min(row[2] for row in group), max(row[3] for row in group)) for group in groups]  # fmt: skip


def _build_step_figure(key: str, title: str, label: str, paper: str, name: str, rows: Spreads) -> Figure:
    xs, mean, low, high = (tuple(column) for column in zip(*rows, strict=True))
    series = Series(name, xs, mean, low, high, style="line")
    return Figure(key, title, CAPTION, "samples seen", label, (series,), y_scale=choose_scale(low, span=1), paper=paper)
