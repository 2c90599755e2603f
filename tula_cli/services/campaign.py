"""`tula recommend --trainings`, and the plan that `tula train --seeds` submits: how many nodes each of many trainings gets, and how many run side by side."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from pydantic import TypeAdapter

from tula_cli.errors import Infeasible, SpecError, require_positive
from tula_cli.models.choice.campaign import (
    Campaign,
    Option,
    Quantity,
    Start,
    compute_makespan,
    describe_plan,
    find_shortest_makespan,
    is_within,
    list_options,
    plan_cheapest,
    plan_shortest,
    sum_costs,
)
from tula_cli.models.choice.columns import Floats
from tula_cli.query import Query
from tula_cli.run.directory import Run
from tula_cli.run.files import read_record, write_atomic
from tula_cli.run.owner import require_own
from tula_cli.services.recommend import answer_query
from tula_cli.words import format_count, format_duration, format_number

MAX_TRAININGS = 500
"""Planning more takes minutes."""
PLAN_FILE = "trainings.json"
"""File of a run that has its plan for many trainings."""


def plan_campaign(
    runs: Sequence[Run],
    query: Query,
    trainings: int,
    *,
    overrides: Sequence[str] = (),
    one_at_a_time: bool = False,
) -> Campaign:
    """Plan many trainings of one job; nothing is written.

    Objective time gives the shortest plan; cost and energy give the plan of lowest cost or energy within the deadline. The
    knee, which is the default, limits the batch to that of the knee, and gives the shortest plan, or the cheapest within
    the deadline if there is one. If the job names node types, all trainings run on one of them.

    Args:
        runs: the runs of the job, with the results.
        query: objective and limits; `max_nodes` limits the nodes in use at a time (default: the most of search.nodes),
            `deadline_hours` and `budget` are those of all trainings together.
        trainings: the number of trainings.
        overrides: settings that override those of the job.
        one_at_a_time: whether no two trainings may run side by side, as on this machine.

    Raises:
        SpecError: the number of trainings is below 1 or too large, or the query is about a training under way.
        Pending, BadMeasurements: as in `answer_query`.
        Infeasible: no configuration or no plan is within the limits.
    """
    require_positive(trainings=trainings)
    if trainings > MAX_TRAININGS:
        raise SpecError(f"trainings {trainings}: at most {MAX_TRAININGS} can be planned together", "plan fewer at once")
    if query.from_training:
        raise SpecError("--from-training has no effect on a plan for many trainings", "remove it")
    for_one = replace(query, deadline_hours=None, budget=None)  # these are for all trainings together
    answer = answer_query(runs, for_one, overrides=overrides, estimates_start=False)
    candidates, currency = answer.candidates, answer.recommendation.currency
    max_batch = answer.recommendation.choice.batch if query.objective == "knee" else query.max_batch
    if query.objective == "accuracy-time":
        columns = ("hours", "hours_low", "hours_high", "cost")
        candidates = candidates.with_columns({name: candidates[f"same_progress_{name}"] for name in columns})
    nodes = query.max_nodes or max(nodes for run in runs for nodes in run.spec.search.nodes)
    candidates = candidates.take((candidates["nodes"] <= nodes) & (candidates["batch"] <= (max_batch or math.inf)))
    if not len(candidates):
        raise Infeasible(f"no configuration is feasible on at most {format_count(nodes)}", "raise --max-nodes")

    quantity = _choose_quantity(query)
    groups = [
        list_options(
            candidates,
            np.asarray(rows),
            cost="kwh" if quantity == "energy" else "cost",
            all_nodes=nodes if one_at_a_time else None,
        )
        for rows in candidates.frame.groupby(["type", "batch"]).indices.values()
    ]
    subject = f"{format_count(trainings, 'training')} on at most {format_count(nodes)}"
    if max_batch is not None:
        subject += f" with batches of at most {max_batch}"
    choose = _plan_shortest_batch if quantity == "time" else partial(_plan_cheapest_batch, prices=candidates["cost"])
    plan = describe_plan(
        choose(groups, query, trainings=trainings, nodes=nodes, subject=subject, currency=currency),
        candidates,
        query=query,
        minimises=quantity,
        nodes=nodes,
        max_batch=max_batch,
        currency=currency,
        warnings=answer.warnings,
        one_at_a_time=one_at_a_time,
    )
    if quantity == "energy" and not is_within(plan.cost, _get_limit(query.budget)):
        raise Infeasible(
            f"the plan of lowest energy for {subject} costs {format_number(plan.cost, 4)} {currency}, more than the"
            f" budget of {query.budget:g}",
            "raise --budget, or choose --objective cost",
        )
    return plan


def save_campaign(runs: Sequence[Run], plan: Campaign) -> None:
    """Store a plan for `tula train --seeds` in all runs of a job.

    Raises:
        TulaError: it cannot be written, or a run belongs to another user.
    """
    for run in runs:
        if run.exists:
            require_own(run.path)
            write_atomic(run.path / PLAN_FILE, TypeAdapter(Campaign).dump_json(plan, indent=1).decode() + "\n")


def load_campaign(runs: Sequence[Run]) -> Campaign | None:
    """Return the stored plan of a job, or None if there is none.

    Raises:
        BadMeasurements: its file is damaged.
    """
    plans = (read_record(run.path / PLAN_FILE, TypeAdapter(Campaign)) for run in runs)
    return next(filter(None, plans), None)


def _choose_quantity(query: Query) -> Quantity:
    """Return the quantity that a plan minimises."""
    if query.objective == "energy":
        return "energy"
    is_cheapest = query.objective == "cost" or (query.objective == "knee" and query.deadline_hours is not None)
    return "cost" if is_cheapest else "time"


def _get_limit(value: float | None) -> float:
    return math.inf if value is None else value


def _plan_shortest_batch(
    groups: Sequence[Sequence[Option]], query: Query, *, trainings: int, nodes: int, subject: str, currency: str
) -> list[Start]:
    """Return the shortest plan within the budget.

    Args:
        groups: the options of each batch on each node type; all trainings of a plan use one of them.
        query: the limits.
        trainings: the number of trainings.
        nodes: the number of nodes in use at a time.
        subject: trainings, nodes and batches, for messages.
        currency: of the costs.

    Raises:
        Infeasible: no plan is within budget and deadline.
    """
    makespans = [find_shortest_makespan(options, trainings=trainings, nodes=nodes) for options in groups]
    plan: list[Start] | None = None
    makespan = math.inf
    for index in np.argsort(makespans, kind="stable"):
        if makespans[index] >= makespan:
            break
        other = plan_shortest(
            groups[index], trainings=trainings, nodes=nodes, budget=_get_limit(query.budget), deadline=makespan
        )
        if other is not None and compute_makespan(other) < makespan:
            plan, makespan = other, compute_makespan(other)
    if plan is None:
        least = trainings * min(option.cost for options in groups for option in options)
        raise _make_over_budget_error(f"{subject} cost at least", least, query, currency)
    if not is_within(makespan, _get_limit(query.deadline_hours)):
        budget = "" if query.budget is None else f" within a budget of {query.budget:g} {currency}"
        raise _make_too_late_error(f"{subject}{budget} take at least", makespan, query)
    return plan


def _plan_cheapest_batch(
    groups: Sequence[Sequence[Option]],
    query: Query,
    *,
    trainings: int,
    nodes: int,
    subject: str,
    currency: str,
    prices: Floats,
) -> list[Start]:
    """Return the plan of lowest cost or energy within the deadline, of a batch whose plan is within the budget if any is.

    Other arguments and errors are as for the shortest plan.

    Args:
        prices: cost of a training by row of the candidates; the cost of an option may be its energy.
    """
    deadline = _get_limit(query.deadline_hours)
    plans = [plan_cheapest(options, trainings=trainings, nodes=nodes, deadline=deadline) for options in groups]
    within = [starts for starts in plans if starts is not None]
    if not within:
        makespan = min(find_shortest_makespan(options, trainings=trainings, nodes=nodes) for options in groups)
        raise _make_too_late_error(f"{subject} take at least", makespan, query)
    budget = _get_limit(query.budget)
    affordable = [plan for plan in within if is_within(sum(prices[start.option.row] for start in plan), budget)]
    plan = min(affordable or within, key=lambda starts: (sum_costs(starts), compute_makespan(starts)))
    if _choose_quantity(query) == "cost" and not is_within(sum_costs(plan), _get_limit(query.budget)):
        late = "" if query.deadline_hours is None else f" within {format_duration(3600 * query.deadline_hours)}"
        raise _make_over_budget_error(f"{subject}{late} cost at least", sum_costs(plan), query, currency)
    return plan


def _make_over_budget_error(least: str, cost: float, query: Query, currency: str) -> Infeasible:
    knee = query.objective == "knee"
    fewer = "plan fewer trainings, or allow larger batches with --objective cost" if knee else "or plan fewer trainings"
    return Infeasible(
        f"{least} {format_number(cost, 4)} {currency}, more than the budget of {query.budget:g}",
        f"raise --budget, {fewer}",
    )


def _make_too_late_error(least: str, makespan: float, query: Query) -> Infeasible:
    knee = query.objective == "knee"
    fewer = "plan fewer trainings, or allow larger batches with --objective time" if knee else "or plan fewer trainings"
    options = "--deadline" if query.budget is None else "--deadline, --budget"
    return Infeasible(
        f"{least} {format_duration(3600 * makespan)}, more than the deadline of"
        f" {format_duration(3600 * _get_limit(query.deadline_hours))}",
        f"raise {options} or --max-nodes, {fewer}",
    )
