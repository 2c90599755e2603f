import io
import json
from pathlib import Path
from typing import Any

import pytest
from make_results import Truth, out_of_memory, probe_all, spec
from quiet import quiet

from tula_cli.cli import app
from tula_cli.errors import Infeasible, SpecError
from tula_cli.models.choice.campaign import Campaign
from tula_cli.query import Query
from tula_cli.run.directory import RunDir
from tula_cli.services.campaign import MAX_TRAININGS, plan_campaign
from tula_cli.services.recommend import recommend
from tula_cli.show.campaign import render_campaign
from tula_cli.show.screen import Screen


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, spec(search={"max_batch": 4096}))
    probes = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}
    for result in [*probe_all(Truth(noise=0.01), probes), out_of_memory(2, 512)]:
        run.write_result(result)
    return run


def plan(run: RunDir, trainings: int, **query: Any) -> Campaign:
    answer = recommend(run, run.read_spec(), Query(**query), now=1.0)
    return plan_campaign(answer, run.read_spec(), Query(**query), trainings)


def test_many_trainings_are_planned_on_few_nodes_each(run: RunDir) -> None:
    single, many = plan(run, 1), plan(run, 30)
    assert single.waves[0].nodes > max(wave.nodes for wave in many.waves)
    assert many.speedup > 1.3 and many.node_hours < many.at_fastest.node_hours and many.max_nodes == 16
    assert many.bound_hours <= many.hours < 30 * single.hours


def test_the_knee_limits_the_batch_and_time_does_not(run: RunDir) -> None:
    knee = recommend(run, run.read_spec(), Query(), now=1.0).recommendation.choice.batch
    by_knee, by_time = plan(run, 1), plan(run, 1, objective="time")
    assert by_knee.max_batch == knee >= by_knee.batch
    assert by_time.max_batch is None and by_time.batch > knee and by_time.hours < by_knee.hours
    assert plan(run, 1, objective="time", max_batch=64).batch <= 64


def test_a_deadline_makes_the_plan_the_cheapest_within_it(run: RunDir) -> None:
    shortest, cheapest = plan(run, 12), plan(run, 12, objective="cost", max_nodes=16)
    within = plan(run, 12, deadline_hours=1.1 * shortest.hours)
    assert within.minimises == "cost" and within.hours <= 1.1 * shortest.hours
    assert cheapest.cost <= within.cost <= shortest.cost
    with pytest.raises(
        Infeasible, match=r"12 trainings on at most 16 nodes take at least .*, more than the deadline of"
    ):
        plan(run, 12, deadline_hours=0.9 * shortest.hours)


def test_a_budget_is_for_all_trainings(run: RunDir) -> None:
    cost = plan(run, 12).cost
    assert plan(run, 12, budget=1.01 * cost).cost == cost
    with pytest.raises(Infeasible, match="more than the budget"):
        plan(run, 12, budget=0.99 * cost)


def test_more_nodes_than_were_measured_run_more_trainings_side_by_side(run: RunDir) -> None:
    wide = plan(run, 30, max_nodes=64, nodes=2)
    assert {wave.nodes for wave in wide.waves} == {2} and max(wave.side_by_side for wave in wide.waves) == 30
    with pytest.raises(Infeasible, match=r"no configuration is (within|feasible on) at most 1 node"):
        plan(run, 30, max_nodes=1)


def test_a_number_of_trainings_that_cannot_be_planned_is_refused(run: RunDir) -> None:
    for trainings in (0, MAX_TRAININGS + 1):
        with pytest.raises(SpecError, match="trainings"):
            plan(run, trainings)
    answer = recommend(run, run.read_spec(), Query(), now=1.0)
    with pytest.raises(SpecError, match="--from-training"):
        plan_campaign(answer, run.read_spec(), Query(from_training=True), 2)


def test_a_plan_has_the_warnings_of_the_answer_with_their_codes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quiet(monkeypatch, tmp_path)
    query = Query(nodes=64, max_nodes=64)
    answer = recommend(run, run.read_spec(), query, now=1.0)
    assert answer.warnings and plan_campaign(answer, run.read_spec(), query, 3).warnings == tuple(answer.warnings)
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    options = ["--trainings", "3", "--nodes", "64", "--max-nodes", "64", "--json"]
    assert app.run(["recommend", "--run", str(run.path), *options], screen=screen) == 0
    printed = json.loads(screen.out.getvalue())  # type: ignore[attr-defined]
    assert [warning["code"] for warning in printed["diagnostics"]] == [warning.code for warning in answer.warnings]
    assert printed["data"]["warnings"] == [warning.text for warning in answer.warnings]


def test_the_screen_has_the_plan_its_alternative_and_the_waves(run: RunDir) -> None:
    many = plan(run, 30)
    *lines, table = render_campaign(many)
    text = "\n".join(map(str, lines))
    assert f"30 trainings on at most 16 nodes, batch {many.batch}" in text
    assert "times as fast" in text and "No plan with this batch finishes before" in text
    assert table.row_count == len(many.waves)
