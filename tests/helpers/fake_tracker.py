"""A tracker that records what it receives, by address; some addresses are down."""

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
    tracker_run: TrackerRun
    fails_after: list[int] = field(default_factory=list)  # successful calls of `points` before one fails half way
    received_params: dict[str, Scalar] = field(default_factory=dict)
    received_tags: dict[str, str] = field(default_factory=dict)
    received_summary: dict[str, float] = field(default_factory=dict)
    received_points: list[Point] = field(default_factory=list)
    received_files: list[str] = field(default_factory=list)
    openings: list[dict[str, Any]] = field(default_factory=list)
    state: str = ""

    def params(self, values: Mapping[str, Scalar]) -> None:
        self.received_params |= values

    def tags(self, values: Mapping[str, str]) -> None:
        self.received_tags |= values

    def points(self, points: Sequence[Point]) -> None:
        if self.fails_after and self.fails_after[0] == 0:
            self.received_points += points[: len(points) // 2]
            raise TrackerError("the tracker is down", "wait")
        self.fails_after[:1] = [self.fails_after[0] - 1] if self.fails_after else []
        self.received_points += points

    def summary(self, values: Mapping[str, float], *, samples: int) -> None:
        self.received_summary |= values

    def artifact(self, path: Path) -> None:
        self.received_files.append(path.name)

    def close(self, state: State, *, at: float) -> None:
        self.state = state


RUNS_BY_ADDRESS: defaultdict[str, dict[str, FakeRun]] = defaultdict(dict)
"""The runs at each address, by their keys in tula's run."""
UNREACHABLE_ADDRESSES: set[str] = set()
"""Addresses that do not respond."""


class FakeTracker:
    def __init__(self, *, uri: str, project: str) -> None:
        if uri in UNREACHABLE_ADDRESSES:
            raise TrackerError("the tracker is down", "wait")
        self.uri, self.project = uri, project

    def open(self, run: TrackerRun, *, known: str | None) -> FakeRun:
        there = RUNS_BY_ADDRESS[self.uri]
        assert (known is None) == (run.key not in there), "a run is opened as new only once"
        result = there.setdefault(run.key, FakeRun(f"id-{len(there)}", run))
        result.openings.append({"known": known})
        return result
