"""Tables of a report mark what is uncertain, and their captions explain the marks."""

from typing import Any

import make_reports as reports
import pytest
from make_reports import find_section, find_table, read_column
from make_results import Truth, make_probe
from make_runs import prediction

from tula_cli.extras.report.sections import build_configurations_table, build_scaling_study
from tula_cli.extras.report.values import describe_notes, explain_notes
from tula_cli.query import Query
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.services import recommend as recommending


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose probe of the choice, on one node, was disturbed: steps took three times as long there as they take."""
    run = reports.add_recommendation(reports.make_probed_run(tmp_path_factory.mktemp("caveats")), "cost")
    kept = run.read_recommendation()
    assert kept is not None and kept.choice.nodes == 1
    disturbed = make_probe(Truth(jitter=0.01), 1, kept.choice.batch)
    run.write_result(disturbed.model_copy(update={"step_times": tuple(3 * step for step in disturbed.step_times)}))
    return run


@pytest.mark.parametrize("key", ["configurations", "strong_scaling"])
def test_tables_of_the_report_have_notes_that_the_caption_explains(key: str, run: RunDir) -> None:
    value = find_table(reports.make_report(run), key)
    notes = read_column(value, "note")
    assert any("efficiency above 110 %" in note for note in notes) and any("efficiency" not in note for note in notes)
    assert "Efficiency above 110 %: samples/s per GPU exceed 110 %" in value.caption
    assert ("Wide interval" in value.caption) == any("wide interval" in note for note in notes)


def test_the_choice_is_the_first_row_whatever_the_order(run: RunDir) -> None:
    configurations = find_table(reports.make_report(run), "configurations")
    assert configurations.marks.index("chosen") == 0 and configurations.marks.count("chosen") == 1
    times = read_column(configurations, "time")
    assert times[1:] == sorted(times[1:]) and times != sorted(times), "the choice by cost is not the fastest"


@pytest.mark.parametrize(
    ("changes", "caveats"),
    [
        ({}, []),
        ({"step_low": None, "step_high": None}, ["interval_unknown"]),
        ({"step_low": 0.01, "step_high": 10.0}, ["wide_interval"]),
        ({"step_time": 0.0996}, []),  # on four nodes; two need 0.1 s for half of the batch
        ({"step_time": 0.0994}, ["efficiency_above_100"]),
        ({"step_time": 0.1 / 1.099}, ["efficiency_above_100"]),
        ({"step_time": 0.1 / 1.101}, ["efficiency_above_110"]),
    ],
)
def test_caveats_of_a_scaling_study_begin_at_their_bounds(changes: dict[str, Any], caveats: list[str]) -> None:
    _, point = build_scaling_study([prediction(2, 128), prediction(4, 256, **changes)])
    assert point.caveats == caveats


def test_notes_name_the_quantities_within_noise_once() -> None:
    names = ["wide_interval", "time_within_noise", "cost_within_noise", "efficiency_above_100"]
    assert describe_notes(names) == "wide interval; efficiency above 100 %; time, cost within noise"
    explanation = explain_notes([names, ["interval_unknown"]])
    for start in ("Wide interval: ", "Within noise: ", "Efficiency above 100 %: ", "Interval unknown: "):
        assert explanation.count(start) == 1


def test_an_efficiency_above_100_is_marked_in_its_table(run: RunDir) -> None:
    report = reports.make_report(run)
    efficiency = read_column(find_table(report, "strong_scaling"), "efficiency")
    assert max(efficiency) > 100
    for value, note in zip(efficiency, read_column(find_table(report, "strong_scaling"), "note"), strict=True):
        assert ("efficiency above 1" in note) == (value >= 100.5)
    assert "is implausible" in " ".join(find_section(report, "scaling").text)


def test_an_unknown_interval_is_called_unknown(run: RunDir) -> None:
    answer = recommending.recommend_configuration(
        open_runs_of_job(run), Query(objective="cost"), now=1.0
    ).recommendation
    unknown = answer.choice.model_copy(update={"hours_low": None, "hours_high": None})
    rows = [unknown, *answer.rows[1:]]
    configurations = build_configurations_table(rows, unknown, "USD")
    notes = read_column(configurations, "note")
    assert notes[0] == "interval unknown" and not any("unknown" in note for note in notes[1:])
    assert "Interval unknown: too few probes" in configurations.caption
