"""How long a training takes on the nodes and with the time limit that the bounds choose, compared with the best in hindsight."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
from easy_backfilling import Cluster
from lublin_feitelson import ModelJob
from size_classes import PastWait, WaitBound, wait_bound
from workload_format import LoggedJob

NODES = (1, 2, 4, 8, 16, 32, 64)
MINUTES = (60, 240, 720, 1440)
NODE_HOURS = (4.0, 200.0)  # of the training on one node, log-uniform
SERIAL = (0.002, 0.05)  # share of it that more nodes do not speed up, log-uniform
NEAR = 0.1


@dataclass(frozen=True)
class Ask:
    """The request of a chain of jobs: nodes and time limit of each of its jobs."""

    nodes: int
    minutes: float
    links: int  # that a training needs


@dataclass(frozen=True)
class Choices:
    """How far what was chosen is from the best in hindsight."""

    by: str
    trainings: int
    mean_regret: float  # of the time to the result
    median_regret: float
    near: float  # share of the trainings that take at most a tenth more
    nodes_near: float  # the same, where the best time limit in hindsight goes with the chosen nodes

    @property
    def words(self) -> str:
        return (
            f"{self.trainings} trainings take {self.mean_regret:.1%} more than the best in hindsight on average, "
            f"{self.median_regret:.1%} in the median; {self.near:.0%} at most {NEAR:.0%} more, by their nodes {self.nodes_near:.0%}"
        )


Rule = Callable[[WaitBound | None, float | None], float]
"""The wait that a job of a chain is expected to have, by its bound and by the scheduler's estimate, which only the first job has."""
RULES: dict[str, Rule | None] = {
    "run time alone": None,
    "bound": lambda bound, _: _bound(bound),
    "bound and estimate": lambda bound, estimate: max(_bound(bound), estimate or 0.0),
    "median": lambda bound, _: _middle(bound),
    "median and estimate": lambda bound, estimate: max(_middle(bound), estimate or 0.0),
    "estimate, then nothing": lambda _, estimate: estimate or 0.0,
    "estimate, then median": lambda bound, estimate: _middle(bound) if estimate is None else estimate,
    "estimate, then bound": lambda bound, estimate: _bound(bound) if estimate is None else estimate,
}


def links_wait(ask: Ask, first: float, later: float) -> float:
    """Return the seconds that all links wait together: a bound where those of the links are bounds.

    It holds the more surely the more links there are, for they are not all long at once.

    Args:
        ask: the chain.
        first: of the first link, to which the scheduler's own estimate may have been added.
        later: of each other one.
    """
    return first + (ask.links - 1) * later


def _bound(bound: WaitBound | None) -> float:
    return bound.seconds if bound else 0.0


def _middle(bound: WaitBound | None) -> float:
    return bound.middle if bound else 0.0


def choices(nodes: int, jobs: Sequence[ModelJob], log: Sequence[LoggedJob], *, count: int, seed: int) -> list[Choices]:
    """Return by each rule how well it chooses for trainings that come at moments of the last two thirds of a log.

    Args:
        nodes: of the cluster.
        jobs: that it schedules.
        log: what it makes of them.
        count: of trainings.
        seed: of what they take and when they come.
    """
    rng = np.random.default_rng([seed, 1])
    moments = np.sort(rng.uniform(jobs[len(jobs) // 3].submitted, jobs[9 * len(jobs) // 10].submitted, count))
    history = [PastWait(job.submitted, job.wait, job.nodes, job.limit / 60) for job in log]
    cluster = Cluster(nodes, jobs)
    regrets_by_rule: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    for moment in moments:
        cluster.until(float(moment))
        hours, serial = (float(np.exp(rng.uniform(*np.log(ends)))) for ends in (NODE_HOURS, SERIAL))
        runs = {count: 3600 * hours * ((1 - serial) / count + serial) for count in NODES}
        asks = _asks(runs)
        actual = {ask: _actual(cluster, ask, runs[ask.nodes]) for ask in asks}
        best = min(actual.values())
        known = [past for past in history if past.known_at <= moment]
        bounds = {ask: wait_bound(known, nodes=ask.nodes, minutes=ask.minutes, now=float(moment)) for ask in asks}
        for name, rule in RULES.items():
            chosen = min(asks, key=lambda ask: _expected(ask, rule, bounds[ask], cluster.earliest(ask.nodes), runs))
            best_on_nodes = min(took for ask, took in actual.items() if ask.nodes == chosen.nodes)
            regrets_by_rule[name].append((actual[chosen] / best - 1, best_on_nodes / best - 1))
    return [_summed(name, pairs) for name, pairs in regrets_by_rule.items()]


def _asks(runs: dict[int, float]) -> list[Ask]:
    """Return what may be asked for; of limits that one job ends within, the shortest alone."""
    asks = []
    for nodes, seconds in runs.items():
        for minutes in MINUTES:
            links = max(1, math.ceil(seconds / 60 / minutes))
            asks.append(Ask(nodes, minutes, links))
            if links == 1:
                break
    return asks


def _expected(ask: Ask, rule: Rule | None, bound: WaitBound | None, estimate: float, runs: dict[int, float]) -> float:
    waits = 0.0 if rule is None else links_wait(ask, rule(bound, estimate), rule(bound, None))
    return runs[ask.nodes] + waits


def _actual(cluster: Cluster, ask: Ask, seconds: float) -> float:
    """Return how long a training takes from now on, waits included."""
    forked, started, remaining = cluster.fork(), cluster.now, seconds
    for _ in range(ask.links):
        job = ModelJob(forked.now, ask.nodes, min(remaining, 60.0 * ask.minutes), 60.0 * ask.minutes)
        forked.wait_of(job)
        remaining -= job.run
        forked.until(forked.starts[id(job)] + job.run)
    return forked.now - started


def _summed(name: str, pairs: Sequence[tuple[float, float]]) -> Choices:
    regrets = [regret for regret, _ in pairs]
    near, nodes_near = (mean(row[place] <= NEAR for row in pairs) for place in (0, 1))
    return Choices(name, len(pairs), mean(regrets), median(regrets), near, nodes_near)
