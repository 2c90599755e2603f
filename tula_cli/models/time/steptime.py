"""The time of one optimizer step, fitted to probes (the paper's Eq. 2, with compute and synchronisation overlapped)."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.models import messages
from tula_cli.models.time import mixture
from tula_cli.models.time.formulas import PRIORS, Points, Priors
from tula_cli.models.time.mixture import StepModel
from tula_cli.models.time.noise import BLOCKS, Z90, compute_block_deviation, compute_trimmed_mean
from tula_cli.words import describe_probe_place, format_count

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
Numbers = Sequence[int] | Floats | Ints

T_BLOCKS = 2.132  # Student's t, 95 %, for five blocks (4 degrees of freedom)
DEFAULT_REPEAT_SD = 0.015
"""Standard deviation of the mean step time between jobs, as a share, on the steadiest clusters: the minimum assumed.
The value for the current cluster is estimated by the fit (`StepTimeFit.repeat_deviation`)."""
_MAX_STEADY_NOISE = 0.1  # a probe whose noise is above this share of its step time is pointed out
MAX_EXTRAPOLATION = 8
"""Maximum ratio of the nodes of a prediction to the most nodes of any probe."""
_MAX_RELATIVE_MISS = 0.25  # so is one that the fit misses by more than this share
_BLOCK = 512
"""Configurations that are predicted at a time: with more of them BLAS occupies all cores, mostly waiting."""


@dataclass(frozen=True)
class Observation:
    """The steps of one probe, or of a training at one configuration. Seconds."""

    nodes: int
    gpus_per_node: int
    local_batch: int  # samples an optimizer step on one GPU
    step_times: tuple[float, ...]  # one an optimizer step, after warm-up; of a training, one a stretch of them
    compute_time: float  # a step without synchronisation; nan where it was not measured
    doubt: float | None = None  # of a training: its noise, which its own steps alone do not tell; None of a probe

    @property
    def seconds(self) -> float:
        return compute_trimmed_mean(self.step_times)

    @property
    def noise(self) -> float | None:
        """Drift of the step time within the probe, as a share of it; None if there are too few steps."""
        if self.doubt is not None:
            return self.doubt
        spread = compute_block_deviation(self.step_times)
        return None if spread is None else spread / self.seconds

    def __str__(self) -> str:
        return describe_probe_place(self.nodes, self.local_batch)


@dataclass(frozen=True)
class Estimate:
    """A step time in seconds, with a 90 % interval (None if its width is unknown)."""

    seconds: float
    low: float | None = None
    high: float | None = None
    fitted: float | None = None  # what the model says where seconds are measured ones


@dataclass(frozen=True)
class Estimates:
    """Step times in seconds at many configurations, with their 90 % intervals: arrays of shape (n,), nan if unknown."""

    seconds: Floats
    low: Floats
    high: Floats
    fitted: Floats  # by the model, where seconds are measured ones; else nan

    def at(self, index: int) -> Estimate:
        """Return the estimate at one of the configurations."""
        low, high, fitted = (
            None if math.isnan(column[index]) else float(column[index]) for column in (self.low, self.high, self.fitted)
        )
        return Estimate(float(self.seconds[index]), low, high, fitted)

    def set_measured(self, index: int, measured: Estimate) -> None:
        """Put the estimate by measurements in place of that by the model, in the arrays themselves."""
        self.fitted[index] = self.seconds[index]
        for column, value in ((self.seconds, measured.seconds), (self.low, measured.low), (self.high, measured.high)):
            column[index] = math.nan if value is None else value

    def scale(self, factor: float) -> "Estimates":
        """Return the step times multiplied by a factor, with the same relative intervals."""
        return Estimates(
            factor * self.seconds, factor * self.low, factor * self.high, np.full(len(self.seconds), math.nan)
        )


def estimate_measured(step_times: Sequence[float], repeats: float) -> Estimate:
    """Return the estimate for a configuration that was measured.

    The interval is that of one more block of steps, in another job on the same cluster.

    Args:
        step_times: of one job.
        repeats: standard deviation of one job from the mean of all jobs, as a share; the difference of two jobs
            includes both.
    """
    seconds, spread = compute_trimmed_mean(step_times), compute_block_deviation(step_times)
    if spread is None:
        return Estimate(seconds)
    half = math.hypot(T_BLOCKS * spread * math.sqrt(1 + 1 / BLOCKS), Z90 * math.sqrt(2) * repeats * seconds)
    return Estimate(seconds, max(0.0, seconds - half), seconds + half)


@dataclass(frozen=True)
class _Scope:
    """The replicas that synchronise with each other: the nodes, or the GPUs of the only node that was measured."""

    gpus_per_node: frozenset[int]
    across: bool

    @classmethod
    def from_observations(cls, observations: Iterable[Observation]) -> "_Scope":
        all_observations = list(observations)
        return cls(
            frozenset(o.gpus_per_node for o in all_observations), across=any(o.nodes > 1 for o in all_observations)
        )

    @property
    def levels(self) -> bool:
        """Whether nodes with several numbers of GPUs were measured.

        Synchronisation inside and between nodes can then be separated.
        """
        return self.across and len(self.gpus_per_node) > 1

    @property
    def noun(self) -> str:
        return "node" if self.across else "GPU"

    def make_points(self, nodes: Floats, gpus_per_node: Floats, local_batch: Floats) -> Points:
        alone = nodes * gpus_per_node == 1
        return Points(
            replicas=nodes if self.across else gpus_per_node,
            local_batch=local_batch,
            alone=alone,
            inside=(nodes == 1) & ~alone & self.across,
            gpus=gpus_per_node if self.levels else None,
        )

    def describe_why_unpredictable(self, nodes: int, gpus_per_node: int) -> str:
        if not self.across and nodes > 1:
            return "only one node was measured: the communication time of several nodes is unknown"
        if self.across and not min(self.gpus_per_node) <= gpus_per_node <= max(self.gpus_per_node):
            return f"only {_list_numbers(self.gpus_per_node)} GPUs per node were measured, not {gpus_per_node}"
        return ""


@dataclass(frozen=True)
class StepTimeFit:
    """The step-time model of one kind of node, fitted to its probes."""

    words: str  # the fit in one line
    warnings: tuple[Diagnostic, ...]
    error: float | None  # median relative residual; None where exactly determined
    model: StepModel = field(repr=False)
    priors: Priors = field(repr=False)
    _scope: _Scope = field(repr=False)
    _seen: tuple[Observation, ...] = field(repr=False)

    @property
    def determined_exactly(self) -> bool:
        """Whether there are no more measurements than parameters, so that no residual shows the quality of the fit."""
        return self.error is None

    @property
    def levels(self) -> bool:
        """Whether probes had several numbers of GPUs per node."""
        return self._scope.levels

    def describe_why_unpredictable(self, nodes: int, gpus_per_node: int, local_batch: int) -> str:
        """Return why a configuration cannot be predicted from the measurements; empty if it can."""
        if why := self._describe_why_nodes_unpredictable(nodes, gpus_per_node):
            return why
        if len(self._batches) == 1 and local_batch not in self._batches:
            return "only one local batch was measured: how the step time grows with it is unknown"
        return ""

    def find_unpredictable(self, nodes: Ints, gpus_per_node: int, local_batch: Ints) -> Flags:
        """Return which of many configurations cannot be predicted, shape (n,)."""
        refused_nodes = [
            count for count in np.unique(nodes).tolist() if self._describe_why_nodes_unpredictable(count, gpus_per_node)
        ]
        is_refused = np.isin(nodes, refused_nodes)
        return is_refused | ~np.isin(local_batch, list(self._batches)) if len(self._batches) == 1 else is_refused

    def _describe_why_nodes_unpredictable(self, nodes: int, gpus_per_node: int) -> str:
        """Return why no local batch can be predicted on these nodes; empty if some can."""
        if why := self._scope.describe_why_unpredictable(nodes, gpus_per_node):
            return why
        replicas, requested = self._replicas, nodes if self._scope.across else gpus_per_node
        if len(replicas) == 1 and requested not in replicas:
            return f"only one number of {self._scope.noun}s was measured: how the step time changes with it is unknown"
        if requested > MAX_EXTRAPOLATION * (most := max(replicas)):
            return (
                f"{requested} {self._scope.noun}s are more than {MAX_EXTRAPOLATION} times the {most} that were measured"
            )
        return ""

    @cached_property
    def _replicas(self) -> frozenset[int]:
        return frozenset(o.nodes if self._scope.across else o.gpus_per_node for o in self._seen)

    @cached_property
    def _batches(self) -> frozenset[int]:
        return frozenset(o.local_batch for o in self._seen)

    def predict(self, nodes: int, gpus_per_node: int, local_batch: int) -> Estimate:
        """Return the time of one optimizer step with its 90 % prediction interval; `describe_why_unpredictable` is not checked."""
        return self.predict_all([nodes], [gpus_per_node], [local_batch]).at(0)

    def predict_all(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers) -> Estimates:
        """Return the step times at many configurations, with their intervals; `describe_why_unpredictable` is not checked."""
        columns = [np.asarray(column, dtype=float) for column in (nodes, gpus_per_node, local_batch)]
        blocks = range(0, max(1, len(columns[0])), _BLOCK)
        blocks_predicted = [
            self.model.predict(self.make_points(*(column[at : at + _BLOCK] for column in columns))) for at in blocks
        ]
        log_seconds, sd = (np.concatenate(column_blocks) for column_blocks in zip(*blocks_predicted, strict=True))
        return Estimates(
            seconds=np.exp(log_seconds),
            low=np.exp(log_seconds - Z90 * sd),
            high=np.exp(log_seconds + Z90 * sd),
            fitted=np.full(len(log_seconds), math.nan),
        )

    def repeat_deviation(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers) -> Floats:
        """Return the standard deviation between one job and the mean of all jobs, as a share, shape (n,).

        The prior is 3 % for steps without synchronisation. It is scaled by the deviation of the run's probes and
        trainings from the fit, and from each other if several measured one configuration.
        """
        return self.model.measurement_noise(self.make_points(nodes, gpus_per_node, local_batch))

    def compute(self, nodes: int, gpus_per_node: int, local_batch: int) -> float:
        """Return the seconds of a step without synchronisation; `describe_why_unpredictable` is not checked."""
        return float(self.model.parts(self.make_points([nodes], [gpus_per_node], [local_batch]))[1][0])

    def make_points(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers) -> Points:
        """Return configurations in the coordinates of the model."""
        return self._scope.make_points(
            np.asarray(nodes, dtype=float), np.asarray(gpus_per_node, dtype=float), np.asarray(local_batch, dtype=float)
        )

    def list_measured_points(self) -> tuple[Points, Floats]:
        """Return the measured configurations and their step times in seconds."""
        columns = ([getattr(o, name) for o in self._seen] for name in ("nodes", "gpus_per_node", "local_batch"))
        return self.make_points(*columns), np.array([o.seconds for o in self._seen])

    def draw_samples(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers, *, count: int = 256) -> Floats:
        """Return posterior samples of ln step times, shape (count, n), without single-job noise; deterministic."""
        mean, covariance = self.model.joint(self.make_points(nodes, gpus_per_node, local_batch))
        values, vectors = np.linalg.eigh(covariance)
        drawn = np.random.default_rng(0).standard_normal((count, len(mean)))
        samples: Floats = mean + drawn @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
        return samples


def fit_step_time(observations: Iterable[Observation], *, collective: str, priors: Priors = PRIORS) -> StepTimeFit:
    """Fit the step-time model to probes.

    Args:
        observations: one per probe, in any order; repeated configurations count each.
        collective: a key of `formulas.SHAPES`.
        priors: assumptions before any probe.

    Raises:
        BadMeasurements: there is no observation, or a step time is not positive.
    """
    sorted_observations = sorted(observations, key=lambda o: (o.nodes, o.gpus_per_node, o.local_batch))
    seconds = _check_seconds(sorted_observations)
    scope = _Scope.from_observations(sorted_observations)
    points = scope.make_points(
        np.array([o.nodes for o in sorted_observations], dtype=float),
        np.array([o.gpus_per_node for o in sorted_observations], dtype=float),
        np.array([o.local_batch for o in sorted_observations], dtype=float),
    )
    model = mixture.fit_step_model(
        points,
        step=seconds,
        compute=np.array([o.compute_time if o.compute_time > 0 else math.nan for o in sorted_observations]),
        spread=np.array([math.nan if o.noise is None else o.noise for o in sorted_observations]),
        collective=collective,
        priors=priors,
    )
    fitted = np.exp(model.predict(points)[0])
    residuals = fitted / seconds - 1
    # With no more measurements than parameters the priors may still keep the fit from a probe: then there is a residual.
    has_residuals = _count_measurements(sorted_observations) > _count_parameters(sorted_observations, scope) or bool(
        (np.abs(residuals) > _MAX_RELATIVE_MISS).any()
    )
    error = float(np.median(np.abs(residuals))) if has_residuals else None
    return StepTimeFit(
        words=_describe_fit(model, points, scope, error, sorted_observations),
        warnings=tuple(_list_fit_warnings(sorted_observations, seconds, residuals)),
        error=error,
        model=model,
        priors=priors,
        _scope=scope,
        _seen=tuple(sorted_observations),
    )


def _check_seconds(observations: Sequence[Observation]) -> Floats:
    if not observations:
        raise BadMeasurements("no probe was measured", "run tula profile first")
    for observation in observations:
        times = observation.step_times
        if not times or not all(math.isfinite(time) and time > 0 for time in times):
            raise BadMeasurements(
                f"the step times of the probe with {observation} are not all positive numbers",
                "delete this probe in folder results of the run, then run tula profile again",
            )
    return np.array([observation.seconds for observation in observations])


def _count_measurements(observations: Sequence[Observation]) -> int:
    """Count the measurements: one per configuration, and one more if its compute was measured apart."""
    configurations = {(o.nodes, o.gpus_per_node, o.local_batch) for o in observations}
    return len(configurations) + len(_find_separate_compute(observations))


def _find_separate_compute(observations: Iterable[Observation]) -> set[tuple[int, int, int]]:
    """Return the configurations whose compute was measured apart from their synchronisation."""
    together = (o for o in observations if o.nodes * o.gpus_per_node > 1)
    return {(o.nodes, o.gpus_per_node, o.local_batch) for o in together if o.compute_time > 0}


def _count_parameters(observations: Sequence[Observation], scope: _Scope) -> int:
    """Count the parameters to determine: floor and slope of compute, level and growth of synchronisation."""
    batches = {o.local_batch for o in observations}
    synchronising = {
        o.nodes if scope.across else o.gpus_per_node for o in observations if o.nodes * o.gpus_per_node > 1
    }
    return min(len(batches), 2) + min(len(synchronising), 2)


def _list_fit_warnings(observations: Sequence[Observation], seconds: Floats, residuals: Floats) -> Iterator[Diagnostic]:
    """Yield warnings about the reliability of the fit."""
    probes = (o for o in observations if o.doubt is None)
    unsteady = [f"{o} by {100 * o.noise:.0f} %" for o in probes if o.noise is not None and o.noise > _MAX_STEADY_NOISE]
    if unsteady:
        yield messages.step_times_drift(probes=unsteady)
    # A larger local batch with a clearly shorter step: another algorithm, a change of clocks, or a disturbed probe.
    falling = [
        f"{smaller} and {larger.local_batch}"
        for (smaller, time_before), (larger, after) in itertools.pairwise(zip(observations, seconds, strict=True))
        if (smaller.nodes, smaller.gpus_per_node) == (larger.nodes, larger.gpus_per_node)
        and smaller.local_batch < larger.local_batch
        and after < time_before * (1 - _MAX_STEADY_NOISE)
    ]
    if falling:
        yield messages.step_time_falls_with_batch(pairs=falling)
    misses: dict[str, list[str]] = {}
    for o, measured, off in zip(observations, seconds, residuals, strict=True):
        if abs(off) > _MAX_RELATIVE_MISS:
            times = f"{_format_duration(measured)} measured, {_format_duration(measured * (1 + off))} fitted"
            misses.setdefault("probe" if o.doubt is None else "training", []).append(f"{o} ({times})")
    for kind, where in misses.items():
        yield messages.fit_misses(kind=kind, where=where)


def _describe_fit(
    model: StepModel, points: Points, scope: _Scope, error: float | None, observations: Sequence[Observation]
) -> str:
    """Describe the fit in one line: compute over the batch, synchronisation over the replicas, and the error.

    If no measurement separates the two, the description says that only whole step times were used.
    """
    batches = np.unique(points.local_batch)[[0, -1]]
    fewest, most = (
        (None, None) if points.gpus is None else (np.full(2, end) for end in (points.gpus.min(), points.gpus.max()))
    )
    ends = Points(np.full(2, points.replicas.min()), batches, np.full(2, True), np.full(2, False), fewest)
    compute = model.parts(ends)[1]
    ranges = [_describe_range(compute, [f"local batch {batch:g}" for batch in batches])]
    together = np.unique(points.replicas[~points.alone])
    if len(together):
        counts = together[[0, -1]]
        inside = np.array([bool(points.inside[points.replicas == count].all()) for count in counts])
        sync = model.parts(Points(counts, np.full(2, batches[0]), np.full(2, False), inside, most))[2]
        of = "" if most is None else f" of {round(most[0])} GPUs"
        ranges.append(_describe_range(sync, [f"{format_count(round(count), scope.noun)}{of}" for count in counts]))
    quality = "exactly determined, no residual" if error is None else f"median residual {100 * error:.1f} %"
    parts_text = ", overlapped with synchronisation ".join(ranges)
    alone = ""
    if len(model.members) > 1:
        by_steps = " only from the times of complete steps" * model.whole_steps_alone
        alone = f"{by_steps}, compute hides synchronisation with probability {100 * model.overlapped:.0f} %"
    trained = sum(o.doubt is not None for o in observations)
    sources = format_count(len(points) - trained, "probe") + f" and {format_count(trained, 'training')}" * bool(trained)
    return f"step = compute {parts_text} ({sources}{alone}, {quality})"


def _describe_range(seconds: Floats, positions: Sequence[str]) -> str:
    first_text, last_text = (
        f"{_format_duration(time)} at {where}" for time, where in zip(seconds, positions, strict=True)
    )
    return first_text if positions[0] == positions[1] else f"{first_text} to {last_text}"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _list_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))
