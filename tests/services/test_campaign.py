import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from isolation import isolate_environment
from make_results import Truth, make_out_of_memory, make_probes, make_spec

from tula_cli.assets import find_asset
from tula_cli.cli import app
from tula_cli.errors import Infeasible, SpecError
from tula_cli.models.choice.campaign import Campaign
from tula_cli.query import Query
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_runs_by_job, open_runs_of_job
from tula_cli.services.campaign import MAX_TRAININGS, plan_campaign, plan_trainings
from tula_cli.services.recommend import recommend_configuration
from tula_cli.show.campaign import render_campaign
from tula_cli.show.screen import Screen
from tula_cli.words import format_duration, format_number


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, make_spec(search={"max_batch": 4096}))
    probes = {2: (16, 32, 64, 128, 256), 4: (8,), 8: (4,), 16: (2, 256)}
    for result in [*make_probes(Truth(noise=0.01), probes), make_out_of_memory(2, 512)]:
        run.write_result(result)
    return run


def plan(run: RunDir, trainings: int, **query: Any) -> Campaign:
    return plan_campaign([open_runs_of_job(run)], Query(**query), [trainings])


def test_many_trainings_are_planned_on_few_nodes_each(run: RunDir) -> None:
    single, many = plan(run, 1), plan(run, 30)
    assert single.waves[0].nodes > max(wave.nodes for wave in many.waves)
    assert many.speedup > 1.3 and many.node_hours < many.at_fastest.node_hours and many.max_nodes == 16
    assert many.bound_hours <= many.hours < 30 * single.hours


def test_the_knee_limits_the_batch_and_time_does_not(run: RunDir) -> None:
    knee = recommend_configuration(open_runs_of_job(run), Query(), now=1.0).recommendation.choice.batch
    by_knee, by_time = plan(run, 1), plan(run, 1, objective="time")
    assert by_knee.max_batch == knee >= by_knee.batch
    assert by_time.max_batch is None and by_time.batch > knee and by_time.hours < by_knee.hours
    assert plan(run, 1, objective="time", max_batch=64).batch <= 64


def test_a_deadline_makes_the_plan_the_cheapest_within_it(run: RunDir) -> None:
    shortest, cheapest = plan(run, 12), plan(run, 12, objective="cost", max_nodes=16)
    within = plan(run, 12, deadline_hours=1.1 * shortest.hours)
    assert within.minimises == "cost" and within.hours <= 1.1 * shortest.hours
    assert cheapest.cost <= within.cost <= shortest.cost
    late = 0.9 * shortest.hours
    with pytest.raises(Infeasible) as raised:
        plan(run, 12, deadline_hours=late)
    assert raised.value.message == (
        f"12 trainings on at most 16 nodes with batches of at most {shortest.max_batch} take at least"
        f" {format_duration(3600 * shortest.hours)}, more than the deadline of {format_duration(3600 * late)}"
    )


def test_a_budget_gives_the_shortest_plan_within_it(run: RunDir) -> None:
    shortest, cheapest = plan(run, 12), plan(run, 12, deadline_hours=1e6)
    assert plan(run, 12, budget=1.01 * shortest.cost).waves == shortest.waves
    budget = (shortest.cost + cheapest.cost) / 2
    within = plan(run, 12, budget=budget)
    assert within.max_batch == shortest.max_batch and within.minimises == "time"
    assert within.cost <= budget and shortest.hours < within.hours <= cheapest.hours
    # just below its duration, every plan costs more than the budget
    assert plan(run, 12, deadline_hours=0.9999 * within.hours).cost > budget
    with pytest.raises(Infeasible, match=r"within a budget of .* take at least .*, more than the deadline"):
        plan(run, 12, objective="time", max_batch=within.max_batch, budget=budget, deadline_hours=0.9 * within.hours)


def test_a_budget_below_the_cheapest_plan_is_refused(run: RunDir) -> None:
    cheapest = plan(run, 12, deadline_hours=1e6)
    assert plan(run, 12, budget=cheapest.cost).cost == pytest.approx(cheapest.cost)
    least = rf"with batches of at most {cheapest.max_batch} cost at least {format_number(cheapest.cost, 4)} .* budget"
    with pytest.raises(Infeasible, match=least):
        plan(run, 12, budget=0.99 * cheapest.cost)
    early = plan(run, 12, deadline_hours=1.01 * plan(run, 12).hours)
    with pytest.raises(Infeasible, match="cost at least"):
        plan(run, 12, budget=0.99 * early.cost, deadline_hours=early.hours)


@pytest.mark.parametrize(
    ("trainings", "budget", "hours", "cost"), [(5, 5.0, 0.969, 4.74), (2, 1.9, 0.969, 1.894), (1, 1.0, 0.969, 0.947)]
)
def test_limits_of_all_trainings_change_neither_the_knee_nor_the_options_of_one(
    trainings: int, budget: float, hours: float, cost: float
) -> None:
    demo = RunDir.find_newest(find_asset("demo"))
    within, free = plan(demo, trainings, budget=budget), plan(demo, trainings)
    assert (within.hours, within.cost) == pytest.approx((hours, cost), rel=1e-3)
    assert within.max_batch == free.max_batch == within.batch and within.at_fastest == free.at_fastest
    assert within.bound_hours < 0.5 * within.hours, "the batch is faster on more nodes, beyond the budget"
    assert plan(demo, trainings, deadline_hours=1.0).max_batch == free.max_batch


def test_a_plan_of_lowest_energy_above_the_budget_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make_spec(search={"max_batch": 4096}))
    for result in make_probes(Truth(noise=0.01, watts=300.0), {2: (16, 32, 64, 128, 256), 4: (8,), 16: (2, 256)}):
        run.write_result(result)
    cost = plan(run, 4, objective="energy").cost
    assert plan(run, 4, objective="energy", budget=1.01 * cost).cost == cost
    with pytest.raises(
        Infeasible, match=r"the plan of lowest energy for 4 trainings .* costs .*, more than the budget"
    ):
        plan(run, 4, objective="energy", budget=0.99 * cost)


def test_of_the_batches_whose_plan_is_within_the_budget_the_one_of_lowest_energy_is_chosen(tmp_path: Path) -> None:
    pricing = {"kind": "gb_hour", "price": 1.0}
    run = RunDir.create(tmp_path, make_spec(search={"max_batch": 4096}, pricing=pricing))
    for result in make_probes(Truth(noise=0.01, watts=300.0), {2: (16, 32, 64, 128, 256), 4: (8,), 16: (2, 256)}):
        run.write_result(result)
    lowest, cheapest = plan(run, 4, objective="energy"), plan(run, 4, objective="cost")
    assert cheapest.cost < 0.9 * lowest.cost
    within = plan(run, 4, objective="energy", budget=0.95 * lowest.cost)
    assert within.cost <= 0.95 * lowest.cost and within.kwh >= lowest.kwh and within.batch != lowest.batch


def test_within_a_budget_the_plan_of_lowest_energy_takes_cheaper_configurations_of_a_batch(tmp_path: Path) -> None:
    pricing = {"price": 1.0, "spot": {"discount": 0.6, "interruptions_per_day": 2}}
    run = RunDir.create(tmp_path, make_spec(search={"max_batch": 4096}, pricing=pricing))
    for result in make_probes(Truth(noise=0.01, watts=300.0), {2: (16, 32, 64, 128, 256), 4: (8,), 16: (2, 256)}):
        run.write_result(result)
    lowest = plan(run, 4, objective="energy", max_batch=64)
    assert {wave.market for wave in lowest.waves} == {"on_demand"}
    within = plan(run, 4, objective="energy", max_batch=64, budget=0.6 * lowest.cost)
    assert {wave.market for wave in within.waves} == {"spot"} and within.cost <= 0.6 * lowest.cost


def test_more_nodes_than_were_measured_run_more_trainings_side_by_side(run: RunDir) -> None:
    wide = plan(run, 30, max_nodes=64, nodes=2)
    assert {wave.nodes for wave in wide.waves} == {2} and max(wave.side_by_side for wave in wide.waves) == 30
    with pytest.raises(Infeasible, match=r"no configuration is (within|feasible on) at most 1 node"):
        plan(run, 30, max_nodes=1)


def test_a_number_of_trainings_that_cannot_be_planned_is_refused(run: RunDir) -> None:
    with pytest.raises(SpecError, match=f"at most {MAX_TRAININGS} can be planned together"):
        plan(run, MAX_TRAININGS + 1)


def test_a_plan_has_the_warnings_of_the_answer_with_their_codes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isolate_environment(monkeypatch, tmp_path)
    query = Query(nodes=64, max_nodes=64)
    answer = recommend_configuration(open_runs_of_job(run), query, now=1.0)
    assert answer.warnings and plan(run, 3, nodes=64, max_nodes=64).warnings == tuple(answer.warnings)
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
    assert "x faster and needs" in text and "no plan with this batch finishes before" in text
    assert table.row_count == len(many.waves)


def test_the_screen_names_the_limits_as_durations_and_costs(run: RunDir) -> None:
    many = plan(run, 30)
    limited = replace(many, deadline_hours=1 / 3, budget=5.0)
    assert f"the shortest plan within 20.0 min and a budget of 5 {many.currency};" in str(
        list(render_campaign(limited))[1]
    )
    on_type = replace(many, waves=tuple(replace(wave, node_type="a100") for wave in many.waves))
    assert "no plan with this batch on a100 nodes finishes before" in str(list(render_campaign(on_type))[1])


@pytest.mark.parametrize(
    ("speedup", "share", "sentence"),
    [
        (1.94, 0.52, "The plan is 1.94x faster and needs 52 % of the node-hours."),
        (0.5, 0.52, "The plan is 2.00x slower and needs 52 % of the node-hours."),
        (1.0, 0.52, "The plan takes as long and needs 52 % of the node-hours."),
        (1.94, 1.0, "The plan is 1.94x faster and needs the same node-hours."),
        (1.0, 1.0, ""),
    ],
)
def test_the_screen_compares_speed_and_node_hours_unless_both_are_equal(
    run: RunDir, speedup: float, share: float, sentence: str
) -> None:
    many = plan(run, 4)
    changed = replace(many, speedup=speedup, node_hours=share * many.at_fastest.node_hours)
    line = str(list(render_campaign(changed))[2])
    assert line.endswith(sentence) and ("The plan" in line) == bool(sentence)


# --- several jobs


@pytest.fixture
def two_jobs(run: RunDir) -> list[RunDir]:
    other = RunDir.create(run.path.parent, make_spec(name="other", train={"epochs": 3}, search={"max_batch": 4096}))
    for result in run.read_results():
        other.write_result(result)
    return [run, other]


def plan_jobs(runs: list[RunDir], *trainings: int, save: bool = False, **query: Any) -> Campaign:
    return plan_trainings(open_runs_by_job(runs), Query(**query), trainings, save=save)


def test_trainings_of_several_jobs_are_planned_together(two_jobs: list[RunDir]) -> None:
    names = [open_runs_of_job(run)[0].job_name for run in two_jobs]
    together = plan_jobs(two_jobs, 5, 8)
    assert [(job.job, job.trainings) for job in together.jobs] == [(names[0], 5), (names[1], 8)]
    assert together.trainings == 13 and sum(wave.trainings for wave in together.waves) == 13
    assert [wave.job for wave in together.waves].count("other") == sum(together.frame()["job"] == "other")
    assert together.lower_bound <= together.hours * (1 + 1e-9) and together.speedup > 1.0
    assert together.cost == pytest.approx(sum(training.cost for training in together.schedule))
    assert together.cost == pytest.approx(sum(job.cost for job in together.jobs))
    one_by_one = plan(two_jobs[0], 5).hours + plan(two_jobs[1], 8).hours
    assert together.hours < one_by_one, "one job fills the nodes that the other leaves idle"
    for training in together.schedule:
        running = [t for t in together.schedule if t.start <= training.start < (t.start + t.hours) * (1 - 1e-9)]
        assert sum(t.nodes for t in running) <= together.max_nodes


def test_deadline_and_budget_are_those_of_the_trainings_of_all_jobs(two_jobs: list[RunDir]) -> None:
    shortest = plan_jobs(two_jobs, 3, 2)
    cheapest = plan_jobs(two_jobs, 3, 2, deadline_hours=1e6)
    assert cheapest.minimises == "cost" and cheapest.cost < shortest.cost and cheapest.is_optimal
    budget = (shortest.cost + cheapest.cost) / 2
    within = plan_jobs(two_jobs, 3, 2, budget=budget)
    assert within.cost <= budget and shortest.hours < within.hours <= cheapest.hours
    with pytest.raises(Infeasible, match=r"5 trainings \(3 of .*, 2 of other\) on at most 16 nodes takes .* deadline"):
        plan_jobs(two_jobs, 3, 2, deadline_hours=0.9 * shortest.lower_bound)
    with pytest.raises(Infeasible, match=r"on at most 16 nodes takes .*, more than the deadline"):
        plan_jobs(two_jobs, 3, 2, objective="time", max_batch=64, deadline_hours=1e-3)
    with pytest.raises(Infeasible, match=r"cost at least .*, more than the budget"):
        plan_jobs(two_jobs, 3, 2, budget=0.99 * cheapest.cost)


def test_numbers_of_trainings_that_do_not_match_the_jobs_are_refused(two_jobs: list[RunDir]) -> None:
    for runs, trainings in ((two_jobs, (5,)), (two_jobs[:1], (5, 8)), (two_jobs, (5, 8, 9))):
        with pytest.raises(SpecError, match=r"--trainings: got . numbers? \(.*\) for . jobs? \("):
            plan_jobs(runs, *trainings)
    with pytest.raises(SpecError, match="is given for two jobs"):
        plan_trainings([open_runs_of_job(two_jobs[0])] * 2, Query(), (5, 8))
    with pytest.raises(SpecError, match="at most 500"):
        plan_jobs(two_jobs, 300, 300)
    with pytest.raises(SpecError, match="cannot be stored"):
        plan_jobs(two_jobs, 5, 8, save=True)


def test_jobs_without_a_common_node_type_or_currency_are_refused(two_jobs: list[RunDir]) -> None:
    first, second = open_runs_by_job(two_jobs)
    second[0].type = "a100"
    with pytest.raises(SpecError, match=r"no node type in common \(.*none named; other: a100\)"):
        plan_trainings([first, second], Query(), (5, 8))
    dollars = second[0].spec.pricing.model_copy(update={"currency": "EUR"})
    priced = second[0].with_spec(second[0].spec.model_copy(update={"pricing": dollars}))
    with pytest.raises(SpecError, match="different currencies: EUR, USD"):
        plan_trainings([first, [priced]], Query(), (5, 8))


def test_the_screen_has_the_bound_and_the_waves_of_each_job(two_jobs: list[RunDir]) -> None:
    together = plan_jobs(two_jobs, 5, 8)
    *lines, table = render_campaign(replace(together, is_optimal=False, node_type="a100"))
    text = "\n".join(map(str, lines))
    bound = f"none on a100 nodes takes less than {format_duration(3600 * together.lower_bound)}."
    assert (
        f"the shortest plan that was found; {bound}" in text and "Each training on its fastest configuration: " in text
    )
    assert table.row_count == len(together.waves)
    assert "This is the shortest plan. All" in str(list(render_campaign(replace(together, is_optimal=True)))[1])
