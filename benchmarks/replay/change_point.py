"""Error rate and delay of the detection of changed step times: python benchmarks/replay/change_point.py [--series 60] [--json]

Series of step times are simulated: Student's t with 3 degrees of freedom on the logarithm, with a spike of up to ten times in one of
fifty values, independent or autoregressive (by the coefficient). Reported are false alarms in series without a change by number of
polls; polls until a lasting change of 20 % is detected, median and maximum; and the share of series in which it is detected.
"""

import argparse
import json
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tula_cli.models.time.changes import ChangePointTest

POLLS = 500  # number of polls of a series without a change
POLLS_BEFORE, POLLS_AFTER = 60, 200  # number of polls before and after a change
SHIFTS = {"slower": 1.2, "faster": 1 / 1.2}


def simulate_step_times(rng: Generator, count: int, alike: float) -> NDArray[np.float64]:
    """Return times around 50 ms; `alike` is the autoregressive coefficient of their logarithms."""
    noise = 0.04 * rng.standard_t(3, count)
    for index in range(1, count):
        noise[index] = alike * noise[index - 1] + np.sqrt(1 - alike**2) * noise[index]
    spikes = np.where(rng.random(count) < 0.02, rng.uniform(2, 10, count), 1.0)
    return np.asarray(0.05 * np.exp(noise) * spikes)


def detect_changes(series: NDArray[np.float64]) -> list[int]:
    """Return the indices at which a change is detected."""
    test = ChangePointTest()
    return [at for at, value in enumerate(series) if test.add_value(float(value)) is not None]


def measure(count: int) -> list[dict[str, Any]]:
    """Return a row for each kind of series."""
    rows = []
    for alike in (0.0, 0.5, 0.8):
        rng = np.random.default_rng(14)
        alarms = sum(len(detect_changes(simulate_step_times(rng, POLLS, alike))) for _ in range(count))
        row: dict[str, Any] = {"alike": alike, "looks": count * POLLS, "alarms": alarms}
        for name, factor in SHIFTS.items():
            delays = []
            for _ in range(count):
                series = simulate_step_times(rng, POLLS_BEFORE + POLLS_AFTER, alike)
                series[POLLS_BEFORE:] *= factor
                delays += [at + 1 - POLLS_BEFORE for at in detect_changes(series) if at >= POLLS_BEFORE][:1]
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
