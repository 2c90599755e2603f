"""The stages, the most useful first."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from gpu.stage import Stage


@dataclass(frozen=True)
class StagePlan:
    """A stage."""

    name: str
    usual: float  # typical seconds on a GPU; the stage does not start if less of the budget is left
    limit: float  # seconds until the stage is terminated; results written before are kept
    place: str  # module of gpu.stages : function

    def function(self) -> Callable[[Stage], None]:
        """Import and return the function that measures the stage."""
        module, _, name = self.place.partition(":")
        result: Callable[[Stage], None] = getattr(importlib.import_module(f"gpu.stages.{module}"), name)
        return result


STAGES = {
    row.name: row
    for row in (
        StagePlan("env", 15, 60, "machine:env"),
        StagePlan("quickstart", 100, 220, "jobs:quickstart"),
        StagePlan("syncs", 100, 200, "steps:syncs"),
        StagePlan("timing", 160, 260, "steps:timing"),
        StagePlan("oom", 180, 290, "oom:oom"),
        StagePlan("memory", 200, 290, "memory:memory"),
        StagePlan("profile_largest", 200, 290, "memory:profile_largest"),
        StagePlan("largest", 200, 290, "memory:largest_of_all"),
        StagePlan("overhead", 200, 290, "overhead:overhead"),
        StagePlan("ranks", 160, 290, "ranks:ranks"),
        StagePlan("errors", 90, 150, "errors:errors"),
        StagePlan("resume", 110, 240, "jobs:resume"),
        StagePlan("loader", 35, 80, "machine:loader"),
        StagePlan("table1", 220, 290, "table:table1"),
    )
}
"""Typical durations: up to `timing`, measured on a fresh machine with an H100 that reads its libraries from a cold disk; the others
are estimates from partial runs.
"""
