"""Cross-validation of search strategies on a run's probes: how well the probes of each strategy predict the others.

The paper's Figure 11 compares its two searches in this way. Here, the step-time model is fitted to those measured
probes that a strategy selects, and judged by the others. If a strategy selects all of them, each is left out once.
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
from tula_cli.services.recommendation.measurements import TypeMeasurements
from tula_cli.services.search import STRATEGIES, group_probes_by_nodes
from tula_cli.spec.job import JobSpec

JUDGED_STRATEGIES = ("partial", "sweep", "full")
TRAININGS = "all, with trainings"
"""The row for the fit behind a recommendation, if the run has trainings."""

Place = tuple[int, int]
"""Number of nodes and local batch."""


@dataclass(frozen=True)
class Validation:
    """The accuracy of one strategy on the probes of a run. Errors are shares of the measured step time."""

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
        """Return the observations of probes and trainings at some configurations."""
        probes = [self.probes[configuration] for configuration in places if configuration in self.probes]
        return [
            *probes,
            *(as_observation(steps) for configuration in places for steps in self.trained.get(configuration, ())),
        ]

    def measured_seconds(self, configuration: Place, repeats: float) -> float:
        """Return the step time from probe and trainings of a configuration; `repeats` is the deviation between jobs."""
        probe = self.probes.get(configuration)
        estimate = estimate_from_measurements(
            None if probe is None else probe.step_times, self.trained.get(configuration, ()), repeats
        )
        assert estimate is not None
        return estimate.seconds


def cross_validate_measurements(measurements: TypeMeasurements) -> tuple[Validation, ...]:
    """Return how well each strategy would have predicted the measurements of a node type.

    Raises:
        BadMeasurements: too little was measured.
    """
    estimator = measurements.estimator
    return validate_strategies(
        estimator.spec,
        estimator.probes.values(),
        trained=[steps for steps_here in estimator.trained.values() for steps in steps_here],
        others=measurements.others,
        priors=estimator.steps.priors,
    )


def validate_strategies(
    spec: JobSpec,
    probes: Iterable[Measured],
    *,
    trained: Iterable[TrainedSteps] = (),
    others: OtherSizes = NO_OTHER_SIZES,
    priors: Priors,
) -> tuple[Validation, ...]:
    """Validate the strategies on the probes of one node type; strategies that predict no other probe are left out.

    Configurations measured by trainings are predicted too. If there are any, the last row uses all probes and
    trainings, as `tula recommend` does, with each configuration left out once.

    Args:
        spec: the job.
        probes: probes of the job.
        trained: steps of its trainings, one entry per training and configuration.
        others: measurements with other numbers of GPUs per node, which every fit includes.
        priors: priors of every fit.

    Raises:
        BadMeasurements: no strategy predicts anything, because too little was measured.
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
            f"too few probes to compare predictions with measurements: {len(probed)}",
            "measure more (search.strategy: sweep or full)",
        )
    return tuple(validations)


Pairs = list[tuple[float, Estimate]]
"""Measured times with the predictions of a fit without them. Seconds."""


def _judge_strategy(measurements: _Measurements, name: str, chosen: Sequence[Place]) -> Validation | None:
    """Return the validation of one strategy, without trainings; None if it predicts nothing."""
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
    """Return the measured and predicted time of each configuration, by a fit to the others."""
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
    """Return measured times and predictions of a fit; configurations that it cannot predict are left out."""
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
