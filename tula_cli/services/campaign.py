"""`tula recommend --trainings`, and the plan that `tula train --seeds` submits: how many nodes each of many trainings gets, and how many run side by side."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from pydantic import TypeAdapter

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import Infeasible, SpecError
from tula_cli.models.choice.campaign import Campaign, CandidatesOfJob, PlanRequest, make_campaign
from tula_cli.models.choice.campaign_of_jobs import JobsPlan, JobTrainings, PlanTarget, plan_jobs
from tula_cli.models.choice.candidates import Candidates, Floats
from tula_cli.models.choice.node_schedule import (
    ScheduledStart,
    TrainingOption,
    compute_makespan,
    compute_shortest_makespan,
    find_cheapest_plan,
    find_shortest_plan,
    is_within_limit,
    list_options,
    sum_costs,
)
from tula_cli.query import QUANTITIES, Quantity, Query
from tula_cli.run.directory import Run
from tula_cli.run.files import read_record, write_file_atomically
from tula_cli.run.owner import require_ownership
from tula_cli.services.recommend import count_pending_probes, recommend_configuration
from tula_cli.words import format_count, format_duration, format_number, join_words

MAX_TRAININGS = 500
"""Maximum number of trainings that are planned together; planning more takes minutes."""
PLAN_FILE = "trainings.json"
"""File of a run that has its plan for many trainings."""


def plan_trainings(
    jobs: Sequence[Sequence[Run]],
    query: Query,
    trainings: Sequence[int],
    *,
    overrides: Sequence[str] = (),
    save: bool = False,
) -> Campaign:
    """Plan many trainings of one job or of several, as `plan_campaign` does, and store the plan if requested.

    Args:
        jobs, query, trainings, overrides: as in `plan_campaign`.
        save: whether to store the plan for `tula train --seeds`.

    Raises:
        SpecError: there is not one number of trainings for each job, or the plan of several jobs is to be stored.
        TulaError: the plan cannot be stored, or a run belongs to another user.
        Pending, BadMeasurements, Infeasible: as in `plan_campaign`.
    """
    if len(trainings) != len(jobs):
        raise SpecError(
            f"[[--trainings]]: got {format_count(len(trainings), 'number')} ({', '.join(map(str, trainings))}) for"
            f" {format_count(len(jobs), 'job')} ({', '.join(runs[0].id for runs in jobs)})",
            "give one number for each job, in the order of the jobs: [[--trainings 10 --trainings 20]]",
        )
    if save and len(jobs) > 1:
        raise SpecError(
            "a plan for several jobs cannot be stored, because tula train --seeds submits the trainings of one job only",
            "plan each job separately to store its plan, or start the trainings yourself as this plan shows",
        )
    plan = plan_campaign(jobs, query, trainings, overrides=overrides, for_seeds=save)
    if save:
        save_campaign(jobs[0], plan)
    return plan


@dataclass(frozen=True)
class _JobCandidates:
    """The configurations of a job that a plan may use."""

    candidates: Candidates
    max_batch: int | None
    currency: str
    warnings: Sequence[Diagnostic]


def _find_usable_configurations(
    runs: Sequence[Run], query: Query, nodes: int, overrides: Sequence[str]
) -> _JobCandidates:
    """Return the configurations of a job that are within the limits of one training."""
    query_of_training = replace(query, deadline_hours=None, budget=None)  # both limits apply to all trainings together
    pending = count_pending_probes(runs)
    answer = recommend_configuration(runs, query_of_training, overrides=overrides, pending=pending, now=time.time())
    candidates = answer.candidates
    max_batch = answer.recommendation.choice.batch if query.objective == "knee" else query.max_batch
    if query.objective == "accuracy-time":
        columns = ("hours", "hours_low", "hours_high", "cost")
        candidates = candidates.with_columns({name: candidates[f"same_progress_{name}"] for name in columns})
    candidates = candidates.select_rows(
        (candidates["nodes"] <= nodes) & (candidates["batch"] <= (max_batch or math.inf))
    )
    if not len(candidates):
        raise Infeasible(f"no configuration is possible on {format_count(nodes)} or fewer", "raise [[--max-nodes]]")
    return _JobCandidates(candidates, max_batch, answer.recommendation.currency, answer.warnings)


def plan_campaign(
    jobs: Sequence[Sequence[Run]],
    query: Query,
    trainings: Sequence[int],
    *,
    overrides: Sequence[str] = (),
    for_seeds: bool = False,
) -> Campaign:
    """Plan many trainings of one job or of several; nothing is written.

    Objective time gives the shortest plan; cost and energy give the plan of lowest cost or energy within the deadline. The
    knee, which is the default, limits the batch to that of the knee, and gives the shortest plan, or the cheapest within
    the deadline if there is one. If the jobs name node types, all trainings run on one of them.

    Args:
        jobs: the runs of each job, with the results.
        query: objective and limits; `max_nodes` limits the nodes in use at a time (default: the most of search.nodes),
            `deadline_hours` and `budget` are those of all trainings together.
        trainings: the number of trainings of each job, at least 1.
        overrides: settings that override those of each job.
        for_seeds: whether `tula train --seeds` will run the plan, on this machine one training after the other; for one job.

    Raises:
        SpecError: the trainings are too many, a run is given twice, or the jobs have different
            currencies or no node type in common.
        Pending, BadMeasurements: as in `recommend_configuration`.
        Infeasible: no configuration or no plan is within the limits.
    """
    if sum(trainings) > MAX_TRAININGS:
        raise SpecError(
            f"[[--trainings]] {sum(trainings)}: at most {MAX_TRAININGS} can be planned together", "plan fewer at once"
        )
    names, one_at_a_time = _list_job_names(jobs), for_seeds and not jobs[0][0].spec.cluster.backend.has_queue
    nodes = query.max_nodes or max(nodes for runs in jobs for run in runs for nodes in run.spec.search.nodes)
    considered = [_find_usable_configurations(runs, query, nodes, overrides) for runs in jobs]
    currency = _require_common_currency(considered)
    candidates = Candidates.concatenate([job_candidates.candidates for job_candidates in considered])
    ends = list(itertools.accumulate(len(job_candidates.candidates) for job_candidates in considered))
    planned_jobs = [
        CandidatesOfJob(name, number, range(end - len(job_candidates.candidates), end), job_candidates.max_batch)
        for name, number, job_candidates, end in zip(names, trainings, considered, ends, strict=True)
    ]
    all_nodes = nodes if one_at_a_time else None
    tables = [
        [
            JobTrainings(job.trainings, _list_options_by_batch(candidates, job, type_, query, all_nodes))
            for job in planned_jobs
        ]
        for type_ in _list_common_node_types(names, considered)
    ]
    nodes = min(nodes, max(sum(map(_count_max_nodes_in_use, table)) for table in tables))  # more would stay idle
    subject = _describe_planned_trainings(planned_jobs, nodes)
    lower_bound = None
    if len(jobs) > 1:
        plan_of_jobs = _plan_several_jobs(tables, query, nodes=nodes, subject=subject, currency=currency)
        starts, lower_bound = plan_of_jobs.starts, plan_of_jobs.lower_bound
    else:
        groups = [options for (job,) in tables for options in job.batches]
        is_shortest = _choose_minimised_quantity(query).name == "time"
        choose = _choose_shortest_plan if is_shortest else partial(_choose_cheapest_plan, prices=candidates["cost"])
        starts = choose(groups, query, trainings=trainings[0], nodes=nodes, subject=subject, currency=currency)
    request = PlanRequest(
        query=query,
        minimises=_choose_minimised_quantity(query).name,
        nodes=nodes,
        currency=currency,
        warnings=_list_warnings(names, considered),
        one_at_a_time=one_at_a_time,
    )
    plan = make_campaign(starts, candidates, planned_jobs, request, lower_bound=lower_bound)
    _require_within_limits(plan, subject, query)
    return plan


def _require_common_currency(considered: Sequence[_JobCandidates]) -> str:
    currencies = sorted({job_candidates.currency for job_candidates in considered})
    if len(currencies) > 1:
        raise SpecError(
            f"the costs of the jobs are in different currencies: {', '.join(currencies)}",
            "give all jobs the same currency and price: [[--set pricing.currency=NAME --set pricing.price=PRICE]]",
        )
    return currencies[0]


def _list_options_by_batch(
    candidates: Candidates, job: CandidatesOfJob, node_type: str, query: Query, all_nodes: int | None
) -> list[list[TrainingOption]]:
    """Return the options of a job on a node type, by batch.

    If the plan minimises neither time nor cost, but has a budget, there is also a list per batch of the options that all
    trainings together can afford.
    """
    quantity, prices = _choose_minimised_quantity(query), candidates["cost"]
    rows = np.asarray(job.rows)[candidates["type"][job.rows] == node_type]
    budgets = [math.inf]
    if quantity.name not in ("time", "cost") and query.budget is not None:
        budgets.append(query.budget / job.trainings)
    groups = []
    for budget in budgets:
        affordable = rows[[is_within_limit(price, budget) for price in prices[rows]]]
        batches = candidates["batch"][affordable]
        groups += [affordable[batches == batch] for batch in np.unique(batches)]
    cost = quantity.column if quantity.grows_with_nodes else "cost"
    return [list_options(candidates, rows, cost=cost, all_nodes=all_nodes) for rows in groups]


def _count_max_nodes_in_use(job: JobTrainings) -> int:
    """Return the number of nodes in use if every training of a job runs at once, on its largest number of nodes."""
    return job.trainings * max(option.nodes for options in job.batches for option in options)


def _describe_planned_trainings(jobs: Sequence[CandidatesOfJob], nodes: int) -> str:
    """Describe trainings, nodes and batches, for messages."""
    trainings, on_nodes = (
        format_count(sum(job.trainings for job in jobs), "training"),
        f"on at most {format_count(nodes)}",
    )
    if len(jobs) > 1:
        return f"{trainings} ({join_words(f'{job.trainings} of {job.job}' for job in jobs)}) {on_nodes}"
    batches = "" if jobs[0].max_batch is None else f" with batches of at most {jobs[0].max_batch}"
    return f"{trainings} {on_nodes}{batches}"


def _list_warnings(names: Sequence[str], considered: Sequence[_JobCandidates]) -> list[Diagnostic]:
    """Return the warnings of all jobs, with the name of the job if there are several."""
    if len(names) == 1:
        return list(considered[0].warnings)
    return [
        replace(warning, text=f"{name}: {warning.text}")
        for name, job_candidates in zip(names, considered, strict=True)
        for warning in job_candidates.warnings
    ]


def _require_within_limits(plan: Campaign, subject: str, query: Query) -> None:
    """Raise an error if a plan exceeds the deadline or the budget, which planning does not enforce for every objective."""
    if plan.minimises not in ("time", "cost") and not is_within_limit(plan.cost, _get_limit_or_infinity(query.budget)):
        raise Infeasible(
            f"the plan of {QUANTITIES[plan.minimises].lowest} for {subject} costs {format_number(plan.cost, 4)} {plan.currency}, more than the"
            f" budget of {query.budget:g}",
            "raise [[--budget]], or choose [[--objective]] cost",
        )
    if not is_within_limit(plan.hours, _get_limit_or_infinity(query.deadline_hours)):
        raise _make_too_late_error(f"the shortest plan found for {subject} takes", plan.hours, query)
    if not is_within_limit(plan.cost, _get_limit_or_infinity(query.budget)):
        raise _make_over_budget_error(f"the cheapest plan found for {subject} costs", plan.cost, query, plan.currency)


def _plan_several_jobs(
    tables: Sequence[Sequence[JobTrainings]], query: Query, *, nodes: int, subject: str, currency: str
) -> JobsPlan:
    """Return the best plan of several jobs; `tables` has their trainings on each node type.

    Raises:
        Infeasible: no plan was found within the budget of the shortest plan, or the deadline of the cheapest one.
    """
    is_shortest = _choose_minimised_quantity(query).name == "time"
    target = (
        PlanTarget("time", budget=_get_limit_or_infinity(query.budget))
        if is_shortest
        else PlanTarget("cost", deadline=_get_limit_or_infinity(query.deadline_hours))
    )
    plans = [best for table in tables if (best := plan_jobs(table, nodes, target)) is not None]
    if plans:
        return min(plans, key=lambda best: target.rate_plan(best.starts))
    if is_shortest:
        least = min(
            sum(job.trainings * min(option.cost for batch in job.batches for option in batch) for job in table)
            for table in tables
        )
        raise _make_over_budget_error(f"{subject} cost at least", least, query, currency)
    shortest = [best for table in tables if (best := plan_jobs(table, nodes, PlanTarget("time"))) is not None]
    makespan = min(compute_makespan(best.starts) for best in shortest)
    raise _make_too_late_error(f"the shortest plan found for {subject} takes", makespan, query)


def _list_job_names(jobs: Sequence[Sequence[Run]]) -> list[str]:
    """Return the names of jobs, or if several have the same one, those of their first runs.

    Raises:
        SpecError: a run is given twice.
    """
    ids = [runs[0].id for runs in jobs]
    if repeated := next((name for name, count in Counter(ids).items() if count > 1), None):
        raise SpecError(f"run {repeated} is given for two jobs", "give each run only once")
    names = [runs[0].job_name for runs in jobs]
    return names if len(set(names)) == len(names) else ids


def _list_common_node_types(names: Sequence[str], considered: Sequence[_JobCandidates]) -> list[str]:
    """Return the node types on which all jobs were measured; the type of a job that names none is empty."""
    types = [sorted(set(job_candidates.candidates["type"])) for job_candidates in considered]
    if common := sorted(set(types[0]).intersection(*types[1:])):
        return common
    described = [
        f"{name}: {', '.join(job_candidates) or 'none named'}"
        for name, job_candidates in zip(names, types, strict=True)
    ]
    raise SpecError(
        f"the jobs have no node type in common ({'; '.join(described)})",
        "measure all jobs on at least one common node type",
    )


def save_campaign(runs: Sequence[Run], plan: Campaign) -> None:
    """Store a plan for `tula train --seeds` in all runs of a job.

    Raises:
        TulaError: it cannot be written, or a run belongs to another user.
    """
    for run in runs:
        if run.exists:
            require_ownership(run.path)
            write_file_atomically(run.path / PLAN_FILE, TypeAdapter(Campaign).dump_json(plan, indent=1).decode() + "\n")


def load_campaign(runs: Sequence[Run]) -> Campaign | None:
    """Return the stored plan of a job, or None if there is none.

    Raises:
        BadMeasurements: its file is damaged.
    """
    plans = (read_record(run.path / PLAN_FILE, Campaign) for run in runs)
    return next(filter(None, plans), None)


def _choose_minimised_quantity(query: Query) -> Quantity:
    """Return the quantity that a plan minimises: time, or one that grows with the nodes."""
    if query.objective == "knee":
        return QUANTITIES["time" if query.deadline_hours is None else "cost"]
    return query.quantity if query.quantity.grows_with_nodes else QUANTITIES["time"]


def _get_limit_or_infinity(value: float | None) -> float:
    return math.inf if value is None else value


def _choose_shortest_plan(
    groups: Sequence[Sequence[TrainingOption]], query: Query, *, trainings: int, nodes: int, subject: str, currency: str
) -> list[ScheduledStart]:
    """Return the shortest plan within the budget.

    Args:
        groups: the options of each batch on each node type; all trainings of a plan use one of them.

    Raises:
        Infeasible: no plan is within budget and deadline.
    """
    makespans = [compute_shortest_makespan(options, trainings=trainings, nodes=nodes) for options in groups]
    plan: list[ScheduledStart] | None = None
    makespan = math.inf
    for index in np.argsort(makespans, kind="stable"):
        if makespans[index] >= makespan:
            break
        other = find_shortest_plan(
            groups[index],
            trainings=trainings,
            nodes=nodes,
            budget=_get_limit_or_infinity(query.budget),
            deadline=makespan,
        )
        if other is not None and compute_makespan(other) < makespan:
            plan, makespan = other, compute_makespan(other)
    if plan is None:
        least = trainings * min(option.cost for options in groups for option in options)
        raise _make_over_budget_error(f"{subject} cost at least", least, query, currency)
    if not is_within_limit(makespan, _get_limit_or_infinity(query.deadline_hours)):
        budget = "" if query.budget is None else f" within a budget of {query.budget:g} {currency}"
        raise _make_too_late_error(f"{subject}{budget} take at least", makespan, query)
    return plan


def _choose_cheapest_plan(
    groups: Sequence[Sequence[TrainingOption]],
    query: Query,
    *,
    trainings: int,
    nodes: int,
    subject: str,
    currency: str,
    prices: Floats,
) -> list[ScheduledStart]:
    """Return the plan of lowest cost or energy within the deadline; a batch whose plan is within the budget is preferred.

    Other arguments and errors are as for the shortest plan.

    Args:
        prices: cost of a training by row of the candidates; the cost of an option may be its energy.
    """
    deadline = _get_limit_or_infinity(query.deadline_hours)
    plans = [find_cheapest_plan(options, trainings=trainings, nodes=nodes, deadline=deadline) for options in groups]
    within = [starts for starts in plans if starts is not None]
    if not within:
        makespan = min(compute_shortest_makespan(options, trainings=trainings, nodes=nodes) for options in groups)
        raise _make_too_late_error(f"{subject} take at least", makespan, query)
    budget = _get_limit_or_infinity(query.budget)
    affordable = [plan for plan in within if is_within_limit(sum(prices[start.option.row] for start in plan), budget)]
    plan = min(affordable or within, key=lambda starts: (sum_costs(starts), compute_makespan(starts)))
    if _choose_minimised_quantity(query).name == "cost" and not is_within_limit(sum_costs(plan), budget):
        deadline_text = (
            "" if query.deadline_hours is None else f" within {format_duration(3600 * query.deadline_hours)}"
        )
        raise _make_over_budget_error(f"{subject}{deadline_text} cost at least", sum_costs(plan), query, currency)
    return plan


def _make_over_budget_error(message_start: str, cost: float, query: Query, currency: str) -> Infeasible:
    knee = query.objective == "knee"
    fewer = (
        "plan fewer trainings, or allow larger batches with [[--objective]] cost" if knee else "or plan fewer trainings"
    )
    return Infeasible(
        f"{message_start} {format_number(cost, 4)} {currency}, more than the budget of {query.budget:g}",
        f"raise [[--budget]], {fewer}",
    )


def _make_too_late_error(message_start: str, makespan: float, query: Query) -> Infeasible:
    knee = query.objective == "knee"
    fewer = (
        "plan fewer trainings, or allow larger batches with [[--objective]] time" if knee else "or plan fewer trainings"
    )
    options = "[[--deadline]]" if query.budget is None else "[[--deadline]], [[--budget]]"
    return Infeasible(
        f"{message_start} {format_duration(3600 * makespan)}, more than the deadline of"
        f" {format_duration(3600 * _get_limit_or_infinity(query.deadline_hours))}",
        f"raise {options} or [[--max-nodes]], {fewer}",
    )
