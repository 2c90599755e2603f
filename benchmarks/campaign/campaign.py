"""Speedup of a plan for several trainings over each training at its fastest: python benchmarks/campaign/campaign.py TABLE.csv [--json]

Each set of the tables (an app on a cluster with a number of GPUs per node; see benchmarks/replay) has measured step times on several
numbers of nodes. A training has the same number of samples on each of them. The plan for 4, 8 and 30 trainings on the measured
number of nodes is compared with running each training at its fastest, as many at a time as fit.

With a fixed batch, the step time at a global batch is interpolated between the local batches measured on each number of nodes;
each batch that was measured on at least three numbers of nodes counts, and the result of a set is their geometric mean. With a
free batch, each number of nodes has its best local batch.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))

from replay_data import MeasuredSet, load_sets

from tula_cli.models.choice.node_schedule import TrainingOption, compute_shortest_makespan, find_cheapest_plan

TRAININGS = (4, 8, 30)
FEWEST_SIZES = 3  # numbers of nodes on which a batch must have been measured
Batch = Literal["free", "fixed"]


@dataclass(frozen=True)
class Gain:
    """A plan compared with each training at its fastest; geometric means over the sets."""

    batch: Batch
    trainings: int
    sets: int
    nodes: tuple[int, ...]  # in all, of the sets
    speedup: float
    node_hours: float  # total, of the sets
    bound: float  # speedup that no schedule exceeds


def list_step_costs(measured: MeasuredSet, batch: Batch) -> Iterator[dict[int, float]]:
    """Yield the seconds per sample by number of nodes, for each global batch (fixed) or at the best batch of each (free)."""
    steps: dict[int, dict[int, float]] = defaultdict(dict)  # nodes to global batch to seconds per sample
    for place, observation in measured.truth.items():
        total = place.replicas * place.local_batch
        steps[place.nodes][total] = observation.seconds / total
    if batch == "free":
        yield {nodes: min(costs.values()) for nodes, costs in steps.items()}
        return
    for total in sorted({total for costs in steps.values() for total in costs}):
        costs_here = {
            nodes: _interpolate(costs, total) for nodes, costs in steps.items() if min(costs) <= total <= max(costs)
        }
        if len(costs_here) >= FEWEST_SIZES:
            yield costs_here


def _interpolate(costs: Mapping[int, float], batch: int) -> float:
    """Return the seconds per sample at a batch, linear in the logarithms."""
    batches = sorted(costs)
    return math.exp(np.interp(math.log(batch), np.log(batches), np.log([costs[each] for each in batches])))


def compare(hours: Mapping[int, float], trainings: int, nodes: int) -> tuple[float, float, float]:
    """Return speedup and share of node-hours of the plan, and the largest speedup of any schedule."""
    options = [TrainingOption(width, value, width * value) for width, value in hours.items()]
    makespan = compute_shortest_makespan(options, trainings=trainings, nodes=nodes)
    starts = find_cheapest_plan(options, trainings=trainings, nodes=nodes, deadline=makespan)
    assert starts is not None
    fastest = min(options, key=lambda option: (option.hours, option.nodes))
    usual = math.ceil(trainings / (nodes // fastest.nodes)) * fastest.hours
    bound = max(fastest.hours, trainings * min(option.cost for option in options) / nodes)
    return usual / makespan, sum(start.option.cost for start in starts) / (trainings * fastest.cost), usual / bound


def judge(sets: Sequence[MeasuredSet]) -> list[Gain]:
    """Return the gains over the sets with several numbers of nodes."""
    gains = []
    for batch in ("fixed", "free"):
        tables = [costs for each in sets if each.kind != "one node" and (costs := [*list_step_costs(each, batch)])]
        tables = [costs for costs in tables if max(map(len, costs)) >= FEWEST_SIZES]
        for trainings in TRAININGS:
            means = [
                np.mean([np.log(compare(costs, trainings, max(costs))) for costs in each], axis=0) for each in tables
            ]
            sizes = tuple(sorted({max(costs) for each in tables for costs in each}))
            gains.append(Gain(batch, trainings, len(tables), sizes, *np.exp(np.mean(means, axis=0)).tolist()))
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cluster", help="only sets of this cluster")
    arguments = parser.parse_args()
    sets = [each for each in load_sets(*arguments.tables) if arguments.cluster in (None, each.cluster)]
    gains = judge(sets)
    if arguments.json:
        print(json.dumps([asdict(gain) for gain in gains], indent=1))
        return
    for gain in gains:
        print(
            f"{gain.batch:5} batch, {gain.trainings:2} trainings, {gain.sets} sets: {gain.speedup:.2f} times as fast"
            f" (at most {gain.bound:.2f}), {gain.node_hours:.2f} of the node-hours"
        )


if __name__ == "__main__":
    main()
