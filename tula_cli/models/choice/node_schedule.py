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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tula_cli.models.choice.candidates import Candidates, Floats, Ints, find_pareto_front
from tula_cli.spec.schedules import RELATIVE_TOLERANCE

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
    """Return rows of the candidates as options, without those that another one beats in nodes, hours and cost.

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


def compute_shortest_makespan(options: Sequence[TrainingOption], *, trainings: int, nodes: int) -> float:
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


def find_cheapest_plan(
    options: Sequence[TrainingOption], *, trainings: int, nodes: int, deadline: float = math.inf
) -> list[ScheduledStart] | None:
    """Return the plan of lowest cost that finishes `trainings` equal trainings within `deadline` hours, by start.

    If all trainings can have the lowest cost within the deadline, this is the shortest plan in which they do.

    Returns:
        None if no plan meets the deadline.
    """
    in_time = [option for option in options if option.nodes <= nodes and is_within_limit(option.hours, deadline)]
    if not in_time:
        return None
    least = min(option.cost for option in in_time)
    lowest = [option for option in in_time if option.cost <= least * (1 + RELATIVE_TOLERANCE)]
    if (side_by_side := _plan_concurrent_start(lowest, trainings=trainings, nodes=nodes)) is not None:
        return side_by_side
    least = min(option.cost for option in options if option.nodes <= nodes)
    cheapest = [option for option in options if option.cost <= least * (1 + RELATIVE_TOLERANCE)]
    makespan = compute_shortest_makespan(cheapest, trainings=trainings, nodes=nodes)
    # all trainings can use their cheapest configuration: this plan is the shortest one that does
    if makespan <= deadline:
        options, deadline = cheapest, makespan
    if not 0 < deadline < math.inf:
        return None
    deadline *= 1 + RELATIVE_TOLERANCE
    plan = _CheapestPlan(options, trainings, nodes, decimals=_KEY_DIGITS - math.ceil(math.log10(deadline)))
    costs = plan.divide_nodes_into_groups(nodes, deadline)[0][nodes]
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


def is_within_limit(value: float, limit: float) -> bool:
    """Return whether a sum is within a limit, apart from rounding."""
    return value <= limit * (1 + RELATIVE_TOLERANCE)


def find_shortest_plan(
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
    too_short = compute_shortest_makespan(options, trainings=trainings, nodes=nodes)
    if not is_within_limit(too_short, deadline):
        return None
    for allowed in (too_short, deadline):
        plan = find_cheapest_plan(options, trainings=trainings, nodes=nodes, deadline=allowed)
        if plan is not None and is_within_limit(sum_costs(plan), budget):
            break
    else:
        return None
    makespan = compute_makespan(plan)
    while makespan > too_short * (1 + _MAKESPAN_TOLERANCE):
        middle = (too_short + makespan) / 2
        shorter = find_cheapest_plan(options, trainings=trainings, nodes=nodes, deadline=middle)
        if shorter is not None and is_within_limit(sum_costs(shorter), budget):
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
        idle = [node for node in range(nodes) if ends[node] <= start.hours * (1 + RELATIVE_TOLERANCE)]
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
        running = ([other for other in early if other.end > moment * (1 + RELATIVE_TOLERANCE)] for moment in moments)
        moment = next(
            moment
            for moment, others in zip(moments, running, strict=True)
            if sum(other.option.nodes for other in others) + start.option.nodes <= nodes
        )
        early.append(ScheduledStart(moment, start.option))
    return sorted(early)


def schedule_trainings_in_order(counted: Sequence[tuple[TrainingOption, int]], nodes: int) -> list[ScheduledStart]:
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
            while running and running[0][0] <= hour * (1 + RELATIVE_TOLERANCE):
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
            and count * option_on_part.cost <= cost * (1 + RELATIVE_TOLERANCE)
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
    def divide_nodes_into_groups(self, nodes: int, hours: float, below: int | None = None) -> tuple[Floats, Ints, Ints]:
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
            before = self.divide_nodes_into_groups(width, self._compute_remaining_hours(hours, last), width)[0][width]
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
        _, last, share = self.divide_nodes_into_groups(nodes, hours, below)
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
