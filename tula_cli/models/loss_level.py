"""Detect a training loss that has blown up although it is finite: half of the progress is lost and not soon regained.

A loss that jumps because the data became harder (a curriculum, mixup) or the learning rate restarts keeps part of the
progress and falls from there: the detector waits longer for it, and if the loss falls, training continues from that
level.

All limits are differences of losses, so that negative losses and those near zero are judged equally. The level is a
median over steps, which single batches with a high loss do not move.
"""

import math
import statistics
from dataclasses import dataclass, field

LEVEL_WINDOW_STEPS = 16
"""Number of steps whose median is the level of the loss."""
MAX_LOST_SHARE, MAX_RISE_OF_LOWEST, MAX_RISE_IN_SD = 0.5, 0.3, 6.0
"""A level is too high if it exceeds the lowest one by this share of the progress, by this share of the lowest level
itself, and by this many standard deviations of single steps."""
WHOLE_RISE_SHARE, PARTIAL_RISE_WEIGHT = 0.9, 0.25
"""A rise by less than the first share of the progress is partial, and its steps count only as the second, so that the
detector waits correspondingly longer."""
RECOVERED_SHARE, RECOVERED_SD = 0.1, 1.5
"""A partial rise is over once the level has fallen by this share of it and by this many standard deviations of single
steps."""
UNCHANGED_SHARE, UNCHANGED_STEPS = 0.25, 3
"""Share of the allowed rise up to which a loss counts as unchanged, and number of newest steps for which that must
hold."""


def compute_max_spike_steps(steps: int) -> int:
    """Return how many steps a spike may last in a training of `steps` steps.

    A tenth of a short training (16 to 40 steps), or a hundredth of a long one if that is more.
    """
    return max(16, min(40, steps // 10), steps // 100)


@dataclass
class LossLevel:
    """Recent losses of one training and the state of the blow-up detection."""

    newest: list[float] = field(default_factory=list)  # at most LEVEL_WINDOW_STEPS
    first: float | None = None  # level of the first LEVEL_WINDOW_STEPS; None before
    lowest: float = math.inf  # lowest level of the loss so far
    noise: float = 0.0  # standard deviation of single losses at the lowest level
    sound: int = 0  # samples up to which the loss was normal
    lr_factor: float = 0.0  # learning-rate factor at the step where the loss became too high; 0: it is not too high
    above: float = 0  # weighted number of steps since the level became too high; steps of a partial rise count less
    highest: float = 0.0  # highest level since then

    def add_loss(self, loss: float, *, samples: int, lr_factor: float) -> None:
        """Record the loss of the next step.

        Args:
            loss: of the step; a loss that is not finite does not move the level.
            samples: trained so far, including this step.
            lr_factor: factor by which the learning rate was multiplied. At 1 there is nothing to lower, and no loss is
                judged.
        """
        if math.isfinite(loss):
            self.newest = [*self.newest, loss][-LEVEL_WINDOW_STEPS:]
        level = self.level
        if self.first is None and level < math.inf:
            self.first = level
        if level < self.lowest:
            self.lowest = level
            self.noise = self._compute_spread()
        limit = self._compute_limit()
        if not self.above and max([loss, *self.newest[-UNCHANGED_STEPS:]]) - self.lowest <= UNCHANGED_SHARE * limit:
            self.sound = samples
        if loss - self.lowest <= limit and not self.above:
            self.lr_factor = 0.0
        elif not self.lr_factor:
            self.lr_factor = lr_factor
        rise = level - self.lowest if self.first is not None and lr_factor > 1 else -math.inf
        self._count_steps_above(is_high=rise > (UNCHANGED_SHARE * limit if self.above else limit))

    @property
    def level(self) -> float:
        """Median of the newest steps; infinity before there are enough."""
        return statistics.median(self.newest) if len(self.newest) == LEVEL_WINDOW_STEPS else math.inf

    def _count_steps_above(self, *, is_high: bool) -> None:
        level, first_level = self.level, self.first
        if not is_high or first_level is None:
            self.above = 0
            return
        self.highest = max(self.highest, level) if self.above else level
        is_partial = self.highest - self.lowest < WHOLE_RISE_SHARE * (first_level - self.lowest)
        fall = max(RECOVERED_SHARE * (self.highest - self.lowest), RECOVERED_SD * self._compute_spread())
        if is_partial and self.highest - level > fall:
            self.lowest, self.noise, self.above = level, self._compute_spread(), 0
        else:
            self.above += PARTIAL_RISE_WEIGHT if is_partial else 1

    def _compute_spread(self) -> float:
        """Return the standard deviation of single steps about the level, robust to outliers."""
        level = self.level
        return 1.4826 * statistics.median(abs(value - level) for value in self.newest)

    def _compute_limit(self) -> float:
        """Return the rise above the lowest level from which the loss is too high."""
        if self.first is None:
            return math.inf
        return max(
            MAX_LOST_SHARE * (self.first - self.lowest),
            MAX_RISE_OF_LOWEST * abs(self.lowest),
            MAX_RISE_IN_SD * self.noise,
        )
