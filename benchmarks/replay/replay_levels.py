"""Prediction errors on nodes with several GPUs from one node and from nodes with one GPU: python benchmarks/replay/replay_levels.py TABLE.csv... [--json]

Measured are all candidates on one node with 1, 2, 4 ... GPUs, and on several nodes with one GPU each; all other numbers of nodes and
GPUs are predicted. For comparison: the times of the same nodes with one GPU each, which would be the prediction without measurements
within a node. The second result measures one more configuration, the smallest batch on two nodes with all GPUs, and predicts the rest.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from replay_command import run_command
from replay_data import MeasuredSet, Where

from tula_cli.models.time import step_time
from tula_cli.models.time.step_time import Observation


@dataclass(frozen=True)
class LevelScore:
    """Several nodes with several GPUs, for one app on one cluster."""

    cluster: str
    app: str
    corner: bool  # whether one of them is measured
    configurations: int
    median: float
    covered: float  # by the 90 % interval
    width: float  # median of upper end divided by lower end
    one_gpu: float  # median error of using the time with one GPU per node


def judge(sets: Iterable[MeasuredSet]) -> list[LevelScore]:
    """Evaluate each app on each cluster that has one node with several GPUs and several nodes with one."""
    by_app: dict[tuple[str, str], list[MeasuredSet]] = defaultdict(list)
    for each in sets:
        by_app[each.cluster, each.app].append(each)
    return [row for key, value in sorted(by_app.items()) for row in _rows(*key, value)]


def _rows(cluster: str, app: str, sets: list[MeasuredSet]) -> Iterator[LevelScore]:
    truth = {place: o for each in sets for place, o in each.truth.items()}
    apart = [place for each in sets for place in each.batches if each.kind != "several GPUs a node"]
    seen = {place: truth[place] for place in apart if place.nodes == 1 or place.gpus_per_node == 1}
    wanted = sorted(place for place in truth if place.nodes > 1 and place.gpus_per_node > 1)
    if not wanted or {place.nodes > 1 for place in seen} != {True, False}:
        return
    most = max(place.gpus_per_node for place in wanted)
    corner = next(place for place in wanted if place.gpus_per_node == most)
    yield _score(cluster, app, seen, {place: truth[place] for place in wanted}, corner=False)
    remaining = {place: truth[place] for place in wanted if place != corner}
    yield _score(cluster, app, {**seen, corner: truth[corner]}, remaining, corner=True)


def _score(
    cluster: str, app: str, seen: dict[Where, Observation], wanted: dict[Where, Observation], *, corner: bool
) -> LevelScore:
    fit = step_time.fit_step_time(list(seen.values()), collective="ring")
    places = [
        place
        for place in wanted
        if not fit.describe_why_unpredictable(place.nodes, place.gpus_per_node, place.local_batch)
    ]
    nodes, gpus, batches = ([getattr(at, name) for at in places] for name in ("nodes", "gpus_per_node", "local_batch"))
    seconds = np.array([wanted[place].seconds for place in places])
    steps = fit.predict_step_times(nodes, gpus, batches)
    alone = fit.predict_step_times(nodes, [1] * len(nodes), batches).seconds
    return LevelScore(
        cluster, app, corner, len(places), float(np.median(np.abs(steps.seconds / seconds - 1))),
        float(np.mean((steps.low <= seconds) & (seconds <= steps.high))), float(np.median(steps.high / steps.low)),
        float(np.median(np.abs(alone / seconds - 1))),
    )  # fmt: skip


def format_row(row: LevelScore) -> str:
    return (
        f"{row.app} on {row.cluster}{', one of them measured' * row.corner}: {row.configurations} configurations, median error"
        f" {row.median:.1%} (with one GPU a node {row.one_gpu:.1%}), interval holds {row.covered:.0%}, its ends"
        f" {row.width:.1f} times apart"
    )


def main() -> None:
    run_command(judge, format_row, about=__doc__)


if __name__ == "__main__":
    main()
