"""The peak memory of one GPU, Eq. 3: parameters, gradients, optimizer state and factors stay, the rest grows.

    M(m) = M_param + M_grad + M_opt + M_factors + M_batch m + (A_0 + A_1 m)

m is the micro-batch (the local batch over the accumulation steps): what is in memory at one time. All memory is bytes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from statsmodels.regression.linear_model import WLS

from tula_cli.errors import BadMeasurements
from tula_cli.records import Footprint, Measured


@dataclass(frozen=True)
class _Point:
    """Eq. 3 at one micro-batch; `held` is what the allocator keeps at the peak, as a multiple of it."""

    micro_batch: float
    parameters: int
    gradients: int
    optimizer: int
    factors: int
    batch: int
    activations: int
    peak: int
    held: float


@dataclass(frozen=True)
class MemoryModel:
    """Eq. 3 with its coefficients. Bytes; slopes are bytes a sample of the micro-batch."""

    parameters: float
    gradients: float
    optimizer: float
    factors: float
    batch_slope: float
    activations_fixed: float
    activations_slope: float
    held: float  # memory reserved by the allocator over memory in use, at the peak
    accumulate: int
    error: float | None  # median relative residual of the peak; None where nothing is left over to tell

    @property
    def fixed(self) -> float:
        """What no batch size changes."""
        return self.parameters + self.gradients + self.optimizer + self.factors + self.activations_fixed

    @property
    def slope(self) -> float:
        """What one more sample in the micro-batch takes."""
        return self.batch_slope + self.activations_slope

    def peak(self, local_batch: int) -> int:
        """Return the memory in use at the peak (Eq. 3)."""
        return round(self.fixed + self.slope * local_batch / self.accumulate)

    def reserved(self, local_batch: int) -> int:
        """Return what the allocator holds at the peak: what must be there, and what is paid for."""
        return round(self.held * self.peak(local_batch))

    def largest_local_batch(self, capacity: int | None, *, margin: float) -> int | None:
        """Return the largest local batch that leaves `margin` of the capacity free.

        Args:
            capacity: bytes of one GPU; None where nothing bounds it.
            margin: share of the capacity.

        Returns:
            A multiple of the accumulation steps, 0 where not even one sample fits; None where memory sets no bound.
        """
        if capacity is None:
            return None
        room = capacity * (1 - margin) / self.held - self.fixed
        if room < 0:
            return 0
        if self.slope <= 0:
            return None
        return math.floor(room / self.slope) * self.accumulate


def fit(points: Iterable[Measured | Footprint], *, accumulate: int = 1) -> MemoryModel:
    """Fit Eq. 3 to measured probes, estimates, or both.

    Measurements win. Where they show one micro-batch only, estimates tell how activations grow and the measurement
    corrects their level; without estimates activations are taken as proportional to the batch.

    Args:
        points: probes (micro-batch from their own accumulation) and estimates, in any order.
        accumulate: micro-batches a step, for the estimates and for what the model is asked later.

    Raises:
        BadMeasurements: there is no point.
    """
    seen = list(points)
    measured = [_of_measured(point) for point in seen if isinstance(point, Measured)]
    estimated = [_of_footprint(point, accumulate) for point in seen if isinstance(point, Footprint)]
    if not measured and not estimated:
        raise BadMeasurements("nothing tells how much memory a batch takes", "run tula profile or tula estimate first")
    if len({point.micro_batch for point in measured}) > 1 or not estimated:
        return _line(measured, accumulate=accumulate)
    model = _line(estimated, accumulate=accumulate)
    return _corrected(model, measured, accumulate=accumulate) if measured else model


def _of_measured(probe: Measured) -> _Point:
    memory = probe.memory
    return _Point(
        micro_batch=probe.local_batch / probe.accumulate,
        parameters=memory.parameters,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        factors=memory.factors,
        batch=memory.batch,
        activations=memory.activations,
        peak=memory.peak,
        held=max(1.0, memory.reserved / memory.peak) if memory.peak > 0 else 1.0,
    )


def _of_footprint(footprint: Footprint, accumulate: int) -> _Point:
    return _Point(
        micro_batch=footprint.local_batch / accumulate,
        parameters=footprint.parameters,
        gradients=footprint.gradients,
        optimizer=footprint.optimizer,
        factors=footprint.factors,
        batch=footprint.batch,
        activations=footprint.activations,
        peak=footprint.peak,
        held=1.0,
    )


def _line(points: Sequence[_Point], *, accumulate: int) -> MemoryModel:
    """Fit each component apart: constants by their largest value, the batch in proportion, activations by a line."""
    fixed, slope = _activations(points)
    model = MemoryModel(
        parameters=max(point.parameters for point in points),
        gradients=max(point.gradients for point in points),
        optimizer=max(point.optimizer for point in points),
        factors=max(point.factors for point in points),
        batch_slope=float(np.median([point.batch / point.micro_batch for point in points])),
        activations_fixed=fixed,
        activations_slope=slope,
        held=float(np.median([point.held for point in points])),
        accumulate=accumulate,
        error=None,
    )
    return replace(model, error=_median_error(model, points))


def _activations(points: Sequence[_Point]) -> tuple[float, float]:
    """Return the fixed part and the slope of the activations; neither is negative."""
    sizes = np.array([point.micro_batch for point in points])
    bytes_ = np.array([point.activations for point in points], dtype=float)
    if np.ptp(sizes) == 0:
        return 0.0, max(0.0, float(bytes_.mean() / sizes[0]))
    weights = 1 / np.array([max(point.peak, 1) for point in points], dtype=float) ** 2
    fixed, slope = WLS(bytes_, np.column_stack([np.ones_like(sizes), sizes]), weights=weights).fit().params
    if slope < 0:
        return max(0.0, float(bytes_.max())), 0.0
    if fixed < 0:
        return 0.0, max(0.0, float(WLS(bytes_, sizes[:, None], weights=weights).fit().params[0]))
    return float(fixed), float(slope)


def _corrected(model: MemoryModel, measured: Sequence[_Point], *, accumulate: int) -> MemoryModel:
    """Move an estimate to where the measurements of one micro-batch are.

    What is measured beyond the estimate is taken as fixed (the process, the libraries' workspaces); what is measured
    below it as proportional (tensors that are freed or fused).
    """
    level = _line(measured, accumulate=accumulate)
    micro_batch = measured[0].micro_batch
    seen = level.activations_fixed + level.activations_slope * micro_batch
    expected = model.activations_fixed + model.activations_slope * micro_batch
    excess, share = max(0.0, seen - expected), min(1.0, seen / expected) if expected > 0 else 1.0
    return replace(
        level,
        activations_fixed=model.activations_fixed * share + excess,
        activations_slope=model.activations_slope * share,
    )


def _median_error(model: MemoryModel, points: Sequence[_Point]) -> float | None:
    """Return the median relative residual of the peak; None where two coefficients go through everything there is."""
    if len({point.micro_batch for point in points}) < 3:
        return None
    off = [abs((model.fixed + model.slope * point.micro_batch) / max(point.peak, 1) - 1) for point in points]
    return float(np.median(off))
