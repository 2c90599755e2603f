import re

import pytest

from tula_cli.show.plots import Curve, draw_curves

TICKS = {0.0: "32", 1.0: "64", 2.0: "128"}


def drawn(*curves: Curve, color: bool = False, width: int = 30) -> list[str]:
    return draw_curves("time (s)", curves, ticks=TICKS, label="batch", width=width, height=12, color=color).splitlines()


def test_points_stand_above_their_ticks_and_at_their_values():
    lines = drawn(Curve([(0, 1.0), (1, 3.0), (2, 2.0)], "o"))
    assert lines[0].strip() == "time (s)" and lines[-1].strip() == "batch" and len(lines) == 12
    ticks, below = lines[9], lines[10]
    places = [match.start() for match in re.finditer("┬", ticks)]
    assert below[places[0]] == "3" and below[places[1]] == "6"
    assert below.endswith("128")
    rows = {column: row for row, line in enumerate(lines) for column, char in enumerate(line) if char == "o"}
    assert sorted(rows) == places and rows[places[0]] == 8 and rows[places[1]] == 2
    assert lines[2].startswith("3.00┤") and lines[8].startswith("1.00┤")


def test_points_of_a_curve_are_joined_and_a_later_curve_lies_over_an_earlier_one():
    text = "".join(drawn(Curve([(0, 1.0), (2, 1.5)], "o"), Curve([(0, 1.0)], "O")))
    assert text.count("·") > 10 and text.count("o") == 1 and text.count("O") == 1


@pytest.mark.parametrize("value", [0.0, 5.0, -2.0])
def test_one_value_alone_can_be_drawn(value):
    assert sum(line.count("o") for line in drawn(Curve([(1, value)], "o"))) == 1


def test_colour_is_laid_on_and_changes_nothing_else():
    curve = Curve([(0, 1.0), (2, 2.0)], "o", "cyan")
    colored = "\n".join(drawn(curve, color=True))
    assert "\x1b[36mo\x1b[0m" in colored
    assert re.sub(r"\x1b\[\d+m", "", colored) == "\n".join(drawn(curve))


def test_no_line_is_wider_than_asked():
    assert max(map(len, drawn(Curve([(0, 1e-6), (2, 123456.0)], "o"), width=44))) == 44
