"""The step time at any configuration, measured or predicted: the fit of the step-time model to the probes of a job."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements
from tula_cli.models import messages
from tula_cli.models.choice.candidates import Flags, Floats, Ints
from tula_cli.models.time.noise import BLOCK_COUNT, Z90, compute_block_deviation, compute_trimmed_mean
from tula_cli.models.time.step_model import (
    PRIORS,
    ConfigurationPoints,
    Priors,
    StepModel,
    TimedConfigurations,
    fit_step_model,
)
from tula_cli.words import describe_probe_configuration, format_count, join_words

Numbers = Sequence[int] | Floats | Ints

STUDENT_T_95 = 2.132  # Student's t, 95 %, for five blocks (4 degrees of freedom)
DEFAULT_REPEAT_SD = 0.015
"""Standard deviation of the mean step time between jobs, as a share, on the steadiest clusters: the minimum assumed.
The value for the current cluster is estimated by the fit (`StepTimeFit.compute_repeat_deviation`)."""
_MAX_STEADY_NOISE = 0.1  # probes with more relative noise are reported
MAX_EXTRAPOLATION = 8
"""Maximum ratio of the nodes of a prediction to the most nodes of any probe."""
_MAX_RELATIVE_MISS = 0.25  # larger relative residuals are reported; `fit_misses` names the 25 %
_CONFIGURATIONS_PER_CHUNK = 512
"""Configurations that are predicted at a time: with more of them BLAS occupies all cores, mostly waiting."""


@dataclass(frozen=True)
class Observation:
    """The steps of one probe, or of a training at one configuration. Seconds."""

    nodes: int
    gpus_per_node: int
    local_batch: int  # samples per optimizer step on one GPU
    step_times: tuple[float, ...]  # one per optimizer step after warm-up; for a training, one per stretch of steps
    compute_time: float  # per step, without synchronisation; nan if not measured
    doubt: float | None = None  # noise of a training, which includes variation beyond its steps; None for a probe

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
        return describe_probe_configuration(self.nodes, self.local_batch)


@dataclass(frozen=True)
class Estimate:
    """A step time in seconds, with a 90 % interval (None if its width is unknown)."""

    seconds: float
    low: float | None = None
    high: float | None = None
    fitted: float | None = None  # prediction of the model if `seconds` is measured; else None


@dataclass(frozen=True)
class Estimates:
    """Step times in seconds at many configurations, with their 90 % intervals: arrays of shape (n,), nan if unknown."""

    seconds: Floats
    low: Floats
    high: Floats
    fitted: Floats  # predictions of the model where `seconds` is measured; else nan

    def get_estimate(self, index: int) -> Estimate:
        """Return the estimate at one of the configurations."""
        low, high, fitted = (
            None if math.isnan(column[index]) else float(column[index]) for column in (self.low, self.high, self.fitted)
        )
        return Estimate(float(self.seconds[index]), low, high, fitted)

    def set_measured_estimate(self, index: int, measured: Estimate) -> None:
        """Put the estimate by measurements in place of that by the model, in the arrays themselves."""
        self.fitted[index] = self.seconds[index]
        for column, value in ((self.seconds, measured.seconds), (self.low, measured.low), (self.high, measured.high)):
            column[index] = math.nan if value is None else value

    def scale(self, factor: float) -> "Estimates":
        """Return the step times multiplied by a factor, with the same relative intervals."""
        return Estimates(
            factor * self.seconds, factor * self.low, factor * self.high, np.full(len(self.seconds), math.nan)
        )


def estimate_measured_step_time(step_times: Sequence[float], repeats: float) -> Estimate:
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
    half = math.hypot(STUDENT_T_95 * spread * math.sqrt(1 + 1 / BLOCK_COUNT), Z90 * math.sqrt(2) * repeats * seconds)
    return Estimate(seconds, max(0.0, seconds - half), seconds + half)


@dataclass(frozen=True)
class _ReplicaScope:
    """The replicas that synchronise with each other: the nodes, or the GPUs of the only node that was measured."""

    gpus_per_node: frozenset[int]
    across: bool

    @classmethod
    def from_observations(cls, observations: Iterable[Observation]) -> "_ReplicaScope":
        all_observations = list(observations)
        return cls(
            frozenset(o.gpus_per_node for o in all_observations), across=any(o.nodes > 1 for o in all_observations)
        )

    @property
    def has_several_gpu_counts(self) -> bool:
        """Whether nodes with several numbers of GPUs were measured.

        Synchronisation inside and between nodes can then be separated.
        """
        return self.across and len(self.gpus_per_node) > 1

    @property
    def noun(self) -> str:
        return "node" if self.across else "GPU"

    def make_points(self, *columns: Numbers) -> ConfigurationPoints:
        """Return configurations, given as nodes, GPUs per node and local batches, in the coordinates of the model."""
        nodes, gpus_per_node, local_batch = (np.asarray(column, dtype=float) for column in columns)
        is_single_gpu = nodes * gpus_per_node == 1
        return ConfigurationPoints(
            replicas=nodes if self.across else gpus_per_node,
            local_batch=local_batch,
            is_single_gpu=is_single_gpu,
            is_within_node=(nodes == 1) & ~is_single_gpu & self.across,
            gpus=gpus_per_node if self.has_several_gpu_counts else None,
        )

    def make_measured_points(self, observations: Sequence[Observation]) -> ConfigurationPoints:
        """Return the measured configurations in the coordinates of the model."""
        names = ("nodes", "gpus_per_node", "local_batch")
        return self.make_points(*([getattr(observation, name) for observation in observations] for name in names))

    def describe_why_unpredictable(self, nodes: int, gpus_per_node: int) -> str:
        if not self.across and nodes > 1:
            return "only one node was measured, so the communication time of several nodes is unknown"
        if self.across and not min(self.gpus_per_node) <= gpus_per_node <= max(self.gpus_per_node):
            return f"only {join_words(sorted(self.gpus_per_node))} GPUs per node were measured, not {gpus_per_node}"
        return ""


@dataclass(frozen=True)
class StepTimeFit:
    """The step-time model of one kind of node, fitted to its probes."""

    words: str  # description of the fit in one line
    warnings: tuple[Diagnostic, ...]
    error: float | None  # median relative residual; None if the fit is exact
    model: StepModel = field(repr=False)
    priors: Priors = field(repr=False)
    _scope: _ReplicaScope = field(repr=False)
    _observations: tuple[Observation, ...] = field(repr=False)

    @property
    def is_exactly_determined(self) -> bool:
        """Whether there are no more measurements than parameters, so that no residual shows the quality of the fit."""
        return self.error is None

    @property
    def has_several_gpu_counts(self) -> bool:
        """Whether probes had several numbers of GPUs per node."""
        return self._scope.has_several_gpu_counts

    def describe_why_unpredictable(self, nodes: int, gpus_per_node: int, local_batch: int) -> str:
        """Return why a configuration cannot be predicted from the measurements; empty if it can."""
        if why := self._describe_why_nodes_unpredictable(nodes, gpus_per_node):
            return why
        if len(self._batches) == 1 and local_batch not in self._batches:
            return "only one local batch was measured, so the step time at other local batches is unknown"
        return ""

    def flag_unpredictable_configurations(self, nodes: Ints, gpus_per_node: int, local_batch: Ints) -> Flags:
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
            return f"only one number of {self._scope.noun}s was measured, so the step time at other numbers is unknown"
        if requested > MAX_EXTRAPOLATION * (max_replicas := max(replicas)):
            return f"{requested} {self._scope.noun}s are more than {MAX_EXTRAPOLATION} times the {max_replicas} that were measured"
        return ""

    @cached_property
    def _replicas(self) -> frozenset[int]:
        return frozenset(o.nodes if self._scope.across else o.gpus_per_node for o in self._observations)

    @cached_property
    def _batches(self) -> frozenset[int]:
        return frozenset(o.local_batch for o in self._observations)

    def predict(self, nodes: int, gpus_per_node: int, local_batch: int) -> Estimate:
        """Return the time of one optimizer step with its 90 % prediction interval; `describe_why_unpredictable` is not checked."""
        return self.predict_step_times([nodes], [gpus_per_node], [local_batch]).get_estimate(0)

    def predict_step_times(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers) -> Estimates:
        """Return the step times at many configurations, with their intervals; `describe_why_unpredictable` is not checked."""
        columns = [np.asarray(column, dtype=float) for column in (nodes, gpus_per_node, local_batch)]
        blocks = range(0, max(1, len(columns[0])), _CONFIGURATIONS_PER_CHUNK)
        blocks_predicted = [
            self.model.predict(self.make_points(*(column[at : at + _CONFIGURATIONS_PER_CHUNK] for column in columns)))
            for at in blocks
        ]
        log_seconds, sd = (np.concatenate(column_blocks) for column_blocks in zip(*blocks_predicted, strict=True))
        return Estimates(
            seconds=np.exp(log_seconds),
            low=np.exp(log_seconds - Z90 * sd),
            high=np.exp(log_seconds + Z90 * sd),
            fitted=np.full(len(log_seconds), math.nan),
        )

    def compute_repeat_deviation(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers) -> Floats:
        """Return the standard deviation between one job and the mean of all jobs, as a share, shape (n,).

        The prior is 3 % for steps without synchronisation. It is scaled by the deviation of the run's probes and
        trainings from the fit, and from each other if several measured one configuration.
        """
        return self.model.compute_measurement_noise(self.make_points(nodes, gpus_per_node, local_batch))

    def compute_time_without_sync(self, nodes: int, gpus_per_node: int, local_batch: int) -> float:
        """Return the seconds of a step without synchronisation; `describe_why_unpredictable` is not checked."""
        return float(self.model.compute_parts(self.make_points([nodes], [gpus_per_node], [local_batch]))[1][0])

    def make_points(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers) -> ConfigurationPoints:
        """Return configurations in the coordinates of the model."""
        return self._scope.make_points(nodes, gpus_per_node, local_batch)

    def list_measured_points(self) -> tuple[ConfigurationPoints, Floats]:
        """Return the measured configurations and their step times in seconds."""
        points = self._scope.make_measured_points(self._observations)
        return points, np.array([o.seconds for o in self._observations])

    def draw_samples(self, nodes: Numbers, gpus_per_node: Numbers, local_batch: Numbers) -> Floats:
        """Return posterior samples of ln step times, shape (POSTERIOR_SAMPLES, n), without single-job noise."""
        return draw_posterior_samples(*self.model.predict_jointly(self.make_points(nodes, gpus_per_node, local_batch)))


POSTERIOR_SAMPLES = 256


def draw_posterior_samples(mean: Floats, covariance: Floats) -> Floats:
    """Return samples of a joint normal distribution, shape (POSTERIOR_SAMPLES, n); the same in every call."""
    values, vectors = np.linalg.eigh(covariance)
    draws = np.random.default_rng(0).standard_normal((POSTERIOR_SAMPLES, len(mean)))
    samples: Floats = mean + draws @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    return samples


def fit_step_time(observations: Iterable[Observation], *, collective: str, priors: Priors = PRIORS) -> StepTimeFit:
    """Fit the step-time model to probes.

    Args:
        observations: one per probe, in any order; repeated configurations count each.
        collective: a key of `SHAPES`.
        priors: assumptions before any probe.

    Raises:
        BadMeasurements: there is no observation, or a step time is not positive.
    """
    sorted_observations = sorted(observations, key=lambda o: (o.nodes, o.gpus_per_node, o.local_batch))
    seconds = _check_seconds(sorted_observations)
    scope = _ReplicaScope.from_observations(sorted_observations)
    points = scope.make_measured_points(sorted_observations)
    timed = TimedConfigurations(
        points,
        step=seconds,
        compute=np.array([o.compute_time if o.compute_time > 0 else math.nan for o in sorted_observations]),
        spread=np.array([math.nan if o.noise is None else o.noise for o in sorted_observations]),
    )
    model = fit_step_model(timed, collective=collective, priors=priors)
    fitted = np.exp(model.predict(points)[0])
    residuals = fitted / seconds - 1
    # With as few measurements as parameters, the priors may still cause residuals.
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
        _observations=tuple(sorted_observations),
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
    """Count the measurements: one per configuration, and one more if compute was measured apart from synchronisation."""
    separate = [o for o in observations if o.nodes * o.gpus_per_node > 1 and o.compute_time > 0]
    return sum(
        len({(o.nodes, o.gpus_per_node, o.local_batch) for o in counted}) for counted in (observations, separate)
    )


def _count_parameters(observations: Sequence[Observation], scope: _ReplicaScope) -> int:
    """Count the parameters to determine: floor and slope of compute, level and growth of synchronisation."""
    batches = {o.local_batch for o in observations}
    synchronising = {
        o.nodes if scope.across else o.gpus_per_node for o in observations if o.nodes * o.gpus_per_node > 1
    }
    return min(len(batches), 2) + min(len(synchronising), 2)


def _list_fit_warnings(observations: Sequence[Observation], seconds: Floats, residuals: Floats) -> Iterator[Diagnostic]:
    probes = (o for o in observations if o.doubt is None)
    unsteady = [f"{o} by {100 * o.noise:.0f} %" for o in probes if o.noise is not None and o.noise > _MAX_STEADY_NOISE]
    if unsteady:
        yield messages.step_times_drift(probes=unsteady)
    # A larger local batch with a clearly shorter step: another algorithm, changed clocks, or a disturbed probe.
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
    for o, measured, residual in zip(observations, seconds, residuals, strict=True):
        if abs(residual) > _MAX_RELATIVE_MISS:
            times = f"{_format_duration(measured)} measured, {_format_duration(measured * (1 + residual))} fitted"
            misses.setdefault("probe" if o.doubt is None else "training", []).append(f"{o} ({times})")
    for kind, where in misses.items():
        yield messages.fit_misses(kind=kind, where=where)


def _describe_fit(
    model: StepModel,
    points: ConfigurationPoints,
    scope: _ReplicaScope,
    error: float | None,
    observations: Sequence[Observation],
) -> str:
    """Describe the fit in one line: compute over the batch, synchronisation over the replicas, and the error.

    If no measurement separates the two, the description says that only whole step times were used.
    """
    batches = np.unique(points.local_batch)[[0, -1]]
    fewest = None if points.gpus is None else np.full(2, points.gpus.min())
    most = None if points.gpus is None else np.full(2, points.gpus.max())
    ends = ConfigurationPoints(np.full(2, points.replicas.min()), batches, np.full(2, True), np.full(2, False), fewest)
    compute = model.compute_parts(ends)[1]
    ranges = [_describe_range(compute, [f"local batch {batch:g}" for batch in batches])]
    replica_counts = np.unique(points.replicas[~points.is_single_gpu])
    if len(replica_counts):
        counts = replica_counts[[0, -1]]
        inside = np.array([bool(points.is_within_node[points.replicas == count].all()) for count in counts])
        sync = model.compute_parts(
            ConfigurationPoints(counts, np.full(2, batches[0]), np.full(2, False), inside, most)
        )[2]
        of_gpus = "" if most is None else f" of {round(most[0])} GPUs"
        ranges.append(_describe_range(sync, [f"{format_count(round(count), scope.noun)}{of_gpus}" for count in counts]))
    quality = "exactly determined, no residual" if error is None else f"median residual {100 * error:.1f} %"
    parts_text = ", overlapped with synchronisation ".join(ranges)
    overlap_text = " only from the times of complete steps" * model.has_only_whole_steps
    overlap_text += f", compute hides synchronisation with probability {100 * model.overlap_probability:.0f} %"
    if len(model.members) == 1:
        overlap_text = ""
    trained = sum(o.doubt is not None for o in observations)
    sources = format_count(len(points) - trained, "probe") + f" and {format_count(trained, 'training')}" * bool(trained)
    return f"step = compute {parts_text} ({sources}{overlap_text}, {quality})"


def _describe_range(seconds: Floats, positions: Sequence[str]) -> str:
    first_text, last_text = (
        f"{_format_duration(time)} at {where}" for time, where in zip(seconds, positions, strict=True)
    )
    return first_text if positions[0] == positions[1] else f"{first_text} to {last_text}"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
