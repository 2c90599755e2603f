"""The figures of the paper that show gradients (Figures 5 to 8), for reports, and the Hessian's eigenvalue behind them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tula_cli.extras.report.values import TrainingCurve
    from tula_cli.services.document import Figure


class Figures:
    """This package as reports use it: `PaperFigures`."""

    def build_gradient_figures(self, curves: "Sequence[TrainingCurve]") -> "Iterator[Figure]":
        from tula_cli.extras.figures.gradients import build_gradient_figures

        return build_gradient_figures(curves)


package = Figures()
