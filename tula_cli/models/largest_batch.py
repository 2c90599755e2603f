"""The search for the largest local batch that fits: the estimate, one probe there, then bisection between fit and failure.

Every trial is a probe in new processes. Its result, measured or out of memory, narrows the bracket and corrects the
memory model that proposes the next trial.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tula_cli.models.memory import MemoryModel, fit_memory_model
from tula_cli.run.records.probes import Footprint, Measured, OutOfMemory, Result
from tula_cli.run.records.tasks import BatchBounds
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN

BRACKET_RESOLUTION = 32
"""The search ends once the bracket is at most this part of the batch wide, as two jobs differ by no less."""
MIN_TRIAL_GROWTH = 1.125
"""Least factor to the next trial while every batch has fitted."""


@dataclass(frozen=True)
class BatchBracket:
    """The largest local batch known to fit on one number of nodes, and the smallest above it known not to fit."""

    bounds: BatchBounds
    step: int  # accumulation steps, of which local batches are multiples
    fitting: int  # largest local batch that fitted; 0 if none has
    failing: int | None  # smallest local batch that did not fit; None if all trials fitted
    model: MemoryModel | None  # memory model of one rank; None without an estimate and measurements
    capacity: int | None  # bytes of one GPU; None if unknown

    @classmethod
    def from_results(cls, spec: JobSpec, nodes: int, bounds: BatchBounds, results: Iterable[Result]) -> "BatchBracket":
        """Return the bracket after the results of probes; those on other numbers of nodes do not count."""
        here = [result for result in results if result.nodes == nodes]
        measured = [result for result in here if isinstance(result, Measured)]
        fitting = max((probe.local_batch for probe in measured), default=0)
        too_large = [r.local_batch for r in here if isinstance(r, OutOfMemory) and r.local_batch > fitting]
        points: list[Measured | Footprint] = [*measured, *bounds.footprints]
        model = None
        if points:
            accumulate, sharded = spec.train.accumulate, spec.train.is_sharded
            model = fit_memory_model(points, accumulate=accumulate, sharded=sharded)
            model = model.adapt_to_ranks(nodes * spec.cluster.gpus_per_node)
        capacities = [probe.capacity for probe in measured if probe.capacity is not None]
        return cls(
            bounds=bounds,
            step=spec.train.accumulate,
            fitting=fitting,
            failing=min(too_large, default=None),
            model=model,
            capacity=min(capacities, default=bounds.capacity),
        )

    def choose_next_trial(self) -> int | None:
        """Return the next local batch to try, or None if the largest is known.

        Without a known capacity nothing is tried beyond the first batch that fits.
        """
        if self.fitting >= self.bounds.limit or self.failing == self.step:
            return None
        if self.fitting and self.capacity is None:
            return None
        if self.failing is None:
            return self._choose_trial_above()
        if not self.fitting:
            return self._round_batch_down(self.failing / 2, self._compute_unit(self.failing / 2))
        width, unit = self.failing - self.fitting, self._compute_unit(self.fitting)
        if width <= unit:
            return None
        # Near the estimate, but far enough from both ends that the bracket shrinks by a quarter at least; in the middle
        # if the bracket contradicts the estimate.
        estimate = self.estimate_largest_batch(margin=0.0)
        if estimate is None or not self.fitting < estimate < self.failing - self.step:
            estimate = self.fitting + width // 2
        return self._round_batch_down(min(max(estimate, self.fitting + width / 4), self.failing - width / 4), unit)

    def estimate_largest_batch(self, *, margin: float) -> int | None:
        """Return the largest local batch that leaves `margin` of the memory free according to the model, within the
        bracket; None if the model or the capacity is unknown."""
        if self.model is None or self.usable_bytes is None:
            return None
        largest = self.model.compute_largest_local_batch(self.usable_bytes, margin=margin)
        highest = self.bounds.limit if self.failing is None else self.failing - self.step
        return highest if largest is None else min(largest, highest)

    @property
    def usable_bytes(self) -> int | None:
        """The capacity, or what a batch that did not fit needs according to the model: the rest is lost to fragmentation.

        If the model does not know how memory grows, that batch may need hardly more than the largest one that fitted.
        """
        if self.model is None or self.failing is None or self.capacity is None:
            return self.capacity
        known = self.failing if self.model.grows else self.fitting
        return min(self.capacity, int(self.model.compute_needed_memory(known)))

    def compute_headroom(self) -> float | None:
        """Return the share of the memory that the largest fitting batch leaves free; None if that is unknown."""
        if self.model is None or self.usable_bytes is None or not self.fitting:
            return None
        return max(0.0, 1 - float(self.model.compute_needed_memory(self.fitting)) / self.usable_bytes)

    def _choose_trial_above(self) -> int:
        """Return the next trial while nothing has failed: the first leaves the margin free, so that it probably fits
        and corrects the model."""
        estimate = self.estimate_largest_batch(margin=0.0 if self.fitting else MEMORY_MARGIN)
        if not self.fitting:
            target = float(self.bounds.start if estimate is None else estimate)
        else:
            target = max(
                estimate or 0.0, MIN_TRIAL_GROWTH * self.fitting, self.fitting + self._compute_unit(self.fitting)
            )
        return min(self._round_batch_down(target, self._compute_unit(target)), self.bounds.limit)

    def _round_batch_down(self, local_batch: float, unit: int) -> int:
        """Return the largest multiple of `unit` up to `local_batch`, or the first one above `fitting` if that is larger."""
        return max(math.floor(local_batch / unit), self.fitting // unit + 1) * unit

    def _compute_unit(self, local_batch: float) -> int:
        """Return the power of two, times the accumulation steps, of which trials near a local batch are multiples."""
        return self.step << max(0, math.floor(math.log2(max(local_batch, self.step) / self.step / BRACKET_RESOLUTION)))
