"""The stages in the order of their worth."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from gpu.stage import Stage


@dataclass(frozen=True)
class Row:
    """A stage."""

    name: str
    usual: float  # seconds that a card takes; with less left of a budget it does not start
    limit: float  # seconds; it is ended then, and has told what it measured so far
    place: str  # module of gpu.stages : function

    def function(self) -> Callable[[Stage], None]:
        """Return what measures it."""
        module, _, name = self.place.partition(":")
        result: Callable[[Stage], None] = getattr(importlib.import_module(f"gpu.stages.{module}"), name)
        return result


STAGES = {
    row.name: row
    for row in (
        Row("env", 15, 60, "machine:env"),
        Row("quickstart", 100, 220, "jobs:quickstart"),
        Row("syncs", 100, 200, "steps:syncs"),
        Row("timing", 160, 260, "steps:timing"),
        Row("oom", 180, 290, "oom:oom"),
        Row("memory", 200, 290, "memory:memory"),
        Row("profile_largest", 200, 290, "memory:profile_largest"),
        Row("largest", 200, 290, "memory:largest_of_all"),
        Row("overhead", 200, 290, "overhead:overhead"),
        Row("ranks", 160, 290, "ranks:ranks"),
        Row("errors", 90, 150, "errors:errors"),
        Row("resume", 110, 240, "jobs:resume"),
        Row("loader", 35, 80, "machine:loader"),
        Row("table1", 220, 290, "table:table1"),
    )
}
"""What they usually take: up to `timing`, on a fresh machine with an H100, which reads its libraries from a cold disk; the
others are estimates from what they did in a part of that time."""
