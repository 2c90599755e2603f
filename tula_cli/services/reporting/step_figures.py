"""Figures of what is kept of every step of a training: norm, Delta(G), scaling factor."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from tula_cli.run.series.step_series import StepSeries
from tula_cli.services.reporting.document import Figure, Series
from tula_cli.services.reporting.units import MAX_POINTS, scale_of

Spreads = Sequence[tuple[float, float, float, float]]
"""Samples seen, mean, least and largest."""

CAPTION = (
    "Of every step; of a long training a point is the mean of neighbouring steps, the band their least and largest."
)


def step_figures(steps: StepSeries, *, name: str, prefix: str = "") -> Iterator[Figure]:
    """Yield what a training has kept of its steps, over the samples seen; nothing where it has kept nothing.

    Args:
        steps: what it has kept.
        name: of the curves.
        prefix: of the figures' keys.
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
            yield _step_figure(f"{prefix}{key}", title, label, paper, name, join_neighbours(rows))


def join_neighbours(rows: Spreads) -> Spreads:
    """Return at most `MAX_POINTS` rows: neighbours become one, with the least and the largest of them, so that no spike is lost."""
    size = -(-len(rows) // MAX_POINTS)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [(group[-1][0], fmean(row[1] for row in group), min(row[2] for row in group), max(row[3] for row in group)) for group in groups]  # fmt: skip


def _step_figure(key: str, title: str, label: str, paper: str, name: str, rows: Spreads) -> Figure:
    xs, mean, low, high = (tuple(column) for column in zip(*rows, strict=True))
    series = Series(name, xs, mean, low, high, style="line")
    return Figure(key, title, CAPTION, "samples seen", label, (series,), y_scale=scale_of(low, span=1), paper=paper)
