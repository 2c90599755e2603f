"""How well a run's own probes foresee each other: what each strategy would have said of those that it does not take.

The paper's Figure 11 asks this of its two searches. Here it is asked of the run itself: a strategy takes its probes of those
that were measured, the step-time model is fitted to them, and the others are what it is judged by. Where it takes all of
them, each is left out once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tula_cli.errors import BadMeasurements
from tula_cli.models.observations import NO_OTHER_SIZES, OtherSizes
from tula_cli.models.observations import as_observation as of_probe
from tula_cli.models.time import steptime
from tula_cli.models.time.formulas import Priors
from tula_cli.models.time.steptime import Estimate, Observation
from tula_cli.models.time.stretches import as_observation, estimate_from_measurements, group_trainings_by_configuration
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.services.search import STRATEGIES, group_probes_by_nodes
from tula_cli.spec.job import JobSpec
from tula_cli.words import format_count

JUDGED_STRATEGIES = ("partial", "sweep", "full")
TRAININGS = "all, with trainings"
"""The row of what an answer goes by where the run has trainings."""

Place = tuple[int, int]
"""Nodes and local batch."""


@dataclass(frozen=True)
class Validation:
    """One strategy on the probes of a run. Errors are shares of the measured step time."""

    strategy: str  # or `TRAININGS`
    probes: int  # that it takes of those there are
    unseen: int  # that it is judged by
    median: float
    p90: float
    held: float  # share of them inside its 90 % intervals
    left_out_once: bool  # it takes all there are, and each was left out once


@dataclass(frozen=True)
class _Measurements:
    """The measurements on one node type, by nodes and local batch."""

    spec: JobSpec
    priors: Priors
    probes: Mapping[Place, Observation]
    trained: Mapping[Place, Sequence[TrainedSteps]]
    elsewhere: tuple[Observation, ...]  # with other numbers of GPUs a node, which every fit takes

    @property
    def places(self) -> list[Place]:
        return sorted({*self.probes, *self.trained})

    def observations_at(self, places: Iterable[Place]) -> list[Observation]:
        """Return the probes and the trainings at some configurations."""
        probes = [self.probes[configuration] for configuration in places if configuration in self.probes]
        return [
            *probes,
            *(as_observation(steps) for configuration in places for steps in self.trained.get(configuration, ())),
        ]

    def measured_seconds(self, configuration: Place, repeats: float) -> float:
        """Return what probe and trainings of a configuration have measured together; jobs differ by `repeats`."""
        probe = self.probes.get(configuration)
        estimate = estimate_from_measurements(
            None if probe is None else probe.step_times, self.trained.get(configuration, ()), repeats
        )
        assert estimate is not None
        return estimate.seconds


def validate_strategies(
    spec: JobSpec,
    probes: Iterable[Measured],
    *,
    trained: Iterable[TrainedSteps] = (),
    others: OtherSizes = NO_OTHER_SIZES,
    priors: Priors,
) -> tuple[Validation, ...]:
    """Judge the strategies on the probes of one kind of node; those that tell nothing of any other probe are left out.

    What trainings have measured is foreseen too. Where there are any, the last row takes all probes and trainings, each
    configuration left out once: what `tula recommend` goes by.

    Args:
        spec: the job.
        probes: of it.
        trained: the steps of its trainings, one a training and configuration.
        others: with other numbers of GPUs a node, which every fit takes as well.
        priors: of every fit.

    Raises:
        BadMeasurements: no strategy tells anything, as too little was measured.
    """
    probed = {(probe.nodes, probe.local_batch): of_probe(probe) for probe in probes}
    elsewhere = (*map(of_probe, others.probes), *map(as_observation, others.trained))
    measurements = _Measurements(spec, priors, probed, group_trainings_by_configuration(trained), elsewhere)
    by_nodes = group_probes_by_nodes(probed)
    validations: list[Validation] = []
    for name in JUDGED_STRATEGIES:
        chosen = [(nodes, local) for nodes, locals_ in STRATEGIES[name](by_nodes).items() for local in locals_]
        judged = _judge_strategy(measurements, name, sorted(chosen))
        if judged is not None and all(
            (judged.probes, judged.unseen) != (validation.probes, validation.unseen) for validation in validations
        ):
            validations.append(judged)
    if measurements.trained and (pairs := _predict_leave_one_out(measurements, measurements.places, trainings=True)):
        validations.append(_make_validation_row(TRAININGS, len(probed), pairs, left_out_once=True))
    if not validations:
        raise BadMeasurements(
            f"nothing of each other follows from {format_count(len(probed), 'probe')}",
            "measure more (search.strategy: sweep or full)",
        )
    return tuple(validations)


Pairs = list[tuple[float, Estimate]]
"""A measured time, and the prediction of a fit without it. Seconds."""


def _judge_strategy(measurements: _Measurements, name: str, chosen: Sequence[Place]) -> Validation | None:
    """Return how one strategy does by itself, without trainings; None where it tells nothing."""
    unseen = [configuration for configuration in measurements.places if configuration not in chosen]
    takes_all = all(configuration in chosen for configuration in measurements.probes)
    probes = [measurements.probes[configuration] for configuration in chosen]
    pairs = _predict_pairs(measurements, probes, unseen) + (
        _predict_leave_one_out(measurements, chosen, trainings=False) if takes_all else []
    )
    return _make_validation_row(name, len(chosen), pairs, left_out_once=takes_all) if pairs else None


def _make_validation_row(name: str, probes: int, pairs: Pairs, *, left_out_once: bool) -> Validation:
    off = np.array([abs(estimate.seconds / seconds - 1) for seconds, estimate in pairs])
    is_inside = [_is_inside(seconds, estimate) for seconds, estimate in pairs]
    return Validation(
        strategy=name,
        probes=probes,
        unseen=len(pairs),
        median=float(np.median(off)),
        p90=float(np.percentile(off, 90)),
        held=float(np.mean(is_inside)),
        left_out_once=left_out_once,
    )


def _is_inside(seconds: float, estimate: Estimate) -> bool:
    return (estimate.low or 0.0) <= seconds <= (estimate.high or 0.0)


def _predict_leave_one_out(measurements: _Measurements, places: Sequence[Place], *, trainings: bool) -> Pairs:
    """Return what each configuration takes by a fit to the others."""
    pairs: Pairs = []
    for out in places:
        remaining = [configuration for configuration in places if configuration != out]
        pairs += _predict_pairs(
            measurements,
            measurements.observations_at(remaining)
            if trainings
            else [measurements.probes[configuration] for configuration in remaining],
            [out],
        )
    return pairs


def _predict_pairs(measurements: _Measurements, observations: Sequence[Observation], places: Sequence[Place]) -> Pairs:
    """Return what some configurations take by a fit; those of which it says nothing are left out."""
    if not observations or not places:
        return []
    cluster, gpus = measurements.spec.cluster, measurements.spec.cluster.gpus_per_node
    fit = steptime.fit_step_time(
        [*observations, *measurements.elsewhere], collective=cluster.collective, priors=measurements.priors
    )
    predictable = [(nodes, local) for nodes, local in places if not fit.refusal(nodes, gpus, local)]
    repeats = [float(fit.repeat_deviation([nodes], [gpus], [local])[0]) for nodes, local in predictable]
    return [
        (measurements.measured_seconds(configuration, spread), fit.predict(configuration[0], gpus, configuration[1]))
        for configuration, spread in zip(predictable, repeats, strict=True)
    ]
