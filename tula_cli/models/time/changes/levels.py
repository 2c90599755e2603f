"""Looks at the steps of a training, and when what they take has come to another level."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.models.time.changes.change_point import MAX_VALUES, WINDOW, ChangePointTest
from tula_cli.run.records.results import StepParts

SETTLING_SAMPLES = 3
"""The first looks are not judged: caches fill, loaders start."""


@dataclass(frozen=True)
class StepSample:
    """What some steps took, and where the first of them began."""

    samples: int
    epoch: float | None  # None where nobody knows how many samples one has
    at: float  # Unix time
    parts: StepParts


@dataclass(frozen=True)
class Level:
    """A change of level: the looks before it, and those since."""

    before: Sequence[StepSample]
    after: Sequence[StepSample]


class LevelDetector:
    """Follows the looks of one start of a training."""

    def __init__(self) -> None:
        self.test = ChangePointTest()
        self.looks: deque[StepSample] = deque(maxlen=WINDOW * MAX_VALUES)  # those that the test remembers
        self.unsettled = SETTLING_SAMPLES

    def add(self, sample: StepSample) -> Level | None:
        """Take a look; return a change of level where it shows one."""
        if self.unsettled:
            self.unsettled -= 1
            return None
        self.looks.append(sample)
        change = self.test.add(sample.parts.step)
        if change is None:
            return None
        new, old = change
        samples = list(self.looks)
        self.looks = deque(samples[-new:], maxlen=self.looks.maxlen)
        return Level(before=samples[-new - old : -new], after=samples[-new:])
