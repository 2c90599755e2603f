"""The step-time model of a job, fitted to its probes and trainings; wider intervals if ranks are delayed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tula_cli.diagnostics import Diagnostic
from tula_cli.models.observations import convert_to_observation
from tula_cli.models.time import step_time, stretches
from tula_cli.models.time.step_time import PRIORS, LocalResidual, Observation, Priors, StepTimeFit, choose_priors
from tula_cli.models.time.stragglers import find_stragglers, warn_unexplained_waits
from tula_cli.run.records.base import Components
from tula_cli.run.records.probes import Measured
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
        collective: `cluster.collective`.
        priors: of the first fit.
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
