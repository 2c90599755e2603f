"""The peak memory of one GPU, Eq. 3: parameters, gradients, optimizer state and factors are constant, the rest grows.

    M(m) = M_param + M_grad + M_opt + M_factors + M_batch m + A(m),  plus M_libraries

m is the micro-batch (the local batch over the accumulation steps): the samples in memory at one time. A(m), activations
and workspaces, is a piecewise linear curve: the peak is the maximum over several moments of a step, each linear in m.
The estimate gives the shape of the curve, the probes its level and scale. All memory is in bytes.

If probes measure only their peak (a user's script), A(m) is the rest of it beyond the counted model states, including
the batch, and there is no breakdown by component.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.models import messages
from tula_cli.models.choice.grid import Number
from tula_cli.run.records.probes import Components, Footprint, Measured, ModelStates, PeakMemory

MIN_PROBE_DISTANCE = 0.05
"""Probes whose estimated activations differ by less than this share of the peak do not show how activations grow."""
ROUNDING_ERROR = 1e-9
"""Growth of a fitted line, as a share of the peak, that is a rounding error of the fit to equal peaks."""

FAR_RATIO = 2.0
"""A factor between measured and estimated growth beyond which the measurement is used but a warning is given."""

HEAP_GROWTH, HEAP_GROWTH_SD = 1.5, 0.2
"""Factor by which the peak of a CPU process grows faster with the batch than its tensors do (heap and workspaces): mean
over four networks, and standard deviation."""
HEAP_NOISE = 5 * 2**20
"""Standard deviation of such a peak between processes, in bytes."""


@dataclass(frozen=True)
class _Point:
    """Eq. 3 at one micro-batch."""

    micro_batch: float
    memory: Components | PeakMemory
    min_device_ratio: float | None  # minimum device memory in a simulation, as a multiple of the peak; None for probes
    on_heap: bool = False  # whether the peak is that of a process on the CPU
    # for a probe that recorded only its peak: the peak less the other terms; may be negative
    activations: float = math.nan

    @property
    def reserved_ratio(self) -> float:
        """Memory that the allocator reserves, as a multiple of the peak."""
        return max(1.0, self.memory.reserved / self.memory.peak) if self.memory.peak > 0 else 1.0

    @property
    def states(self) -> ModelStates | None:
        return self.memory if isinstance(self.memory, Components) else self.memory.states

    def separate_activations(self, states: ModelStates, batch_slope: float) -> "_Point":
        """Return the point with its activations, given the terms that probes share."""
        if isinstance(self.memory, Components):
            return replace(self, activations=float(self.memory.activations))
        return replace(self, activations=self.memory.peak - states.static_bytes - batch_slope * self.micro_batch)


@dataclass(frozen=True)
class PiecewiseLinear:
    """A piecewise linear function through points, extended beyond them by its outer pieces."""

    xs: tuple[float, ...]  # ascending
    ys: tuple[float, ...]

    def __call__(self, x: Number) -> Number:
        """Return the value at `x`, a number or an array."""
        if len(self.xs) == 1:
            return self.ys[0]
        xs: Any = self.xs
        ys: Any = self.ys
        piece: Any
        if np.ndim(x):
            xs, ys = np.array(xs), np.array(ys)
            piece = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, len(xs) - 2)
        else:  # for a single value, tens of times as fast as numpy
            piece = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        return ys[piece] + (ys[piece + 1] - ys[piece]) / (xs[piece + 1] - xs[piece]) * (x - xs[piece])

    def get_last_slope(self) -> float:
        return (self.ys[-1] - self.ys[-2]) / (self.xs[-1] - self.xs[-2]) if len(self.xs) > 1 else 0.0


@dataclass(frozen=True)
class MemoryModel:
    """Eq. 3 with its coefficients. Bytes; slopes are bytes per sample of the micro-batch."""

    states: ModelStates  # 0 if unknown
    batch_slope: float
    activations: PiecewiseLinear  # by micro-batch; non-decreasing
    libraries: int  # memory of libraries, which also counts towards the capacity
    reserved_ratio: PiecewiseLinear  # by micro-batch: reserved over used memory, if the capacity is not exhausted
    min_device_ratio: float  # minimum device memory over used memory, when the allocator releases its cache
    accumulate: int
    error: float | None  # median relative residual of the peak; None if the fit is exact
    by_component: bool = True  # False if only peaks are known: batch and activations are then one term
    sharded: bool = False  # whether the ranks divide the states, which are those of the whole model (`adapt_to_ranks`)
    warning: Diagnostic | None = None  # warning about the growth of memory with the batch
    grows: bool = True  # False if measured memory does not grow with the batch, so that its growth is an assumption

    def adapt_to_ranks(self, ranks: Number) -> "MemoryModel":
        """Return the model of one of `ranks` ranks; unchanged if the ranks do not share a model.

        Args:
            ranks: a number; or an array, if the model is then evaluated at an array of local batches of that shape.
        """
        if not self.sharded:
            return self
        share = {name: -(-size // ranks) for name, size in self.states.model_dump().items() if name != "factors"}
        return replace(self, states=self.states.model_copy(update=share), sharded=False)

    @property
    def bytes_per_sample(self) -> float:
        """Memory of one more sample in the micro-batch, for large batches."""
        return self.batch_slope + self.activations.get_last_slope()

    @property
    def fixed_bytes(self) -> float:
        """Peak extrapolated from large batches to zero samples."""
        last_corner, last_slope = self.activations.xs[-1], self.activations.get_last_slope()
        return float(max(0.0, self.states.static_bytes + self.activations(last_corner) - last_slope * last_corner))

    def compute_activations(self, micro_batch: Number) -> Number:
        return np.maximum(0.0, self.activations(micro_batch))

    def compute_footprint(self, local_batch: int) -> Footprint:
        """Return Eq. 3 at a local batch, component by component.

        Raises:
            BadMeasurements: the probes measured only their peaks.
        """
        if not self.by_component:
            raise BadMeasurements(
                "the probes recorded only their peak memory, not its components",
                "you need not do anything: tula recommend uses only the peak",
            )
        micro_batch = local_batch / self.accumulate
        memory = Components(
            **self.states.model_dump(),
            batch=round(self.batch_slope * micro_batch),
            activations=round(self.compute_activations(micro_batch)),
            peak=self.compute_peak(local_batch),
            reserved=self.compute_reserved_memory(local_batch),
            libraries=self.libraries,
        )
        return Footprint(local_batch=local_batch, memory=memory, room=round(self.min_device_ratio * memory.peak))

    def compute_peak(self, local_batch: Number) -> Number:
        """Return the memory in use at the peak (Eq. 3)."""
        return _round_bytes(self._compute_micro_batch_peak(local_batch / self.accumulate))

    def compute_reserved_memory(self, local_batch: Number) -> Number:
        """Return the memory reserved at the peak if the device has space for it: the memory that is priced."""
        micro_batch = local_batch / self.accumulate
        return _round_bytes(
            np.maximum(1.0, self.reserved_ratio(micro_batch)) * self._compute_micro_batch_peak(micro_batch)
        )

    def compute_needed_memory(self, local_batch: Number) -> Number:
        """Return the minimum device memory for a local batch, libraries included."""
        return _round_bytes(self._compute_micro_batch_needed_memory(local_batch / self.accumulate))

    def compute_largest_local_batch(self, capacity: int | None, *, margin: float) -> int | None:
        """Return the largest local batch that leaves the share `margin` of the capacity free.

        Args:
            capacity: bytes of one GPU; None if unbounded.

        Returns:
            A multiple of the accumulation steps, 0 if not even one sample fits; None if memory sets no bound.
        """
        if capacity is None:
            return None
        limit = capacity * (1 - margin)
        corners = [0.0, *(x for x in self.activations.xs if x > 0)]
        below = [x for x in corners if self._compute_micro_batch_needed_memory(x) <= limit]
        if not below:
            return 0
        at = max(below)
        if at == corners[-1]:
            slope = float(self._compute_micro_batch_needed_memory(at + 1) - self._compute_micro_batch_needed_memory(at))
        else:
            end = corners[corners.index(at) + 1]
            slope = float(
                (self._compute_micro_batch_needed_memory(end) - self._compute_micro_batch_needed_memory(at))
                / (end - at)
            )
        if slope <= 0:
            return None if at == corners[-1] else math.floor(at) * self.accumulate
        return math.floor(at + float(limit - self._compute_micro_batch_needed_memory(at)) / slope) * self.accumulate

    def _compute_micro_batch_peak(self, micro_batch: Number) -> Number:
        return self.states.static_bytes + self.batch_slope * micro_batch + self.compute_activations(micro_batch)

    def _compute_micro_batch_needed_memory(self, micro_batch: Number) -> Number:
        return self.min_device_ratio * self._compute_micro_batch_peak(micro_batch) + self.libraries


def _round_bytes(size: Number) -> Number:
    return np.rint(size) if np.ndim(size) else round(float(size))


def fit_memory_model(
    points: Iterable[Measured | Footprint], *, accumulate: int = 1, sharded: bool = False
) -> MemoryModel:
    """Fit Eq. 3 to measured probes, estimates, or both.

    Measurements take precedence. The estimate gives the shape of the growth of activations; measurements shift and
    stretch that curve. Without estimates activations are a line, through the origin if only one micro-batch was
    measured. The model is never below a measurement.

    Args:
        points: probes (micro-batch from their own accumulation) and estimates, in any order.
        accumulate: micro-batches per step, for the estimates and for later queries of the model.
        sharded: whether each measured rank held its share of a model; estimates are of whole models.

    Raises:
        BadMeasurements: there is no point.
    """
    all_points = list(points)
    probes = [point for point in all_points if isinstance(point, Measured)]
    measured = _move_heap_growth_to_peaks([_make_point_of_probe(probe, sharded=sharded) for probe in probes])
    estimated = [_make_point_of_footprint(point, accumulate) for point in all_points if isinstance(point, Footprint)]
    if not measured and not estimated:
        raise BadMeasurements("memory has been neither measured nor estimated", "run tula profile first")
    believed = measured or estimated
    states = _find_largest_states(believed, estimated)
    slopes = _fit_batch_slopes(believed) or _fit_batch_slopes(estimated)
    batch_slope = float(np.median(slopes)) if slopes else 0.0
    split_points = [
        [point.separate_activations(states, batch_slope) for point in points] for points in (measured, estimated)
    ]
    activations, grows, warning = _fit_activations(*split_points)
    model = MemoryModel(
        states=states,
        batch_slope=batch_slope,
        activations=activations,
        libraries=max(point.memory.libraries or 0 for point in believed),
        reserved_ratio=_fit_reserved_ratio(measured, estimated),
        min_device_ratio=_fit_min_ratio(measured, estimated),
        accumulate=accumulate,
        error=None,
        by_component=bool(slopes),
        sharded=sharded,
        warning=warning,
        grows=grows,
    )
    return replace(model, error=_compute_median_error(model, believed))


def _make_point_of_probe(probe: Measured, *, sharded: bool) -> _Point:
    memory = probe.memory
    if sharded and isinstance(memory, Components):
        memory = _merge_shards(memory, probe.nodes * probe.gpus_per_node)
    # without a limit, the libraries of the process do not count
    if probe.capacity is None and probe.environment.device == "cpu":
        memory = memory.model_copy(update={"libraries": 0})
    return _Point(
        probe.local_batch / probe.accumulate, memory, min_device_ratio=None, on_heap=probe.environment.device == "cpu"
    )


def _move_heap_growth_to_peaks(points: list[_Point]) -> list[_Point]:
    """On the CPU, count library memory above the smallest measured value as part of the peak, with the same total.

    It consists of holes and workspaces of the heap, which grow with the batch."""
    least = min((point.memory.libraries or 0 for point in points), default=0)
    return [
        _move_library_memory_to_peak(point, (point.memory.libraries or 0) - least) if point.on_heap else point
        for point in points
    ]


def _move_library_memory_to_peak(point: _Point, size: int) -> _Point:
    memory = point.memory
    changes = {"libraries": (memory.libraries or 0) - size, "peak": memory.peak + size}
    if isinstance(memory, Components):
        changes["activations"] = memory.activations + size
    return replace(point, memory=memory.model_copy(update=changes))


def _merge_shards(memory: Components, ranks: int) -> Components:
    """Return the memory of a rank if it held the states of the whole model, with all else unchanged."""
    states = {name: ranks * getattr(memory, name) for name in ("parameters", "gradients", "optimizer")}
    extra = sum(states.values()) * (ranks - 1) // ranks
    return memory.model_copy(update={**states, "peak": memory.peak + extra, "reserved": memory.reserved + extra})


def _make_point_of_footprint(footprint: Footprint, accumulate: int) -> _Point:
    free_ratio = max(1.0, footprint.room / max(footprint.memory.peak, 1)) if footprint.room else None
    return _Point(footprint.local_batch / accumulate, footprint.memory, free_ratio)


def _find_largest_states(believed: Sequence[_Point], estimated: Sequence[_Point]) -> ModelStates:
    """Return the largest observed value of each state; 0 if unknown, or if their sum exceeds a measured peak."""
    measured_states = [states for point in believed if (states := point.states) is not None]
    if not measured_states:
        return _NO_STATES
    # Probes at batches where AGS is the identity have no factors, but the requested batch may have some.
    factors = [states.factors for point in estimated if (states := point.states) is not None]
    largest_states = ModelStates(
        parameters=max(states.parameters for states in measured_states),
        gradients=max(states.gradients for states in measured_states),
        optimizer=max(states.optimizer for states in measured_states),
        factors=max(states.factors for states in measured_states) or max(factors, default=0),
    )
    peaks = [point.memory.peak for point in believed if isinstance(point.memory, PeakMemory)]
    return _NO_STATES if peaks and largest_states.static_bytes >= min(peaks) else largest_states


_NO_STATES = ModelStates(parameters=0, gradients=0, optimizer=0, factors=0)


def _fit_batch_slopes(points: Sequence[_Point]) -> list[float]:
    return [point.memory.batch / point.micro_batch for point in points if isinstance(point.memory, Components)]


def _fit_activations(
    measured: Sequence[_Point], estimated: Sequence[_Point]
) -> tuple[PiecewiseLinear, bool, Diagnostic | None]:
    """Return the curve of the activations, never falling or below a measurement, whether they grow, and a warning.

    If the measured ones do not grow, the curve beyond them grows as estimated, or without an estimate in proportion to the
    batch: a flat curve would let any batch fit.
    """
    shape = _make_non_decreasing({point.micro_batch: point.activations for point in estimated})
    if not measured:
        return shape, True, None
    if not estimated:
        shape = PiecewiseLinear((0.0, 1.0), (0.0, 1.0))
    level, scale = _fit_correction(measured, shape, proportional=not estimated)
    warning, grows = None, scale > 0 or level <= 0
    if not grows:
        warning = messages.memory_growth_unknown(
            largest=max(point.micro_batch for point in measured), estimated=bool(estimated)
        )
    elif estimated and not 1 / FAR_RATIO <= scale <= FAR_RATIO:
        warning = messages.memory_grows_differently(factor=scale)
    if not grows and estimated:
        level, scale = max(0.0, *(point.activations - shape(point.micro_batch) for point in measured)), 1.0
    points = {x: max(0.0, level + scale * shape(x)) for x in shape.xs}
    for point in measured:
        level_here = points.get(point.micro_batch, max(0.0, level + scale * shape(point.micro_batch)))
        points[point.micro_batch] = max(level_here, point.activations)
    if len(points) < 2 or max(points) <= max(point.micro_batch for point in measured):
        end = 2 * max(points)  # beyond an outlier, the curve continues like the fit
        points[end] = max(0.0, level + scale * shape(end)) if grows or estimated else 2 * level
    return _make_non_decreasing(points), grows, warning


def _make_non_decreasing(points: dict[float, float]) -> PiecewiseLinear:
    xs = sorted(points)
    return PiecewiseLinear(tuple(xs), tuple(np.maximum.accumulate([points[x] for x in xs]).tolist()))


def _fit_correction(measured: Sequence[_Point], shape: PiecewiseLinear, *, proportional: bool) -> tuple[float, float]:
    """Return (level, scale) that map the shape of the activations to the measured ones; scale is not negative.

    The scale is 0 if the activations of several micro-batches are equal or fall.
    If the probes do not show how activations grow, an excess over the shape is treated as fixed (workspaces), and a
    deficit of a single micro-batch as proportional (tensors that are freed or fused). On the CPU, heap and workspaces
    make the growth up to HEAP_GROWTH times the estimated one, which probes with similar peaks hardly correct.
    """
    expected = np.array([shape(point.micro_batch) for point in measured])
    activations = np.array([point.activations for point in measured])
    peaks = np.array([max(point.memory.peak, 1) for point in measured], dtype=float)
    on_heap = all(point.on_heap for point in measured) and not proportional
    if len({point.micro_batch for point in measured}) < 2:
        if proportional:
            return 0.0, float(activations.max() / expected.max())
        share = min(HEAP_GROWTH if on_heap else 1.0, float((activations / np.maximum(expected, 1)).max()))
        return max(0.0, float((activations - share * expected).max())), share
    if on_heap:
        return _fit_line_on_heap(expected, activations, 1 / peaks)
    if not proportional and np.ptp(expected) < MIN_PROBE_DISTANCE * peaks.max():
        return max(0.0, float((activations - expected).max())), 1.0
    level, scale = _fit_weighted_line(expected, activations, 1 / peaks)
    if scale * np.ptp(expected) < ROUNDING_ERROR * peaks.max():
        return float(activations.max()), 0.0
    # The estimate may count memory that is not in use at the peak (later gradients), so a negative level is ignored.
    if level < 0 and proportional and all(isinstance(point.memory, Components) for point in measured):
        weights = 1 / peaks
        return 0.0, float(np.sum(expected * activations * weights**2) / np.sum((expected * weights) ** 2))
    return level, scale


def _fit_line_on_heap(xs: np.ndarray, ys: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return level and slope of a line, with the slope shrunk towards HEAP_GROWTH by the noise of the peaks."""
    slope = _fit_weighted_line(xs, ys, weights)[1]
    measured, believed = float(np.sum((xs - xs.mean()) ** 2)) / HEAP_NOISE**2, 1 / HEAP_GROWTH_SD**2
    slope = max(0.0, (measured * slope + believed * HEAP_GROWTH) / (measured + believed))
    return float(np.average(ys - slope * xs, weights=weights**2)), slope


def _fit_weighted_line(xs: np.ndarray, ys: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    design = np.column_stack([np.ones_like(xs), xs]) * weights[:, None]
    scale = np.linalg.norm(design, axis=0)
    level, slope = np.linalg.lstsq(design / scale, ys * weights, rcond=None)[0] / scale
    return float(level), float(slope)


def _fit_reserved_ratio(measured: Sequence[_Point], estimated: Sequence[_Point]) -> PiecewiseLinear:
    """Return the ratio of reserved to used memory: the estimated curve, shifted to the measurements."""
    ratios = sorted((point.micro_batch, point.reserved_ratio) for point in estimated)
    xs, ys = zip(*ratios, strict=True) if ratios else ((0.0,), (1.0,))
    curve = PiecewiseLinear((*xs, 2 * xs[-1] + 1), (*ys, ys[-1]))  # constant beyond the last point
    errors = [point.reserved_ratio - curve(point.micro_batch) for point in measured]
    shift = float(np.median(errors or [0.0]))
    return PiecewiseLinear(curve.xs, tuple(max(1.0, y + shift) for y in curve.ys))


def _fit_min_ratio(measured: Sequence[_Point], estimated: Sequence[_Point]) -> float:
    """Return the simulated minimum ratio of device memory to used memory, else the observed reserved ratio.

    Peaks measured on the CPU already include the heap and workspaces that the ratio of an estimate allows for: the
    ratio is then 1.
    """
    if any(point.on_heap for point in measured):
        return 1.0
    ratios = [point.min_device_ratio for point in estimated if point.min_device_ratio is not None]
    return float(np.median(ratios or [point.reserved_ratio for point in measured] or [1.0]))


def _compute_median_error(model: MemoryModel, points: Sequence[_Point]) -> float | None:
    """Return the median relative residual of the peak; None with fewer than three micro-batches.

    Two coefficients fit two micro-batches exactly.
    """
    if len({point.micro_batch for point in points}) < 3:
        return None
    errors = [
        abs(model._compute_micro_batch_peak(point.micro_batch) / max(point.memory.peak, 1) - 1) for point in points
    ]
    return float(np.median(errors))


PREFETCH_FACTOR = 2
"""Batches that each process of a data loader prepares ahead."""
LOADERS_AT_A_TIME = 2
"""The training's loader and the evaluation's."""


@dataclass(frozen=True)
class DataMemory:
    """Host memory of the data of all ranks of a node, without the model and the processes. Bytes."""

    batches: int  # one micro-batch per rank
    shared: int  # batches in /dev/shm that loader processes have prepared
    pinned: int  # pinned copies of batches for the transfer to GPUs
    samples: int  # samples that are not yet part of a batch


def count_max_prefetched_batches(workers: int) -> int:
    """Return the maximum batches of a rank that are ready or in use: those prepared ahead, and one per loader."""
    return LOADERS_AT_A_TIME * (PREFETCH_FACTOR * workers + 1)


def estimate_data_memory(
    micro_batches: Sequence[int], *, sample: int, ranks: int, workers: int, on_gpu: bool
) -> DataMemory:
    """Return the maximum memory of the data at the last of the micro-batches.

    Args:
        micro_batches: samples of one rank at a time, ascending: all sizes that one process uses in turn, because pinned
            memory is not released and none of its blocks serves a larger batch. A training has one.
        sample: bytes of an input with its target.
        ranks: of the node.
        workers: loader processes per rank; without any, nothing goes through /dev/shm.
        on_gpu: whether batches are pinned.
    """
    batch = micro_batches[-1] * sample
    # Pinned blocks are rounded up to powers of two.
    blocks = {1 << (size * sample - 1).bit_length() for size in micro_batches} if on_gpu else set()
    return DataMemory(
        batches=ranks * batch,
        shared=ranks * count_max_prefetched_batches(workers) * batch if workers else 0,
        pinned=ranks * count_max_prefetched_batches(workers) * sum(blocks),
        samples=ranks * max(1, workers) * batch,
    )
