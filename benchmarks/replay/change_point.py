"""How often the watch over step times errs, and how late it is: python benchmarks/replay/change_point.py [--series 60] [--json]

Series of step times are made up: Student's t with 3 degrees of freedom on the logarithm, a spike of up to ten times in fifty,
independent or with neighbours alike (autoregressive, by its coefficient). Alarms where nothing has changed, in so many looks;
looks until a lasting change of 20 % is told, median and largest, and the share of series in which it is.
"""

import argparse
import json
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tula_cli.models.time.changes import ChangePointTest

LOOKS = 500  # of a series without a change
BEFORE, AFTER = 60, 200  # looks around a change
SHIFTS = {"slower": 1.2, "faster": 1 / 1.2}


def step_times(rng: Generator, count: int, alike: float) -> NDArray[np.float64]:
    """Return times around 50 ms; `alike` is the autoregressive coefficient of their logarithms."""
    noise = 0.04 * rng.standard_t(3, count)
    for index in range(1, count):
        noise[index] = alike * noise[index - 1] + np.sqrt(1 - alike**2) * noise[index]
    spikes = np.where(rng.random(count) < 0.02, rng.uniform(2, 10, count), 1.0)
    return np.asarray(0.05 * np.exp(noise) * spikes)


def told(series: NDArray[np.float64]) -> list[int]:
    """Return at which values a change is told."""
    test = ChangePointTest()
    return [at for at, value in enumerate(series) if test.add(float(value)) is not None]


def measure(count: int) -> list[dict[str, Any]]:
    """Return a row for each kind of series."""
    rows = []
    for alike in (0.0, 0.5, 0.8):
        rng = np.random.default_rng(14)
        alarms = sum(len(told(step_times(rng, LOOKS, alike))) for _ in range(count))
        row: dict[str, Any] = {"alike": alike, "looks": count * LOOKS, "alarms": alarms}
        for name, factor in SHIFTS.items():
            delays = []
            for _ in range(count):
                series = step_times(rng, BEFORE + AFTER, alike)
                series[BEFORE:] *= factor
                delays += [at + 1 - BEFORE for at in told(series) if at >= BEFORE][:1]
            row[name] = {"told": len(delays) / count}
            if delays:
                row[name] |= {"median": float(np.median(delays)), "largest": max(delays)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.series)
    for row in rows:
        print(json.dumps(row) if arguments.json else row)


if __name__ == "__main__":
    main()
