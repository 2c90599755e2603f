import itertools
import math
import random

import make_runs as make
import numpy as np
import pytest

from tula_cli.models.choice.campaign import Campaign, CandidatesOfJob, PlanRequest, make_campaign
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.node_schedule import (
    ScheduledStart,
    TrainingOption,
    compute_makespan,
    compute_shortest_makespan,
    find_cheapest_plan,
    find_predecessors,
    find_shortest_plan,
    list_options,
    sum_costs,
)
from tula_cli.query import Query


def search_all_schedules(
    options: list[TrainingOption], trainings: int, nodes: int, deadline: float = math.inf, budget: float = math.inf
) -> tuple[float, float]:
    """Return the shortest makespan within the budget, and the lowest cost within the deadline, of all schedules.

    A training starts at 0 or when another finishes: a later start never helps.
    """
    best = [math.inf, math.inf]

    def extend(
        running: tuple[tuple[float, int], ...], free: int, now: float, rest: int, end: float, cost: float
    ) -> None:
        is_dear = cost > budget * (1 + 1e-9)
        if (is_dear or end >= best[0]) and (cost >= best[1] or end > deadline * (1 + 1e-9)):
            return
        if not rest:
            best[0] = best[0] if is_dear else min(best[0], end)
            best[1] = min(best[1], cost if end <= deadline * (1 + 1e-9) else math.inf)
            return
        for option in options:
            if option.nodes <= free:
                begun = tuple(sorted((*running, (now + option.hours, option.nodes))))
                after = max(end, now + option.hours)
                extend(begun, free - option.nodes, now, rest - 1, after, cost + option.cost)
        if running:
            first = running[0][0]
            done = sum(width for at, width in running if at <= first)
            extend(tuple(r for r in running if r[0] > first), free + done, first, rest, end, cost)

    extend((), nodes, 0.0, trainings, 0.0, 0.0)
    return best[0], best[1]


def make_options(seed: int, *, monotone: bool) -> tuple[list[TrainingOption], int, int]:
    """Return random options on 1, 2, 4 and 8 nodes, with a number of nodes and of trainings."""
    rng = random.Random(seed)
    nodes = rng.choice([2, 4, 8])
    options, hours = [], 10.0
    for width in (1, 2, 4, 8):
        if width > nodes or (width > 1 and rng.random() < 0.2):
            continue
        hours = rng.uniform(hours / 2, hours) if monotone else rng.uniform(1.0, 10.0)
        options.append(TrainingOption(width, hours, width * hours))
        if rng.random() < 0.3:  # a spot market
            options.append(
                TrainingOption(width, hours * rng.uniform(1.0, 1.5), width * hours * rng.uniform(0.3, 1.0), 1)
            )
    return options, nodes, rng.randint(1, {2: 6, 4: 5, 8: 4}[nodes])


def check_schedule(starts: list[ScheduledStart], nodes: int) -> None:
    for start in starts:
        running = [s for s in starts if s.hours <= start.hours + 1e-6 and s.end > start.hours + 1e-6]
        assert sum(s.option.nodes for s in running) <= nodes


@pytest.mark.parametrize("monotone", [True, False])
def test_no_schedule_of_equal_trainings_is_shorter_or_cheaper_within_the_deadline(monotone: bool) -> None:
    for seed in range(60):
        options, nodes, trainings = make_options(seed, monotone=monotone)
        shortest, _ = search_all_schedules(options, trainings, nodes)
        assert compute_shortest_makespan(options, trainings=trainings, nodes=nodes) == pytest.approx(shortest)
        for factor in (1.0, 1.2, 1.7):
            starts = find_cheapest_plan(options, trainings=trainings, nodes=nodes, deadline=factor * shortest)
            assert starts is not None and len(starts) == trainings
            check_schedule(starts, nodes)
            assert max(start.end for start in starts) <= factor * shortest * (1 + 1e-6)
            _, cheapest = search_all_schedules(options, trainings, nodes, factor * shortest)
            assert sum(start.option.cost for start in starts) == pytest.approx(cheapest)


@pytest.mark.parametrize("monotone", [True, False])
def test_no_schedule_within_the_budget_is_shorter(monotone: bool) -> None:
    constrained = 0
    for seed in range(60):
        options, nodes, trainings = make_options(seed, monotone=monotone)
        shortest, _ = search_all_schedules(options, trainings, nodes)
        costs = [trainings * option.cost for option in options if option.nodes <= nodes]
        assert find_shortest_plan(options, trainings=trainings, nodes=nodes, budget=0.99 * min(costs)) is None
        for share in (0.0, 0.3, 0.6):
            budget = min(costs) + share * (max(costs) - min(costs))
            expected, _ = search_all_schedules(options, trainings, nodes, budget=budget)
            starts = find_shortest_plan(options, trainings=trainings, nodes=nodes, budget=budget)
            assert starts is not None and len(starts) == trainings
            check_schedule(starts, nodes)
            assert compute_makespan(starts) == pytest.approx(expected, rel=1e-5)
            assert sum_costs(starts) <= budget * (1 + 1e-6)
            constrained += expected > shortest * 1.01
            deadline = {"deadline": 0.99 * expected, "budget": budget}
            assert find_shortest_plan(options, trainings=trainings, nodes=nodes, **deadline) is None
    assert constrained > 10


def test_node_counts_that_do_not_divide_each_other_give_plans_near_the_shortest_schedule() -> None:
    excesses = []
    for seed in range(60):
        rng = random.Random(seed)
        nodes, hours = rng.randint(2, 6), 10.0
        options = []
        for width in range(1, nodes + 1):
            hours = rng.uniform(hours * (width - 1) / width if width > 1 else hours, hours)
            options.append(TrainingOption(width, hours, width * hours))
        trainings = rng.randint(1, 4)
        makespan = compute_shortest_makespan(options, trainings=trainings, nodes=nodes)
        starts = find_cheapest_plan(options, trainings=trainings, nodes=nodes, deadline=makespan)
        assert starts is not None and max(start.end for start in starts) == pytest.approx(makespan)
        check_schedule(starts, nodes)
        shortest, _ = search_all_schedules(options, trainings, nodes)
        excesses.append(makespan / shortest - 1)
    assert min(excesses) >= -1e-9 and max(excesses) < 0.2 and np.mean(np.array(excesses) > 1e-9) <= 2 / 60


def test_no_plan_meets_a_deadline_below_the_shortest_makespan_or_on_too_few_nodes() -> None:
    options = [TrainingOption(2, 6.0, 12.0), TrainingOption(4, 4.0, 16.0)]
    assert compute_shortest_makespan(options, trainings=3, nodes=4) == 10.0
    assert find_cheapest_plan(options, trainings=3, nodes=4, deadline=9.9) is None
    assert compute_shortest_makespan(options, trainings=1, nodes=1) == math.inf
    assert find_cheapest_plan(options, trainings=1, nodes=1) is None


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3])
def test_plans_do_not_depend_on_the_unit_of_time(scale: float) -> None:
    rows = {1: 10.1, 2: 6.7, 3: 5.3, 4: 4.9, 6: 3.7, 8: 3.1}
    plan, scaled = describe(12, 8, rows), describe(12, 8, {nodes: scale * hours for nodes, hours in rows.items()})
    assert scaled.hours == pytest.approx(scale * plan.hours)
    assert [(w.nodes, w.trainings) for w in scaled.waves] == [(w.nodes, w.trainings) for w in plan.waves]


def test_without_a_deadline_all_trainings_are_the_cheapest_and_as_many_as_fit_run_side_by_side() -> None:
    starts = find_cheapest_plan([TrainingOption(1, 10.0, 10.0), TrainingOption(4, 4.0, 16.0)], trainings=6, nodes=4)
    assert starts is not None
    assert [(start.hours, start.option.nodes) for start in starts] == [(0.0, 1)] * 4 + [(10.0, 1)] * 2


def test_options_are_the_rows_that_no_other_beats() -> None:
    table = Candidates.from_predictions(
        [
            make.prediction(1, 64, hours=8.0, cost=8.0),
            make.prediction(2, 64, hours=5.0, cost=10.0),
            make.prediction(2, 64, hours=6.0, cost=4.0, market="spot"),
            make.prediction(4, 64, hours=5.0, cost=20.0),
            make.prediction(4, 32, hours=1.0, cost=1.0),
        ]
    )
    options = list_options(table, np.arange(4))
    assert options == [TrainingOption(1, 8.0, 8.0, 0), TrainingOption(2, 5.0, 10.0, 1), TrainingOption(2, 6.0, 4.0, 2)]


def describe(trainings: int, nodes: int, rows: dict[int, float]) -> Campaign:
    """Return the shortest plan with configurations of one batch, given as nodes to hours."""
    table = Candidates.from_predictions(
        [
            make.prediction(n, 64, hours=hours, cost=2 * n * hours, hours_low=0.9 * hours, hours_high=1.2 * hours)
            for n, hours in rows.items()
        ]
    )
    options = list_options(table, np.arange(len(rows)))
    makespan = compute_shortest_makespan(options, trainings=trainings, nodes=nodes)
    starts = find_cheapest_plan(options, trainings=trainings, nodes=nodes, deadline=makespan)
    assert starts is not None
    request = PlanRequest(query=Query(), minimises="time", nodes=nodes, currency="EUR", warnings=["careful"])
    return make_campaign(starts, table, [CandidatesOfJob("job", trainings, range(len(rows)), 64)], request)


def test_a_plan_has_its_figures_and_those_of_each_training_at_its_fastest() -> None:
    plan = describe(10, 4, {1: 10.0, 2: 6.0, 4: 4.0})
    assert [(w.trainings, w.side_by_side, w.nodes, w.start, w.end) for w in plan.waves] == [
        (8, 4, 1, 0.0, 20.0),
        (2, 2, 2, 20.0, 26.0),
    ]
    assert plan.hours == 26.0 and plan.hours_low == pytest.approx(23.4) and plan.hours_high == pytest.approx(31.2)
    assert plan.node_hours == 8 * 10 + 2 * 12 and plan.cost == 2 * plan.node_hours and plan.kwh is None
    assert plan.bound_hours == 25.0, "10 trainings of 10 node-hours on 4 nodes"
    fastest = plan.at_fastest
    assert (fastest.nodes, fastest.side_by_side, fastest.hours, fastest.node_hours) == (4, 1, 40.0, 160.0)
    assert plan.speedup == pytest.approx(40 / 26) and plan.batch == 64
    assert plan.frame()["trainings"].sum() == 10


def test_fewer_trainings_than_fit_at_the_fastest_need_no_plan() -> None:
    plan = describe(2, 8, {1: 10.0, 2: 6.0, 4: 4.0})
    assert plan.speedup == 1.0 and plan.at_fastest.side_by_side == 2
    assert [(wave.nodes, wave.side_by_side) for wave in plan.waves] == [(4, 2)]


def test_every_number_of_trainings_up_to_the_nodes_is_planned() -> None:
    for trainings, nodes in itertools.product(range(1, 9), (3, 8)):
        assert sum(wave.trainings for wave in describe(trainings, nodes, {1: 10.0, 2: 6.0, 8: 3.0}).waves) == trainings


@pytest.mark.parametrize("seed", range(20))
def test_trainings_that_wait_for_their_predecessors_never_need_more_nodes_whatever_they_take(seed: int) -> None:
    options, trainings, nodes = make_options(seed, monotone=True)
    starts = find_shortest_plan(options, trainings=trainings, nodes=nodes)
    assert starts is not None
    predecessors = find_predecessors(starts, nodes)
    assert all(all(starts[other].end <= start.hours * (1 + 1e-9) for other in others)
               for start, others in zip(starts, predecessors, strict=True))  # fmt: skip
    rng, spans = random.Random(seed), list[tuple[float, float, int]]()
    for start, others in zip(starts, predecessors, strict=True):
        begin = max((spans[other][1] for other in others), default=0.0)
        spans.append((begin, begin + start.option.hours * rng.uniform(0.3, 3.0), start.option.nodes))
    for moment, _, _ in spans:
        assert sum(width for begin, end, width in spans if begin <= moment < end) <= nodes


def test_nodes_for_all_trainings_at_once_need_no_division_of_the_nodes() -> None:
    options = [TrainingOption(1, 4.0, 4.0, 0), TrainingOption(2, 2.0, 4.0, 1), TrainingOption(8, 1.0, 8.0, 2)]
    many = {"trainings": 500, "nodes": 10**9}  # dividing so many nodes would take hours
    assert compute_shortest_makespan(options, **many) == 1.0
    assert find_cheapest_plan(options, **many) == [ScheduledStart(0.0, options[1])] * 500, (
        "the shortest of the cheapest"
    )
    assert find_cheapest_plan(options, deadline=1.5, **many) == [ScheduledStart(0.0, options[2])] * 500
    assert find_cheapest_plan(options, deadline=0.5, **many) is None
