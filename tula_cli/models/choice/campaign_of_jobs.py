"""Trainings of several jobs on a limited number of nodes: the batch of each job, the nodes of each training, and its start.

Moldable jobs on identical nodes; finding the shortest schedule is NP-hard. List schedules of many choices of nodes are
improved one change at a time. A search through all schedules follows, with a limited number of steps: in small cases it
finishes, so that the plan is optimal. Otherwise a lower bound says how far from the optimum the plan can be.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from tula_cli.models.choice.candidates import Floats
from tula_cli.models.choice.node_schedule import (
    ScheduledStart,
    TrainingOption,
    compute_makespan,
    is_within_limit,
    schedule_trainings_in_order,
    sum_costs,
)
from tula_cli.spec.schedules import RELATIVE_TOLERANCE

_MAX_COMBINATIONS = 24
"""Number of combinations of batches, one of each job, that are tried."""
_MAX_SEARCHED = 30
"""Number of trainings above which the search through all schedules, which cannot finish then, is left out."""
_MAX_SEARCH_STEPS = 150_000
"""Steps of the search through all schedules, of which a second has about 200,000."""
_MAX_LIST_STEPS = 1_500_000
"""Steps of list scheduling, of which a second has about a million."""
_BISECTIONS = 5
"""Number of deadlines that are tried for the shortest plan within a budget."""
_KEPT_CHOICES = 4
"""Number of choices of nodes from which improvements start, of each combination of batches."""


@dataclass(frozen=True)
class JobTrainings:
    """Equal trainings of one job: how many, and the options of each batch that all of them can have."""

    trainings: int
    batches: Sequence[Sequence[TrainingOption]]


@dataclass(frozen=True)
class PlanTarget:
    """The quantity of a plan that is minimised, and the limit of the other one."""

    minimises: Literal["time", "cost"]
    deadline: float = math.inf  # limit in hours for all trainings
    budget: float = math.inf  # limit of the cost of all trainings

    def rate_plan(self, starts: Sequence[ScheduledStart]) -> "Rating":
        """Return the rating of the plan with these starts, by which plans are compared."""
        return self.make_rating(compute_makespan(starts), sum_costs(starts))

    def make_rating(self, makespan: float, cost: float) -> "Rating":
        """Return the rating of a plan of this duration and cost."""
        if self.minimises == "time":
            return Rating(_compute_excess(cost, self.budget), makespan, cost)
        return Rating(_compute_excess(makespan, self.deadline), cost, makespan)


class Rating(NamedTuple):
    """The rating by which plans are compared: first the excess, then the minimised quantity, then the other one; lower is better."""

    excess: float  # relative excess over the limit; 0 within it
    value: float  # value of the minimised quantity
    other: float

    def is_better_than(self, other: "Rating") -> bool:
        """Return whether this is better, apart from rounding."""
        for mine, others in zip(self, other, strict=True):
            if abs(mine - others) > RELATIVE_TOLERANCE * max(abs(mine), abs(others)):
                return mine < others
        return False


class JobOptions(NamedTuple):
    """Equal trainings of one job with one batch: how many, and the options of each."""

    trainings: int
    options: tuple[TrainingOption, ...]


def _compute_excess(value: float, limit: float) -> float:
    return 0.0 if is_within_limit(value, limit) else value / limit - 1 if limit else math.inf


@dataclass(frozen=True)
class JobsPlan:
    """The best plan found, and a lower bound of all plans within the limits."""

    starts: Sequence[ScheduledStart]
    lower_bound: float  # lower bound of the minimised quantity


def plan_jobs(jobs: Sequence[JobTrainings], nodes: int, target: PlanTarget) -> JobsPlan | None:
    """Plan the trainings of several jobs, of shortest makespan or lowest cost.

    Of several shortest plans, the cheapest is returned. If all trainings can have the lowest cost within the deadline,
    the shortest plan in which they do is returned.

    Args:
        nodes: the number of nodes in use at a time.
        target: what to minimise, and the limit of the other quantity.

    Returns:
        None if no plan within the limit was found.
    """
    fitting = [_select_options(job, lambda option: option.nodes <= nodes) for job in jobs]
    if not all(job.batches for job in fitting):
        return None
    if target.minimises == "cost":
        shortest = plan_jobs([_select_cheapest(job) for job in fitting], nodes, PlanTarget("time"))
        if shortest is not None and is_within_limit(compute_makespan(shortest.starts), target.deadline):
            return JobsPlan(shortest.starts, sum_costs(shortest.starts))
    bound = compute_lower_bound(fitting, nodes, target)
    if math.isinf(bound):
        return None
    combinations, are_all = _list_combinations(fitting, nodes, target)
    lists = [_ListSchedules(options, nodes, _MAX_LIST_STEPS // len(combinations)) for options in combinations]
    # minimising the limited quantity finds a plan within the limit if there is one
    limited = PlanTarget("cost" if target.minimises == "time" else "time")
    starts = min((each.improve_plan(goal) for goal in (target, limited) for each in lists), key=target.rate_plan)
    if target.minimises == "time" and target.budget < math.inf:
        starts = _shorten_within_budget(lists, starts, target, bound)
    rating = target.rate_plan(starts)
    is_proven = not rating.excess and is_within_limit(rating.value, bound)
    if not is_proven and len(starts) <= _MAX_SEARCHED:
        search = _ScheduleSearch(nodes, target, starts)
        for options in combinations:
            search.search_schedules(options)
        starts, rating = search.best, target.rate_plan(search.best)
        if search.is_complete and are_all:
            bound = rating.value
    if rating.excess:
        return None
    if target.minimises == "time":
        within = PlanTarget("cost", deadline=rating.value)
        cheaper = [each.improve_plan(within, starts) for each in lists if each.has_same_batches(starts)]
        starts = min([starts, *cheaper], key=within.rate_plan)
    return JobsPlan(sorted(starts), bound)


def _shorten_within_budget(
    lists: Sequence["_ListSchedules"], starts: list[ScheduledStart], target: PlanTarget, bound: float
) -> list[ScheduledStart]:
    """Return the shortest plan within the budget that a bisection of the deadline finds, or the given plan.

    Args:
        lists: the schedules of each combination of batches.
        starts: the given plan.
        target: the budget.
        bound: lower bound of the hours of all plans.
    """
    shortest, longest = bound, compute_makespan(starts)
    for _ in range(_BISECTIONS):
        cheapest_target = PlanTarget("cost", deadline=(shortest + longest) / 2)
        cheaper = min((each.improve_plan(cheapest_target) for each in lists), key=cheapest_target.rate_plan)
        if target.rate_plan(cheaper).is_better_than(target.rate_plan(starts)):
            starts, longest = cheaper, compute_makespan(cheaper)
        else:
            shortest = cheapest_target.deadline
    return starts


def compute_lower_bound(jobs: Sequence[JobTrainings], nodes: int, target: PlanTarget) -> float:
    """Return a lower bound of the minimised quantity over all plans within the limit; inf if there is none.

    The bound of a linear relaxation: fractions of a training may have different options, and trainings may be cut into
    pieces that fill all nodes until the end.
    """
    hours = sorted({option.hours for job in jobs for batch in job.batches for option in batch})
    if target.minimises == "cost":
        return _compute_relaxed_minimum(jobs, target.deadline, nodes * target.deadline, value="cost")
    for least, following in itertools.pairwise([*hours, math.inf]):  # options that are no longer than the makespan
        bound = max(least, _compute_relaxed_minimum(jobs, least, target.budget, value="node_hours") / nodes)
        if bound < following:
            return bound
    return math.inf


def _compute_relaxed_minimum(
    jobs: Sequence[JobTrainings], longest: float, limit: float, *, value: Literal["cost", "node_hours"]
) -> float:
    """Return the least sum of a value with the sum of the other one within a limit, by Lagrangian multipliers.

    Only options that take at most `longest` hours are used. Returns inf if that is not possible.
    """
    totals: list[tuple[int, Floats, Floats]] = []
    multipliers = [np.zeros(1)]
    for job in jobs:
        options = [option for batch in job.batches for option in batch if is_within_limit(option.hours, longest)]
        if not options:
            return math.inf
        points = np.array([(option.cost, option.nodes * option.hours) for option in options])
        values, others = points.T if value == "cost" else points.T[::-1]
        totals.append((job.trainings, values, others))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = (values[:, None] - values) / (others - others[:, None])
        multipliers.append(ratios[np.isfinite(ratios) & (ratios > 0)])
    if not is_within_limit(sum(count * others.min() for count, _, others in totals), limit):
        return math.inf
    if math.isinf(limit):
        return float(sum(count * values.min() for count, values, _ in totals))
    weights = np.unique(np.concatenate(multipliers))[:, None]
    sums = sum(
        (count * (values + weights * others).min(axis=1) for count, values, others in totals), -weights[:, 0] * limit
    )
    return float(np.max(sums))


def _select_options(job: JobTrainings, is_usable: Callable[[TrainingOption], bool]) -> JobTrainings:
    """Return a job with the options that can be used, and without batches that are no better than another in any option."""
    batches = [tuple(filter(is_usable, options)) for options in job.batches]
    batches = [options for options in dict.fromkeys(batches) if options]
    return JobTrainings(
        job.trainings,
        [options for options in batches if not any(_is_dominated(options, other) for other in batches)],
    )


def _is_dominated(options: Sequence[TrainingOption], others: Sequence[TrainingOption]) -> bool:
    """Return whether each option has another one that is as good, and these differ in at least one value."""
    points, other_points = ({(o.nodes, o.hours, o.cost) for o in each} for each in (options, others))
    return points != other_points and all(
        any(all(theirs <= mine for mine, theirs in zip(point, other, strict=True)) for other in other_points)
        for point in points
    )


def _select_cheapest(job: JobTrainings) -> JobTrainings:
    least = min(option.cost for options in job.batches for option in options)
    return _select_options(job, lambda option: is_within_limit(option.cost, least))


def _list_combinations(
    jobs: Sequence[JobTrainings], nodes: int, target: PlanTarget
) -> tuple[list[list[JobOptions]], bool]:
    """Return combinations of one batch of each job, and whether these are all.

    If there are too many, the batches whose lower bounds are the worst are left out.
    """
    ranked = [
        sorted(
            job.batches,
            key=lambda options: compute_lower_bound([JobTrainings(job.trainings, [options])], nodes, target),
        )
        for job in jobs
    ]
    are_all = True
    while math.prod(map(len, ranked)) > _MAX_COMBINATIONS:
        max(ranked, key=len).pop()
        are_all = False
    counts = [job.trainings for job in jobs]
    return [
        [JobOptions(count, tuple(options)) for count, options in zip(counts, combination, strict=True)]
        for combination in itertools.product(*ranked)
    ], are_all


# --- List schedules

_OptionCounts = tuple[tuple[int, ...], ...]
"""For each job, how many of its trainings have each of its options."""


class _ListSchedules:
    """Schedules of one combination of batches that start trainings in some order, as soon as enough nodes are idle."""

    def __init__(self, jobs: Sequence[JobOptions], nodes: int, steps: int) -> None:
        self._jobs, self._nodes, self._steps = jobs, nodes, steps

    def has_same_batches(self, starts: Sequence[ScheduledStart]) -> bool:
        """Return whether the batches are those of a plan."""
        options = {option for job in self._jobs for option in job.options}
        return all(start.option in options for start in starts)

    def improve_plan(self, target: PlanTarget, starts: Sequence[ScheduledStart] | None = None) -> list[ScheduledStart]:
        """Return the best plan that single changes of options lead to, from several initial choices of options.

        Args:
            target: what to minimise.
            starts: a plan whose options are one more initial choice.
        """
        choices = dict.fromkeys(self._list_choices(target))
        rated = sorted((target.rate_plan(self._schedule_choice(choice, target)), choice) for choice in choices)
        first = [choice for _, choice in rated[:_KEPT_CHOICES]]
        if starts is not None:
            first.append(self._read_choice(starts))
        improved = [self._improve_by_single_changes(choice, target, self._steps // len(first)) for choice in first]
        return min((self._schedule_choice(choice, target) for choice in improved), key=target.rate_plan)

    def _list_choices(self, target: PlanTarget) -> Iterator[_OptionCounts]:
        """Yield choices in which all trainings of a job have the same option: the best by a sum of cost and node-hours.

        Each choice limits the hours of one training.
        """
        all_options = [option for job in self._jobs for option in job.options]
        mean_cost = sum(option.cost for option in all_options) or 1.0
        mean_size = sum(option.nodes * option.hours for option in all_options)
        for longest, weight in itertools.product(sorted({option.hours for option in all_options}), _COST_WEIGHTS):
            if longest > target.deadline and weight < 1:
                continue

            def compute_sort_key(
                option: TrainingOption, longest: float = longest, weight: float = weight
            ) -> tuple[float, float]:
                size = option.nodes * option.hours / mean_size
                return max(0.0, option.hours - longest), weight * option.cost / mean_cost + (1 - weight) * size

            yield tuple(
                tuple(trainings * (option == min(options, key=compute_sort_key)) for option in options)
                for trainings, options in self._jobs
            )

    def _read_choice(self, starts: Sequence[ScheduledStart]) -> _OptionCounts:
        counts = Counter(start.option for start in starts)
        return tuple(tuple(counts[option] for option in options) for _, options in self._jobs)

    def _improve_by_single_changes(self, choice: _OptionCounts, target: PlanTarget, steps: int) -> _OptionCounts:
        """Return a choice that no change of the option of some trainings of a job improves, unless the steps run out."""
        rating = target.rate_plan(self._schedule_choice(choice, target))
        steps_each = len(_ORDERS) * sum(map(sum, choice)) * sum(map(len, choice))
        is_better = True
        while is_better:
            is_better = False
            for job, before, after, count in self._list_changes(choice):
                if steps < steps_each:
                    return choice
                if count > choice[job][before]:
                    continue
                steps -= steps_each
                counts = list(choice[job])
                counts[before], counts[after] = counts[before] - count, counts[after] + count
                changed = (*choice[:job], tuple(counts), *choice[job + 1 :])
                changed_rating = target.rate_plan(self._schedule_choice(changed, target))
                if changed_rating.is_better_than(rating):
                    choice, rating, is_better = changed, changed_rating, True
        return choice

    @staticmethod
    def _list_changes(choice: _OptionCounts) -> Iterator[tuple[int, int, int, int]]:
        """Yield job, option before, option after, and number of trainings: all that have the option, half of them ... 1."""
        for job, counts in enumerate(choice):
            for before, after in itertools.permutations(range(len(counts)), 2):
                count = counts[before]
                while count:
                    yield job, before, after, count
                    count //= 2

    def _schedule_choice(self, choice: _OptionCounts, target: PlanTarget) -> list[ScheduledStart]:
        counted = [
            (option, count)
            for counts, (_, options) in zip(choice, self._jobs, strict=True)
            for option, count in zip(options, counts, strict=True)
            if count
        ]
        schedules = (
            schedule_trainings_in_order(sorted(counted, key=lambda entry: order(entry[0])), self._nodes)
            for order in _ORDERS
        )
        return min(schedules, key=target.rate_plan)


_COST_WEIGHTS = (0.0, 0.3, 0.6, 1.0)
"""Weights of the cost of an option, against its node-hours, by which options are chosen to begin with."""
_ORDERS: tuple[Callable[[TrainingOption], tuple[float, float]], ...] = (
    lambda option: (-option.hours, -option.nodes),
    lambda option: (-option.nodes, -option.hours),
    lambda option: (-option.nodes * option.hours, -option.hours),
)
"""Orders in which trainings are started: the longest first, the widest first, and those of the most node-hours first."""


# --- All schedules


class _LeastValues(NamedTuple):
    """The least values of one training of a job, over all of its options."""

    hours: float
    node_hours: float
    cost: float


class _ScheduleSearch:
    """Depth-first search through all schedules in which each training starts at 0 or when another finishes.

    A later start never helps. Branches are cut whose least duration and cost are not below those of the best plan.
    """

    def __init__(self, nodes: int, target: PlanTarget, best: Sequence[ScheduledStart]) -> None:
        self.best = list(best)
        self.is_complete = True
        self._rating = target.rate_plan(best)
        self._nodes, self._target, self._steps = nodes, target, _MAX_SEARCH_STEPS
        # of the combination of batches that is searched:
        self._options: list[tuple[int, TrainingOption]] = []  # each with the index of its job
        self._least: list[_LeastValues] = []  # of each job
        self._known: dict[tuple[object, ...], float] = {}  # least cost at which a state was reached
        self._path: list[ScheduledStart] = []  # the partial schedule

    def search_schedules(self, jobs: Sequence[JobOptions]) -> None:
        """Search the schedules of one combination of batches, and keep the best plan in `best`."""
        self._options = [(index, option) for index, job in enumerate(jobs) for option in reversed(job.options)]
        self._least = [
            _LeastValues(
                hours=min(option.hours for option in job.options),
                node_hours=min(option.nodes * option.hours for option in job.options),
                cost=min(option.cost for option in job.options),
            )
            for job in jobs
        ]
        self._known, self._path = {}, []
        self._search_continuations(0.0, (), tuple(job.trainings for job in jobs), 0, 0.0)

    def _search_continuations(
        self,
        now: float,
        running: tuple[tuple[float, int], ...],
        remaining_counts: tuple[int, ...],
        first: int,
        cost: float,
    ) -> None:
        """Visit all continuations of a partial schedule.

        Args:
            now: the hour at which the next trainings may start.
            running: end and nodes of the trainings that run, by end.
            remaining_counts: the trainings of each job that are not started.
            first: the option from which on trainings may start now: their order does not matter.
            cost: of the trainings that are started.
        """
        self._steps -= 1
        if self._steps < 0:
            self.is_complete = False
            return
        end = running[-1][0] if running else now
        if not self._can_be_better(now, running, remaining_counts, end, cost):
            return
        if not any(remaining_counts):
            self.best, self._rating = list(self._path), self._target.make_rating(end, cost)
            return
        idle = self._nodes - sum(width for _, width in running)
        for index in range(first, len(self._options)):
            job, option = self._options[index]
            if remaining_counts[job] and option.nodes <= idle:
                self._path.append(ScheduledStart(now, option))
                after = tuple(sorted((*running, (now + option.hours, option.nodes))))
                fewer = (*remaining_counts[:job], remaining_counts[job] - 1, *remaining_counts[job + 1 :])
                self._search_continuations(now, after, fewer, index, cost + option.cost)
                self._path.pop()
        if running:
            now = running[0][0]
            running = tuple(entry for entry in running if entry[0] > now * (1 + RELATIVE_TOLERANCE))
            state = (now, running, remaining_counts)
            if cost < self._known.get(state, math.inf):
                self._known[state] = cost
                self._search_continuations(now, running, remaining_counts, 0, cost)

    def _can_be_better(
        self, now: float, running: Sequence[tuple[float, int]], remaining_counts: Sequence[int], end: float, cost: float
    ) -> bool:
        """Return whether the least duration and cost of what remains are below those of the best plan."""
        node_hours = sum((until - now) * width for until, width in running)
        for count, least in zip(remaining_counts, self._least, strict=True):
            if count:
                end = max(end, now + least.hours)
                node_hours += count * least.node_hours
                cost += count * least.cost
        rating = self._target.make_rating(max(end, now + node_hours / self._nodes), cost)
        return rating._replace(other=0.0).is_better_than(self._rating._replace(other=0.0))
