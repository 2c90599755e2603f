"""The step-time model of a job, fitted to its probes and trainings, with wider intervals if ranks are delayed.

Every step of a synchronous training takes as long as its slowest rank (Dean and Barroso 2013 call this the tail). Each
rank records its own time per step; a rank that is slow in most of its probes is named. If no rank is, but the exposed
synchronisation grows with the batch, which that of gradients does not, and the probes lie far off their fit, something
else delays ranks: data from a shared source, or a different slow rank each time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from tula_cli.diagnostics import Diagnostic
from tula_cli.models import messages
from tula_cli.models.observations import convert_to_observation
from tula_cli.models.time import step_time, stretches
from tula_cli.models.time.step_model import PRIORS, LocalResidual, Priors, StepModel, choose_priors
from tula_cli.models.time.step_time import Observation, StepTimeFit
from tula_cli.run.records.probes import Components, Measured, RankStepTimes
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.spec.job import JobSpec

DELAYED_RANKS_RESIDUAL = LocalResidual(sd=0.5, batch=1.0, replicas=0.5)
"""Local residual of the steps of delayed ranks: a third off the model in the median; how fast it changes over batch and
replicas."""
_MAX_SHARE_OF_DIVIDED_MODEL = 0.75
"""Gradient bytes per rank, most over fewest ranks, below which a script counts as sharded."""


def fit_step_time_and_find_stragglers(
    spec: JobSpec, measured: Sequence[Measured], trained: Sequence[TrainedSteps] = ()
) -> tuple[StepTimeFit, list[Diagnostic]]:
    """Fit the step-time model; its warnings name slow nodes or ranks and unexplained waits.

    With such delays, predictions for unmeasured configurations have wide intervals.

    Args:
        trained: step times of trainings, used in addition to the probes.

    Raises:
        BadMeasurements: as `step_time.fit_step_time`.
    """
    probes = [convert_to_observation(probe) for probe in measured]
    observations = [*probes, *map(stretches.convert_to_observation, trained)]
    named = [straggler.warning for straggler in find_stragglers(measured)]
    priors = choose_priors_of_job(spec, measured)
    return fit_observations(probes, observations, collective=spec.cluster.collective, priors=priors, named=named)


def choose_priors_of_job(spec: JobSpec, measured: Iterable[Measured]) -> Priors:
    """Return the priors of a job, from its settings and the gradient sizes that its probes measured."""
    sharded = spec.train.is_sharded
    return choose_priors(gradient_bytes=find_gradient_bytes(measured, sharded=sharded), sharded=sharded)


def find_gradient_bytes(measured: Iterable[Measured], *, sharded: bool) -> int:
    """Return the size in bytes of the whole model's gradients, from the probes; 0 if unknown.

    Args:
        sharded: whether tula's own loop shards the model. In a script that shards it, each rank reports its part, which
            is smaller the more ranks there are.
    """
    sizes, sizes_by_ranks = [0], dict[int, int]()
    for probe in measured:
        ranks, memory = probe.nodes * probe.gpus_per_node, probe.memory
        if isinstance(memory, Components):
            # with several micro-batches per step, their sum is a second copy (`worker/measure/meter.py`)
            sizes.append(memory.gradients * ranks if sharded else memory.gradients // min(2, probe.accumulate))
        elif memory.states is not None:
            sizes_by_ranks[ranks] = max(memory.states.gradients, sizes_by_ranks.get(ranks, 0))
    if sizes_by_ranks:
        on_fewest, on_most = sizes_by_ranks[min(sizes_by_ranks)], sizes_by_ranks[max(sizes_by_ranks)]
        is_divided = on_most < _MAX_SHARE_OF_DIVIDED_MODEL * on_fewest
        sizes += [size * ranks if is_divided else size for ranks, size in sizes_by_ranks.items()]
    return max(sizes)


def fit_observations(
    probes: Sequence[Observation],
    observations: Sequence[Observation],
    *,
    collective: str,
    priors: Priors = PRIORS,
    named: Sequence[Diagnostic] = (),
) -> tuple[StepTimeFit, list[Diagnostic]]:
    """Fit the step-time model to observations; if ranks are delayed, fit it again with priors that allow for delays.

    Args:
        probes: observations that are compared with the fit.
        observations: all observations that are fitted.
        named: warnings of known stragglers.

    Raises:
        BadMeasurements: as `step_time.fit_step_time`.
    """
    fit = step_time.fit_step_time(observations, collective=collective, priors=priors)
    causes = list(named) or warn_unexplained_waits(probes, fit.model)
    if causes:
        fit = step_time.fit_step_time(
            observations, collective=collective, priors=replace(priors, local_step=DELAYED_RANKS_RESIDUAL)
        )
    return fit, causes


# --- Slow ranks, and waits that the model does not explain

MIN_STRAGGLER_RATIO = 1.2
"""A rank that takes this multiple of the median rank's time is slow: ranks of one cluster normally differ by a few per
cent."""
_MIN_SLOW_SHARE = 0.75  # minimum share of its probes in which a straggler is slow
_MIN_PROBES = 2  # minimum number of probes
MIN_SYNC_GROWTH = 0.5
"""Exposed synchronisation counts as growing with the batch if it grows by more than this share of the largest batch's
compute."""
FAR_NOISE = 3.0
"""Probes lie far off their fit if its noise is this multiple of that of other clusters."""


@dataclass(frozen=True)
class Straggler:
    """A node, or a rank if there is one node, whose own part of a step takes longer than that of the others."""

    name: str
    factor: float  # time relative to that of the median node or rank
    probes: int  # probes in which it was slow
    all_probes: int  # probes in which it took part
    waits: bool  # whether it waits for data; otherwise it computes slowly

    @property
    def warning(self) -> Diagnostic:
        return messages.straggler(
            name=self.name,
            factor=self.factor,
            slow_probes=self.probes,
            probes=self.all_probes,
            waits_for_data=self.waits,
        )


def find_stragglers(measured: Iterable[Measured]) -> list[Straggler]:
    """Return the nodes or ranks that were slow in most of the probes they took part in, the slowest first."""
    ratios_by_name: dict[str, list[tuple[float, bool]]] = {}
    for probe in measured:
        for name, ratio in _compare_to_median(probe.ranks).items():
            ratios_by_name.setdefault(name, []).append(ratio)
    slow_ranks: list[Straggler] = []
    for name, ratios in ratios_by_name.items():
        slow = [(ratio, is_waiting) for ratio, is_waiting in ratios if ratio >= MIN_STRAGGLER_RATIO]
        if len(slow) >= max(_MIN_PROBES, math.ceil(_MIN_SLOW_SHARE * len(ratios))):
            is_waiting = sum(is_waiting for _, is_waiting in slow) > len(slow) / 2
            slow_ranks.append(Straggler(name, median(ratio for ratio, _ in slow), len(slow), len(ratios), is_waiting))
    return sorted(slow_ranks, key=lambda straggler: -straggler.factor)


def _compare_to_median(ranks: Sequence[RankStepTimes]) -> Mapping[str, tuple[float, bool]]:
    """Return the time of each node relative to the median, and whether waiting for data causes the difference.

    With one node, of each rank.
    """
    if len(ranks) < 2:
        return {}
    by_name: dict[str, list[RankStepTimes]] = {}
    for number, rank in enumerate(ranks):
        by_name.setdefault(rank.host if len({r.host for r in ranks}) > 1 else f"rank {number}", []).append(rank)
    compute_by_name = {name: median(rank.compute for rank in paces) for name, paces in by_name.items()}
    waits = {name: median(rank.wait for rank in paces) for name, paces in by_name.items()}
    median_compute, median_wait = median_low(compute_by_name.values()), median_low(waits.values())
    return {
        name: (seconds / median_compute, waits[name] - median_wait > (seconds - median_compute) / 2)
        for name, seconds in compute_by_name.items()
    }


def warn_unexplained_waits(observations: Sequence[Observation], model: StepModel) -> list[Diagnostic]:
    """Warn about waits that are explained neither by compute nor by the synchronisation of gradients."""
    sizes = {(o.nodes, o.gpus_per_node) for o in observations if o.nodes * o.gpus_per_node > 1}
    if not sizes or model.noise <= FAR_NOISE:
        return []
    max_size = max(sizes)
    far = sorted(
        (o for o in observations if (o.nodes, o.gpus_per_node) == max_size and math.isfinite(o.compute_time)),
        key=lambda o: o.local_batch,
    )
    if len(far) < 2:
        return []
    small, large = far[0], far[-1]
    grown = (large.seconds - large.compute_time) - (small.seconds - small.compute_time)
    if grown <= MIN_SYNC_GROWTH * large.compute_time:
        return []
    return [
        messages.unexplained_waits(
            nodes=max_size[0],
            milliseconds=1e3 * grown,
            small_batch=small.local_batch,
            large_batch=large.local_batch,
        )
    ]
