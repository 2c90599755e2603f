"""The paper's figures of gradients."""

from tula_cli.extras.figures import gradients
from tula_cli.extras.report.values import TrainingCurve


def test_the_density_of_factors_lies_at_their_edges() -> None:
    rows = [
        {"samples": 100 * epoch, "diagnostics": {"factors": {"edges": [0.5, 1.0, 2.0], "counts": counts}}}
        for epoch, counts in ((1, [0, 2, 2, 0]), (2, [0, 0, 0, 4]))
    ]
    (figure,) = gradients.build_gradient_figures([TrainingCurve("ags", 64, rows)])
    density = figure.density
    assert density is not None and density.x_edges == (0, 100, 200)
    assert density.y_edges == (0.5, 1, 2, 4)  # half to one, one to two, above two
    assert density.shares == ((0.5, 0.5, 0), (0, 0, 1))
    nothing = TrainingCurve("ags", 64, [{"samples": 1, "diagnostics": None}])
    assert list(gradients.build_gradient_figures([nothing])) == []
