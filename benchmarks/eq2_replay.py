"""How well Eq. 2 predicts step times that no probe saw.

    python benchmarks/eq2_replay.py step_times.csv [--nodes 2,4,8,16]

The table has the columns cluster, app, nodes, gpus_per_node, local_batch, step_time_s, sync_time_s and flag (rows whose
flag is not "ok" are left out). Each (cluster, app, GPUs a node) is one set. A strategy sees its probes only and the rest
is predicted; with `full` nothing is unseen and the residual is shown instead. The error of a set is the median of
|predicted / measured - 1|; printed is the mean over sets, beside plain least squares on the same terms. Covered is the
share of the predicted step times that lie within the 90 % interval.
"""

import argparse
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tula_cli.models import steptime
from tula_cli.models.steptime import Observation
from tula_cli.search import STRATEGIES

KEYS = ["cluster", "app", "gpus_per_node"]


@dataclass(frozen=True)
class Score:
    """One set under one strategy. Shares, not per cent."""

    least_squares: float
    fitted: float
    covered: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--nodes", type=lambda text: [int(part) for part in text.split(",")], help="only these numbers")
    arguments = parser.parse_args()
    table = read(arguments.table, nodes=arguments.nodes)
    for title, rows in groups(table):
        if found := sets(rows):
            report(title, found)


def read(path: Path, *, nodes: Sequence[int] | None) -> pd.DataFrame:
    """Return one row a configuration: the median where it was measured more than once."""
    table = pd.read_csv(path)
    usable = (table.flag == "ok") & (table.gpus_per_node % 1 == 0) & (table.step_time_s > 0)
    if nodes is not None:
        usable &= table.nodes.isin(nodes)
    return (
        table[usable].groupby([*KEYS, "nodes", "local_batch"], as_index=False)[["step_time_s", "sync_time_s"]].median()
    )


def groups(table: pd.DataFrame) -> Iterable[tuple[str, pd.DataFrame]]:
    for cluster, rows in table.groupby("cluster"):
        yield f"{cluster}, one GPU a node", rows[rows.gpus_per_node == 1]
        yield f"{cluster}, all", rows
    yield "everything", table


def sets(table: pd.DataFrame) -> list[list[Observation]]:
    """Return the sets in which something is left to predict after a sweep."""
    found = [[_observation(row) for row in rows.to_dict("records")] for _, rows in table.groupby(KEYS)]
    return [seen for seen in found if len({o.nodes for o in seen}) > 1 and len(set(probed(seen, "sweep"))) < len(seen)]


def _observation(row: Mapping[Hashable, Any]) -> Observation:
    return Observation(
        nodes=int(row["nodes"]),
        gpus_per_node=int(row["gpus_per_node"]),
        local_batch=int(row["local_batch"]),
        step_times=(float(row["step_time_s"]),),
        sync_time=float(row["sync_time_s"]),
        compute_time=float(row["step_time_s"] - row["sync_time_s"]),
    )


def probed(seen: Sequence[Observation], strategy: str) -> list[Observation]:
    """Return what the strategy would have measured."""
    by_nodes: dict[int, list[int]] = {}
    for observation in sorted(seen, key=lambda o: (o.nodes, o.local_batch)):
        by_nodes.setdefault(observation.nodes, []).append(observation.local_batch)
    chosen = STRATEGIES[strategy](by_nodes)
    return [observation for observation in seen if observation.local_batch in chosen.get(observation.nodes, ())]


def score(seen: Sequence[Observation], strategy: str) -> Score:
    probes = probed(seen, strategy)
    unseen = [observation for observation in seen if observation not in probes] or seen
    fit = steptime.fit(probes, collective="ring")
    estimates = [fit.predict(o.nodes, o.gpus_per_node, o.local_batch) for o in unseen]
    within = [
        estimate.low <= observation.seconds <= estimate.high
        for estimate, observation in zip(estimates, unseen, strict=True)
        if estimate.low is not None and estimate.high is not None
    ]
    return Score(
        least_squares=error(least_squares(probes, unseen), unseen),
        fitted=error([estimate.seconds for estimate in estimates], unseen),
        covered=sum(within) / len(within) if within else None,
    )


def least_squares(probes: Sequence[Observation], unseen: Sequence[Observation]) -> Sequence[float]:
    """Fit a + c b + d (1 - 1/N) without weights, as the paper does, and predict."""

    def design(observations: Sequence[Observation]) -> np.ndarray:
        return np.array([[1.0, o.local_batch, 1 - 1 / o.nodes] for o in observations])

    coefficients = np.linalg.lstsq(design(probes), np.array([o.seconds for o in probes]), rcond=None)[0]
    return [float(value) for value in design(unseen) @ coefficients]


def error(predicted: Sequence[float], observed: Sequence[Observation]) -> float:
    return float(np.median([abs(value / o.seconds - 1) for value, o in zip(predicted, observed, strict=True)]))


def report(title: str, observed: Sequence[Sequence[Observation]]) -> None:
    print(f"{title} ({len(observed)} sets)")
    for strategy in STRATEGIES:
        scores = [score(seen, strategy) for seen in observed]
        covered = [each.covered for each in scores if each.covered is not None]
        print(
            f"  {strategy:8} Eq. 2 {np.mean([s.fitted for s in scores]):6.1%}"
            f"   least squares {np.mean([s.least_squares for s in scores]):6.1%}"
            f"   covered {np.mean(covered):4.0%} of the 90 % intervals"
        )


if __name__ == "__main__":
    main()
