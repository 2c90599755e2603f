"""The energy of a step, from the probes whose GPUs have an energy counter.

    E = P t_step + e b

of one GPU at local batch b: P (watts) is drawn all the time, including while a GPU waits for others; e (joules) is the
additional energy per sample. Residuals are relative.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tula_cli.models.choice.candidates import Floats
from tula_cli.models.choice.grid import Number
from tula_cli.run.records.probes import Measured
from tula_cli.words import format_count, format_number

_MIN_PROBES = 3  # minimum number of probes to separate P and e; with fewer, power is constant
_MAX_CONDITION = 1e4  # condition number above which step time and batch are practically proportional
_MIN_SHARE = 1e-3  # terms below this share of the energy in every probe are left out


@dataclass(frozen=True)
class Power:
    """The power of one GPU over a step, at one configuration or at each of several."""

    watts: Number
    error: Number | None  # half the 90 % interval, as a share of the watts; None without residuals

    def compute_interval_end(self, kwh: Floats, bound: Floats, hours: Floats, *, sign: int) -> Floats:
        """Return an end of the 90 % interval of the energy; nan if unknown.

        The errors of power and time are combined as independent.
        """
        if self.error is None:
            return np.full(len(kwh), np.nan)
        reached: Floats = np.maximum(0.0, kwh * (1 + sign * np.hypot(self.error, bound / hours - 1)))
        return reached


@dataclass(frozen=True)
class PowerModel:
    """The energy model of one kind of node, fitted to its probes."""

    idle: float  # P, watts per GPU
    per_sample: float  # e, joules per sample; 0 if the probes cannot separate it from P
    words: str
    error: float | None  # half the 90 % interval of a further measurement, as a share of it; None without residuals
    _spread: Floats = field(repr=False)  # inverse of the normal matrix, one row per coefficient

    def get_measured_power(self, probe: Measured) -> Power:
        """Return the measured power of a probe, which must have an energy reading."""
        return Power(_compute_mean_watts(probe), self.error)

    def predict_power(self, seconds: Number, local_batch: Number) -> Power:
        """Return the predicted power at the step time and local batch of a configuration, or of each of many."""
        rows = np.stack([seconds, local_batch], axis=-1).astype(float)[..., : len(self._spread)]
        joules = self.idle * seconds + self.per_sample * local_batch
        leverage = np.einsum("...i,ij,...j", rows, self._spread, rows) / joules**2
        error = None if self.error is None else self.error * (1 + leverage) ** 0.5
        return Power(joules / seconds, error)


def fit_power_model(all_probes: Sequence[Measured]) -> PowerModel:
    """Fit the model to the probes with an energy reading, of which there is at least one."""
    probes_with_energy = [probe for probe in all_probes if probe.energy is not None]
    rows = np.array(
        [[_compute_energy_step_time(probe), probe.local_batch] for probe in probes_with_energy], dtype=float
    )
    rows /= np.array([[_compute_mean_watts(probe) * _compute_energy_step_time(probe)] for probe in probes_with_energy])
    fitted = _fit_two_coefficients(rows) if len(probes_with_energy) >= _MIN_PROBES else None
    columns = rows[:, :1] if fitted is None else rows
    coefficients = _solve_least_squares(columns) if fitted is None else fitted
    residuals = columns @ coefficients - 1
    idle, per_sample = (*map(float, coefficients), 0.0)[:2]
    return PowerModel(
        idle=idle,
        per_sample=per_sample,
        words=_describe_power(
            idle, per_sample, residuals, probe_count=len(probes_with_energy), all_probes=len(all_probes)
        ),
        error=_compute_half_interval(residuals, parameters=len(coefficients)),
        _spread=np.linalg.inv(columns.T @ columns),
    )


def _compute_energy_step_time(probe: Measured) -> float:
    """Return the step time over which the energy was counted: the mean of all timed steps, without trimming."""
    return float(np.mean(probe.step_times))


def _compute_mean_watts(probe: Measured) -> float:
    assert probe.energy is not None
    return probe.energy / (probe.nodes * probe.gpus_per_node * _compute_energy_step_time(probe))


def _fit_two_coefficients(rows: Floats) -> Floats | None:
    """Return P and e, or None if the probes cannot separate them or one would be negligible or negative."""
    scale = np.linalg.norm(rows, axis=0)
    if np.linalg.cond(rows / scale) > _MAX_CONDITION:
        return None
    coefficients = _solve_least_squares(rows)
    return coefficients if np.all(coefficients * rows.max(axis=0) > _MIN_SHARE) else None


def _solve_least_squares(rows: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0], dtype=np.float64)


def _compute_half_interval(residuals: Floats, *, parameters: int) -> float | None:
    freedom = len(residuals) - parameters
    if freedom < 1:
        return None
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.95)) * float(np.sqrt(residuals @ residuals / freedom))


def _describe_power(
    idle: float, per_sample: float, residuals: Sequence[float] | Floats, *, probe_count: int, all_probes: int
) -> str:
    per_sample_text = f" and {format_number(per_sample)} J per sample" if per_sample else " at every batch"
    error = "" if probe_count < 2 else f"; median error {100 * float(np.median(np.abs(residuals))):.1f} %"
    return f"{format_number(idle)} W per GPU{per_sample_text}, from {probe_count} of {format_count(all_probes, 'probe')}{error}"
