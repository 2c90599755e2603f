"""When the factors are refreshed (line 10 of Algorithm 1): at the last step of each epoch, or every k steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, Literal

Refresh = Literal["epoch"] | int


@dataclass
class Schedule:
    """Where the training stands between refreshes: an epoch of `steps` steps, or `every` steps counted through."""

    every: int | None
    steps: int | None
    usual: int | None  # steps in an epoch of which nothing else was said; None: as in the epoch before
    taken: int = 0
    refreshed: bool = False
    owed: bool = False

    @classmethod
    def of(cls, refresh: Refresh, steps: int | None) -> Schedule:
        """Start at the first step.

        Args:
            refresh: "epoch" or a number of steps.
            steps: optimizer steps in each epoch, where known; for "epoch" only.

        Raises:
            ValueError: one of them is below 1, or `refresh` is another word or no whole number.
        """
        if refresh == "epoch":
            if steps is not None and steps < 1:
                raise ValueError(f"steps_per_epoch must be at least 1, got {steps}")
            return cls(every=None, steps=steps, usual=steps)
        if not isinstance(refresh, Integral) or isinstance(refresh, bool) or refresh < 1:
            raise ValueError(f'refresh must be "epoch" or a whole number of steps of at least 1, got {refresh!r}')
        return cls(every=int(refresh), steps=int(refresh), usual=int(refresh))

    @property
    def known(self) -> bool:
        """Whether the length of the epoch is known."""
        return self.steps is not None

    @property
    def due(self) -> bool:
        """Whether the coming step refreshes the factors.

        Raises:
            RuntimeError: the length of the epoch is not known.
        """
        if self.steps is None:
            raise RuntimeError(
                'refresh="epoch" needs the length of the epoch: call start_epoch(steps), or give steps_per_epoch'
            )
        return self.owed or self.taken + 1 == self.steps

    def advance(self, *, refreshed: bool) -> None:
        """Count a step."""
        self.taken += 1
        self.refreshed |= refreshed
        self.owed &= not refreshed
        if self.taken == self.steps:
            self._close()

    def start(self, steps: int, *, rest: bool | None = None) -> None:
        """Begin an epoch of so many steps, or what is left of one after a resume; None: whichever the count fits."""
        if self.every is not None:
            return
        if rest is None:
            rest = self.taken + steps == self.steps
        if rest and self.taken:
            return  # the count goes on, and steps that GradScaler skipped before the resume stay skipped
        if self.taken:
            # GradScaler skipped steps, so the count never came to the epoch's last
            self._close()
        self.steps = steps

    def owe(self) -> None:
        """Make the coming step refresh, and every one after it until one has."""
        self.owed = True

    def restart(self) -> None:
        """Forget the place in the epoch."""
        self.taken, self.refreshed, self.owed = 0, False, False

    def position(self) -> dict[str, int | bool | None]:
        """Return what a checkpoint keeps."""
        return {name: value for name, value in asdict(self).items() if name != "usual"}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from a `position()`; from the start where that counted otherwise."""
        self.restart()
        if saved["every"] == self.every:
            self.steps, self.taken = saved["steps"], saved["taken"]
            self.refreshed, self.owed = saved["refreshed"], saved["owed"]

    def _close(self) -> None:
        self.owed |= not self.refreshed
        self.taken, self.refreshed = 0, False
        self.steps = self.usual or self.steps
