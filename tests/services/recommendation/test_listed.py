"""Lists, files and weights of `tula recommend` with many configurations."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from make_results import Truth, add_gradient_noise, make_inspection, make_probes, make_spec
from read_diagnostics import values

from tula_cli.cli import app
from tula_cli.models.choice import candidates
from tula_cli.models.choice.grid import Config
from tula_cli.models.estimator import Estimator
from tula_cli.query import Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.frames import convert_frame_to_records
from tula_cli.run.job_runs import open_runs_of_job
from tula_cli.run.records.recommendations import Prediction
from tula_cli.services import search
from tula_cli.services.recommend import MAX_ROWS_LISTED, Answer, recommend_configuration
from tula_cli.services.recommendation_files import save_answer
from tula_cli.show import recommend as show_recommend
from tula_cli.show.screen import Screen

SMALLEST = 2520  # divides by 1 to 10, and 38 numbers more
MANY = make_spec(
    search={"nodes": [n for n in range(1, 121) if SMALLEST % n == 0], "min_batch": SMALLEST},
    pricing={"price": 2.0, "spot": {"discount": 0.6, "interruptions_per_day": 1.0}},
)
PLAN = {1: (2520, 40320, 645120), 3: (840,), 20: (126, 4032), 120: (21, 1344)}
TRUTH = Truth(dataset_size=10**6, noise=0.01, slope=5e-5)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, MANY)
    for probe in make_probes(TRUTH, PLAN):
        run.write_result(probe if probe.nodes == 1 else add_gradient_noise([probe], 500.0)[0])
    return run


def ask(run: RunDir, objective: Any = "knee", **limits: Any) -> Answer:
    return recommend_configuration(open_runs_of_job(run), Query(objective=objective, **limits), now=1.0)


def places(rows: Any) -> set[tuple[int, int]]:
    return {(row.nodes, row.batch) for row in rows}


@pytest.mark.parametrize("objective", ["knee", "time", "accuracy-time"])
def test_of_many_configurations_those_are_listed_that_are_worth_a_look(run: RunDir, objective: str) -> None:
    answer = ask(run, objective)
    recommendation, every = answer.recommendation, answer.with_all_rows()
    assert (
        MAX_ROWS_LISTED < len(places(every.rows)) == recommendation.candidates
        and len(places(recommendation.rows)) < recommendation.candidates
    )
    assert [Prediction.model_validate_json(text) for text in answer.list_rows_as_json()] == list(every.rows)
    worth = [row for row in every.rows if row.pareto or row.measured]
    assert places([*worth, recommendation.choice, *recommendation.runners_up]) <= places(recommendation.rows)
    assert {row.batch for row in recommendation.rows} == {row.batch for row in every.rows}, "the best of each batch"
    assert recommendation.rows == tuple(row for row in every.rows if row in recommendation.rows), (
        "the same records in the same order"
    )
    assert {row.market for row in recommendation.rows if places([row]) == places([recommendation.choice])} == {
        "on_demand",
        "spot",
    }


def test_of_few_all_are_listed(run: RunDir) -> None:
    answer = ask(run, max_batch=2 * SMALLEST, max_nodes=20)
    assert answer.recommendation == answer.with_all_rows() and answer.recommendation.candidates == len(
        places(answer.with_all_rows().rows)
    )


def test_a_record_is_made_only_of_what_is_listed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        candidates,
        "convert_frame_to_records",
        lambda frame, kind: made.extend(frame.index) or convert_frame_to_records(frame, kind),
    )
    answer = ask(run)
    save_answer(open_runs_of_job(run), answer)
    assert len(made) < len(answer.candidates) / 2


def test_the_table_holds_what_was_measured_and_listed_and_all_where_that_is_asked(run: RunDir) -> None:
    answer = ask(run)
    save_answer(open_runs_of_job(run), answer)
    listed = table(run)
    save_answer(open_runs_of_job(run), answer, every=True)
    every = table(run)
    assert set(listed) == places(answer.recommendation.rows) | {(n, n * b) for n, sizes in PLAN.items() for b in sizes}
    assert set(every) == {
        (config.nodes, config.batch) for config in Estimator.fit(MANY, run.read_results()).list_configurations()
    }
    assert all(every[place] == line for place, line in listed.items())
    kept = run.read_recommendation()
    assert kept == answer.recommendation, "what other commands read stays short"


def table(run: RunDir) -> dict[tuple[int, int], dict[str, str]]:
    with (run.path / "results.csv").open() as file:
        return {(int(line["nodes"]), int(line["batch"])): line for line in csv.DictReader(file)}


def test_reasons_beyond_some_are_reported_together(run: RunDir) -> None:
    far = MANY.model_copy(
        update={"search": MANY.search.model_copy(update={"nodes": (1, 1008, 1260, 1680, 2016, 2520, 3360, 5040)})}
    )
    small = [probe for probe in run.read_results() if probe.nodes <= 3]
    for probe in run.read_results():
        if probe not in small:
            (run.path / f"results/{probe.id}.json").unlink()
    warnings = recommend_configuration([Run(run.path, far)], Query(objective="time"), now=1.0).warnings
    reasons = [warning.values["reason"] for warning in warnings if warning.code == "configurations-left-out"]
    assert len(reasons) == 5 and "more than 8 times the 3" in str(reasons[0])
    assert values(warnings, "more-configurations-left-out")["nodes"] == [3360, 5040]


def test_a_search_weighs_the_best_of_each_batch_and_what_was_measured(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast = Estimator.fit(MANY, run.read_results())
    fitting = set(forecast.list_configurations())
    monkeypatch.setattr(search, "_MAX_COMPARED_CONFIGURATIONS", 10**6)
    whole = search._select_compared_configurations(forecast, fitting)
    monkeypatch.setattr(search, "_MAX_COMPARED_CONFIGURATIONS", 9)
    few = search._select_compared_configurations(forecast, fitting)
    assert len(few) < len(whole) == len(forecast.predict_configurations(*forecast.find_known_configurations()))
    assert {row.batch for row in few} == {row.batch for row in whole} and few[0] == whole[0]
    assert {row for row in whole if row.measured} <= set(few) == {row for row in whole if row in few}
    assert Config(few[0].nodes, few[0].batch) in fitting
    result = search.choose_next_round(MANY, run.read_results(), inspection=make_inspection(dataset_size=10**6))
    assert "Measuring all configurations" in result.words


def said(*arguments: str) -> str:
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    assert app.run(["recommend", *arguments], screen=screen) == 0, screen.err.getvalue()
    return screen.out.getvalue()


def test_all_that_no_table_shows_are_reported_as_json_and_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(ask(run).with_all_rows().rows)
    requested = ("--run", str(run.path), "--all")
    assert "configurations;" not in said(*requested), "a table of them all"
    monkeypatch.setattr(show_recommend, "MAX_TABLE_ROWS", count - 1)
    text = said(*requested)
    assert len(text.splitlines()) < 100 and "configurations; results.csv and --json contain all of them" in text
    assert "results.csv (with --save) and --json contain all of them" in said(*requested, "--objective", "time")
    monkeypatch.setattr(Answer, "with_all_rows", None)  # nor are all made into records at once
    rows = json.loads(said(*requested, "--json"))["data"]["rows"]
    assert len(rows) == count and [row["hours"] for row in rows] == sorted(row["hours"] for row in rows)
