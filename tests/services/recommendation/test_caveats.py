"""Uncertain figures are marked: wide intervals, differences within noise, implausible efficiencies."""

import io
import json
import re
from pathlib import Path
from typing import Any

import make_reports as reports
import make_runs as make
import pytest
from isolation import isolate_environment
from make_results import Truth, make_probe

from tula_cli.cli import app
from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Prediction, SameProgress, list_caveats
from tula_cli.show import recommend as show
from tula_cli.show.screen import Screen

CHOICE = make.prediction(2, 128, hours=1.0, hours_low=0.9, hours_high=1.1, cost=4.0, step_time=0.1)


def row(nodes: int = 4, batch: int = 256, **changes: Any) -> Prediction:
    return make.prediction(nodes, batch, **{"hours": 2.0, "hours_low": 1.8, "hours_high": 2.2, "cost": 9.0, **changes})


def progress(low: float, high: float) -> SameProgress:
    ends = dict.fromkeys(("epochs_low", "epochs_high", "epochs_alike", "epochs_lossy"), 10.0)
    return SameProgress(epochs=10.0, **ends, hours=(low + high) / 2, hours_low=low, hours_high=high, cost=1.0)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        # intervals
        (row(hours_low=0.0, hours_high=89.3 / 3600, hours=0.01, cost=0.01), ["wide_interval"]),
        (row(hours_low=-0.1, hours_high=2.2), ["wide_interval", "time_within_noise", "cost_within_noise"]),
        (row(hours_low=1.2, hours_high=3.61), ["wide_interval"]),
        (row(hours_low=1.25, hours_high=3.75), []),  # three times as high, and no more
        (row(hours_low=1.2, hours_high=float("inf")), ["wide_interval"]),
        (row(hours_low=None, hours_high=None), []),
        (row(hours_low=None, hours_high=5.0), []),
        # differences from the choice: 0.9 to 1.1 h, 3.6 to 4.4
        (row(hours=1.15, hours_low=1.05, hours_high=1.25), ["time_within_noise"]),
        (row(hours=1.3, hours_low=1.11, hours_high=1.5), []),
        (row(hours=0.8, hours_low=0.7, hours_high=0.9), ["time_within_noise"]),
        (row(cost=4.2), ["cost_within_noise"]),
        (row(cost=3.0), []),
        (row(hours=1.0, hours_low=0.95, hours_high=1.05, cost=4.1), ["time_within_noise", "cost_within_noise"]),
        (row(kwh=1.0, kwh_low=0.9, kwh_high=1.1), []),  # that of the choice is not known
        (CHOICE, []),  # it does not differ from itself
        (CHOICE.model_copy(update={"market": "spot", "cost": 1.6}), ["time_within_noise"]),
        # efficiencies
        (row(scaling_efficiency=1.09), []),
        (row(scaling_efficiency=1.88), ["efficiency_above_110"]),
        (row(scaling_efficiency=None), []),
    ],
)  # fmt: skip
def test_caveats_of_a_configuration(other: Prediction, names: list[str]) -> None:
    assert list(list_caveats(other, CHOICE)) == names


def test_differences_of_energy_and_progress_are_compared_where_both_are_known() -> None:
    choice = CHOICE.model_copy(
        update={"kwh": 1.0, "kwh_low": 0.9, "kwh_high": 1.1, "same_progress": progress(1.0, 2.0)}
    )
    other = row(kwh=1.15, kwh_low=1.05, kwh_high=1.3, same_progress=progress(1.5, 3.0))
    apart = row(kwh=1.5, kwh_low=1.4, kwh_high=1.6, same_progress=progress(2.5, 3.0))
    assert list_caveats(other, choice) == ("energy_within_noise", "progress_within_noise")
    assert list_caveats(apart, choice) == ()


def cells(made: Any) -> list[list[str]]:
    return [list(item) for item in zip(*(column.cells for column in made.columns), strict=True)]


def test_tables_have_signs_before_figures_and_a_line_that_explains_those_alone() -> None:
    wide, close = (
        row(1, 64, hours=5.0, hours_low=0.0, hours_high=9.0, cost=50.0),
        row(1, 32, hours=1.05, hours_low=1.0, hours_high=1.2),
    )
    result = make.recommendation(rows=(CHOICE, close, wide), choice=CHOICE, runners_up=())
    made, message = show._render_table_with_legend(show.make_predictions_table(result))
    lines = cells(made)
    assert [line[4] for line in lines] == ["60.0", "~63.0", "?~300"]
    assert [line[5] for line in lines] == ["4.00", "9.00", "~50.0"]
    assert [line[4] for line in cells(show.make_details_table(result))] == [
        "54.0 .. 66.0",
        "60.0 .. 72.0",
        "?0 .. 540",
    ]
    assert (
        "? the 90 % interval is too wide" in message
        and "~ the 90 % interval overlaps" in message
        and "!" not in message
    )


def test_a_table_without_caveats_has_no_line_below() -> None:
    far = row(1, 32)
    result = make.recommendation(rows=(CHOICE, far), choice=CHOICE, runners_up=())
    assert len(list(show._render_table_with_legend(show.make_predictions_table(result)))) == 1
    assert not re.search("[?~!]", str(cells(show.make_predictions_table(result))))


# --- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose probe of the choice, on one node, was disturbed: steps took three times as long there as they take."""
    run = reports.add_recommendation(reports.make_probed_run(tmp_path_factory.mktemp("caveats")), "cost")
    kept = run.read_recommendation()
    assert kept is not None and kept.choice.nodes == 1
    disturbed = make_probe(Truth(jitter=0.01), 1, kept.choice.batch)
    run.write_result(disturbed.model_copy(update={"step_times": tuple(3 * step for step in disturbed.step_times)}))
    return run


def tula(*words: str) -> str:
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    assert app.run(list(words), screen=screen) == 0, screen.err.getvalue()  # type: ignore[attr-defined]
    return str(screen.out.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [[], ["--all"], ["--objective", "time"]])
def test_json_has_the_caveats_of_every_row(
    options: list[str], run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isolate_environment(monkeypatch, tmp_path)
    rows = json.loads(tula("recommend", "--run", str(run.path), "--json", *options))["data"]["rows"]
    assert all(isinstance(entry["caveats"], list) for entry in rows)
    impossible = {(item["nodes"], item["batch"]) for item in rows if "efficiency_above_110" in item["caveats"]}
    assert impossible and all(nodes > 1 for nodes, _ in impossible)
    assert any(first["caveats"] == [] for first in rows)


def test_the_screen_says_what_the_signs_mean(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate_environment(monkeypatch, tmp_path)
    text = tula("recommend", "--run", str(run.path))
    assert re.search(r"^.*! samples/s per GPU exceed 110 %", text, re.MULTILINE) and re.search(r"  ![\d.]+  ", text)
