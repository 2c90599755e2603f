"""The stages in the order of their worth."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from gpu.stage import Stage


@dataclass(frozen=True)
class Row:
    """A stage."""

    name: str
    limit: float  # seconds; it is ended then, and has told what it measured so far
    place: str  # module of gpu.stages : function

    def function(self) -> Callable[[Stage], None]:
        """Return what measures it."""
        module, _, name = self.place.partition(":")
        found: Callable[[Stage], None] = getattr(importlib.import_module(f"gpu.stages.{module}"), name)
        return found


STAGES = {
    row.name: row
    for row in (
        Row("env", 20, "machine:env"),
        Row("quickstart", 150, "jobs:quickstart"),
        Row("syncs", 60, "steps:syncs"),
        Row("timing", 120, "steps:timing"),
        Row("oom", 150, "oom:oom"),
        Row("memory", 180, "memory:memory"),
        Row("largest", 200, "memory:largest_of_all"),
        Row("overhead", 240, "overhead:overhead"),
        Row("ranks", 150, "ranks:ranks"),
        Row("errors", 60, "errors:errors"),
        Row("resume", 70, "jobs:resume"),
        Row("loader", 40, "machine:loader"),
        Row("table1", 270, "table:table1"),
    )
}
