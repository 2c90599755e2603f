"""The interface of all trackers, those that tula includes and those of users."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Scalar = str | int | float | bool
State = Literal["running", "finished", "failed", "killed"]


@dataclass(frozen=True)
class Described:
    """One run at a tracker: tula's whole run, a probe of it, or a training of it."""

    key: str  # within tula's run: "run", "probe-n001-l000032", "train-ab12cd34"
    kind: Literal["run", "probe", "training"]
    group: str  # tula's run that it is of: its name
    started: float  # Unix time
    parent: str | None = None  # the tracker's id of the run that it is inside; None of the whole

    @property
    def name(self) -> str:
        """Return the run's name at the tracker."""
        return self.group if self.kind == "run" else f"{self.group}/{self.key}"


@dataclass(frozen=True)
class Point:
    """Numbers at one moment of a training. The step of every curve is the samples that were trained."""

    samples: int
    time: float  # Unix time
    values: Mapping[str, float]  # finite


class TrackedRun(Protocol):
    """A run that is open at a tracker. Each method may raise `TrackerError`: then the same is sent again later."""

    @property
    def id(self) -> str:
        """The tracker's own id: by it the run is opened again."""
        ...

    def params(self, values: Mapping[str, Scalar]) -> None:
        """Take settings. One that was sent before may come with another value."""
        ...

    def tags(self, values: Mapping[str, str]) -> None:
        """Take words: how attempts ended, why a configuration was chosen. A later value replaces an earlier one."""
        ...

    def points(self, points: Sequence[Point]) -> None:
        """Take points of curves, ascending by samples."""
        ...

    def summary(self, values: Mapping[str, float], *, at: Point | None) -> None:
        """Take single numbers of the whole run; a later value replaces an earlier one.

        Args:
            values: finite.
            at: the last point of the run's curves; None where it has none.
        """
        ...

    def rewind(self, samples: int) -> bool:
        """Take away the points beyond so many samples, which are trained again; return False where a tracker keeps them."""
        ...

    def artifact(self, path: Path) -> None:
        """Take a file; one of the same name is replaced."""
        ...

    def close(self, state: State, *, at: float) -> None:
        """Send what is still held back, and say how far the run is.

        Args:
            state: "running" where more is to come.
            at: Unix time of its end, so far.
        """
        ...


class Exporter(Protocol):
    """A tracker."""

    def open(self, run: Described, *, known: str | None, after: int | None) -> TrackedRun:
        """Begin a run, or open one again.

        Args:
            run: which.
            known: the tracker's id of it, where it was begun before.
            after: samples up to which its points were sent; None where none were. Some beyond that may be there already, of a process
                that was killed while it sent.

        Raises:
            TrackerError: the tracker does not answer, or refuses.
        """
        ...
