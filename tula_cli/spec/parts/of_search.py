"""Section search: what to measure."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tula_cli.spec.kinds import NonNegativeFloat, Positive, PositiveFloat, Section
from tula_cli.spec.sections import SequenceLengths

MEMORY_MARGIN = 0.1
"""Share of a GPU's memory that a configuration is to leave free."""
LEAST_STEPS = 5
"""The fewest steps that a probe times, however long they take: fewer tell nothing of their spread."""
LOOKS = 3
"""Looks of a probe at the time of steps of their own: on data that is there, of synchronisation, of local work."""

REMOVED_STRATEGIES: Mapping[str, str] = {
    "five": "use adaptive, which costs as little and chooses better, or partial, the four corners",
    "few": "use partial, the four corners",
    "two": "use partial, the four corners",
}
"""Values of `strategy` that were removed, and what to use instead."""


class Search(Section):
    """The configurations that are measured, and how."""

    nodes: Annotated[list[Positive], Field(min_length=1)] = [2, 4, 8, 16]  # numbers of nodes
    gpus_per_node: Annotated[list[Positive], Field(min_length=1)] | None = (
        None  # to use of each, searched too; none: all that it has
    )
    min_batch: Positive = 32  # smallest global batch; candidates are min_batch x 2^k
    max_batch: Positive | None = None  # besides memory and the dataset's size
    # auto: adaptive, or sweep for a long training; sweep: all batches on the fewest nodes, the smallest elsewhere, the middle
    # and the largest on the most; partial: the four corners; full: all; adaptive: in rounds
    strategy: Literal["auto", "sweep", "partial", "full", "adaptive"] = "auto"
    sequence: SequenceLengths | None = None  # lengths of text to measure too, a few batches of each on the fewest nodes
    # a probe times steps until it has as many, they have taken min_seconds, and the standard error of their mean is below 1 %
    min_steps: Annotated[int, Field(ge=5)] = 10
    min_seconds: NonNegativeFloat = 2.0  # clocks and power have settled by then
    max_seconds: PositiveFloat = 60.0  # it ends then in any case, if it has 5; so does the warm-up
    warmup_steps: Annotated[int, Field(ge=2)] = (
        10  # at least, before those that are timed; it lasts until they are alike
    )
    max_node_hours: PositiveFloat | None = None  # the most that probes, and rehearsals of a script, may cost
    max_minutes: PositiveFloat = 20.0  # the most one profiling job may last; SLURM is asked for 2 more, to end it first and write why, and prices count them
    packing: Literal["jobs", "single"] = "jobs"  # a job a number of nodes, or one job for all

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "Search":
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(f"max_batch {self.max_batch} is below min_batch {self.min_batch}")
        if self.max_seconds < self.min_seconds:
            raise ValueError(f"max_seconds {self.max_seconds:g} is below min_seconds {self.min_seconds:g}")
        for name, sizes in (("nodes", self.nodes), ("gpus_per_node", self.gpus_per_node or [])):
            if len(set(sizes)) != len(sizes):
                raise ValueError(f"{name} names a size twice: {sizes}")
        return self

    @property
    def split_steps(self) -> int:
        """How many steps a probe takes at most for each look of its own at times, and for that at gradients."""
        return self.min_steps

    def timed_steps(self, step_time: float) -> int:
        """Return how many steps a probe is expected to time, where they are steady.

        Args:
            step_time: seconds of one.
        """
        wanted = max(self.min_steps, math.ceil(self.min_seconds / step_time))
        return max(LEAST_STEPS, min(wanted, math.ceil(self.max_seconds / step_time)))

    def probe_seconds(self, step_time: float) -> float:
        """Return what the steps of a probe are expected to take: warm-up, timed ones, and its other looks. Seconds.

        Args:
            step_time: seconds of one.
        """
        looks = LOOKS * LEAST_STEPS + self.split_steps  # steady steps are looked at for as few as tell anything
        return (self.warmup_steps + self.timed_steps(step_time) + looks) * step_time
