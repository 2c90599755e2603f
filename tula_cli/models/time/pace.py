"""Adjust the probes to the pace of a running training.

A training shows one configuration. The change there since the probes, in compute and in synchronisation, is assumed for
all other configurations, because nothing else is known of them; the result says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tula_cli.diagnostics import Diagnostic
from tula_cli.models import messages
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.results import StepParts
from tula_cli.words import describe_probe_place

MIN_CHANGE = 0.05
"""Share of a step below which a difference from the probes does not count as a change."""
WAITING_SHARE = 0.1
"""Share of a step from which on waiting for data limits the pace."""

Result = Measured | OutOfMemory | Failed


@dataclass(frozen=True)
class TrainingPace:
    """The current step time of a training."""

    nodes: int
    gpus_per_node: int
    local_batch: int
    step_times: tuple[float, ...]  # seconds; means of about a second each
    parts: StepParts  # medians

    @property
    def step(self) -> float:
        return compute_trimmed_mean(self.step_times)


@dataclass(frozen=True)
class PacedResults:
    """The adjusted results, and warnings about the assumptions behind them."""

    results: tuple[Result, ...]
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class _PaceChange:
    """Change from the probes to the current pace."""

    compute: float  # factor
    sync: float  # factor of the exposed synchronisation
    added: float  # seconds of it, where the probes had next to none
    a_sample: float  # seconds that the loader of a GPU takes for one, where it sets the pace

    def scaled_times(self, step: float, compute: float, *, local_batch: int, alone: bool) -> tuple[float, float]:
        """Return the current step time and compute time. Seconds."""
        least, compute_time = self.a_sample * local_batch, self.compute * compute
        exposed = 0.0 if alone else self.sync * max(0.0, step - compute) + self.added
        step_time = max(compute_time + exposed, least)
        return step_time, min(step_time, max(compute_time, least))


def scale_results_to_pace(
    results: Sequence[Result],
    pace: TrainingPace,
    *,
    step_of: Callable[[int, int], float],
    compute_of: Callable[[int, int], float],
) -> PacedResults:
    """Return the results of the probes adjusted to the pace of a training.

    Args:
        results: of the probes.
        pace: of the training.
        step_of: seconds of a step at (nodes, local batch), by the fit to the probes.
        compute_of: the same without synchronisation.
    """
    at = pace.nodes, pace.local_batch
    probe = next((r for r in results if isinstance(r, Measured) and (r.nodes, r.local_batch) == at), None)
    step = compute_trimmed_mean(probe.step_times) if probe else step_of(*at)
    compute_time = (probe and probe.compute_time) or compute_of(*at)
    change = _estimate_change(pace, step, min(compute_time, step))
    scaled = (_scale_probe(r, change, compute_of, pace) if isinstance(r, Measured) else r for r in results)
    return PacedResults(tuple(scaled), tuple(_warn_of_pace(pace, change, step)))


def _estimate_change(pace: TrainingPace, step: float, compute: float) -> _PaceChange:
    """Return the change from the given step and compute time to the training's pace."""
    observed, data = pace.parts, pace.parts.data or 0.0
    waits = data >= WAITING_SHARE * pace.step
    a_sample = pace.step / pace.local_batch if waits else 0.0
    if observed.compute is None or observed.sync is None:
        factor = (pace.step - waits * data) / step
        factor = factor if abs(factor - 1) >= MIN_CHANGE else 1.0
        return _PaceChange(factor, factor, 0.0, a_sample)
    factor = (observed.compute + (not waits) * data) / compute
    exposed, added_sync = step - compute, observed.sync - (step - compute)
    alone = pace.nodes * pace.gpus_per_node == 1 or abs(added_sync) < MIN_CHANGE * step
    has_synchronisation = exposed >= MIN_CHANGE * step
    return _PaceChange(
        compute=factor if abs(factor - 1) >= MIN_CHANGE else 1.0,
        sync=1.0 if alone or not has_synchronisation else observed.sync / exposed,
        added=0.0 if alone or has_synchronisation else added_sync,
        a_sample=a_sample,
    )


def _scale_probe(
    probe: Measured, change: _PaceChange, compute_of: Callable[[int, int], float], pace: TrainingPace
) -> Measured:
    if (probe.nodes, probe.local_batch) == (pace.nodes, pace.local_batch):
        observed = pace.parts
        compute = None if observed.compute is None else observed.compute + (observed.data or 0.0)
        update = {
            "step_times": pace.step_times,
            "compute_time": compute,
            "sync_time": observed.sync,
            "data_wait": observed.data,
        }
        return probe.model_copy(update=update)
    mean_step = compute_trimmed_mean(probe.step_times)
    compute_time = min(mean_step, probe.compute_time or compute_of(probe.nodes, probe.local_batch))
    alone = probe.nodes * probe.gpus_per_node == 1
    step, compute = change.scaled_times(mean_step, compute_time, local_batch=probe.local_batch, alone=alone)
    factor = step / mean_step
    return probe.model_copy(
        update={"step_times": tuple(factor * time for time in probe.step_times), "compute_time": compute}
    )


def _warn_of_pace(pace: TrainingPace, change: _PaceChange, step: float) -> list[Diagnostic]:
    """Return the observed change and what is assumed of all other configurations."""
    where, has_parts = describe_probe_place(pace.nodes, pace.local_batch), pace.parts.compute is not None
    several = pace.nodes * pace.gpus_per_node > 1
    pace_warning = messages.training_pace(
        where=where,
        factor=pace.step / step,
        compute=change.compute if has_parts else None,
        sync=change.sync if has_parts and several else None,
        added_sync_ms=1000 * change.added,
    )
    data = [messages.training_waits_for_data(milliseconds=1000 * change.a_sample)] if change.a_sample else []
    return [pace_warning, *data, messages.other_configurations_assumed(where=where)]
