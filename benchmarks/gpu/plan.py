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
        Row("quickstart", 90, 200, "jobs:quickstart"),
        Row("syncs", 60, 150, "steps:syncs"),
        Row("timing", 100, 200, "steps:timing"),
        Row("oom", 90, 200, "oom:oom"),
        Row("memory", 130, 280, "memory:memory"),
        Row("largest", 200, 290, "memory:largest_of_all"),
        Row("overhead", 200, 290, "overhead:overhead"),
        Row("ranks", 100, 240, "ranks:ranks"),
        Row("errors", 50, 120, "errors:errors"),
        Row("resume", 110, 240, "jobs:resume"),
        Row("loader", 35, 80, "machine:loader"),
        Row("table1", 220, 290, "table:table1"),
    )
}
"""What they usually take is a guess for a large card, as long as none has run them."""
