"""The figures of the paper that show gradients (Figures 5 to 8), for reports, and the Hessian's eigenvalue behind them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tula_cli.extras.report.values import GradientCurve
    from tula_cli.run.step_series import StepSeries
    from tula_cli.services.document import Figure


class Figures:
    """This package as reports use it: `PaperFigures`."""

    def build_gradient_figures(self, curves: "Sequence[GradientCurve]", *, prefix: str = "") -> "Iterator[Figure]":
        from tula_cli.extras.figures.gradients import build_gradient_figures

        return build_gradient_figures(curves, prefix=prefix)

    def build_factor_density(self, curve: "GradientCurve", *, key: str, title: str) -> "Iterator[Figure]":
        from tula_cli.extras.figures.gradients import build_factor_density

        return build_factor_density(curve, key=key, title=title)

    def build_step_figures(self, steps: "StepSeries", *, name: str, prefix: str = "") -> "Iterator[Figure]":
        from tula_cli.extras.figures.gradients import build_step_figures

        return build_step_figures(steps, name=name, prefix=prefix)


package = Figures()
