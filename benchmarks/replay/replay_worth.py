"""Total cost of strategies by the length of the training: python benchmarks/replay/replay_worth.py TABLE.csv... [--json]

For each set and strategy, relative to the best training: the node-seconds of probing plus the loss of choosing the predicted cheapest
configuration (money), and the wall time of probing plus the loss of choosing the predicted fastest (time); the same for bounded
batches, as the mean over all bounds (capped). Jobs of one round run in parallel, and each round waits for its last job; a queue would
add one wait per round.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np
from replay_data import MeasuredSet, load_sets
from replay_score import STRATEGIES, Regrets, list_true_predictions, run_strategy, score_set

LENGTHS = (0.1, 0.5, 2.0, 10.0, 50.0)  # hours of the training at its fastest


@dataclass(frozen=True)
class StrategyCost:
    """Means over the sets, relative to the best training."""

    hours: float
    strategy: str
    sets: int
    money: float
    capped_money: float
    time: float
    capped_time: float


def judge(sets: Sequence[MeasuredSet], lengths: Iterable[float] = LENGTHS) -> list[StrategyCost]:
    return [_summarise(sets, hours, name) for hours in lengths for name in STRATEGIES]


def _summarise(sets: Sequence[MeasuredSet], hours: float, strategy: str) -> StrategyCost:
    rows = [_cost_of_set(replace(each, hours=hours), strategy) for each in sets]
    money, capped_money, time, capped_time = (float(np.mean(column)) for column in zip(*rows, strict=True))
    return StrategyCost(hours, strategy, len(rows), money, capped_money, time, capped_time)


def _cost_of_set(measured: MeasuredSet, strategy: str) -> tuple[float, float, float, float]:
    meter, result, true = (
        run_strategy(measured, STRATEGIES[strategy]),
        score_set(measured, strategy, "tula"),
        list_true_predictions(measured),
    )
    money = meter.cost / (3600 * min(row.cost for row in true))
    time = meter.wall / (3600 * min(row.hours for row in true))
    return (
        money + _uncapped_regret(result.cheapest),
        money + _mean_capped_regret(result.cheapest),
        time + _uncapped_regret(result.fastest),
        time + _mean_capped_regret(result.fastest),
    )


def _uncapped_regret(regrets: Regrets | None) -> float:
    return 0.0 if regrets is None else regrets.free  # all candidates were measured


def _mean_capped_regret(regrets: Regrets | None) -> float:
    return 0.0 if regrets is None or not regrets.capped else float(np.mean(regrets.capped))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--hours", type=float, nargs="+", default=LENGTHS, help="lengths of the training where it is fastest"
    )
    arguments = parser.parse_args()
    rows = judge(load_sets(*cast("list[str]", arguments.tables)), arguments.hours)
    if arguments.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        return
    print(f"{rows[0].sets} sets\n{'hours':>6}  {'strategy':9} {'money':>6} {'capped':>7} {'time':>6} {'capped':>7}")
    for row in rows:
        shares = f"{row.money:6.1%} {row.capped_money:7.1%} {row.time:6.1%} {row.capped_time:7.1%}"
        print(f"{row.hours:6g}  {row.strategy:9} {shares}")


if __name__ == "__main__":
    main()
