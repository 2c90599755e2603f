"""Looks at the steps of a training, and when what they take has come to another level."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tula_cli.models.time.changes.change_point import MOST, WINDOW, ChangePointTest
from tula_cli.run.records.results import StepParts

SETTLING = 3
"""The first looks are not judged: caches fill, loaders start."""


@dataclass(frozen=True)
class Look:
    """What some steps took, and where the first of them began."""

    samples: int
    epoch: float | None  # None where nobody knows how many samples one has
    at: float  # Unix time
    parts: StepParts


@dataclass(frozen=True)
class Level:
    """A change of level: the looks before it, and those since."""

    before: Sequence[Look]
    after: Sequence[Look]


class Levels:
    """Follows the looks of one start of a training."""

    def __init__(self) -> None:
        self.test = ChangePointTest()
        self.looks: deque[Look] = deque(maxlen=WINDOW * MOST)  # those that the test remembers
        self.unsettled = SETTLING

    def add(self, look: Look) -> Level | None:
        """Take a look; return a change of level where it shows one."""
        if self.unsettled:
            self.unsettled -= 1
            return None
        self.looks.append(look)
        found = self.test.add(look.parts.step)
        if found is None:
            return None
        new, old = found
        looks = list(self.looks)
        self.looks = deque(looks[-new:], maxlen=self.looks.maxlen)
        return Level(before=looks[-new - old : -new], after=looks[-new:])
