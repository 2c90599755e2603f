"""The time of one optimizer step, Eq. 2: a fixed part, a part that grows with the local batch, and synchronisation.

    t(N, b) = a + c b + d s(R)

s is what the collective's traffic grows with: 1 - 1/R for a ring, R - 1 for a parameter server, log2 R for a tree. It
is fitted by weighted least squares on relative errors, so that a short step counts as much as a long one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from statsmodels.regression.linear_model import WLS

from tula_cli.errors import BadMeasurements
from tula_cli.models.noise import BLOCKS, centre, drift

Floats = NDArray[np.float64]

CONFIDENCE = 0.9  # of every interval
_T_BLOCKS = 2.132  # Student's t, 95 %, for the blocks of `drift` (4 degrees of freedom)
_Z = 1.645  # normal quantile, 95 %
_REPEATS = 0.015  # standard deviation of the same job started again, as a share: what the steadiest clusters show
_UNSTEADY = 0.1  # a probe whose noise is above this share of its step time is pointed out
_OFF = 0.25  # so is one that the fit misses by more than this share


@dataclass(frozen=True)
class Observation:
    """The steps of one probe. Seconds."""

    nodes: int
    gpus_per_node: int
    local_batch: int  # samples an optimizer step on one GPU
    step_times: tuple[float, ...]  # one an optimizer step, after warm-up
    sync_time: float  # exposed synchronisation, within the steps
    compute_time: float  # a step without synchronisation

    @property
    def seconds(self) -> float:
        return centre(self.step_times)

    @property
    def noise(self) -> float | None:
        """How much the step time drifts within the probe, as a share of it; None where there are too few steps."""
        spread = drift(self.step_times)
        return None if spread is None else spread / self.seconds

    def __str__(self) -> str:
        return f"{_count(self.nodes, 'node')}, local batch {self.local_batch}"


@dataclass(frozen=True)
class Estimate:
    """Seconds, with a 90 % interval (None where nothing tells how wide it is)."""

    seconds: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class _At:
    """Where a term of Eq. 2 is evaluated."""

    replicas: int
    local_batch: int


@dataclass(frozen=True)
class _Column:
    """One term of Eq. 2: its name for humans and what its coefficient is multiplied with."""

    words: str
    value: Callable[[_At], float]


_FIXED = _Column("", lambda _: 1.0)
_COMPUTE = _Column("local batch", lambda at: at.local_batch)
_BANDWIDTH = _Column("(1 - 1/{R})", lambda at: 1 - 1 / at.replicas)
_DEPTH = _Column("log2 {R}", lambda at: math.log2(at.replicas))
_SERVED = _Column("({R} - 1)", lambda at: at.replicas - 1)

SYNCHRONISATION: Mapping[str, tuple[_Column, ...]] = {
    "ring": (_BANDWIDTH,),
    "tree": (_DEPTH,),
    "reduce_scatter_allgather": (_BANDWIDTH, _DEPTH),
    "parameter_server": (_SERVED,),  # Eq. 2c's N, less the one replica that has nobody to wait for
}


def observed(step_times: Sequence[float]) -> Estimate:
    """Return the step time of a configuration that was measured.

    The interval is that of one more block of steps, in another job on the same cluster.
    """
    seconds, spread = centre(step_times), drift(step_times)
    if spread is None:
        return Estimate(seconds)
    half = math.hypot(_T_BLOCKS * spread * math.sqrt(1 + 1 / BLOCKS), _Z * _REPEATS * seconds)
    return Estimate(seconds, max(0.0, seconds - half), seconds + half)


@dataclass(frozen=True)
class _Scope:
    """Which replicas the traffic is counted over: the nodes, or the GPUs of the one node that was measured.

    With several nodes the traffic inside a node is the same for every number of nodes and is part of the fixed term; it
    is the nodes that tell configurations apart (also where one of them is a single node).
    """

    gpus_per_node: frozenset[int]
    across: bool

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> "_Scope":
        seen = list(observations)
        scope = cls(frozenset(o.gpus_per_node for o in seen), across=any(o.nodes > 1 for o in seen))
        if scope.across and len(scope.gpus_per_node) > 1:
            raise BadMeasurements(
                f"probes with {_listed(scope.gpus_per_node)} GPUs a node cannot be fitted together",
                "profile each number of GPUs a node as a run of its own",
            )
        return scope

    @property
    def words(self) -> str:
        return "nodes" if self.across else "GPUs"

    def row(self, columns: Sequence[_Column], nodes: int, gpus_per_node: int, local_batch: int) -> list[float]:
        """Return one row of the design."""
        at = _At(nodes if self.across else gpus_per_node, local_batch)
        return [column.value(at) for column in columns]

    def refusal(self, nodes: int, gpus_per_node: int) -> str:
        if not self.across and nodes > 1:
            return "only one node was measured: nothing tells what more of them cost in synchronisation"
        if self.across and gpus_per_node not in self.gpus_per_node:
            return f"only {_listed(self.gpus_per_node)} GPUs a node were measured, not {gpus_per_node}"
        return ""


@dataclass(frozen=True)
class StepTimeFit:
    """Eq. 2 fitted to probes."""

    words: str  # the fit in one line
    warnings: tuple[str, ...]
    error: float | None  # median relative residual; None where exactly determined
    _columns: tuple[_Column, ...] = field(repr=False)
    _results: Any = field(repr=False)  # statsmodels' RegressionResults
    _scope: _Scope = field(repr=False)
    _basis: tuple[_Column, ...] = field(repr=False)  # one synchronisation term: tells what the probes determine
    _seen: tuple[Observation, ...] = field(repr=False)

    @property
    def determined_exactly(self) -> bool:
        """Whether there are as many parameters as probes, so that no residual tells how good the fit is."""
        return self.error is None

    def refusal(self, nodes: int, gpus_per_node: int, local_batch: int) -> str:
        """Return why this cannot be predicted from what was measured; empty where it can."""
        if why := self._scope.refusal(nodes, gpus_per_node):
            return why
        design = _design(self._basis, self._scope, self._seen)
        row = self._scope.row(self._basis, nodes, gpus_per_node, local_batch)
        if _in_row_space(design, row):
            return ""
        if np.ptp(design[:, 2]) == 0 and row[2] != design[0, 2]:
            return "one number of nodes was measured: nothing tells how the step time changes with it"
        if np.ptp(design[:, 1]) == 0:
            return "one local batch was measured: nothing tells how the step time grows with it"
        return "number of nodes and local batch changed together in every probe: their effects cannot be told apart"

    def predict(self, nodes: int, gpus_per_node: int, local_batch: int) -> Estimate:
        """Return the time of one optimizer step with its 90 % prediction interval.

        Raises:
            BadMeasurements: the probes do not determine it.
        """
        if why := self.refusal(nodes, gpus_per_node, local_batch):
            raise BadMeasurements(
                f"cannot predict {_count(nodes, 'node')} with local batch {local_batch}: {why}",
                "measure more configurations with tula profile",
            )
        row = [self._scope.row(self._columns, nodes, gpus_per_node, local_batch)]
        seconds = float(self._results.predict(row)[0])
        if self.determined_exactly:
            return Estimate(seconds)
        # The weight is that of the probes: noise is a share of the step time.
        forecast = self._results.get_prediction(row, weights=np.array([seconds**-2]))
        low, high = forecast.conf_int(obs=True, alpha=1 - CONFIDENCE)[0]
        return Estimate(seconds, max(0.0, float(low)), float(high))


def fit(observations: Iterable[Observation], *, collective: str) -> StepTimeFit:
    """Fit Eq. 2 to probes.

    A term that the probes do not determine, or whose coefficient comes out negative (no step gets shorter by more work
    or more traffic), is left out with a warning.

    Args:
        observations: one a probe, in any order; repeated configurations count each.
        collective: a key of SYNCHRONISATION.

    Raises:
        BadMeasurements: there is no observation, a step time is not positive, or the GPUs a node differ between nodes.
    """
    seen = sorted(observations, key=lambda o: (o.nodes, o.gpus_per_node, o.local_batch))
    seconds = _checked_seconds(seen)
    scope = _Scope.of(seen)
    columns, warnings = _determined((_FIXED, _COMPUTE, *SYNCHRONISATION[collective]), scope, seen)
    columns, dropped = _physical(columns, scope, seen, seconds)
    results = _solve(_design(columns, scope, seen), seconds, noise=_pooled_noise(seen))
    residuals = np.asarray(results.fittedvalues) / seconds - 1
    error = float(np.median(np.abs(residuals))) if results.df_resid > 0 else None
    return StepTimeFit(
        words=_words(columns, results.params, scope, len(seen), error),
        warnings=(*warnings, *dropped, *_suspicions(seen, seconds, residuals)),
        error=error,
        _columns=columns,
        _results=results,
        _scope=scope,
        _basis=(_FIXED, _COMPUTE, SYNCHRONISATION[collective][0]),
        _seen=tuple(seen),
    )


def _checked_seconds(observations: Sequence[Observation]) -> Floats:
    if not observations:
        raise BadMeasurements("no probe was measured", "run tula profile first")
    for observation in observations:
        times = observation.step_times
        if not times or not all(math.isfinite(time) and time > 0 for time in times):
            raise BadMeasurements(
                f"the step times of the probe with {observation} are not all positive numbers",
                "delete its result and run tula profile again",
            )
    return np.array([observation.seconds for observation in observations])


def _design(columns: Sequence[_Column], scope: _Scope, observations: Sequence[Observation]) -> Floats:
    return np.array([scope.row(columns, o.nodes, o.gpus_per_node, o.local_batch) for o in observations], dtype=float)


def _determined(
    columns: Sequence[_Column], scope: _Scope, observations: Sequence[Observation]
) -> tuple[tuple[_Column, ...], list[str]]:
    """Keep each column, in order, that adds to the rank of the design."""
    kept: list[_Column] = []
    warnings = []
    for column in columns:
        design = _design([*kept, column], scope, observations)
        name = column.words.format(R=scope.words)
        if _rank(design) > len(kept):
            kept.append(column)
        elif np.ptp(design[:, -1]) == 0:
            warnings.append(f"every probe has the same {name}; the fit holds for that alone")
        else:
            warnings.append(f"the probes do not tell the effect of {name} from that of the others; it is left out")
    return tuple(kept), warnings


def _rank(design: Floats) -> int:
    scale = np.abs(design).max(axis=0)
    return int(np.linalg.matrix_rank(design / np.where(scale > 0, scale, 1)))


def _physical(
    columns: tuple[_Column, ...], scope: _Scope, observations: Sequence[Observation], seconds: Floats
) -> tuple[tuple[_Column, ...], list[str]]:
    """Leave out, one after the other, the term with the most negative share of the step time."""
    warnings = []
    while len(columns) > 1:
        design = _design(columns, scope, observations)
        shares = (design * _solve(design, seconds).params / seconds[:, None]).mean(axis=0)
        worst = int(np.argmin(shares))
        if shares[worst] >= -1e-9:
            break
        name = columns[worst].words.format(R=scope.words)
        what = f"does not grow with {name}" if name else "has no fixed part"
        warnings.append(f"the step time {what} in these probes; that term is left out")
        columns = (*columns[:worst], *columns[worst + 1 :])
    return columns, warnings


def _solve(design: Floats, seconds: Floats, *, noise: float = 0.0) -> Any:
    """Fit with relative weights; the residual variance is at least what the steps of the probes themselves show."""
    model = WLS(seconds, design, weights=seconds**-2.0)
    plain = model.fit()
    if plain.df_resid <= 0:
        return plain
    scale = max(float(plain.scale), noise**2)
    return model.fit(cov_type="fixed scale", cov_kwds={"scale": scale}, use_t=True)


def _pooled_noise(observations: Sequence[Observation]) -> float:
    known = [noise for observation in observations if (noise := observation.noise) is not None]
    return float(np.median(known)) if known else 0.0


def _in_row_space(design: Floats, row: Sequence[float]) -> bool:
    """Return whether a prediction at `row` follows from those at the rows of `design`, whatever the coefficients."""
    return _rank(np.vstack([design, row])) == _rank(design)


def _suspicions(observations: Sequence[Observation], seconds: Floats, residuals: Floats) -> list[str]:
    """Return what a reader should know before believing the fit."""
    return [
        *_unsteady(observations),
        *_falling(observations, seconds),
        *_missed(observations, seconds, residuals),
    ]


def _unsteady(observations: Sequence[Observation]) -> list[str]:
    return [
        f"unsteady probe: {o} drifts by {o.noise:.0%} of its step time"
        for o in observations
        if o.noise is not None and o.noise > _UNSTEADY
    ]


def _falling(observations: Sequence[Observation], seconds: Floats) -> list[str]:
    """Point out a larger local batch with a clearly shorter step: another algorithm, a clock, a disturbed probe."""
    return [
        f"not monotone: a step at {larger} is shorter than at local batch {smaller.local_batch}"
        for (smaller, before), (larger, after) in itertools.pairwise(zip(observations, seconds, strict=True))
        if (smaller.nodes, smaller.gpus_per_node) == (larger.nodes, larger.gpus_per_node)
        and after < before * (1 - _UNSTEADY)
    ]


def _missed(observations: Sequence[Observation], seconds: Floats, residuals: Floats) -> list[str]:
    return [
        f"the fit misses the probe at {o}: {_duration(measured)} measured, {_duration(measured * (1 + off))} fitted"
        for o, measured, off in zip(observations, seconds, residuals, strict=True)
        if abs(off) > _OFF
    ]


def _words(columns: Sequence[_Column], params: Floats, scope: _Scope, count: int, error: float | None) -> str:
    terms = [
        f"{_duration(value)} x {column.words.format(R=scope.words)}" if column.words else _duration(value)
        for column, value in zip(columns, params, strict=True)
    ]
    quality = "exactly determined, no residual" if error is None else f"median residual {error:.1%}"
    return f"step = {' + '.join(terms)} ({_count(count, 'probe')}, {quality})"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))
