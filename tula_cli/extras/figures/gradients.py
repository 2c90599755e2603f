"""The paper's figures of gradients: norms, Delta(G), scaling factors and the Hessian's eigenvalue (Figures 5 to 8)."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from tula_cli.extras.report.values import (
    MAX_POINTS,
    Row,
    TrainingCurve,
    choose_scale,
    convert_to_number,
    get_value_at_path,
    has_position,
    make_mean_series,
)
from tula_cli.run.step_series import StepSeries
from tula_cli.services.document import Density, Figure, Series


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
    has_quantiles: bool = False  # whether figures of one training show its 5 and 95 % quantiles, q05 and q95


EPOCH_QUANTITIES = (
    Quantity("gradient_norm", "diagnostics.norm.q50", "Gradient norm", "norm of the gradient",
             "Median over the steps of an epoch; for a single training, bars show the 5 and 95 % quantiles.", True, "Figure 5", True),
    Quantity("gradient_change", "diagnostics.delta.q50", "Change of the gradient, Delta(G)", "Delta(G)",
             "Eq. 5 of the paper, median over the steps of an epoch; for a single training, bars show the 5 and 95 % quantiles.", True, "Figure 6", True),
    Quantity("factor_mean", "ags.mean", "Mean scaling factor", "factor"),
    Quantity("factor_steps", "ags.scaled", "Share of scaled steps", "share of steps"),
    Quantity("factor_at_cap", "ags.at_cap", "Share of factors at their cap", "share of factors"),
    Quantity("factor_at_floor", "ags.at_floor", "Share of factors at their floor", "share of factors"),
)  # fmt: skip
LEARNING_RATE_BOUND = Quantity(
    "lr_bound",
    "lr_bound",
    "Bound on the learning rate (Lemma 1)",
    "learning rate",
    "Computed from the measured curvature.",
    True,
)


def build_gradient_figures(curves: Sequence[TrainingCurve]) -> Iterator[Figure]:
    """Yield a figure per logged quantity against samples seen.

    Recorded steps of a single training take the place of the medians of its epochs.
    """
    steps = curves[0].steps if len(curves) == 1 else None
    of_steps = {} if steps is None else {figure.key: figure for figure in _build_step_figures(steps, curves[0].name)}
    for quantity in EPOCH_QUANTITIES:
        plotted = of_steps.pop(quantity.key, None)
        yield from _draw_quantity(quantity, curves, lambda curve: curve.epochs) if plotted is None else [plotted]
    yield from _build_curvature_figure(curves)
    yield from _draw_quantity(LEARNING_RATE_BOUND, curves, lambda curve: curve.curvature)
    yield from of_steps.values()
    first_curves = {curve.name: curve for curve in reversed(curves)}
    for name, curve in first_curves.items():
        suffix = f"_{re.sub(r'[^A-Za-z0-9]+', '_', name)}" if len(first_curves) > 1 else ""
        yield from _build_factor_density(curve, key=f"factors{suffix}")


def _draw_quantity(
    quantity: Quantity, curves: Sequence[TrainingCurve], rows: Callable[[TrainingCurve], Sequence[Row]]
) -> Iterator[Figure]:
    series = list(make_mean_series(curves, rows, quantity.path))
    if quantity.has_quantiles and len(curves) == 1 and series:
        series = [_add_quantiles(series[0], rows(curves[0]), quantity)]
    if series:
        scale = choose_scale((y for line in series for y in line.y), span=1) if quantity.log else "linear"
        yield Figure(quantity.key, quantity.title, quantity.caption, "samples seen", quantity.label, tuple(series), y_scale=scale, paper=quantity.paper)  # fmt: skip


def _add_quantiles(series: Series, rows: Sequence[Row], quantity: Quantity) -> Series:
    folder = quantity.path.rpartition(".")[0]
    at = {float(row["samples"]): row for row in rows if has_position(row)}
    low, high = (
        tuple(convert_to_number(get_value_at_path(at[x], f"{folder}.{name}")) for x in series.x)
        for name in ("q05", "q95")
    )
    return replace(series, low=low, high=high)


def _build_curvature_figure(curves: Sequence[TrainingCurve]) -> Iterator[Figure]:
    """Yield the figure of the largest eigenvalue of the Hessian and of the gradient norm, if they were recorded."""
    named = {"largest eigenvalue": "eigenvalue", "gradient norm": "gradient_norm"}
    has_several_curves = len({curve.name for curve in curves}) > 1
    series = [
        line
        for name, path in named.items()
        for curve_name in dict.fromkeys(curve.name for curve in curves)
        for line in make_mean_series([c for c in curves if c.name == curve_name], lambda c: c.curvature, path, name=f"{curve_name}: {name}" if has_several_curves else name)
    ]  # fmt: skip
    if series:
        scale = choose_scale((y for line in series for y in line.y), span=1)
        yield Figure(
            "eigenvalue", "Largest Hessian eigenvalue and gradient norm", "Both are computed on the same training samples (train.diagnostics: hessian).",
            "samples seen", "eigenvalue, norm", tuple(series), y_scale=scale, paper="Figure 5",
        )  # fmt: skip


def _build_factor_density(curve: TrainingCurve, *, key: str) -> Iterator[Figure]:
    """Yield the distribution of the scaling factors, with one column per epoch; nothing if no factors are logged.

    The outer bins hold the values beyond all edges. Only the range between the first and last non-empty bins is drawn.
    """
    logged = [
        (float(row["samples"]), bin_counts)
        for row in curve.epochs
        if has_position(row) and (bin_counts := _read_bin_counts(row))
    ]
    # rows with other bin edges cannot be drawn in the same figure
    logged = [entry for entry in logged if entry[1][0] == logged[0][1][0]]
    filled = {bin_index for _, (_, counts) in logged for bin_index, count in enumerate(counts) if count}
    if not filled:
        return
    edges = logged[0][1][0]
    step = edges[1] / edges[0]
    all_edges = (edges[0] / step, *edges, edges[-1] * step)  # bin edges, closed at both ends for the two open bins
    low, high = min(filled), max(filled)
    columns = tuple(tuple(count / max(sum(counts), 1) for count in counts[low : high + 1]) for _, (_, counts) in logged)
    yield Figure(
        key, f"Scaling factors of {curve.name}, batch {curve.batch}", "Share of the elements (or tensors) whose factor lies in a bin, at the end of each epoch; the outer bins hold"
        " all factors beyond the range.", "samples seen", "scaling factor",
        density=Density((0.0, *(samples for samples, _ in logged)), all_edges[low : high + 2], columns),
        y_scale="log2", paper="Figure 7",
    )  # fmt: skip


def _read_bin_counts(row: Row) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    edges, counts = (get_value_at_path(row, f"diagnostics.factors.{name}") for name in ("edges", "counts"))
    if (
        not _is_number_series(edges)
        or not _is_number_series(counts)
        or len(counts) != len(edges) + 1
        or min(edges) <= 0
        or not any(counts)
    ):
        return None
    return tuple(edges), tuple(counts)


def _is_number_series(values: Any) -> bool:
    return (
        isinstance(values, list) and len(values) > 1 and all(convert_to_number(value) is not None for value in values)
    )


# --- Figures of steps


class SpreadRow(NamedTuple):
    """Mean, minimum and maximum of a quantity over one or more neighbouring steps."""

    samples: float  # samples seen after the last of the steps
    mean: float
    low: float
    high: float


CAPTION = "All steps. In a long training, each point is the mean of neighbouring steps, and the band shows their minimum and maximum."


def _build_step_figures(steps: StepSeries, name: str) -> Iterator[Figure]:
    """Yield figures of the recorded steps of a training against samples seen; nothing if no steps were recorded."""
    quantities = (
        ("gradient_norm", "Gradient norm", "norm of the gradient", "Figure 5", (steps.norm, steps.norm_low, steps.norm_high)),
        ("gradient_change", "Change of the gradient, Delta(G)", "Delta(G), Eq. 5", "Figure 6", (steps.delta, steps.delta_low, steps.delta_high)),
        ("factor_of_steps", "Scaling factor of scaled steps", "factor", "", (steps.factor,) * 3),
    )  # fmt: skip
    for key, title, label, paper, columns in quantities:
        rows = [
            SpreadRow(float(at), mean, low, high)
            for at, mean, low, high in zip(steps.samples, *columns, strict=True)
            if mean is not None and low is not None and high is not None
        ]
        if rows:
            xs, mean, low, high = zip(*merge_adjacent_rows(rows), strict=True)
            series = Series(name, xs, mean, low, high, style="line")
            scale = choose_scale(low, span=1)
            yield Figure(key, title, CAPTION, "samples seen", label, (series,), y_scale=scale, paper=paper)


def merge_adjacent_rows(rows: Sequence[SpreadRow]) -> list[SpreadRow]:
    """Return at most `MAX_POINTS` rows by merging neighbours; expects at least one row.

    A merged row keeps the minimum and maximum of its group, so that no spike is lost.
    """
    size = math.ceil(len(rows) / MAX_POINTS)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [
        SpreadRow(
            samples=group[-1].samples,
            mean=fmean(row.mean for row in group),
            low=min(row.low for row in group),
            high=max(row.high for row in group),
        )
        for group in groups
    ]
