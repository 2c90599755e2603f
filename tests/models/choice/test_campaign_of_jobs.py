import itertools
import math
import random
from collections.abc import Sequence

import pytest

from tula_cli.models.choice.campaign_of_jobs import JobTrainings, PlanTarget, compute_lower_bound, plan_jobs
from tula_cli.models.choice.node_schedule import (
    ScheduledStart,
    TrainingOption,
    compute_makespan,
    compute_shortest_makespan,
    find_cheapest_plan,
    sum_costs,
)


def search_all_schedules(
    jobs: Sequence[tuple[int, Sequence[TrainingOption]]],
    nodes: int,
    deadline: float = math.inf,
    budget: float = math.inf,
) -> tuple[float, float]:
    """Return the shortest makespan within the budget, and the lowest cost within the deadline, of all schedules of options.

    A training starts at 0 or when another finishes: a later start never helps.
    """
    best = [math.inf, math.inf]

    def extend(
        running: tuple[tuple[float, int], ...], free: int, now: float, rest: tuple[int, ...], end: float, cost: float
    ) -> None:
        is_dear = cost > budget * (1 + 1e-9)
        if (is_dear or end >= best[0]) and (cost >= best[1] or end > deadline * (1 + 1e-9)):
            return
        if not any(rest):
            best[0] = best[0] if is_dear else min(best[0], end)
            best[1] = min(best[1], cost if end <= deadline * (1 + 1e-9) else math.inf)
            return
        for job, (_, options) in enumerate(jobs):
            for option in options if rest[job] else ():
                if option.nodes <= free:
                    begun = tuple(sorted((*running, (now + option.hours, option.nodes))))
                    fewer = (*rest[:job], rest[job] - 1, *rest[job + 1 :])
                    after = max(end, now + option.hours)
                    extend(begun, free - option.nodes, now, fewer, after, cost + option.cost)
        if running:
            first = running[0][0]
            done = sum(width for at, width in running if at <= first)
            extend(tuple(r for r in running if r[0] > first), free + done, first, rest, end, cost)

    extend((), nodes, 0.0, tuple(count for count, _ in jobs), 0.0, 0.0)
    return best[0], best[1]


def make_jobs(
    seed: int, *, count: int = 2, trainings: tuple[int, int] = (1, 2), nodes: int | None = None
) -> tuple[list[JobTrainings], int]:
    """Return jobs of two batches, with options on random numbers of nodes, and a number of nodes."""
    rng = random.Random(seed)
    nodes = nodes or rng.choice([3, 4])
    jobs = []
    for job in range(count):
        batches = []
        for batch in range(2):
            hours, options = rng.uniform(2.0, 20.0) if not batch else 1.3 * batches[0][0].hours, []
            for width in range(1, nodes + 1):
                hours *= rng.uniform(0.5, 1.0) if width > 1 else 1.0
                if width == 1 or rng.random() < 0.6:
                    options.append(
                        TrainingOption(width, hours, width * hours * rng.uniform(0.7, 1.0), 10 * job + batch)
                    )
            batches.append(options)
        jobs.append(JobTrainings(rng.randint(*trainings), batches))
    return jobs, nodes


def check_plan(starts: Sequence[ScheduledStart], jobs: Sequence[JobTrainings], nodes: int) -> None:
    """Check that all trainings are planned, those of a job with options of one batch, and never need too many nodes."""
    planned = [start.option for start in starts]
    for job in jobs:
        counts = [sum(planned.count(option) for option in options) for options in job.batches]
        assert sorted(counts) == [*[0] * (len(counts) - 1), job.trainings]
    for start in starts:
        running = [s for s in starts if s.hours <= start.hours + 1e-6 and s.end > start.hours + 1e-6]
        assert sum(s.option.nodes for s in running) <= nodes


@pytest.mark.parametrize("seed", range(15))
def test_no_schedule_of_a_few_trainings_of_several_jobs_is_shorter_or_cheaper(seed: int) -> None:
    jobs, nodes = make_jobs(seed)

    def search(**limits: float) -> tuple[float, float]:
        results = [
            search_all_schedules(
                [(job.trainings, batch) for job, batch in zip(jobs, batches, strict=True)], nodes, **limits
            )
            for batches in itertools.product(*(job.batches for job in jobs))
        ]
        return min(time for time, _ in results), min(cost for _, cost in results)

    shortest, least = search()
    plan = plan_jobs(jobs, nodes, PlanTarget("time"))
    assert plan is not None and compute_makespan(plan.starts) == pytest.approx(shortest) == plan.lower_bound
    check_plan(plan.starts, jobs, nodes)
    for factor in (1.0, 1.15, 1.5):
        cheapest = plan_jobs(jobs, nodes, PlanTarget("cost", deadline=factor * shortest))
        assert cheapest is not None and compute_makespan(cheapest.starts) <= factor * shortest * (1 + 1e-6)
        check_plan(cheapest.starts, jobs, nodes)
        _, expected = search(deadline=factor * shortest)
        assert sum_costs(cheapest.starts) == pytest.approx(expected) == cheapest.lower_bound
    for share in (0.0, 0.3):
        budget = least + share * (sum_costs(plan.starts) - least)
        within = plan_jobs(jobs, nodes, PlanTarget("time", budget=budget))
        assert within is not None and sum_costs(within.starts) <= budget * (1 + 1e-6)
        expected, _ = search(budget=budget)
        assert compute_makespan(within.starts) == pytest.approx(expected) == within.lower_bound
    assert plan_jobs(jobs, nodes, PlanTarget("time", budget=0.99 * least)) is None
    assert plan_jobs(jobs, nodes, PlanTarget("cost", deadline=0.99 * shortest)) is None


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_many_trainings_are_near_a_bound_that_no_plan_is_below(seed: int) -> None:
    jobs, nodes = make_jobs(seed, count=3, trainings=(10, 20), nodes=8)
    plan = plan_jobs(jobs, nodes, PlanTarget("time"))
    assert plan is not None and 1 - 1e-9 <= compute_makespan(plan.starts) / plan.lower_bound <= 1.08
    check_plan(plan.starts, jobs, nodes)
    within = PlanTarget("cost", deadline=1.1 * compute_makespan(plan.starts))
    cheapest = plan_jobs(jobs, nodes, within)
    assert cheapest is not None and sum_costs(cheapest.starts) <= sum_costs(plan.starts)
    assert 1 - 1e-9 <= sum_costs(cheapest.starts) / cheapest.lower_bound <= 1.05


def test_trainings_of_one_job_are_planned_nearly_as_well_as_by_the_exact_plan_for_equal_trainings() -> None:
    for seed in range(6):
        rng, hours, options = random.Random(seed), 10.0, []
        for width in (1, 2, 4, 8):
            options.append(TrainingOption(width, hours, width * hours))
            hours *= rng.uniform(0.5, 0.9)
        trainings = rng.randint(8, 40)
        exact = compute_shortest_makespan(options, trainings=trainings, nodes=8)
        plan = plan_jobs([JobTrainings(trainings, [options])], 8, PlanTarget("time"))
        assert plan is not None and exact * (1 - 1e-9) <= compute_makespan(plan.starts) <= 1.05 * exact
        cheapest = find_cheapest_plan(options, trainings=trainings, nodes=8, deadline=1.1 * exact)
        other = plan_jobs([JobTrainings(trainings, [options])], 8, PlanTarget("cost", deadline=1.1 * exact))
        assert cheapest is not None and other is not None
        assert sum_costs(cheapest) * (1 - 1e-9) <= sum_costs(other.starts) <= 1.05 * sum_costs(cheapest)


def test_a_budget_that_only_a_mixture_of_options_is_within_makes_the_plan_little_longer() -> None:
    jobs = [
        JobTrainings(30, [[TrainingOption(1, 10.0, 10.0), TrainingOption(4, 2.0, 16.0)]]),
        JobTrainings(9, [[TrainingOption(1, 3.0, 3.0, 1)]]),
    ]
    shortest, budget = plan_jobs(jobs, 4, PlanTarget("time")), 30 * 13.0 + 27.0
    assert shortest is not None and sum_costs(shortest.starts) > budget
    within = plan_jobs(jobs, 4, PlanTarget("time", budget=budget))
    assert within is not None and sum_costs(within.starts) <= budget
    assert compute_makespan(within.starts) <= 1.1 * compute_lower_bound(jobs, 4, PlanTarget("time", budget=budget))


def test_without_a_deadline_the_plan_of_lowest_cost_is_the_shortest_in_which_all_trainings_have_it() -> None:
    jobs = [
        JobTrainings(4, [[TrainingOption(1, 8.0, 8.0), TrainingOption(2, 5.0, 10.0)]]),
        JobTrainings(1, [[TrainingOption(4, 4.0, 1.0, 1)]]),
    ]
    plan = plan_jobs(jobs, 4, PlanTarget("cost"))
    assert plan is not None and sum_costs(plan.starts) == plan.lower_bound == 33.0
    assert compute_makespan(plan.starts) == 12.0


def test_jobs_that_fit_on_no_number_of_nodes_have_no_plan() -> None:
    jobs = [JobTrainings(1, [[TrainingOption(4, 1.0, 1.0)]]), JobTrainings(1, [[TrainingOption(1, 1.0, 1.0)]])]
    assert plan_jobs(jobs, 2, PlanTarget("time")) is None and plan_jobs(jobs, 2, PlanTarget("cost")) is None
