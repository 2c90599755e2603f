"""Many trainings on a limited number of nodes: how many nodes each gets, and how many run side by side.

A plan divides the nodes into groups. A group runs trainings on smaller groups of its nodes first, then trainings that use
all of its nodes, one after the other. If every number of nodes divides the next one and the limit (1, 2, 4, 8 of 16), no
schedule is better than the best of these plans: the tests compare them with all schedules in small cases. For other
numbers of nodes a better schedule exists in about 1 of 150 random cases; the plan took up to 16 % longer.
"""

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.models.choice.candidates import Candidates, Floats, Ints, find_pareto_front
from tula_cli.query import QuantityName, Query
from tula_cli.run.frames import make_frame
from tula_cli.run.records.recommendations import Prediction

if TYPE_CHECKING:
    import pandas as pd

_RELATIVE_TOLERANCE = 1e-9
"""Relative tolerance of comparisons between sums of durations."""
_MAKESPAN_TOLERANCE = 1e-6
"""Relative difference to which the shortest makespan within a budget is determined."""
_KEY_DIGITS = 12
"""Significant digits of the hours that remain of a deadline, so that equal sums are equal numbers."""


@dataclass(frozen=True, order=True)
class TrainingOption:
    """A configuration that a training can run with: nodes, hours and cost of one training, and its row of the candidates."""

    nodes: int
    hours: float
    cost: float
    row: int = 0


@dataclass(frozen=True, order=True)
class ScheduledStart:
    """One training of a plan: when it starts (hours after the first), and its configuration."""

    hours: float
    option: TrainingOption

    @property
    def end(self) -> float:
        """The hour at which it finishes."""
        return self.hours + self.option.hours


def list_options(
    candidates: Candidates, rows: Ints, *, cost: str = "cost", all_nodes: int | None = None
) -> list[TrainingOption]:
    """Return the options, of some rows of the candidates, that no other beats in nodes, hours and cost.

    Args:
        rows: the indices of the rows to consider.
        cost: the column that stands for the cost.
        all_nodes: the nodes of every option, where trainings run one at a time; None for those of each row.

    Returns:
        The options, ascending by nodes, then hours.
    """
    points: Floats = np.stack([candidates[name][rows].astype(float) for name in ("nodes", "hours", cost)], axis=1)
    if all_nodes is not None:
        points[:, 0] = all_nodes
    points, first = np.unique(points, axis=0, return_index=True)
    front = find_pareto_front(points)
    values = zip(points[front].tolist(), rows[first[front]].tolist(), strict=True)
    return sorted(TrainingOption(int(nodes), hours, cost, row) for (nodes, hours, cost), row in values)


def find_shortest_makespan(options: Sequence[TrainingOption], *, trainings: int, nodes: int) -> float:
    """Return the hours in which `trainings` equal trainings can be finished on `nodes` nodes; inf if none fits."""
    if (side_by_side := _plan_concurrent_start(options, trainings=trainings, nodes=nodes)) is not None:
        return compute_makespan(side_by_side)
    groups: dict[int, Floats] = {}  # nodes of a group to the hours in which it finishes 0, 1, 2 ... trainings
    for width, group in _group_by_nodes(options, nodes):
        least = _divide_nodes(groups, width, trainings, np.maximum)[0][width]
        fastest = min(group, key=lambda option: option.hours)
        series: tuple[TrainingOption, ...] = (fastest,)
        before = least.copy()
        while len(series) <= trainings and not _can_run_concurrently(series, options):
            count = len(series)
            np.minimum(least[count:], before[:-count] + count * fastest.hours, out=least[count:])
            series = (*series, fastest)
        groups[width] = least
    return float(_divide_nodes(groups, nodes, trainings, np.maximum)[0][nodes][trainings])


def plan_cheapest(
    options: Sequence[TrainingOption], *, trainings: int, nodes: int, deadline: float = math.inf
) -> list[ScheduledStart] | None:
    """Return the plan of lowest cost that finishes `trainings` equal trainings within `deadline` hours, by start.

    If all trainings can have the lowest cost within the deadline, this is the shortest plan in which they do.

    Returns:
        None if no plan meets the deadline.
    """
    in_time = [option for option in options if option.nodes <= nodes and is_within(option.hours, deadline)]
    if not in_time:
        return None
    least = min(option.cost for option in in_time)
    lowest = [option for option in in_time if option.cost <= least * (1 + _RELATIVE_TOLERANCE)]
    if (side_by_side := _plan_concurrent_start(lowest, trainings=trainings, nodes=nodes)) is not None:
        return side_by_side
    least = min(option.cost for option in options if option.nodes <= nodes)
    cheapest = [option for option in options if option.cost <= least * (1 + _RELATIVE_TOLERANCE)]
    makespan = find_shortest_makespan(cheapest, trainings=trainings, nodes=nodes)
    # all trainings can use their cheapest configuration: this plan is the shortest one that does
    if makespan <= deadline:
        options, deadline = cheapest, makespan
    if not 0 < deadline < math.inf:
        return None
    deadline *= 1 + _RELATIVE_TOLERANCE
    plan = _CheapestPlan(options, trainings, nodes, decimals=_KEY_DIGITS - math.ceil(math.log10(deadline)))
    costs = plan.divide_into_groups(nodes, deadline)[0][nodes]
    if not np.isfinite(costs[trainings]):
        return None
    return _schedule_earliest_starts(plan.list_starts(nodes, deadline, trainings), nodes)


def _plan_concurrent_start(
    options: Sequence[TrainingOption], *, trainings: int, nodes: int
) -> list[ScheduledStart] | None:
    """Return the plan that starts all trainings at once with the fastest option; None if the nodes do not suffice.

    No plan with these options is shorter. It spares the division of nodes, whose time grows with their number.
    """
    fastest = min(
        (option for option in options if option.nodes <= nodes), key=lambda o: (o.hours, o.cost), default=None
    )
    if fastest is None or trainings * fastest.nodes > nodes:
        return None
    return [ScheduledStart(0.0, fastest)] * trainings


def compute_makespan(starts: Sequence[ScheduledStart]) -> float:
    """Return the hour at which the last training of a plan finishes."""
    return max(start.end for start in starts)


def sum_costs(starts: Sequence[ScheduledStart]) -> float:
    """Return the cost of all trainings of a plan."""
    return sum(start.option.cost for start in starts)


def is_within(value: float, limit: float) -> bool:
    """Return whether a sum is within a limit, apart from rounding."""
    return value <= limit * (1 + _RELATIVE_TOLERANCE)


def plan_shortest(
    options: Sequence[TrainingOption],
    *,
    trainings: int,
    nodes: int,
    budget: float = math.inf,
    deadline: float = math.inf,
) -> list[ScheduledStart] | None:
    """Return the shortest plan that costs at most `budget` for all trainings together; of several, the cheapest.

    The lowest cost of a plan never rises with its deadline, so that the deadline is found by bisection.

    Returns:
        None if no plan within the budget finishes within `deadline` hours.
    """
    too_short = find_shortest_makespan(options, trainings=trainings, nodes=nodes)
    if not is_within(too_short, deadline):
        return None
    for allowed in (too_short, deadline):
        plan = plan_cheapest(options, trainings=trainings, nodes=nodes, deadline=allowed)
        if plan is not None and is_within(sum_costs(plan), budget):
            break
    else:
        return None
    makespan = compute_makespan(plan)
    while makespan > too_short * (1 + _MAKESPAN_TOLERANCE):
        middle = (too_short + makespan) / 2
        shorter = plan_cheapest(options, trainings=trainings, nodes=nodes, deadline=middle)
        if shorter is not None and is_within(sum_costs(shorter), budget):
            plan, makespan = shorter, compute_makespan(shorter)
        else:
            too_short = middle
    return plan


def find_predecessors(starts: Sequence[ScheduledStart], nodes: int) -> list[tuple[int, ...]]:
    """Return for each training of a plan the trainings, by index, whose nodes it takes over.

    If each waits for these, at most `nodes` nodes are in use however long the trainings take.

    Args:
        starts: the trainings, by start.
    """
    last: list[int | None] = [None] * nodes  # last training on each node so far
    predecessors = []
    for index, start in enumerate(starts):
        ends = [0.0 if other is None else starts[other].end for other in last]
        idle = [node for node in range(nodes) if ends[node] <= start.hours * (1 + _RELATIVE_TOLERANCE)]
        taken = sorted(idle, key=lambda node: (-ends[node], last[node] or 0))[: start.option.nodes]
        predecessors.append(tuple(sorted({other for node in taken if (other := last[node]) is not None})))
        for node in taken:
            last[node] = index
    return predecessors


def _schedule_earliest_starts(starts: Sequence[ScheduledStart], nodes: int) -> list[ScheduledStart]:
    """Return a plan in which each training, in the order of their starts, starts as soon as enough nodes are idle."""
    early: list[ScheduledStart] = []
    for start in sorted(starts):
        moments = sorted({0.0, *(other.end for other in early)})
        running = ([other for other in early if other.end > moment * (1 + _RELATIVE_TOLERANCE)] for moment in moments)
        moment = next(
            moment
            for moment, others in zip(moments, running, strict=True)
            if sum(other.option.nodes for other in others) + start.option.nodes <= nodes
        )
        early.append(ScheduledStart(moment, start.option))
    return sorted(early)


def schedule_in_order(counted: Sequence[tuple[TrainingOption, int]], nodes: int) -> list[ScheduledStart]:
    """Start numbers of trainings as soon as enough nodes are idle; those that do not fit let later ones pass."""
    waiting = [(option, count) for option, count in counted if count]
    starts: list[ScheduledStart] = []
    running: list[tuple[float, int]] = []
    hour, idle = 0.0, nodes
    while waiting:
        still_waiting = []
        for option, count in waiting:
            started = min(count, idle // option.nodes)
            idle -= started * option.nodes
            for _ in range(started):
                starts.append(ScheduledStart(hour, option))
                heapq.heappush(running, (hour + option.hours, option.nodes))
            if count > started:
                still_waiting.append((option, count - started))
        waiting = still_waiting
        if waiting:
            hour = running[0][0]
            while running and running[0][0] <= hour * (1 + _RELATIVE_TOLERANCE):
                idle += heapq.heappop(running)[1]
    return starts


def _group_by_nodes(options: Sequence[TrainingOption], most: int) -> Iterator[tuple[int, list[TrainingOption]]]:
    """Yield the options of each number of nodes up to `most`, ascending."""
    fitting = sorted(option for option in options if option.nodes <= most)
    for width, group in itertools.groupby(fitting, key=lambda option: option.nodes):
        yield width, list(group)


def _can_run_concurrently(series: Sequence[TrainingOption], options: Sequence[TrainingOption]) -> bool:
    """Return whether the last trainings of a series finish as soon and as cheaply side by side on parts of its nodes.

    A series that does is not considered, because groups on these parts are.
    """
    hours, cost, nodes = series[-1].hours, series[-1].cost, series[-1].nodes
    for count, option in enumerate(series[-2::-1], 2):
        hours, cost = hours + option.hours, cost + option.cost
        if any(
            count * option_on_part.nodes <= nodes
            and option_on_part.hours <= hours
            and count * option_on_part.cost <= cost * (1 + _RELATIVE_TOLERANCE)
            for option_on_part in options
        ):
            return True
    return False


def _divide_nodes(
    groups: Mapping[int, Floats], nodes: int, trainings: int, combine_values: Callable[[Floats, Floats], Floats]
) -> tuple[Floats, Ints, Ints]:
    """Divide 0 to `nodes` nodes into groups that run side by side.

    Args:
        groups: nodes of a group to its least value for 0, 1, 2 ... trainings, shape (trainings + 1,).
        combine_values: the value of two sets of nodes together: the sum of their costs, or the later of their ends.

    Returns:
        The least value, the nodes of the last group (0: one node stays idle) and the trainings on it, by nodes and
        trainings; each of shape (nodes + 1, trainings + 1).
    """
    least = np.full((nodes + 1, trainings + 1), np.inf)
    least[:, 0] = 0.0
    last, share = np.zeros(least.shape, dtype=np.int64), np.zeros(least.shape, dtype=np.int64)
    counts = np.arange(trainings + 1)
    # trainings that remain for the other groups, by (total, trainings on the last group)
    others = counts[:, None] - counts[None, :]
    for total in range(1, nodes + 1):
        least[total] = least[total - 1]
        for width in groups:
            if width > total:
                continue
            both = np.where(others >= 0, combine_values(least[total - width][others], groups[width][None, :]), np.inf)
            best = both.argmin(axis=1)
            value = both[counts, best]
            better = value < least[total]
            least[total, better], last[total, better], share[total, better] = value[better], width, best[better]
    return least, last, share


class _CheapestPlan:
    """Plans of lowest cost by nodes and deadline; each is computed once."""

    def __init__(self, options: Sequence[TrainingOption], trainings: int, nodes: int, *, decimals: int) -> None:
        self._trainings, self._decimals = trainings, decimals
        self._options = dict(_group_by_nodes(options, nodes))
        self._narrower = {width: [o for o in options if o.nodes < width] for width in self._options}

    @functools.cache  # noqa: B019 - the cached object lives as long as one plan
    def divide_into_groups(self, nodes: int, hours: float, below: int | None = None) -> tuple[Floats, Ints, Ints]:
        """Divide nodes into groups smaller than `below` that finish within `hours`; values are costs."""
        widths = [width for width in self._options if width <= nodes and (below is None or width < below)]
        groups = {width: self._plan_group(width, hours)[0] for width in widths}
        return _divide_nodes(groups, nodes, self._trainings, np.add)

    @functools.cache  # noqa: B019
    def _plan_group(self, width: int, hours: float) -> tuple[Floats, Ints]:
        """Return the lowest cost of 0, 1, 2 ... trainings on one group within `hours`, and the index of its last trainings."""
        series = self._list_series(width, hours)
        costs = np.full((len(series), self._trainings + 1), np.inf)
        for index, last in enumerate(series):
            before = self.divide_into_groups(width, self._compute_remaining_hours(hours, last), width)[0][width]
            costs[index, len(last) :] = before[: len(before) - len(last)] + sum(option.cost for option in last)
        return costs.min(axis=0), costs.argmin(axis=0)

    @functools.cache  # noqa: B019
    def _list_series(self, width: int, hours: float) -> list[tuple[TrainingOption, ...]]:
        """Return what a group may run on all of its nodes, one after the other, within `hours`."""
        series: list[tuple[TrainingOption, ...]] = [()]
        for last in series:
            start = self._options[width].index(last[-1]) if last else 0
            for option in self._options[width][start:]:
                longer = (*last, option)
                fits = len(longer) <= self._trainings and self._compute_remaining_hours(hours, longer) >= 0
                if fits and not _can_run_concurrently(longer, self._narrower[width]):
                    series.append(longer)
        return series

    def list_starts(
        self, nodes: int, hours: float, trainings: int, below: int | None = None, begin: float = 0.0
    ) -> list[ScheduledStart]:
        """Return the trainings of the plan; a group runs its trainings without a pause."""
        _, last, share = self.divide_into_groups(nodes, hours, below)
        starts: list[ScheduledStart] = []
        while trainings:
            width, count = int(last[nodes, trainings]), int(share[nodes, trainings])
            if width:
                starts += self._list_group_starts(width, hours, count, begin)
            nodes, trainings = nodes - (width or 1), trainings - count
        return starts

    def _list_group_starts(self, width: int, hours: float, trainings: int, begin: float) -> list[ScheduledStart]:
        series = self._list_series(width, hours)[int(self._plan_group(width, hours)[1][trainings])]
        starts = self.list_starts(
            width, self._compute_remaining_hours(hours, series), trainings - len(series), width, begin
        )
        at = max((start.end for start in starts), default=begin)
        for option in series:
            starts.append(ScheduledStart(at, option))
            at += option.hours
        return starts

    def _compute_remaining_hours(self, hours: float, options: Sequence[TrainingOption]) -> float:
        """Return the hours that remain after trainings one after the other."""
        return round(hours - sum(option.hours for option in options), self._decimals)


# --- The plan


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


def describe_plan(
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
        request: what the plan is made for.
        lower_bound: what no plan of several jobs is below.
    """
    rows = {row: candidates.prediction(row) for row in {start.option.row for start in starts}}
    used = [rows[start.option.row] for start in starts]
    names = [next(job.job for job in jobs if start.option.row in job.rows) for start in starts]
    planned_jobs: list[JobSummary] = []
    waves: list[Wave] = []
    for job in jobs:
        of_job = [start for start in starts if start.option.row in job.rows]
        trainings = [rows[start.option.row] for start in of_job]
        waves += _join_waves(of_job, rows, job.job)
        planned_jobs.append(
            JobSummary(
                job=job.job,
                trainings=job.trainings,
                batch=trainings[0].batch,
                max_batch=job.max_batch,
                end=compute_makespan(of_job),
                cost=sum(row.cost for row in trainings),
                node_hours=sum(row.all_node_hours for row in trainings),
            )
        )
    hours = compute_makespan(starts)
    hours_low, hours_high = _scale_interval(hours, used)
    at_fastest = _compute_at_fastest(candidates, jobs, used[0].type, request)
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
        return replace(plan, lower_bound=lower_bound, is_optimal=is_within(value, lower_bound))
    same = candidates.select(batch=used[0].batch, type=used[0].type)
    bound_hours = _compute_bound(same, trainings=len(starts), request=request)
    return replace(plan, batch=used[0].batch, max_batch=jobs[0].max_batch, bound_hours=bound_hours)


def _scale_interval(hours: float, rows: Sequence[Prediction]) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a plan's hours if all step times are off by as much; None if a row has no interval."""
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


def _compute_bound(candidates: Candidates, *, trainings: int, request: PlanRequest) -> float:
    """Return a lower bound of the hours of all schedules of equal trainings, from the fastest options and the least node-hours."""
    hours, widths, nodes = candidates["hours"], candidates["nodes"], request.nodes
    fits = widths <= nodes
    if request.one_at_a_time:
        return trainings * float(hours[fits].min())
    return float(max(hours[fits].min(), trainings * (widths * hours)[fits].min() / nodes))


def _compute_at_fastest(
    candidates: Candidates, jobs: Sequence[CandidatesOfJob], node_type: str, request: PlanRequest
) -> FastestConfigurationPlan:
    """Return the figures of the fastest configurations: of any node type for one job, of the same one for several."""
    fastest = []
    for job in jobs:
        table = candidates.select_rows(job.rows)
        table = table.select(type=node_type) if len(jobs) > 1 else table
        fastest.append(table.select_rows(table["nodes"] <= request.nodes).sort_by_time().prediction(0))
    counted = [
        (TrainingOption(request.nodes if request.one_at_a_time else row.nodes, row.hours, row.cost), job.trainings)
        for row, job in zip(fastest, jobs, strict=True)
    ]
    starts = schedule_in_order(sorted(counted, key=lambda entry: -entry[0].hours), request.nodes)
    figures = FastestConfigurationPlan(
        hours=compute_makespan(starts),
        cost=sum_costs(starts),
        node_hours=sum(job.trainings * row.all_node_hours for row, job in zip(fastest, jobs, strict=True)),
    )
    if len(jobs) > 1:
        return figures
    side_by_side = sum(start.hours == 0 for start in starts)
    return replace(figures, nodes=fastest[0].nodes, batch=fastest[0].batch, side_by_side=side_by_side)
