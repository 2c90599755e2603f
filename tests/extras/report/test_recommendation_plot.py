"""`recommendation.plot()`: a figure of matplotlib."""

import io
import sys
from pathlib import Path
from typing import Literal

import matplotlib.figure
import pytest
from make_reports import add_recommendation, make_probed_run

from tula_cli.errors import SpecError
from tula_cli.run.records.recommendations import Recommendation


@pytest.fixture
def recommendation(tmp_path: Path) -> Recommendation:
    stored = add_recommendation(make_probed_run(tmp_path)).read_recommendation()
    assert stored is not None
    return stored


@pytest.mark.parametrize(("against", "label"), [("cost", "cost (USD)"), ("nodes", "nodes")])
def test_a_plot_shows_every_configuration_and_marks_the_choice(
    recommendation: Recommendation, against: Literal["cost", "nodes"], label: str
) -> None:
    figure = recommendation.plot(against)
    assert isinstance(figure, matplotlib.figure.Figure)
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_xlabel() == label and axes.get_title(loc="left").startswith("time (")
    choice = recommendation.choice
    chosen_x = choice.cost if against == "cost" else choice.nodes
    (star,) = [line for line in axes.lines if line.get_marker() == "*"]
    assert star.get_xdata()[0] == pytest.approx(chosen_x)
    points = {float(x) for line in axes.lines for x in line.get_xdata()}
    assert points >= {float(row.cost if against == "cost" else row.nodes) for row in recommendation.rows}
    assert any(text.get_text().startswith("chosen: ") for text in legend.get_texts())


def test_a_plot_is_sharp_in_a_notebook(recommendation: Recommendation) -> None:
    figure, drawn = recommendation.plot(), io.BytesIO()
    figure.savefig(drawn, format="png")
    width = int.from_bytes(drawn.getvalue()[16:20], "big")
    assert width == 780 and figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)


def test_the_line_against_nodes_connects_the_fastest(recommendation: Recommendation) -> None:
    (axes,) = recommendation.plot("nodes").axes
    (line,) = [line for line in axes.lines if line.get_linestyle() == "-"]
    fastest = [min(row.hours for row in recommendation.rows if row.nodes == nodes) for nodes in line.get_xdata()]
    scale = line.get_ydata()[0] / fastest[0]
    assert list(line.get_ydata()) == pytest.approx([scale * hours for hours in fastest])


def test_a_plot_without_matplotlib_names_the_extra(
    recommendation: Recommendation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecError, match="need the package matplotlib") as error:
        recommendation.plot()
    assert "pip install 'tula-cli[report]'" in error.value.hint
