"""Which strategy is worth most, by how long the training is: python benchmarks/replay/replay_worth.py TABLE.csv... [--json]

Of each set and strategy, as shares of the best training there is: the node-seconds of probing with what the choice of the
cheapest loses against the cheapest (money), and the wall time of probing with what the choice of the fastest loses against
the fastest (time); the same where the batch is bounded, in the mean over every bound (capped). Jobs of one round run side
by side, and every round waits for the last one; a queue would count for each round once more.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np
from replay_data import MeasuredSet, load
from replay_score import STRATEGIES, Regrets, metered, score, truth

LENGTHS = (0.1, 0.5, 2.0, 10.0, 50.0)  # hours of the training where it is fastest


@dataclass(frozen=True)
class StageObjective:
    """Means over the sets, as shares of the best training."""

    hours: float
    strategy: str
    sets: int
    money: float
    capped_money: float
    time: float
    capped_time: float


def judge(sets: Sequence[MeasuredSet], lengths: Iterable[float] = LENGTHS) -> list[StageObjective]:
    return [_of(sets, hours, name) for hours in lengths for name in STRATEGIES]


def _of(sets: Sequence[MeasuredSet], hours: float, strategy: str) -> StageObjective:
    rows = [_taken(replace(each, hours=hours), strategy) for each in sets]
    money, capped_money, time, capped_time = (float(np.mean(column)) for column in zip(*rows, strict=True))
    return StageObjective(hours, strategy, len(rows), money, capped_money, time, capped_time)


def _taken(measured: MeasuredSet, strategy: str) -> tuple[float, float, float, float]:
    meter, result, true = metered(measured, STRATEGIES[strategy]), score(measured, strategy, "tula"), truth(measured)
    money = meter.cost / (3600 * min(row.cost for row in true))
    time = meter.wall / (3600 * min(row.hours for row in true))
    return (
        money + _free(result.cheapest),
        money + _capped(result.cheapest),
        time + _free(result.fastest),
        time + _capped(result.fastest),
    )


def _free(regrets: Regrets | None) -> float:
    return 0.0 if regrets is None else regrets.free  # all was measured


def _capped(regrets: Regrets | None) -> float:
    return 0.0 if regrets is None or not regrets.capped else float(np.mean(regrets.capped))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--hours", type=float, nargs="+", default=LENGTHS, help="lengths of the training where it is fastest"
    )
    arguments = parser.parse_args()
    rows = judge(load(*cast("list[str]", arguments.tables)), arguments.hours)
    if arguments.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        return
    print(f"{rows[0].sets} sets\n{'hours':>6}  {'strategy':9} {'money':>6} {'capped':>7} {'time':>6} {'capped':>7}")
    for row in rows:
        shares = f"{row.money:6.1%} {row.capped_money:7.1%} {row.time:6.1%} {row.capped_time:7.1%}"
        print(f"{row.hours:6g}  {row.strategy:9} {shares}")


if __name__ == "__main__":
    main()
