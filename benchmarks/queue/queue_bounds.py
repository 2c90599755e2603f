"""Whether bounds of waits hold, how tight they are, and what is chosen by them.

    python benchmarks/queue/queue_bounds.py [--swf LOG] [--seeds 1 2 3] [--jobs 6000] [--load 0.85] [--choices 60] [--json]

With --swf a log in the Standard Workload Format is replayed in the order of time: each job is given the bound that the waits
known at its submission leave. Without it logs are made by the model of Lublin and Feitelson, scheduled with EASY backfilling
on 128 nodes; there the wait of any other job is known, and so is how much longer than the best in hindsight a training takes
on the nodes, with the time limit, that are chosen by the bounds. The first tenth of a log is history alone.

Coverage: waits at or below their bound. Tightness: median over the jobs of the bound's seconds, and of those of the wait.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from chosen_nodes import Choices, choices
from easy_backfilling import Cluster
from lublin_feitelson import ModelJob, model_jobs
from quantile_bound import CONFIDENCE
from size_classes import PastWait, size_of, size_words, wait_bound
from workload_format import LoggedJob, read_log

NODES = 128
HISTORY = 0.1


@dataclass(frozen=True)
class Coverage:
    """How the bounds of one class held; seconds."""

    size: str
    jobs: int
    unbounded: int  # jobs without a bound: too few had waited
    covered: float  # share of the others
    bound: float  # median
    wait: float  # median


def main() -> None:
    options = _options()
    if options.swf:
        rows = replay(read_log(options.swf), confidence=options.confidence)
        _show(options.swf.name, rows, [], as_json=options.json)
        return
    for seed in options.seeds:
        jobs = model_jobs(options.jobs, nodes=NODES, load=options.load, seed=seed)
        log = scheduled(NODES, jobs)
        made = choices(NODES, jobs, log, count=options.choices, seed=seed) if options.choices else []
        rows = replay(log, confidence=options.confidence)
        _show(f"seed {seed}, load {options.load:g}", rows, made, as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swf", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=6000)
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--choices", type=int, default=60)
    parser.add_argument("--confidence", type=float, default=CONFIDENCE)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def scheduled(nodes: int, jobs: Sequence[ModelJob]) -> list[LoggedJob]:
    """Return what a cluster makes of jobs."""
    cluster = Cluster(nodes, jobs)
    cluster.finish()
    return [
        LoggedJob(job.submitted, cluster.starts[id(job)] - job.submitted, job.run, job.nodes, job.limit) for job in jobs
    ]


def past_waits(log: Sequence[LoggedJob]) -> list[PastWait]:
    """Return the waits of a log."""
    return [PastWait(job.submitted, job.wait, job.nodes, job.limit / 60) for job in log]


def replay(log: Sequence[LoggedJob], *, confidence: float = CONFIDENCE) -> list[Coverage]:
    """Return by size class how the bounds of the jobs of a log hold; the last row is of all."""
    history = past_waits(log)
    result: defaultdict[str, list[tuple[float | None, float]]] = defaultdict(list)
    for number, past in enumerate(history[int(HISTORY * len(history)) :], int(HISTORY * len(history))):
        bound = wait_bound(
            history[:number], nodes=past.nodes, minutes=past.minutes, now=past.submitted, confidence=confidence
        )
        pair = (None if bound is None or bound.confidence < confidence else bound.seconds, past.wait)
        result[size_words(size_of(past.nodes, past.minutes))].append(pair)
        result["all"].append(pair)
    everything = result.pop("all")
    return [_coverage(size, result[size]) for size in sorted(result)] + [_coverage("all", everything)]


def _coverage(size: str, pairs: Sequence[tuple[float | None, float]]) -> Coverage:
    bounded = [(bound, wait) for bound, wait in pairs if bound is not None]
    if not bounded:
        return Coverage(size, len(pairs), len(pairs), math.nan, math.nan, math.nan)
    covered = mean(wait <= bound for bound, wait in bounded)
    middle = median(bound for bound, _ in bounded), median(wait for _, wait in bounded)
    return Coverage(size, len(pairs), len(pairs) - len(bounded), covered, *middle)


def _show(name: str, rows: Sequence[Coverage], made: Sequence[Choices], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"log": name, "coverage": [asdict(r) for r in rows], "choices": [asdict(c) for c in made]}))
        return
    print(f"{name}\n{'class':>28}{'jobs':>7}{'no bound':>10}{'covered':>9}{'bound s':>10}{'wait s':>10}")
    for row in rows:
        print(f"{row.size:>28}{row.jobs:7}{row.unbounded:10}{row.covered:9.1%}{row.bound:10.0f}{row.wait:10.0f}")
    for item in made:
        print(f"{item.by:>28}: {item.words}")


if __name__ == "__main__":
    main()
