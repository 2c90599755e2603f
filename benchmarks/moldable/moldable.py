"""Turnaround of trainings that use the nodes that they are granted: python benchmarks/moldable/moldable.py [--json]

Trainings are submitted at random times to a cluster whose load changes over the day (Lublin and Feitelson's model, EASY
backfilling; see benchmarks/queue). Each is a chain of jobs. A moldable training requests a range of nodes: it starts as soon as
the minimum is free, on the largest of its sizes that is free. It is compared with the same training on each fixed number of nodes,
in particular the best in hindsight. Turnaround: from the submission of the first job to the end of the training.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "queue"))

from easy_backfilling import Cluster
from lublin_feitelson import ModelJob, generate_jobs

NODES = 128
NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
NODE_HOURS = (4.0, 200.0)  # of the training on one node, log-uniform
SERIAL_SHARES = (0.002, 0.05)  # serial share of the work, log-uniform
JOB_TIME_LIMIT_SECONDS = 4 * 3600.0  # time limit of each job of the chain
START_SECONDS = 120.0  # seconds from the start of a job to its first step
MIN_EFFICIENCY = 0.5  # minimum parallel efficiency at the largest number of nodes
LOADS = (0.6, 0.75, 0.9)
JOBS, TRAININGS = 6000, 200


@dataclass(frozen=True)
class TrainingJob(ModelJob):
    """A job of a chain; it starts on the largest of its sizes that is available."""

    sizes: tuple[int, ...] = ()
    seconds: Mapping[int, float] | None = None  # duration of the rest of the training, by nodes

    def choose_nodes(self, available: int) -> int:
        return max(size for size in self.sizes if size <= available)

    def seconds_on(self, nodes: int) -> float:
        assert self.seconds is not None
        return START_SECONDS + self.seconds[nodes]


@dataclass(frozen=True)
class Turnaround:
    """The end of a training: seconds since its submission, and its cost."""

    seconds: float
    node_hours: float


@dataclass(frozen=True)
class Comparison:
    """Moldable trainings compared with fixed numbers of nodes, at one load of the cluster."""

    load: float
    trainings: int
    fewest: int  # the minimum number of nodes is the maximum divided by this
    median_ratio: float  # of turnarounds, relative to the best fixed number in hindsight
    p90_ratio: float
    node_hours_ratio: float  # relative to the same; median
    fixed_ratio: float  # median ratio of the best single rule "always so many nodes"
    largest_ratio: float  # of a chain that always waits for the maximum number; median


def train(cluster: Cluster, sizes: tuple[int, ...], seconds: Mapping[int, float]) -> Turnaround:
    """Return the turnaround of a training that is submitted now; `cluster` is not changed.

    Args:
        cluster: at the time of submission.
        sizes: numbers of nodes that each job may be granted, ascending.
        seconds: duration of the whole training by nodes.
    """
    forked, submitted, rest, node_hours = cluster.fork(), cluster.now, 1.0, 0.0
    while rest > 1e-9:
        job = TrainingJob(
            forked.now, sizes[0], 0.0, JOB_TIME_LIMIT_SECONDS, sizes, {nodes: rest * seconds[nodes] for nodes in sizes}
        )
        forked.wait_of(job)
        nodes = forked.granted[id(job)]
        ran = min(job.seconds_on(nodes), JOB_TIME_LIMIT_SECONDS)
        rest -= (ran - START_SECONDS) / seconds[nodes]
        node_hours += nodes * ran / 3600
        forked.until(forked.starts[id(job)] + ran)
    return Turnaround(forked.now - submitted, node_hours)


def compare(load: float, *, fewest: Sequence[int], trainings: int, jobs: int, seed: int) -> list[Comparison]:
    """Compare moldable trainings with fixed numbers of nodes on a cluster with a given load, for each minimum number of nodes."""
    rng = np.random.default_rng([seed, 2])
    others = generate_jobs(jobs, nodes=NODES, load=load, seed=seed)
    moments = np.sort(rng.uniform(others[jobs // 4].submitted, others[3 * jobs // 4].submitted, trainings))
    cluster, ratios = Cluster(NODES, others), []
    for moment in moments:
        cluster.until(float(moment))
        hours, serial = (float(np.exp(rng.uniform(*np.log(ends)))) for ends in (NODE_HOURS, SERIAL_SHARES))
        seconds = {nodes: 3600 * hours * ((1 - serial) / nodes + serial) for nodes in NODE_COUNTS}
        sizes = tuple(nodes for nodes in NODE_COUNTS if seconds[1] / (nodes * seconds[nodes]) >= MIN_EFFICIENCY)
        fixed = {nodes: train(cluster, (nodes,), seconds) for nodes in sizes}
        best = min(fixed.values(), key=lambda each: each.seconds)
        moldable = [
            train(cluster, tuple(nodes for nodes in sizes if nodes * divisor >= sizes[-1]), seconds)
            for divisor in fewest
        ]
        always = [fixed[min(nodes, sizes[-1])] for nodes in NODE_COUNTS]
        rows = [*moldable, *always]
        ratios.append([(each.seconds / best.seconds, each.node_hours / best.node_hours) for each in rows])
    table = np.array(ratios)  # trainings, rules, (seconds, node-hours)
    medians = np.median(table[:, :, 0], axis=0)
    return [
        Comparison(
            load,
            trainings,
            divisor,
            float(medians[rule]),
            float(np.quantile(table[:, rule, 0], 0.9)),
            float(median(table[:, rule, 1])),
            float(medians[len(fewest) :].min()),
            float(medians[-1]),
        )
        for rule, divisor in enumerate(fewest)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainings", type=int, default=TRAININGS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = [
        row
        for load in LOADS
        for row in compare(load, fewest=(64, 8, 4, 2), trainings=arguments.trainings, jobs=JOBS, seed=arguments.seed)
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in results], indent=1))
        return
    for row in results:
        print(
            f"load {row.load:.2f}, fewest 1/{row.fewest:<2} of most: turnaround {row.median_ratio:.2f} times the best fixed number"
            f" (90 %: {row.p90_ratio:.2f}), node-hours {row.node_hours_ratio:.2f}; best single number {row.fixed_ratio:.2f},"
            f" always the most {row.largest_ratio:.2f}"
        )


if __name__ == "__main__":
    main()
