"""The plan of many trainings on a limited number of nodes, as the user sees it: waves, times, costs and a comparison."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tula_cli.diagnostics import Diagnostic
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.node_schedule import (
    ScheduledStart,
    TrainingOption,
    compute_makespan,
    find_predecessors,
    is_within_limit,
    schedule_trainings_in_order,
    sum_costs,
)
from tula_cli.query import QuantityName, Query
from tula_cli.run.frames import make_frame
from tula_cli.run.records.recommendations import Prediction

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Equal trainings that run side by side, and one after the other, without a pause. Hours from the first start."""

    job: str = ""  # its name; empty in a plan that an earlier version has stored
    batch: int | None = None  # global; None in a plan that an earlier version has stored
    nodes: int  # nodes of each training
    local_batch: int
    node_type: str  # empty if the job names none
    market: str
    trainings: int
    side_by_side: int  # maximum number of trainings that run concurrently
    training_hours: float  # hours of one training
    training_cost: float
    start: float
    end: float


@dataclass(frozen=True)
class ScheduledTraining:
    """One training of a plan."""

    start: float  # hours after the first start
    hours: float
    nodes: int
    cost: float
    follows: tuple[int, ...]  # indices in the schedule of the trainings whose nodes it takes over
    job: str = ""  # its name; empty in a plan that an earlier version has stored


@dataclass(frozen=True)
class JobSummary:
    """The trainings of one job of a plan together. Hours are from the first start of the plan."""

    job: str
    trainings: int
    batch: int  # global batch of each training
    max_batch: int | None  # largest batch considered: that of the knee, or the limit of the query; None without a limit
    end: float  # hours until the last of its trainings finishes
    cost: float
    node_hours: float


@dataclass(frozen=True, kw_only=True)
class FastestConfigurationPlan:
    """The same trainings if each had the fastest configuration of its job; the plan is compared with them."""

    hours: float
    cost: float
    node_hours: float
    nodes: int | None = None  # nodes of each training; None for several jobs, like the next two fields
    batch: int | None = None
    side_by_side: int | None = None


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A plan for many trainings of one job or of several, the answer of `tula recommend --trainings`.

    Costs are in `currency`.
    """

    trainings: int  # trainings of all jobs
    max_nodes: int  # maximum nodes in use at a time
    minimises: QuantityName
    deadline_hours: float | None  # limit for all trainings; None without a limit
    budget: float | None  # limit for all trainings; None without a limit
    hours: float  # hours until the last training finishes
    hours_low: float | None  # 90 % interval if all step times deviate equally; None if one has no interval
    hours_high: float | None
    cost: float
    node_hours: float
    kwh: float | None
    speedup: float  # hours of `at_fastest` over those of the plan
    currency: str
    warnings: tuple[Diagnostic, ...]  # about the measurements
    node_type: str = ""  # node type of all trainings; empty if the jobs name none
    jobs: tuple[JobSummary, ...] = ()  # empty in a plan that an earlier version has stored
    waves: tuple[Wave, ...]
    schedule: tuple[ScheduledTraining, ...]  # single trainings, by start
    at_fastest: FastestConfigurationPlan
    # --- Only for one job; None for several
    batch: int | None = None  # global batch of every training
    max_batch: int | None = None  # as in `JobSummary`
    bound_hours: float | None = None  # lower bound of the hours of all schedules with this batch and node type
    # --- Only for several jobs; None for one
    lower_bound: float | None = None  # lower bound of the minimised quantity (hours, cost or kWh) over all plans
    is_optimal: bool | None = None  # whether the plan reaches `lower_bound`

    def frame(self) -> "pd.DataFrame":
        """Return the waves as a table, one row each; its columns are the fields of `Wave`."""
        return make_frame([asdict(wave) for wave in self.waves])


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The request for a plan: query, limits and settings of all its trainings."""

    query: Query  # objective and limits
    minimises: QuantityName
    nodes: int  # maximum nodes in use at a time
    currency: str  # currency of the costs
    warnings: Sequence[Diagnostic] = ()  # about the measurements
    one_at_a_time: bool = False  # whether at most one training runs at a time


@dataclass(frozen=True)
class CandidatesOfJob:
    """The configurations of one job that were considered, and the number of its trainings."""

    job: str
    trainings: int
    rows: range  # rows of this job in the table of all jobs
    max_batch: int | None


def make_campaign(
    starts: Sequence[ScheduledStart],
    candidates: Candidates,
    jobs: Sequence[CandidatesOfJob],
    request: PlanRequest,
    *,
    lower_bound: float | None = None,
) -> Campaign:
    """Return a plan with its figures.

    Args:
        starts: the trainings, at least one, all of a job with the same batch.
        candidates: the configurations of all jobs, with the rows of the options.
        request: query, limits and settings of the plan.
        lower_bound: lower bound of the minimised quantity over all plans of several jobs; None for one job.
    """
    rows = {row: candidates.make_prediction(row) for row in {start.option.row for start in starts}}
    used = [rows[start.option.row] for start in starts]
    names = [next(job.job for job in jobs if start.option.row in job.rows) for start in starts]
    planned_jobs: list[JobSummary] = []
    waves: list[Wave] = []
    for job in jobs:
        job_starts = [start for start in starts if start.option.row in job.rows]
        trainings = [rows[start.option.row] for start in job_starts]
        waves += _join_waves(job_starts, rows, job.job)
        planned_jobs.append(
            JobSummary(
                job=job.job,
                trainings=job.trainings,
                batch=trainings[0].batch,
                max_batch=job.max_batch,
                end=compute_makespan(job_starts),
                cost=sum(row.cost for row in trainings),
                node_hours=sum(row.all_node_hours for row in trainings),
            )
        )
    hours = compute_makespan(starts)
    hours_low, hours_high = _scale_interval(hours, used)
    at_fastest = _plan_fastest_configurations(candidates, jobs, used[0].type, request)
    plan = Campaign(
        trainings=len(starts),
        max_nodes=request.nodes,
        minimises=request.minimises,
        deadline_hours=request.query.deadline_hours,
        budget=request.query.budget,
        hours=hours,
        hours_low=hours_low,
        hours_high=hours_high,
        cost=sum(row.cost for row in used),
        node_hours=sum(row.all_node_hours for row in used),
        kwh=_sum_energies(used),
        speedup=at_fastest.hours / hours,
        currency=request.currency,
        warnings=tuple(request.warnings),
        node_type=used[0].type,
        jobs=tuple(planned_jobs),
        waves=tuple(sorted(waves, key=lambda wave: wave.start)),
        schedule=tuple(
            ScheduledTraining(start.hours, start.option.hours, row.nodes, row.cost, follows, name)
            for start, row, follows, name in zip(
                starts, used, find_predecessors(starts, request.nodes), names, strict=True
            )
        ),
        at_fastest=at_fastest,
    )
    if lower_bound is not None:
        value = hours if request.minimises == "time" else sum_costs(starts)
        return replace(plan, lower_bound=lower_bound, is_optimal=is_within_limit(value, lower_bound))
    same = candidates.select_matching_rows(batch=used[0].batch, type=used[0].type)
    bound_hours = _compute_hours_bound(same, trainings=len(starts), request=request)
    return replace(plan, batch=used[0].batch, max_batch=jobs[0].max_batch, bound_hours=bound_hours)


def _scale_interval(hours: float, rows: Sequence[Prediction]) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a plan's hours if all step times are wrong by the same factor; None if a row has no interval."""
    ratios = [
        (row.hours_low / row.hours, row.hours_high / row.hours)
        for row in rows
        if row.hours_low is not None and row.hours_high is not None
    ]
    if len(ratios) < len(rows):
        return None, None
    return hours * min(low for low, _ in ratios), hours * max(high for _, high in ratios)


def _sum_energies(trainings: Sequence[Prediction]) -> float | None:
    """Return the energy of trainings in kWh, or None if that of one is unknown."""
    energies = [row.kwh for row in trainings if row.kwh is not None]
    return sum(energies) if len(energies) == len(trainings) else None


def _join_waves(starts: Sequence[ScheduledStart], rows: Mapping[int, Prediction], job: str) -> list[Wave]:
    """Group the trainings of a job that have the same configuration and duration into waves, in the order of their starts."""
    counts = Counter((float(f"{start.hours:.9g}"), start.option) for start in starts)
    waves: list[Wave] = []
    open_waves: dict[TrainingOption, int] = {}
    for (start, option), count in sorted(counts.items()):
        index, row = open_waves.get(option), rows[option.row]
        if index is not None and math.isclose(waves[index].end, start, rel_tol=1e-6):
            wave = waves[index]
            waves[index] = replace(
                wave,
                trainings=wave.trainings + count,
                side_by_side=max(wave.side_by_side, count),
                end=start + option.hours,
            )
            continue
        open_waves[option] = len(waves)
        waves.append(
            Wave(
                job=job,
                batch=row.batch,
                nodes=row.nodes,
                local_batch=row.local_batch,
                node_type=row.type,
                market=row.market,
                trainings=count,
                side_by_side=count,
                training_hours=option.hours,
                training_cost=row.cost,
                start=start,
                end=start + option.hours,
            )
        )
    return waves


def _compute_hours_bound(candidates: Candidates, *, trainings: int, request: PlanRequest) -> float:
    """Return a lower bound of the hours of all schedules of equal trainings, from the fastest options and the least node-hours."""
    hours, widths, nodes = candidates["hours"], candidates["nodes"], request.nodes
    fits = widths <= nodes
    if request.one_at_a_time:
        return trainings * float(hours[fits].min())
    return float(max(hours[fits].min(), trainings * (widths * hours)[fits].min() / nodes))


def _plan_fastest_configurations(
    candidates: Candidates, jobs: Sequence[CandidatesOfJob], node_type: str, request: PlanRequest
) -> FastestConfigurationPlan:
    """Return the figures of the fastest configurations: of any node type for one job, of the same one for several."""
    fastest = []
    for job in jobs:
        table = candidates.select_rows(job.rows)
        table = table.select_matching_rows(type=node_type) if len(jobs) > 1 else table
        fastest.append(table.select_rows(table["nodes"] <= request.nodes).sort_by_time().make_prediction(0))
    counted = [
        (TrainingOption(request.nodes if request.one_at_a_time else row.nodes, row.hours, row.cost), job.trainings)
        for row, job in zip(fastest, jobs, strict=True)
    ]
    starts = schedule_trainings_in_order(sorted(counted, key=lambda entry: -entry[0].hours), request.nodes)
    figures = FastestConfigurationPlan(
        hours=compute_makespan(starts),
        cost=sum_costs(starts),
        node_hours=sum(job.trainings * row.all_node_hours for row, job in zip(fastest, jobs, strict=True)),
    )
    if len(jobs) > 1:
        return figures
    side_by_side = sum(start.hours == 0 for start in starts)
    return replace(figures, nodes=fastest[0].nodes, batch=fastest[0].batch, side_by_side=side_by_side)
