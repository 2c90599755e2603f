"""Accuracy of predictions for half of the GPUs from one observed job, on published step times.

    python benchmarks/observe/observe.py step_times.csv [--json]

Each configuration with a neighbour on half of the nodes (within one node: of the GPUs) and the same batch per GPU is used as the
only observed job, and `tula_cli.models.observed` predicts the neighbour's step time. It is compared with the ring law: the same
compute time, and exposed synchronisation in proportion to (n - 1) / n. The priors of the step-time model were derived from these
and other tables; benchmarks/replay/replay_priors.py shows how little they depend on a single cluster. "fitted" is a bound for any
such prediction: a median regression with 28 coefficients fitted to these pairs themselves.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

from replay_data import MeasuredSet, Where, load_sets

from tula_cli.models.observed import MAX_ADVISED_COST_RATIO, predict_alternative_request, should_advise_request


@dataclass(frozen=True)
class Pair:
    """A configuration and its half. Seconds per step."""

    cluster: str
    nodes: int
    gpus_per_node: int
    compute: float  # of the observed step
    observed: float
    actual: float
    ring: float
    predicted: float
    low: float
    high: float
    advised: bool  # whether the report advises to use the half


@dataclass(frozen=True)
class Score:
    """Relative errors of the predicted step time, and the share of right decisions."""

    pairs: int
    ring_median: float
    ring_p90: float
    median: float
    p90: float
    covered: float  # by the 90 % interval
    ring_right: float  # share of right predictions of whether the half is at least 10 % cheaper
    right: float
    advised: float  # share of pairs for which the report advises the half
    advised_cheaper: (
        float | None
    )  # of these, the share that needs at most 90 % of the node-hours; None if there are none


def list_pairs(sets: Sequence[MeasuredSet]) -> Iterator[Pair]:
    """Yield all pairs in which synchronisation was measured separately."""
    for measured in sets:
        for place, observed in measured.truth.items():
            half = _find_half(place)
            if half not in measured.truth or not observed.compute_time > 0:
                continue
            request = predict_alternative_request([observed], observed, half.nodes, half.gpus_per_node)
            scale = request.step_seconds / request.time_ratio
            sync = observed.seconds - observed.compute_time
            ring = (half.replicas - 1) / half.replicas / ((place.replicas - 1) / place.replicas)
            yield Pair(
                cluster=measured.cluster,
                nodes=place.nodes,
                gpus_per_node=place.gpus_per_node,
                compute=observed.compute_time,
                observed=observed.seconds,
                actual=measured.truth[half].seconds,
                ring=observed.compute_time + ring * sync,
                predicted=request.step_seconds,
                low=request.time_low * scale,
                high=request.time_high * scale,
                advised=should_advise_request(request),
            )


def _find_half(place: Where) -> Where:
    if place.nodes > 1:
        return Where(place.nodes // 2 if place.nodes % 2 == 0 else 0, place.gpus_per_node, place.local_batch)
    return Where(1, place.gpus_per_node // 2 if place.gpus_per_node % 2 == 0 else 0, place.local_batch)


def score_pairs(pairs: Sequence[Pair]) -> Score:
    """Return the score of at least one pair."""
    actual, observed, ring, predicted = (
        np.array([getattr(pair, name) for pair in pairs]) for name in ("actual", "observed", "ring", "predicted")
    )
    covered = [pair.low <= pair.actual <= pair.high for pair in pairs]
    ring_error, error = abs(ring / actual - 1), abs(predicted / actual - 1)
    cheaper = actual / observed <= MAX_ADVISED_COST_RATIO
    advised = [pair.actual <= MAX_ADVISED_COST_RATIO * pair.observed for pair in pairs if pair.advised]
    return Score(
        pairs=len(pairs),
        ring_median=float(np.median(ring_error)),
        ring_p90=float(np.quantile(ring_error, 0.9)),
        median=float(np.median(error)),
        p90=float(np.quantile(error, 0.9)),
        covered=float(np.mean(covered)),
        ring_right=float(np.mean((ring / observed <= MAX_ADVISED_COST_RATIO) == cheaper)),
        right=float(np.mean((predicted / observed <= MAX_ADVISED_COST_RATIO) == cheaper)),
        advised=len(advised) / len(pairs),
        advised_cheaper=float(np.mean(advised)) if advised else None,
    )


@dataclass(frozen=True)
class FittedScore:
    """Errors and right decisions of a regression on the pairs that it is fitted to."""

    median: float
    p90: float
    right: float


def score_fitted(pairs: Sequence[Pair]) -> FittedScore:
    """Return the score of a median regression of ln(half / observed) on the quantities of the observed job."""
    from statsmodels.regression.quantile_regression import QuantReg

    nodes, gpus, compute, observed, predicted = (
        np.array([getattr(pair, name) for pair in pairs], dtype=float)
        for name in ("nodes", "gpus_per_node", "compute", "observed", "predicted")
    )
    share, ones = 1 - compute / observed, np.ones(len(pairs))
    levels = [ones, share, share**2, np.log(predicted / observed)]
    synchronisation = np.log(np.maximum(observed - compute, 1e-5))
    places = [ones, nodes == 1, nodes == 2, np.log2(nodes), np.log2(gpus), np.log(compute), synchronisation]
    columns = np.column_stack([level * place for level in levels for place in places])
    actual = np.log([pair.actual / pair.observed for pair in pairs])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # few pairs do not determine all coefficients, which does not affect the fitted values
        fitted = QuantReg(actual, columns).fit(q=0.5, max_iter=3000).fittedvalues
    error = abs(np.exp(fitted - actual) - 1)
    cheaper = np.log(MAX_ADVISED_COST_RATIO)
    return FittedScore(
        median=float(np.median(error)),
        p90=float(np.quantile(error, 0.9)),
        right=float(np.mean((fitted <= cheaper) == (actual <= cheaper))),
    )


def score_groups(pairs: Sequence[Pair]) -> dict[str, Score]:
    """Return the score of all pairs, of each cluster, and by the number of nodes."""
    groups = {
        "all": list(pairs),
        **{f"cluster {name}": [p for p in pairs if p.cluster == name] for name in sorted({p.cluster for p in pairs})},
        "within a node": [p for p in pairs if p.nodes == 1],
        "2 nodes to 1": [p for p in pairs if p.nodes == 2],
        "more nodes": [p for p in pairs if p.nodes > 2],
    }
    return {name: score_pairs(group) for name, group in groups.items() if group}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true", help="print the same numbers as JSON")
    arguments = parser.parse_args()
    try:
        pairs = list(list_pairs(load_sets(*arguments.tables)))
    except (OSError, ValueError) as error:
        sys.exit(f"observe.py: {error}")
    if not pairs:
        sys.exit("observe.py: no configuration in the tables has a neighbour with half of its GPUs")
    scores, fitted = score_groups(pairs), score_fitted(pairs)
    if arguments.json:
        print(
            json.dumps({**{name: asdict(score) for name, score in scores.items()}, "fitted": asdict(fitted)}, indent=1)
        )
        return
    print(f"{'':16} pairs   ring law: median   p90  right   tula: median   p90  right  covered  advised  cheaper")
    for name, score in scores.items():
        cheaper = "-" if score.advised_cheaper is None else f"{score.advised_cheaper:.0%}"
        print(
            f"{name:16} {score.pairs:5} {score.ring_median:18.1%} {score.ring_p90:5.0%} {score.ring_right:6.0%}"
            f" {score.median:14.1%} {score.p90:5.0%} {score.right:6.0%} {score.covered:8.0%} {score.advised:8.0%} {cheaper:>8}"
        )
    print(f"fitted to all pairs: median error {fitted.median:.1%}, p90 {fitted.p90:.0%}, right {fitted.right:.0%}")


if __name__ == "__main__":
    main()
