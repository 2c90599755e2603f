"""Time to the result of trainings on the nodes and with the time limit chosen by the bounds, compared with the best in hindsight."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
from easy_backfilling import Cluster
from lublin_feitelson import ModelJob
from size_classes import PastWait, WaitBound, bound_wait
from workload_format import LoggedJob

NODES = (1, 2, 4, 8, 16, 32, 64)
TIME_LIMITS = (60, 240, 720, 1440)
NODE_HOURS = (4.0, 200.0)  # of the training on one node, log-uniform
SERIAL_SHARES = (0.002, 0.05)  # serial share of the work, log-uniform
NEAR_SHARE = 0.1


@dataclass(frozen=True)
class Request:
    """The request of a chain of jobs: nodes and time limit of each of its jobs."""

    nodes: int
    minutes: float
    links: int  # number of jobs that a training needs


@dataclass(frozen=True)
class Choices:
    """The distance of the choices from the best in hindsight."""

    by: str
    trainings: int
    mean_regret: float  # of the time to the result
    median_regret: float
    near: float  # share of the trainings that take at most a tenth longer
    nodes_near: float  # the same with the chosen nodes and the best time limit in hindsight

    @property
    def words(self) -> str:
        return (
            f"{self.trainings} trainings take {self.mean_regret:.1%} more than the best in hindsight on average, "
            f"{self.median_regret:.1%} in the median; {self.near:.0%} at most {NEAR_SHARE:.0%} more, by their nodes {self.nodes_near:.0%}"
        )


Rule = Callable[[WaitBound | None, float | None], float]
"""The expected wait of a job of a chain from its bound and from the scheduler's estimate, which only the first job has."""
RULES: dict[str, Rule | None] = {
    "run time alone": None,
    "bound": lambda bound, _: _read_bound(bound),
    "bound and estimate": lambda bound, estimate: max(_read_bound(bound), estimate or 0.0),
    "median": lambda bound, _: _read_median(bound),
    "median and estimate": lambda bound, estimate: max(_read_median(bound), estimate or 0.0),
    "estimate, then nothing": lambda _, estimate: estimate or 0.0,
    "estimate, then median": lambda bound, estimate: _read_median(bound) if estimate is None else estimate,
    "estimate, then bound": lambda bound, estimate: _read_bound(bound) if estimate is None else estimate,
}


def chain_wait(ask: Request, first: float, later: float) -> float:
    """Return the total wait of all jobs of a chain in seconds; it is a bound if the waits of the jobs are bounds.

    The more jobs there are, the more certainly it holds, because not all waits are long at once.

    Args:
        ask: the chain.
        first: wait of the first job, which may include the scheduler's estimate.
        later: wait of each other job.
    """
    return first + (ask.links - 1) * later


def _read_bound(bound: WaitBound | None) -> float:
    return bound.seconds if bound else 0.0


def _read_median(bound: WaitBound | None) -> float:
    return bound.middle if bound else 0.0


def judge_choices(
    nodes: int, jobs: Sequence[ModelJob], log: Sequence[LoggedJob], *, count: int, seed: int
) -> list[Choices]:
    """Return for each rule the quality of its choices for trainings submitted in the last two thirds of a log.

    Args:
        nodes: of the cluster.
        jobs: that it schedules.
        log: the resulting log.
        count: number of trainings.
        seed: of the durations and submission times of the trainings.
    """
    rng = np.random.default_rng([seed, 1])
    moments = np.sort(rng.uniform(jobs[len(jobs) // 3].submitted, jobs[9 * len(jobs) // 10].submitted, count))
    history = [PastWait(job.submitted, job.wait, job.nodes, job.limit / 60) for job in log]
    cluster = Cluster(nodes, jobs)
    regrets_by_rule: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    for moment in moments:
        cluster.until(float(moment))
        hours, serial = (float(np.exp(rng.uniform(*np.log(ends)))) for ends in (NODE_HOURS, SERIAL_SHARES))
        runs = {count: 3600 * hours * ((1 - serial) / count + serial) for count in NODES}
        asks = _list_requests(runs)
        actual = {ask: _simulate_duration(cluster, ask, runs[ask.nodes]) for ask in asks}
        best = min(actual.values())
        known = [past for past in history if past.known_at <= moment]
        bounds = {ask: bound_wait(known, nodes=ask.nodes, minutes=ask.minutes, now=float(moment)) for ask in asks}
        for name, rule in RULES.items():
            chosen = min(
                asks, key=lambda ask: _expected_duration(ask, rule, bounds[ask], cluster.earliest(ask.nodes), runs)
            )
            best_on_nodes = min(took for ask, took in actual.items() if ask.nodes == chosen.nodes)
            regrets_by_rule[name].append((actual[chosen] / best - 1, best_on_nodes / best - 1))
    return [_summarise(name, pairs) for name, pairs in regrets_by_rule.items()]


def _list_requests(runs: dict[int, float]) -> list[Request]:
    """Return the possible requests; of the limits that one job finishes within, only the shortest."""
    asks = []
    for nodes, seconds in runs.items():
        for minutes in TIME_LIMITS:
            links = max(1, math.ceil(seconds / 60 / minutes))
            asks.append(Request(nodes, minutes, links))
            if links == 1:
                break
    return asks


def _expected_duration(
    ask: Request, rule: Rule | None, bound: WaitBound | None, estimate: float, runs: dict[int, float]
) -> float:
    waits = 0.0 if rule is None else chain_wait(ask, rule(bound, estimate), rule(bound, None))
    return runs[ask.nodes] + waits


def _simulate_duration(cluster: Cluster, ask: Request, seconds: float) -> float:
    """Return the duration of a training from now on, including waits."""
    forked, started, remaining = cluster.fork(), cluster.now, seconds
    for _ in range(ask.links):
        job = ModelJob(forked.now, ask.nodes, min(remaining, 60.0 * ask.minutes), 60.0 * ask.minutes)
        forked.wait_of(job)
        remaining -= job.run
        forked.until(forked.starts[id(job)] + job.run)
    return forked.now - started


def _summarise(name: str, pairs: Sequence[tuple[float, float]]) -> Choices:
    regrets = [regret for regret, _ in pairs]
    near, nodes_near = (mean(row[place] <= NEAR_SHARE for row in pairs) for place in (0, 1))
    return Choices(name, len(pairs), mean(regrets), median(regrets), near, nodes_near)
