"""Cost and accuracy of searching the number of GPUs per node: python benchmarks/replay/replay_sizes.py TABLE.csv... [--json]

For each app on each cluster that was measured with several numbers of GPUs per node, all are searched (`search.gpus_per_node`) in four
ways: a separate sweep for each number of GPUs, each fitted separately; the same probes in one fit; one fit to a sweep of the largest
number of GPUs and two batches on one node of the others, as tula does; and the same with a sweep of the smallest number. Evaluated are
the candidates that were not probed, and the choice: how much slower the predicted fastest is than the fastest, and how much more
expensive the predicted cheapest than the cheapest, where a node-hour costs the same for any number of used GPUs. Cost is that of the
probes relative to one job per candidate, as in replay.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
from replay_command import run_command
from replay_data import MeasuredSet, Where
from replay_score import PROBE_SECONDS, START_SECONDS

from tula_cli.models.time import step_time
from tula_cli.models.time.step_time import Observation
from tula_cli.services.search import STRATEGIES, ByNodes, choose_smallest_and_middle_probes

Grid = Mapping[int, Mapping[int, list[int]]]
"""GPUs per node -> nodes -> local batches, all ascending."""
Truth = Mapping[Where, Observation]


@dataclass(frozen=True)
class DesignScore:
    """One way to search; means over apps and clusters, as shares."""

    design: str
    sets: int
    probes: float  # per search
    cost: float  # relative to one job per candidate
    median: float  # error
    covered: float  # by the 90 % interval
    most_gpus: float  # median error at the largest number of GPUs per node
    regret_fastest: float
    regret_cheapest: float


def _select_probes(plan: Callable[[ByNodes], dict[int, set[int]]], grid: Grid, gpus: int) -> set[Where]:
    chosen = plan(grid[gpus])
    return {Where(nodes, gpus, local) for nodes, locals_ in chosen.items() for local in locals_}


def _sweep_with_two_batches(grid: Grid, swept: int) -> set[Where]:
    return set().union(
        *(
            _select_probes(STRATEGIES["sweep"] if gpus == swept else choose_smallest_and_middle_probes, grid, gpus)
            for gpus in grid
        )
    )


def _sweep_each(grid: Grid) -> set[Where]:
    return set().union(*(_select_probes(STRATEGIES["sweep"], grid, gpus) for gpus in grid))


DESIGNS: Mapping[str, tuple[Callable[[Grid], set[Where]], bool]] = {
    "a sweep each, fitted apart": (_sweep_each, False),
    "a sweep each, one fit": (_sweep_each, True),
    "a sweep of the most GPUs": (lambda grid: _sweep_with_two_batches(grid, max(grid)), True),
    "a sweep of the fewest GPUs": (lambda grid: _sweep_with_two_batches(grid, min(grid)), True),
}


def judge(sets: Iterable[MeasuredSet]) -> list[DesignScore]:
    """Evaluate each design on each app of a cluster with several numbers of GPUs per node; return the means."""
    by_app: dict[tuple[str, str], list[MeasuredSet]] = defaultdict(list)
    for each in sets:
        by_app[each.cluster, each.app].append(each)
    result: dict[str, list[DesignScore]] = defaultdict(list)
    for value in by_app.values():
        truth = _list_candidates(value)
        grid: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for place in sorted(truth):
            grid[place.gpus_per_node][place.nodes].append(place.local_batch)
        if len(grid) > 1 and all(len(nodes) > 1 for nodes in grid.values()):
            for name, (planned, together) in DESIGNS.items():
                result[name].append(_score_design(name, truth, planned(grid), together=together))
    return [_mean(rows) for rows in result.values()]


def _list_candidates(own: Iterable[MeasuredSet]) -> Truth:
    """Return the candidates on several numbers of nodes with their observations."""
    return {place: each.truth[place] for each in own if each.kind != "one node" for place in each.batches}


def _score_design(design: str, truth: Truth, probes: set[Where], *, together: bool) -> DesignScore:
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
    return DesignScore(
        design, 1, len(probes), _cost(truth, probes) / _cost(truth, set(truth)), *shares, fastest, cheapest
    )


def _regret(truth: Truth, seconds: Mapping[Where, float], *, by_node: bool) -> float:
    """Return how much longer (with `by_node`: more expensive) an epoch is at the predicted best than at the best configuration."""

    def epoch(place: Where, step: float) -> float:
        return step / (place.replicas * place.local_batch) * (place.nodes if by_node else 1)

    picked = min(seconds, key=lambda place: epoch(place, seconds[place]))
    return epoch(picked, truth[picked].seconds) / min(epoch(place, o.seconds) for place, o in truth.items()) - 1


def _cost(truth: Truth, probes: set[Where]) -> float:
    """Return the node-seconds of probes, with the time of steady steps per probe and the start of each job."""
    steps = sum(place.nodes * PROBE_SECONDS(truth[place].seconds) for place in probes)
    return steps + START_SECONDS * sum(nodes for nodes, _ in {(place.nodes, place.gpus_per_node) for place in probes})


def _mean(rows: list[DesignScore]) -> DesignScore:
    numbers = [field.name for field in fields(DesignScore) if field.name not in ("design", "sets")]
    means = {name: float(np.mean([asdict(row)[name] for row in rows])) for name in numbers}
    return DesignScore(design=rows[0].design, sets=len(rows), **means)


def format_row(row: DesignScore) -> str:
    return (
        f"{row.design}: {row.sets} sets, {row.probes:.0f} probes at {row.cost:.2f} of all, median error {row.median:.1%}"
        f" (at the most GPUs {row.most_gpus:.1%}), interval holds {row.covered:.0%}, the fastest"
        f" {row.regret_fastest:.1%} too slow, the cheapest {row.regret_cheapest:.1%} too dear"
    )


def main() -> None:
    run_command(judge, format_row, about=__doc__)


if __name__ == "__main__":
    main()
