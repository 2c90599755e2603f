"""A tracker that remembers what it was sent, by place; some places are down."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tula_cli.errors import TrackerError
from tula_cli.extras.trackers.destination import Point, Scalar, State, TrackerRun


@dataclass
class FakeRun:
    id: str
    described: TrackerRun
    fails_after: list[int] = field(default_factory=list)  # calls of `points` that go well before one fails half way
    given: dict[str, Scalar] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    curve: list[Point] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    opened: list[dict[str, Any]] = field(default_factory=list)
    state: str = ""

    def params(self, values: Mapping[str, Scalar]) -> None:
        self.given |= values

    def tags(self, values: Mapping[str, str]) -> None:
        self.words |= values

    def points(self, points: Sequence[Point]) -> None:
        if self.fails_after and self.fails_after[0] == 0:
            self.curve += points[: len(points) // 2]
            raise TrackerError("the tracker is down", "wait")
        self.fails_after[:1] = [self.fails_after[0] - 1] if self.fails_after else []
        self.curve += points

    def summary(self, values: Mapping[str, float], *, samples: int) -> None:
        self.numbers |= values

    def artifact(self, path: Path) -> None:
        self.files.append(path.name)

    def close(self, state: State, *, at: float) -> None:
        self.state = state


PLACES: defaultdict[str, dict[str, FakeRun]] = defaultdict(dict)
"""The runs at each place, by their keys in tula's run."""
DOWN: set[str] = set()
"""Places that do not answer."""


class FakeTracker:
    def __init__(self, *, uri: str, project: str) -> None:
        if uri in DOWN:
            raise TrackerError("the tracker is down", "wait")
        self.uri, self.project = uri, project

    def open(self, run: TrackerRun, *, known: str | None) -> FakeRun:
        there = PLACES[self.uri]
        assert (known is None) == (run.key not in there), "a run is begun once"
        result = there.setdefault(run.key, FakeRun(f"id-{len(there)}", run))
        result.opened.append({"known": known})
        return result
