"""The basis of a recommendation: the probes, what they leave unknown, and how far they can be trusted."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_cli.errors import BadMeasurements, Infeasible, Pending
from tula_cli.models import efficiency
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import Objective
from tula_cli.models.choice.offers import Offers
from tula_cli.models.efficiency import Noise
from tula_cli.models.forecast import Forecast
from tula_cli.models.observations import NO_OTHER_SIZES, OtherSizes, TooFew
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.time.noise import trimmed_mean
from tula_cli.models.time.stretches import TrainingObservations
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Prediction, TrainedSteps
from tula_cli.services.recommendation.by_trainings import observations_from_trainings
from tula_cli.services.recommendation.doubts import Results, UnknownConfigurations, describe_pending
from tula_cli.services.recommendation.gradient_noise_of import noise_from_trainings, noise_path
from tula_cli.services.recommendation.limits import Limits
from tula_cli.services.recommendation.other_sizes import CachedTrainings, measurements_of_other_sizes
from tula_cli.services.recommendation.saves import newest_saves
from tula_cli.services.recommendation.validation import Validation, cross_validate_strategies
from tula_cli.spec.job import JobSpec, train_length
from tula_cli.spec.scripts.script import script_samples


@dataclass(frozen=True)
class TypeMeasurements:
    """The probes of one type of node, and the models fitted to them."""

    part: Part
    results: Results
    forecast: Forecast
    unknown: tuple[UnknownConfigurations, ...]
    pending: int
    left_out: tuple[str, ...] = ()  # trainings whose steps do not count, and why
    others: OtherSizes = NO_OTHER_SIZES  # that the step time is fitted to as well

    @property
    def type(self) -> str:
        """The type of node as records write it: empty where the job names none."""
        return self.part.type or ""

    @property
    def prefix(self) -> str:
        return f"{self.type}: " * bool(self.type)

    def offers(self, limits: Limits) -> Offers:
        """Return the forecasts on each market."""
        offers = self.forecast.offers(limits.wanted)
        return replace(offers, type=np.full(len(offers), self.type))

    @property
    def trained(self) -> tuple[TrainedSteps, ...]:
        """The trainings whose steps count, beside the probes of their configurations."""
        probes = self.forecast.probes
        return tuple(
            steps.model_copy(
                update={"probed": trimmed_mean(probes[configuration].step_times) if configuration in probes else None}
            )
            for configuration, steps_here in self.forecast.trained.items()
            for steps in steps_here
        )

    def cross_validate(self) -> tuple[Validation, ...]:
        """Return how well each strategy would have foreseen what was measured.

        Raises:
            BadMeasurements: too little was.
        """
        trained = [steps for steps_here in self.forecast.trained.values() for steps in steps_here]
        probes = self.forecast.probes.values()
        priors = self.forecast.steps.priors
        return cross_validate_strategies(self.part.spec, probes, trained=trained, others=self.others, priors=priors)

    def other_market(self, row: Prediction) -> Prediction | None:
        """Return a forecast on the market that it is not for."""
        on_demand = self.forecast.predict(Config(row.nodes, row.batch))
        other_prediction = self.forecast.on_spot(on_demand) if row.market == "on_demand" else on_demand
        return other_prediction and other_prediction.model_copy(update={"type": row.type})


def gather_measurements(
    parts: Sequence[Part],
    limits: Limits,
    pending: Mapping[str | None, int],
    results_of: Mapping[str | None, Results],
    *,
    at_a_pace: bool = False,
) -> tuple[list[TypeMeasurements], list[str]]:
    """Return what is known of each type, and what is to be said of those that are left out.

    Args:
        parts: of the job, one a type of node.
        limits: what the user allows.
        pending: probes under way, by type.
        results_of: the results that each type is judged by.
        at_a_pace: the results have been brought to the pace of a training: no other counts beside them.

    Raises:
        Pending, BadMeasurements, Infeasible: no type is left.
    """
    all_measurements, errors = [], []
    all_results = [result for results in results_of.values() for result in results]
    noise, trainings = noise_path([part.run for part in parts], parts[0].spec, all_results), CachedTrainings()
    for part in parts:
        try:
            results, pending_here = results_of[part.type], pending.get(part.type, 0)
            observations = TrainingObservations() if at_a_pace else trainings(part)
            sizes = NO_OTHER_SIZES if at_a_pace else measurements_of_other_sizes(part, trainings)
            forecast = _fit_forecast(part, results, observations.found, others=sizes, noise=noise, pending=pending_here)
            measurements = _type_measurements(part, results, forecast, limits, observations, pending=pending_here)
            all_measurements.append(replace(measurements, others=sizes))
        except (Pending, BadMeasurements, Infeasible) as error:
            errors.append((part, error))
    if not all_measurements:
        raise next((error for _, error in errors if isinstance(error, Pending)), errors[0][1])
    return all_measurements, [f"node type {part.type} is left out: {error.message}" for part, error in errors]


def _type_measurements(
    part: Part,
    results: Results,
    forecast: Forecast,
    limits: Limits,
    observations: TrainingObservations,
    *,
    pending: int,
) -> TypeMeasurements:
    unknown = _group_unknown(forecast, limits)
    _require_enough(forecast, unknown, pending=pending)
    return TypeMeasurements(part, results, forecast, unknown, pending, observations.left_out)


def gradient_noise_of_job(all_measurements: Sequence[TypeMeasurements], *, needed: bool) -> Noise | None:
    """Return the gradient noise scale that a training has measured on its way, else the probes of all node types at its start.

    It is the job's, not the hardware's.

    Raises:
        Pending, BadMeasurements: it is needed, and no probe tells it yet, or none does.
    """
    probes = [
        result for measurements in all_measurements for result in measurements.results if isinstance(result, Measured)
    ]
    gradient_stats = [probe.gradients for probe in probes if probe.gradients is not None]
    runs = [measurements.part.run for measurements in all_measurements]
    noise = noise_from_trainings(runs, all_measurements[0].part.spec) or efficiency.noise_scale(gradient_stats)
    if noise is not None or not needed:
        return noise
    hint = (
        "it takes a probe on two or more GPUs (or, on one, a local batch of 2 or more) whose gradients are finite; where the"
        " results are older than this objective, delete some in results/ and run tula profile again"
    )
    raise _not_told_error(
        all_measurements,
        f"no probe ({len(probes)} measured) tells the gradient noise that time to accuracy follows from",
        hint if gradient_stats else f"of a script that takes {_DDP}; choose by another objective",
    )


_DDP = "DistributedDataParallel on two or more GPUs, and probes that the script does not end by itself"


def warn_no_gradients(all_measurements: Sequence[TypeMeasurements]) -> list[str]:
    """Say why nothing is told of the same progress where no probe has measured gradients."""
    if any(probe.gradients for measurements in all_measurements for probe in measurements.forecast.probes.values()):
        return []
    return [f"nothing is told of the same progress: gradients were not measured, which of a script takes {_DDP}"]


def require_energy(
    all_measurements: Sequence[TypeMeasurements], left_out: Sequence[str]
) -> tuple[list[TypeMeasurements], list[str]]:
    """Return the node types whose probes tell their energy, and what is to be said of the others beside what is already.

    Raises:
        Pending, BadMeasurements: no probe tells it yet, or none does.
    """
    with_power = [measurements for measurements in all_measurements if measurements.forecast.power is not None]
    if with_power:
        unknown = [measurements.type for measurements in all_measurements if measurements.forecast.power is None]
        return with_power, [
            *left_out,
            *(f"node type {name} is left out: no probe tells its energy" for name in unknown),
        ]
    count = sum(len(measurements.forecast.probes) for measurements in all_measurements)
    raise _not_told_error(
        all_measurements,
        f"no probe ({count} measured) tells the energy of its steps",
        "it takes NVIDIA GPUs that have an energy counter, and pip install 'tula-cli[nvml]' in the jobs' environment; probes"
        " that were measured without it tell it once their files in results/ are deleted and tula profile has run again",
    )


def trained_epochs(spec: JobSpec, dataset_size: int) -> int:
    """Return the epochs that a job trains; of a script whose length is in samples or steps, to a whole one.

    Args:
        spec: the job.
        dataset_size: samples of an epoch.
    """
    if spec.script is None:
        return spec.train.epochs
    return max(1, round(script_samples(spec.script, dataset_size) / dataset_size))


def describe_epochs(chosen: Prediction, measurements: TypeMeasurements, objective: Objective) -> str:
    """Say how many epochs the times are for."""
    spec, same_progress = measurements.part.spec, chosen.same_progress
    length = train_length(spec)
    if objective != "accuracy-time" or same_progress is None:
        return f"every time is for {length}, whatever the batch"
    key = "train.epochs" if spec.script is None else "script.length.epochs"
    description = (
        f"batch {chosen.batch} needs about {same_progress.epochs:.3g} epochs ({same_progress.epochs_low:.3g} to {same_progress.epochs_high:.3g}) for"
        f" the progress of {length} at batch {spec.train.reference_batch}; tula train runs {length}"
    )
    needed = math.ceil(same_progress.epochs)
    if needed == trained_epochs(spec, measurements.forecast.dataset_size):
        return description
    if spec.script is not None and spec.script.length.epochs is None:
        return f"{description} as it is: script.length says how long"
    return f"{description} as it is: --set {key}={needed} trains to the same progress"


def describe_noise_basis(noise: Noise, measurements: TypeMeasurements) -> str:
    spec = measurements.part.spec
    epochs = trained_epochs(spec, measurements.forecast.dataset_size)
    return efficiency.describe_noise(noise, epochs=epochs, reference=spec.train.reference_batch)


def forecast_of_recommendation(run: RunDir, spec: JobSpec, others: OtherSizes = NO_OTHER_SIZES) -> Forecast:
    """Return the forecast that a recommendation is made from.

    Args:
        run: measured on one type of nodes.
        spec: the job; of a comparison with another method.
        others: measured with other numbers of GPUs a node, which the recommendation is based on.

    Raises:
        BadMeasurements, Infeasible: as `Forecast.from_results`.
    """
    results = run.results()
    observations = observations_from_trainings(run, spec, results)
    noise = noise_path([run], spec, results)
    return _fit_forecast(Part(None, run, spec), results, observations.found, others=others, noise=noise, pending=0)


def _fit_forecast(
    part: Part,
    results: Results,
    trained: Sequence[TrainedSteps],
    *,
    others: OtherSizes,
    noise: NoisePath | None,
    pending: int,
) -> Forecast:
    attempts, saves = part.run.attempts(), newest_saves(part.run)
    fit_with = functools.partial(Forecast.from_results, attempts=attempts, saves=saves, trained=trained)
    try:
        return fit_with(part.spec, results, other_sizes=others, noise=noise)
    except (TooFew, Infeasible) as error:
        if pending:
            raise _pending_error(pending, error.message) from error
        raise


def _not_told_error(all_measurements: Sequence[TypeMeasurements], why: str, hint: str) -> Pending | BadMeasurements:
    """Return what is wrong where no probe tells something: those under way may yet."""
    pending = sum(measurements.pending for measurements in all_measurements)
    return _pending_error(pending, why) if pending else BadMeasurements(why, hint)


def _pending_error(pending: int, why: str) -> Pending:
    return Pending(
        f"{describe_pending(pending)}, and those done do not tell enough: {why}",
        "tula status shows how far they are; run tula recommend again when they are done",
    )


def _group_unknown(forecast: Forecast, limits: Limits) -> tuple[UnknownConfigurations, ...]:
    """Return the configurations within the limits whose step time the probes do not tell, by the reason."""
    nodes, batch = forecast.unknown_candidates(limits.wanted)
    nodes, batch = (column[limits.reach(nodes, batch)] for column in (nodes, batch))
    groups: dict[str, UnknownConfigurations] = {}  # whatever the batch, there is one reason on a number of nodes
    for count, first_index, many in zip(*np.unique(nodes, return_index=True, return_counts=True), strict=True):
        why = forecast.why_unknown(Config(int(count), int(batch[first_index])))
        group = groups.get(why, UnknownConfigurations(why, 0, ()))
        groups[why] = UnknownConfigurations(why, group.count + int(many), (*group.nodes, int(count)))
    return tuple(groups.values())


def _require_enough(forecast: Forecast, unknown: Sequence[UnknownConfigurations], *, pending: int) -> None:
    """Raise Pending or BadMeasurements where choosing among what is known would be no choice."""
    if not unknown:
        return
    why = unknown[0].why
    if pending:
        raise _pending_error(pending, why)
    if len(forecast.probes) < 2:
        raise BadMeasurements(
            f"one probe is too few to choose by: {why}", "run tula profile again; it measures what is missing"
        )
