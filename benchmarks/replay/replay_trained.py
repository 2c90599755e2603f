"""Effect of a training's measured step time on predictions of its neighbours: python benchmarks/replay/replay_trained.py TABLE.csv... [--json]

Each strategy sees only its probes of a set. Under each cap on the global batch, the fastest candidate is chosen; if it was not
measured, it is trained: its measured step time becomes an observation with the noise of a training. Evaluated are the neighbouring
candidates (half and twice the batch or the size) that were not probed: median error, coverage of the 90 % interval, and its median
width (upper end divided by lower end), before and after.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from replay_command import run_command
from replay_data import MeasuredSet, Where

from tula_cli.models.time import step_time
from tula_cli.models.time.noise import Floats
from tula_cli.models.time.step_time import DEFAULT_REPEAT_SD, Observation, StepTimeFit
from tula_cli.services.search import STRATEGIES

JUDGED_STRATEGIES = ("partial", "sweep")
Row = tuple[float, bool, float]
"""Error, whether the interval contains the measured time, width of the interval."""


@dataclass(frozen=True)
class NeighbourErrors:
    """Neighbours of trained configurations, before and after the training."""

    strategy: str
    trainings: int
    neighbours: int
    median: tuple[float, float]
    covered: tuple[float, float]
    width: tuple[float, float]


def judge(sets: Iterable[MeasuredSet]) -> list[NeighbourErrors]:
    known = list(sets)
    results = []
    for name in JUDGED_STRATEGIES:
        trained = [rows for each in known for rows in _trainings(each, name)]
        before, after = (np.array([row[at] for rows in trained for row in rows]) for at in (0, 1))
        if len(before):
            off, kept, width = (tuple(rows[:, at] for rows in (before, after)) for at in range(3))
            results.append(
                NeighbourErrors(
                    name,
                    len(trained),
                    len(before),
                    _summarise_both(np.median, off),
                    _summarise_both(np.mean, kept),
                    _summarise_both(np.median, width),
                )
            )
    return results


def _summarise_both(of: Callable[[Floats], np.floating[Any]], told: Iterable[Floats]) -> tuple[float, float]:
    before, after = told
    return float(of(before)), float(of(after))


def _trainings(each: MeasuredSet, strategy: str) -> Iterator[list[tuple[Row, Row]]]:
    offer = each.offer
    chosen = STRATEGIES[strategy](offer.by_size)
    seen = [offer.at(size, local_batch) for size, batches in chosen.items() for local_batch in batches]
    probes = [each.truth[place] for place in seen]
    fit = step_time.fit_step_time(probes, collective=each.collective)
    rates = {place: _predict(fit, place)[0] / place.replicas / place.local_batch for place in offer.candidates}
    best = {min((p for p in rates if each.batches[p] <= cap), key=lambda p: rates[p]) for cap in each.batches.values()}
    for place in sorted(best - set(seen)):
        training = replace(each.truth[place], compute_time=math.nan, doubt=DEFAULT_REPEAT_SD)
        later = step_time.fit_step_time([*probes, training], collective=each.collective)
        neighbour = [other for other in offer.candidates if other not in seen and _are_neighbours(place, other)]
        if neighbour:
            yield [(_make_row(fit, each.truth[other]), _make_row(later, each.truth[other])) for other in neighbour]


def _are_neighbours(one: Where, other: Where) -> bool:
    """Return whether two configurations differ by one step of the batch or of the size."""
    size, batch = (
        abs(math.log2(a / b)) for a, b in ((one.replicas, other.replicas), (one.local_batch, other.local_batch))
    )
    return (size < 0.5 and 0.5 < batch < 1.5) or (batch < 0.5 and 0.5 < size < 1.5)


def _predict(fit: StepTimeFit, place: Where) -> Sequence[float]:
    steps = fit.predict_step_times([place.nodes], [place.gpus_per_node], [place.local_batch])
    return [float(values[0]) for values in (steps.seconds, steps.low, steps.high)]


def _make_row(fit: StepTimeFit, truth: Observation) -> Row:
    seconds, low, high = _predict(fit, Where(truth.nodes, truth.gpus_per_node, truth.local_batch))
    return abs(seconds / truth.seconds - 1), low <= truth.seconds <= high, high / low


def format_row(row: NeighbourErrors) -> str:
    (off, later_off), (kept, later_held), (width, later_width) = row.median, row.covered, row.width
    return (
        f"{row.strategy}: {row.trainings} trainings, {row.neighbours} neighbours that were not probed: median error"
        f" {off:.1%}, after it {later_off:.1%}; interval holds {kept:.0%}, then {later_held:.0%}; its ends {width:.2f}"
        f" times apart, then {later_width:.2f}"
    )


def main() -> None:
    run_command(judge, format_row, about=__doc__)


if __name__ == "__main__":
    main()
