"""How well one cluster is foreseen from another's measurements: python benchmarks/replay/replay_what_if.py TABLE.csv... [--json]

`tula recommend --what-if` judged where the answer is known: an application on cluster A is fitted, the ratios of compute and
of the network are laid over the fit, and the steps on two and more nodes of cluster B are predicted. The ratios are what a user
would have:

- compute, "own": one step of the same application on one GPU of each cluster, at the middle of the batches that both measured;
- compute, "other": the same of one other application, each in turn;
- network: the exposed synchronisation of one other application, one GPU a node, at its smallest common batch, as the geometric
  mean over the numbers of nodes that both measured; each application in turn.

Beside it stands what is foreseen of B with no change at all (as if it were A), and the fit's own single values scaled without
any doubt. Nodes beyond the most that A measured are judged apart: there the growth with the nodes is foreseen as well.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np
from numpy.typing import NDArray
from replay_command import run
from replay_data import MeasuredSet, Where

from tula_cli.models.time import steptime
from tula_cli.models.time.steptime import StepTimeFit
from tula_cli.models.time.what_if import Change, changed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """The steps of an application on one cluster foreseen from another's, over all ratios of the network."""

    known: str  # cluster that was measured
    foreseen: str
    app: str
    compute: str  # what its ratio is from: "own" or "other"
    further: bool  # on more nodes than the known cluster measured
    configurations: int
    median: float
    covered: float  # by the 90 % interval
    width: float  # median of its upper end over its lower one
    unchanged: float  # median error as if it were the known cluster


@dataclass(frozen=True)
class Ratios:
    """Of one application between two clusters, as measured at one place each."""

    compute: float  # times as fast on the cluster that is foreseen
    network: float


def ratios(known: MeasuredSet, foreseen: MeasuredSet) -> Ratios:
    """Return how the same application does on two clusters, with one GPU a node."""
    common = sorted(known.truth.keys() & foreseen.truth.keys())
    alone = [place for place in common if place.nodes == 1]
    middle = alone[len(alone) // 2]
    apart = [min(place for place in common if place.nodes == n) for n in sorted({p.nodes for p in common}) if n > 1]
    syncs = [geometric_mean(_exposed(each, place) for place in apart) for each in (known, foreseen)]
    return Ratios(known.truth[middle].seconds / foreseen.truth[middle].seconds, syncs[0] / syncs[1])


def _exposed(each: MeasuredSet, place: Where) -> float:
    seen = each.truth[place]
    return max(seen.seconds - seen.compute_time, 1e-6)


@functools.cache
def fitted(each: MeasuredSet) -> StepTimeFit:
    """Return the fit to the candidates of a set."""
    seen = [each.truth[place] for place in each.batches]
    return steptime.fit_step_time(seen, collective=each.collective)


def judge(sets: Iterable[MeasuredSet]) -> list[Judged]:
    """Judge every ordered pair of clusters."""
    by_cluster: dict[str, list[MeasuredSet]] = defaultdict(list)
    for each in sets:
        if each.gpus_per_node is not None:
            by_cluster[each.cluster].append(each)
    found = []
    for known, foreseen in itertools.permutations(sorted(by_cluster), 2):
        rows = list(_rows(by_cluster[known], by_cluster[foreseen]))
        for key in sorted({row[0] for row in rows}):
            numbers = np.array([row[1] for row in rows if row[0] == key])
            off, held, width, unchanged = numbers.T
            found.append(
                Judged(
                    known, foreseen, *key, len(numbers), float(np.median(off)), float(held.mean()),
                    float(np.median(width)), float(np.median(unchanged)),
                )
            )  # fmt: skip
    return found


Row = tuple[tuple[str, str, bool], tuple[float, float, float, float]]


def _rows(known: Sequence[MeasuredSet], foreseen: Sequence[MeasuredSet]) -> Iterator[Row]:
    by_app = [{each.app: each for each in sets if each.gpus_per_node == 1} for sets in (known, foreseen)]
    own = {app: ratios(by_app[0][app], by_app[1][app]) for app in by_app[0].keys() & by_app[1].keys()}
    for one, other in itertools.product(known, foreseen):
        if one.app == other.app and one.gpus_per_node == other.gpus_per_node and one.app in own:
            fit = fitted(one)
            for app in own.keys() - {one.app}:
                for name, compute in (("own", own[one.app].compute), ("other", own[app].compute)):
                    yield from _judged(fit, Change(compute, own[app].network), name, one, other)


def _judged(fit: StepTimeFit, change: Change, name: str, one: MeasuredSet, other: MeasuredSet) -> Iterator[Row]:
    most = max(place.nodes for place in one.truth)
    places = [
        place
        for place in other.truth
        if place.nodes > 1 and not fit.refusal(place.nodes, place.gpus_per_node, place.local_batch)
    ]
    where = [[getattr(place, name) for place in places] for name in ("nodes", "gpus_per_node", "local_batch")]
    seconds, low, high = changed(fit, change).predict_all(*where)
    before = fit.predict_all(*where)[0]
    for place, middle, least, largest, unchanged in zip(places, seconds, low, high, before, strict=True):
        truth = other.truth[place].seconds
        numbers = abs(middle / truth - 1), float(least <= truth <= largest), largest / least, abs(unchanged / truth - 1)
        yield (one.app, name, place.nodes > most), numbers


def line(row: Judged) -> str:
    beyond = ", more nodes than measured" * row.further
    return (
        f"{row.app} on {row.foreseen} from {row.known}, compute by {row.compute}{beyond}: {row.configurations} configurations, median"
        f" error {row.median:.1%} (unchanged {row.unchanged:.1%}), interval holds {row.covered:.0%}, its ends"
        f" {row.width:.1f} times apart"
    )


def main() -> None:
    run(judge, line, about=__doc__)


if __name__ == "__main__":
    main()
