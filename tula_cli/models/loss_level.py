"""Detect a training loss that has blown up though it is finite: it lost half of what was learned, and does not soon win it back.

A loss that jumps because data became harder (a curriculum, mixup) or the learning rate restarts keeps a part of what was learned, and
falls from there: it is waited for longer, and where it falls the training goes on from that level.

All limits are differences of losses, so that negative losses and those near zero are judged alike. The level is a median over
steps: single batches with a high loss do not move it.
"""

import math
import statistics
from dataclasses import dataclass, field

WINDOW = 16
"""Steps whose median is the level of the loss."""
MAX_LOST_SHARE, OF_LOWEST, OF_NOISE = 0.5, 0.3, 6.0
"""A level is too high if it is above the lowest one by this share of what was learned, of the lowest level itself, and by so
many standard deviations of single steps."""
WHOLE, PARTLY = 0.9, 0.25
"""A rise by less of what was learned is a partial one, whose steps count less: it is waited for so many times as long."""
RECOVERED, OF_SPREAD = 0.1, 1.5
"""A partial rise is over if the level has come down by so much of it, and by so many standard deviations of single steps."""
SOUND, FEW = 0.25, 3
"""Of that rise: up to so much of it a loss is as it was before, in so many steps."""


def compute_max_spike_steps(steps: int) -> int:
    """Return for how many steps of a training of so many a spike may last: in a short one a tenth, in a long one a hundredth."""
    return max(16, min(40, steps // 10), steps // 100)


@dataclass
class LossLevel:
    """The losses of one training, as far as they tell whether it has blown up."""

    newest: list[float] = field(default_factory=list)  # up to WINDOW
    first: float | None = None  # level of the first steps
    lowest: float = math.inf  # level
    noise: float = 0.0  # standard deviation of single steps about the lowest level
    sound: int = 0  # samples up to which the loss was as before
    lr_factor: float = 0.0  # of the step at which the loss became too high; 0: it is not
    above: float = 0  # steps since the level became too high, until it is sound; those of a partial rise count less
    highest: float = 0.0  # level since then

    def add(self, loss: float, *, samples: int, lr_factor: float) -> None:
        """Take the loss of the next step.

        Args:
            loss: of the step; one that is not finite moves no level.
            samples: trained so far, with this step.
            lr_factor: that the learning rate was multiplied by. At 1 nothing could be lowered, and no loss is judged.
        """
        if math.isfinite(loss):
            self.newest = [*self.newest, loss][-WINDOW:]
        level = self.level
        if self.first is None and level < math.inf:
            self.first = level
        if level < self.lowest:
            self.lowest = level
            self.noise = self._spread()
        limit = self._limit()
        if not self.above and max([loss, *self.newest[-FEW:]]) - self.lowest <= SOUND * limit:
            self.sound = samples
        if loss - self.lowest <= limit and not self.above:
            self.lr_factor = 0.0
        elif not self.lr_factor:
            self.lr_factor = lr_factor
        rise = level - self.lowest if self.first is not None and lr_factor > 1 else -math.inf
        self._count_steps_above(is_high=rise > (SOUND * limit if self.above else limit))

    @property
    def level(self) -> float:
        """The median of the newest steps; infinity before there are enough."""
        return statistics.median(self.newest) if len(self.newest) == WINDOW else math.inf

    def _count_steps_above(self, *, is_high: bool) -> None:
        level, first_level = self.level, self.first
        if not is_high or first_level is None:
            self.above = 0
            return
        self.highest = max(self.highest, level) if self.above else level
        is_partial = self.highest - self.lowest < WHOLE * (first_level - self.lowest)
        fall = max(RECOVERED * (self.highest - self.lowest), OF_SPREAD * self._spread())
        if is_partial and self.highest - level > fall:
            self.lowest, self.noise, self.above = level, self._spread(), 0
        else:
            self.above += PARTLY if is_partial else 1

    def _spread(self) -> float:
        """Return the standard deviation of single steps about the level, which outliers do not move."""
        level = self.level
        return 1.4826 * statistics.median(abs(value - level) for value in self.newest)

    def _limit(self) -> float:
        """Return the rise above the lowest level that is too high."""
        if self.first is None:
            return math.inf
        return max(MAX_LOST_SHARE * (self.first - self.lowest), OF_LOWEST * abs(self.lowest), OF_NOISE * self.noise)
