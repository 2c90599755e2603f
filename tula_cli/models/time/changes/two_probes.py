"""Whether two probes of one configuration took different times for a step, or the noise of their steps explains it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.models.time.noise import standard_error, trimmed_mean

ERRORS_APART = 3.0
"""Standard errors of the difference: 0.3 % of pairs that are alike are further apart by chance, where errors are normal."""
MIN_DIFFERENCE = 0.03
"""Share of the step time: two jobs of one thing on one machine differ by so much without a cause that anything records."""
TEST = (
    f"beyond noise: further apart than {ERRORS_APART:g} standard errors of the two trimmed means (of single steps, and of five blocks of"
    f" steps), and than {100 * MIN_DIFFERENCE:g} %"
)


@dataclass(frozen=True)
class StepRatio:
    """The step time of one probe over that of another."""

    before: float  # seconds, the mean without the fastest and the slowest tenth
    after: float
    error: float  # standard error of the ratio's logarithm; inf where either has fewer than five steps

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the noise of the steps does not explain the difference."""
        log_difference = abs(math.log(self.ratio))
        return log_difference > ERRORS_APART * self.error and log_difference > math.log1p(MIN_DIFFERENCE)


def compare_step_times(times_before: Sequence[float], after: Sequence[float]) -> StepRatio:
    """Compare the step times of two probes.

    Args:
        before: step times of the one, seconds.
        after: those of the other.
    """
    middles = trimmed_mean(times_before), trimmed_mean(after)
    errors = standard_error(times_before) / middles[0], standard_error(after) / middles[1]
    return StepRatio(*middles, error=math.hypot(*errors))
