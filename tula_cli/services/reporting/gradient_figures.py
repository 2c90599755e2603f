"""Figures of what gradients were like and how they were scaled: Figures 5 to 8 of the paper, of one training or of several."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tula_cli.services.reporting.document import Density, Figure, Series
from tula_cli.services.reporting.training_look import Row, is_placed, value_at
from tula_cli.services.reporting.units import scale_of, thin_out


@dataclass(frozen=True)
class GradientCurve:
    """What one training has logged: rows at the ends of epochs, and of the Hessian; curves of one name are averaged."""

    name: str
    epochs: Sequence[Row]
    curvature: Sequence[Row] = ()


@dataclass(frozen=True)
class Quantity:
    """A number in such rows: where it is ("ags.mean": mean of the mapping ags), and how it is drawn."""

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


def gradient_figures(curves: Sequence[GradientCurve], *, prefix: str = "") -> Iterator[Figure]:
    """Yield what the curves have logged, over the samples seen; `prefix` is of the figures' keys."""
    for quantity in OF_EPOCHS:
        yield from _draw_quantity(quantity, curves, lambda curve: curve.epochs, prefix)
        if quantity.key == "gradient_change":
            yield from _accuracy_figure(curves, prefix)
    yield from _eigenvalue_figure(curves, prefix)
    for quantity in OF_CURVATURE:
        yield from _draw_quantity(quantity, curves, lambda curve: curve.curvature, prefix)


def _accuracy_figure(curves: Sequence[GradientCurve], prefix: str) -> Iterator[Figure]:
    """Yield the accuracy over the same samples, where Delta(G) is drawn above it."""
    if not any(mean_series(curves, lambda curve: curve.epochs, OF_EPOCHS[1].path)):
        return
    quantity = Quantity("change_accuracy", "top1", "Accuracy beside it", "top-1 (%)", "On the evaluation set, over the same samples as Delta(G).", paper="Figure 6")  # fmt: skip
    yield from _draw_quantity(quantity, curves, lambda curve: curve.epochs, prefix)


def _draw_quantity(
    quantity: Quantity, curves: Sequence[GradientCurve], rows: Callable[[GradientCurve], Sequence[Row]], prefix: str
) -> Iterator[Figure]:
    series = list(mean_series(curves, rows, quantity.path))
    if quantity.ends is not None and len(curves) == 1 and series:
        series = [_with_spread(series[0], rows(curves[0]), quantity)]
    if series:
        scale = scale_of((y for one_series in series for y in one_series.y), span=1) if quantity.log else "linear"
        yield Figure(f"{prefix}{quantity.key}", quantity.title, quantity.caption, "samples seen", quantity.label, tuple(series), y_scale=scale, paper=quantity.paper)  # fmt: skip


def _with_spread(series: Series, rows: Sequence[Row], quantity: Quantity) -> Series:
    assert quantity.ends is not None
    folder = quantity.path.rpartition(".")[0]
    at = {float(row["samples"]): row for row in rows if is_placed(row)}
    low, high = (tuple(_as_number(value_at(at[x], f"{folder}.{name}")) for x in series.x) for name in quantity.ends)
    return replace(series, low=low, high=high)


def mean_series(
    curves: Sequence[GradientCurve], rows: Callable[[GradientCurve], Sequence[Row]], path: str, *, name: str = ""
) -> Iterator[Series]:
    """Yield the mean over trainings of one name of what their rows hold under a path, against samples.

    At each place it is over those that have come so far. `name` takes the place of the curves' own.
    """
    values_by_name: dict[str, dict[float, list[float]]] = {}
    for curve in curves:
        values_by_samples = values_by_name.setdefault(name or curve.name, {})
        for row in rows(curve):
            if is_placed(row) and (value := _as_number(value_at(row, path))) is not None:
                values_by_samples.setdefault(float(row["samples"]), []).append(value)
    for name_, values_by_samples in values_by_name.items():
        points = thin_out(sorted(values_by_samples.items()))
        if points:
            yield Series(name_, tuple(x for x, _ in points), tuple(fmean(ys) for _, ys in points))


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _eigenvalue_figure(curves: Sequence[GradientCurve], prefix: str) -> Iterator[Figure]:
    """Yield the largest eigenvalue of the Hessian beside the gradient norm on the same samples."""
    named = {"largest eigenvalue": "eigenvalue", "gradient norm": "gradient_norm"}
    several = len({curve.name for curve in curves}) > 1
    series = [
        one_series
        for name, path in named.items()
        for curve_name in dict.fromkeys(curve.name for curve in curves)
        for one_series in mean_series([c for c in curves if c.name == curve_name], lambda c: c.curvature, path, name=f"{curve_name}: {name}" if several else name)
    ]  # fmt: skip
    if series:
        scale = scale_of((y for one_series in series for y in one_series.y), span=1)
        yield Figure(
            f"{prefix}eigenvalue", "Largest Hessian eigenvalue and gradient norm", "Both on the same training samples (train.hessian).",
            "samples seen", "eigenvalue, norm", tuple(series), y_scale=scale, paper="Figure 5",
        )  # fmt: skip


def factor_density(curve: GradientCurve, *, key: str, title: str) -> Iterator[Figure]:
    """Yield how the scaling factors were spread, an epoch a column; nothing where none are logged.

    The bins at the ends hold what is beyond all edges. Only the bins between those that hold something are drawn.
    """
    logged = [
        (float(row["samples"]), counts_) for row in curve.epochs if is_placed(row) and (counts_ := _bin_counts(row))
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


def _bin_counts(row: Row) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    edges, counts = (value_at(row, f"diagnostics.factors.{name}") for name in ("edges", "counts"))
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
