"""Prediction errors on more nodes than were measured: python benchmarks/replay/replay_further.py TABLE.csv... [--json]

In each set, every candidate on the smaller sizes is measured, and all on larger ones are predicted. By the ratio of sizes (2, 4, 8)
to the largest measured size: the median error, the coverage of the 90 % interval, and the median width of that interval (upper end
divided by lower end).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from replay_command import run_command
from replay_data import MeasuredSet

from tula_cli.models.time import step_time


@dataclass(frozen=True)
class FurtherErrors:
    """Configurations at one ratio to the largest measured size."""

    cluster: str
    most: int  # largest measured size
    times: int
    configurations: int
    median: float
    covered: float
    width: float


def judge(sets: Iterable[MeasuredSet], most: Sequence[int] = (2, 4)) -> list[FurtherErrors]:
    result: dict[tuple[str, int, int], list[tuple[float, bool, float]]] = defaultdict(list)
    for each in sets:
        for largest in most:
            for times, row in _rows(each, largest):
                result[each.cluster, largest, times].append(row)
    return [
        FurtherErrors(
            cluster, largest, times, len(rows), *map(float, (np.median(off), np.mean(inside), np.median(width)))
        )
        for (cluster, largest, times), rows in sorted(result.items())
        for off, inside, width in [zip(*rows, strict=True)]
    ]


def _rows(each: MeasuredSet, largest: int) -> Iterable[tuple[int, tuple[float, bool, float]]]:
    size = each.offer.size
    seen = [o for place, o in each.truth.items() if size(place) <= largest and place in each.batches]
    if len({(o.nodes, o.gpus_per_node) for o in seen}) < 2:
        return
    fit = step_time.fit_step_time(seen, collective=each.collective)
    for place, o in each.truth.items():
        where = (place.nodes, place.gpus_per_node, place.local_batch)
        if size(place) > largest and not fit.describe_why_unpredictable(*where):
            result = fit.predict(*where)
            assert result.low is not None and result.high is not None
            times = 2 ** math.ceil(math.log2(size(place) / largest))
            yield (
                times,
                (abs(result.seconds / o.seconds - 1), result.low <= o.seconds <= result.high, result.high / result.low),
            )


def format_row(row: FurtherErrors) -> str:
    return (
        f"{row.cluster}, measured up to {row.most}, {row.times} times as many: {row.configurations} configurations,"
        f" median error {row.median:.1%}, interval holds {row.covered:.0%}, its ends {row.width:.1f} times apart"
    )


def main() -> None:
    run_command(judge, format_row, about=__doc__)


if __name__ == "__main__":
    main()
