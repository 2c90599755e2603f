"""What searching GPUs a node takes and tells: python benchmarks/replay/replay_sizes.py TABLE.csv... [--json]

Of each application on each cluster that was measured on nodes of several numbers of GPUs, all are searched (`search.gpus_per_node`),
in four ways: each number of GPUs by a sweep of its own, each fitted by itself; the same probes in one fit; all in one fit,
with a sweep of the most GPUs and two batches on one node of the others, which is what tula does; and the
same with a sweep of the fewest GPUs. Judged are the candidates that were not probed, and the choice: how much slower the one
that seems fastest is than the fastest, and how much dearer the one that seems cheapest, a node-hour costing the same however
many of its GPUs are used. Cost is that of the probes over one job for every candidate, as in replay.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
from replay_command import run
from replay_data import MeasuredSet, Where
from replay_score import PROBE, START_UP

from tula_cli.models.time import step_time
from tula_cli.models.time.step_time import Observation
from tula_cli.services.search import STRATEGIES, ByNodes, choose_smallest_and_middle_probes

Grid = Mapping[int, Mapping[int, list[int]]]
"""GPUs a node to nodes to local batches, all ascending."""
Truth = Mapping[Where, Observation]


@dataclass(frozen=True)
class Judged:
    """One way to search; means over applications and clusters, shares."""

    design: str
    sets: int
    probes: float  # of a search
    cost: float  # over one job for every candidate
    median: float  # error
    covered: float  # by the 90 % interval
    most_gpus: float  # median error at the most GPUs a node
    regret_fastest: float
    regret_cheapest: float


def _of(plan: Callable[[ByNodes], dict[int, set[int]]], grid: Grid, gpus: int) -> set[Where]:
    chosen = plan(grid[gpus])
    return {Where(nodes, gpus, local) for nodes, locals_ in chosen.items() for local in locals_}


def _with(grid: Grid, swept: int) -> set[Where]:
    return set().union(
        *(_of(STRATEGIES["sweep"] if gpus == swept else choose_smallest_and_middle_probes, grid, gpus) for gpus in grid)
    )


def _each(grid: Grid) -> set[Where]:
    return set().union(*(_of(STRATEGIES["sweep"], grid, gpus) for gpus in grid))


DESIGNS: Mapping[str, tuple[Callable[[Grid], set[Where]], bool]] = {
    "a sweep each, fitted apart": (_each, False),
    "a sweep each, one fit": (_each, True),
    "a sweep of the most GPUs": (lambda grid: _with(grid, max(grid)), True),
    "a sweep of the fewest GPUs": (lambda grid: _with(grid, min(grid)), True),
}


def judge(sets: Iterable[MeasuredSet]) -> list[Judged]:
    """Judge every design on every application of a cluster with nodes of several numbers of GPUs; their means."""
    by_app: dict[tuple[str, str], list[MeasuredSet]] = defaultdict(list)
    for each in sets:
        by_app[each.cluster, each.app].append(each)
    result: dict[str, list[Judged]] = defaultdict(list)
    for value in by_app.values():
        truth = _candidates(value)
        grid: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for place in sorted(truth):
            grid[place.gpus_per_node][place.nodes].append(place.local_batch)
        if len(grid) > 1 and all(len(nodes) > 1 for nodes in grid.values()):
            for name, (planned, together) in DESIGNS.items():
                result[name].append(_judged(name, truth, planned(grid), together=together))
    return [_mean(rows) for rows in result.values()]


def _candidates(own: Iterable[MeasuredSet]) -> Truth:
    """Return what is offered on several numbers of nodes, with what it took."""
    return {place: each.truth[place] for each in own if each.kind != "one node" for place in each.batches}


def _judged(design: str, truth: Truth, probes: set[Where], *, together: bool) -> Judged:
    counts = sorted({place.gpus_per_node for place in truth})
    seen = {gpus: [truth[place] for place in probes if together or place.gpus_per_node == gpus] for gpus in counts}
    item = step_time.fit_step_time(seen[counts[0]], collective="ring") if together else None
    fits = {gpus: item or step_time.fit_step_time(seen[gpus], collective="ring") for gpus in counts}
    seconds = {place: truth[place].seconds for place in probes}
    off, kept, at_most = [], [], []
    for place, o in truth.items():
        if place in probes:
            continue
        result = fits[place.gpus_per_node].predict(place.nodes, place.gpus_per_node, place.local_batch)
        seconds[place] = result.seconds
        off.append(abs(result.seconds / o.seconds - 1))
        kept.append((result.low or 0.0) <= o.seconds <= (result.high or np.inf))
        at_most += [off[-1]] if place.gpus_per_node == counts[-1] else []
    fastest, cheapest = (_regret(truth, seconds, by_node=by_node) for by_node in (False, True))
    shares = float(np.median(off)), float(np.mean(kept)), float(np.median(at_most or off))
    return Judged(design, 1, len(probes), _cost(truth, probes) / _cost(truth, set(truth)), *shares, fastest, cheapest)


def _regret(truth: Truth, seconds: Mapping[Where, float], *, by_node: bool) -> float:
    """Return how much longer (dearer, by node) an epoch takes at what seems best than at what is."""

    def epoch(place: Where, step: float) -> float:
        return step / (place.replicas * place.local_batch) * (place.nodes if by_node else 1)

    picked = min(seconds, key=lambda place: epoch(place, seconds[place]))
    return epoch(picked, truth[picked].seconds) / min(epoch(place, o.seconds) for place, o in truth.items()) - 1


def _cost(truth: Truth, probes: set[Where]) -> float:
    """Return the node-seconds of probes, each charged what one of steady steps takes and each job its start."""
    steps = sum(place.nodes * PROBE(truth[place].seconds) for place in probes)
    return steps + START_UP * sum(nodes for nodes, _ in {(place.nodes, place.gpus_per_node) for place in probes})


def _mean(rows: list[Judged]) -> Judged:
    numbers = [field.name for field in fields(Judged) if field.name not in ("design", "sets")]
    means = {name: float(np.mean([asdict(row)[name] for row in rows])) for name in numbers}
    return Judged(design=rows[0].design, sets=len(rows), **means)


def line(row: Judged) -> str:
    return (
        f"{row.design}: {row.sets} sets, {row.probes:.0f} probes at {row.cost:.2f} of all, median error {row.median:.1%}"
        f" (at the most GPUs {row.most_gpus:.1%}), interval holds {row.covered:.0%}, the fastest"
        f" {row.regret_fastest:.1%} too slow, the cheapest {row.regret_cheapest:.1%} too dear"
    )


def main() -> None:
    run(judge, line, about=__doc__)


if __name__ == "__main__":
    main()
