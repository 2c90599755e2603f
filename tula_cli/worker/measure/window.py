"""How long a probe warms up, and how long it times steps: rules over the step times so far, asked at the ends of blocks.

Ranks have to stop at the same step, so one of them decides for all; between two blocks, for a step that waits for an
answer is not the step of a training. Hence a rule says how many steps come until it is asked again.
"""

import math
import statistics
from collections.abc import Sequence

from tula_cli.models.time.noise import standard_error, trimmed_mean
from tula_cli.spec.parts.of_search import LEAST_STEPS, Search

PRECISION = 0.01
"""Standard error of the mean, as a share of it, at which a window ends: jobs differ by more when they start again."""
UNTIMED_STEPS = 2
"""Steps that begin a probe: the first, which compiles and chooses kernels, and one that refreshes factors."""
MAX_RELATIVE_DIFFERENCE = 0.1
"""Share by which the medians of successive steps may differ once they are warm."""


def count_warm_up_steps(times: Sequence[float], search: Search, *, prefetched: int = 0) -> int:
    """Return how many steps come before the next look; 0: the warm-up is over.

    It is when the newest steps are like those before them, both by their medians. However long the first ones took, they
    bound nothing: compiling is what a warm-up is for.

    Args:
        times: seconds of the steps after the `UNTIMED_STEPS`.
        search: what bounds it.
        ahead: steps whose data the loader may have made while the first ones compiled; only later ones wait for it.
    """
    missing = max(search.warmup_steps - UNTIMED_STEPS, prefetched and prefetched + LEAST_STEPS) - len(times)
    if sum(times) >= search.max_seconds:
        return 0
    if missing > 0:
        return min(LEAST_STEPS, missing)
    few = min(LEAST_STEPS, len(times) // 2)
    if few < 2:
        return LEAST_STEPS
    newest, previous = statistics.median(times[-few:]), statistics.median(times[-2 * few : -few])
    return 0 if abs(newest - previous) <= MAX_RELATIVE_DIFFERENCE * previous else LEAST_STEPS


def count_steps_for_median(times: Sequence[float], search: Search) -> int:
    """Return how many steps tell a median to `PRECISION`, by the spread of those that were timed; never fewer than those
    that tell of a spread, or more than search.min_steps.

    The variance of a median is pi/2 that of a mean, where values are normal.
    """
    error = standard_error(times) / (PRECISION * trimmed_mean(times))
    return min(search.split_steps, max(LEAST_STEPS, math.ceil(min(math.pi / 2 * len(times) * error**2, 1e9))))


def count_steps_to_time(times: Sequence[float], search: Search) -> int:
    """Return how many steps come before the next look; 0: the window is over.

    Blocks grow with what there is, so that looks are few.

    Args:
        times: seconds of the timed steps.
        search: what bounds it.
    """
    timed, seconds = len(times), sum(times)
    if timed < LEAST_STEPS:
        return LEAST_STEPS - timed
    if seconds >= search.max_seconds:
        return 0
    mean = seconds / timed
    missing = max(search.min_steps - timed, math.ceil((search.min_seconds - seconds) / mean))
    if missing <= 0:
        if standard_error(times) <= PRECISION * trimmed_mean(times):
            return 0
        missing = max(LEAST_STEPS, timed // 2)
    return min(missing, math.ceil((search.max_seconds - seconds) / mean))
