"""`tula recommend --trainings`: how many nodes each of many trainings gets, and how many run side by side."""

import math
from collections.abc import Sequence

import numpy as np

from tula_cli.errors import Infeasible, SpecError, require_positive
from tula_cli.models.choice.campaign import (
    Campaign,
    Quantity,
    Start,
    describe_plan,
    find_shortest_makespan,
    list_options,
    plan_cheapest,
)
from tula_cli.models.choice.candidates import Candidates
from tula_cli.query import Query
from tula_cli.services.recommend import Answer
from tula_cli.spec.job import JobSpec
from tula_cli.words import format_count, format_duration

MAX_TRAININGS = 500
"""Planning more takes minutes."""


def plan_campaign(answer: Answer, spec: JobSpec, query: Query, trainings: int) -> Campaign:
    """Plan many trainings of one job; nothing is written.

    Objective time gives the shortest plan; cost and energy give the plan of lowest cost or energy within the deadline. The
    knee, which is the default, limits the batch to that of the knee, and gives the shortest plan, or the cheapest within
    the deadline if there is one. If the job names node types, all trainings run on one of them.

    Args:
        answer: the answer to the query, for one training.
        spec: the job.
        query: objective and limits; `max_nodes` limits the nodes in use at a time (default: the most of search.nodes),
            `deadline_hours` and `budget` are those of all trainings together.
        trainings: the number of trainings.

    Raises:
        SpecError: the number of trainings is below 1 or too large, or the query is about a training under way.
        Infeasible: no configuration or no plan is within the limits.
    """
    require_positive(trainings=trainings)
    if trainings > MAX_TRAININGS:
        raise SpecError(
            f"trainings {trainings}: at most {MAX_TRAININGS} can be planned together", "plan a part of them"
        )
    if query.from_training:
        raise SpecError("--from-training has no effect on a plan for many trainings", "remove it")
    candidates, currency = answer.candidates, answer.recommendation.currency
    max_batch = answer.recommendation.choice.batch if query.objective == "knee" else query.max_batch
    if query.objective == "accuracy-time":
        columns = ("hours", "hours_low", "hours_high", "cost")
        candidates = candidates.with_columns({name: candidates[f"same_progress_{name}"] for name in columns})
    nodes = query.max_nodes or max(spec.search.nodes)
    candidates = candidates.take((candidates["nodes"] <= nodes) & (candidates["batch"] <= (max_batch or math.inf)))
    if not len(candidates):
        raise Infeasible(f"no configuration is feasible on at most {format_count(nodes)}", "raise --max-nodes")

    starts = _plan_best_batch(candidates, query, trainings=trainings, nodes=nodes)
    plan = describe_plan(
        starts,
        candidates,
        query=query,
        minimises=_choose_quantity(query),
        nodes=nodes,
        max_batch=max_batch,
        currency=currency,
        warnings=answer.warnings,
    )
    if query.budget is not None and plan.cost > query.budget:
        raise Infeasible(
            f"{format_count(trainings, 'training')} cost {plan.cost:.4g} {currency}, more than the budget of"
            f" {query.budget:g}",
            "raise --budget, plan fewer trainings, or choose --objective cost",
        )
    return plan


def _choose_quantity(query: Query) -> Quantity:
    """Return the quantity that a plan minimises."""
    if query.objective == "energy":
        return "energy"
    is_cheapest = query.objective == "cost" or (query.objective == "knee" and query.deadline_hours is not None)
    return "cost" if is_cheapest else "time"


def _plan_best_batch(candidates: Candidates, query: Query, *, trainings: int, nodes: int) -> list[Start]:
    """Return the best plan in which all trainings have the same batch and run on nodes of one type.

    Raises:
        Infeasible: no plan is within the deadline.
    """
    quantity = _choose_quantity(query)
    deadline = math.inf if query.deadline_hours is None else query.deadline_hours
    groups = [
        list_options(candidates, np.asarray(rows), cost="kwh" if quantity == "energy" else "cost")
        for rows in candidates.frame.groupby(["type", "batch"]).indices.values()
    ]
    makespans = [find_shortest_makespan(options, trainings=trainings, nodes=nodes) for options in groups]
    if min(makespans) > deadline:
        raise Infeasible(
            f"{format_count(trainings, 'training')} on at most {format_count(nodes)} take at least"
            f" {format_duration(3600 * min(makespans))}, more than the deadline of {deadline:g} h",
            "raise --deadline or --max-nodes, or plan fewer trainings",
        )
    if quantity == "time":
        groups = [groups[int(np.argmin(makespans))]]
        deadline = min(makespans)
    plans = (plan_cheapest(options, trainings=trainings, nodes=nodes, deadline=deadline) for options in groups)
    return min((starts for starts in plans if starts is not None), key=_sum_costs)


def _sum_costs(starts: Sequence[Start]) -> tuple[float, float]:
    """Return the cost of a plan and its makespan."""
    return sum(start.option.cost for start in starts), max(start.end for start in starts)
