"""What a recommendation rests on: the probes, what is unknown yet, and how far they can be trusted."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_cli.errors import BadMeasurements, Infeasible, Pending
from tula_cli.models import efficiency
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import Choice, Objective
from tula_cli.models.choice.offers import Offers
from tula_cli.models.efficiency import Noise
from tula_cli.models.forecast import Forecast
from tula_cli.models.observations import TooFew
from tula_cli.models.ramp.by_noise import NoisePath
from tula_cli.models.time.noise import centre
from tula_cli.models.time.stretches import Told
from tula_cli.models.time.what_if import Change
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Calibration, Prediction, TrainedSteps
from tula_cli.services.progress.held_against import calibrated
from tula_cli.services.recommendation.by_trainings import told_by_trainings
from tula_cli.services.recommendation.gradient_noise_of import noise_path, trained_noise
from tula_cli.services.recommendation.limits import Limits
from tula_cli.services.recommendation.saves import saves_of
from tula_cli.spec.job import JobSpec, train_length
from tula_cli.spec.scripts.section import samples
from tula_cli.words import plural

_REASONS = 5  # for which configurations are left out that are told one by one
_DISAGREE = 0.15  # a second opinion that is further off than this share, and outside the interval, is told

Results = Sequence[Measured | OutOfMemory | Failed]


@dataclass(frozen=True)
class Unknown:
    """Configurations within the limits whose step time the probes do not tell, all for one reason."""

    why: str
    count: int
    nodes: tuple[int, ...]  # the numbers of nodes among them, ascending


@dataclass(frozen=True)
class TypeMeasurements:
    """What the probes of one type of node tell."""

    part: Part
    results: Results
    forecast: Forecast
    unknown: tuple[Unknown, ...]
    pending: int
    left_out: tuple[str, ...] = ()  # trainings whose steps do not count, and why

    @property
    def type(self) -> str:
        """The type of node as records write it: empty where the job names none."""
        return self.part.type or ""

    @property
    def prefix(self) -> str:
        return f"{self.type}: " * bool(self.type)

    def offers(self, limits: Limits) -> Offers:
        """Return the forecasts on each market."""
        found = self.forecast.offers(limits.wanted)
        return replace(found, type=np.full(len(found), self.type))

    @property
    def trained(self) -> tuple[TrainedSteps, ...]:
        """The trainings whose steps count, beside the probes of their configurations."""
        probes = self.forecast.probes
        return tuple(
            one.model_copy(update={"probed": centre(probes[place].step_times) if place in probes else None})
            for place, seen in self.forecast.trained.items()
            for one in seen
        )

    def under(self, change: Change) -> "TypeMeasurements":
        """Return them with the forecast under another network, or on other GPUs.

        Raises:
            BadMeasurements: the probes do not tell what is to be changed.
        """
        return replace(self, forecast=self.forecast.under(change))

    def other_market(self, row: Prediction) -> Prediction | None:
        """Return a forecast on the market that it is not for."""
        on_demand = self.forecast.predict(Config(row.nodes, row.batch))
        found = self.forecast.on_spot(on_demand) if row.market == "on_demand" else on_demand
        return found and found.model_copy(update={"type": row.type})


def measurements_of(
    parts: Sequence[Part],
    limits: Limits,
    pending: Mapping[str | None, int],
    results_of: Mapping[str | None, Results],
    *,
    at_a_pace: bool = False,
    others: Sequence[Measured] = (),
) -> tuple[list[TypeMeasurements], list[str]]:
    """Return what is known of each type, and what is to be said of those that are left out.

    Args:
        parts: of the job, one a type of node.
        limits: what the user allows.
        pending: probes under way, by type.
        results_of: the results that each type is judged by.
        at_a_pace: the results have been brought to the pace of a training: no other counts beside them.
        others: probes with other numbers of GPUs a node, that the step time is fitted to as well.

    Raises:
        Pending, BadMeasurements, Infeasible: no type is left.
    """
    found, errors = [], []
    calibration, unread = calibrated(parts[0].run.path, parts[0].spec.cluster.kind)
    every = [result for results in results_of.values() for result in results]
    noise = noise_path([part.run for part in parts], parts[0].spec, every)
    for part in parts:
        try:
            results = results_of[part.type]
            told = told_by_trainings(part.run, part.spec, results) if not at_a_pace else Told()
            waiting = pending.get(part.type, 0)
            forecast = _forecast(part, results, told.found, calibration, others=others, noise=noise, pending=waiting)
            found.append(_type_measurements(part, results, forecast, limits, told, pending=waiting))
        except (Pending, BadMeasurements, Infeasible) as error:
            errors.append((part, error))
    if not found:
        raise next((error for _, error in errors if isinstance(error, Pending)), errors[0][1])
    return found, [*(f"node type {part.type} is left out: {error.message}" for part, error in errors), *unread]


def _type_measurements(
    part: Part, results: Results, forecast: Forecast, limits: Limits, told: Told, *, pending: int
) -> TypeMeasurements:
    unknown = _unknown(forecast, limits)
    _require_enough(forecast, unknown, pending=pending)
    return TypeMeasurements(part, results, forecast, unknown, pending, told.left_out)


def noise_of(all_measurements: Sequence[TypeMeasurements], *, needed: bool) -> Noise | None:
    """Return the gradient noise scale that a training has measured on its way, else the probes of all node types at its start.

    It is the job's, not the hardware's.

    Raises:
        Pending, BadMeasurements: it is needed, and no probe tells it yet, or none does.
    """
    probes = [
        result for measurements in all_measurements for result in measurements.results if isinstance(result, Measured)
    ]
    known = [probe.gradients for probe in probes if probe.gradients is not None]
    runs = [measurements.part.run for measurements in all_measurements]
    noise = trained_noise(runs, all_measurements[0].part.spec) or efficiency.noise_scale(known)
    if noise is not None or not needed:
        return noise
    hint = (
        "it takes a probe on two or more GPUs (or, on one, a local batch of 2 or more) whose gradients are finite; where the"
        " results are older than this objective, delete some in results/ and run tula profile again"
    )
    raise _untold(
        all_measurements,
        f"no probe ({len(probes)} measured) tells the gradient noise that time to accuracy follows from",
        hint if known else f"of a script that takes {_DDP}; choose by another objective",
    )


_DDP = "DistributedDataParallel on two or more GPUs, and probes that the script does not end by itself"


def without_gradients(all_measurements: Sequence[TypeMeasurements]) -> list[str]:
    """Say why nothing is told of the same progress where no probe has measured gradients."""
    if any(probe.gradients for measurements in all_measurements for probe in measurements.forecast.probes.values()):
        return []
    return [f"nothing is told of the same progress: gradients were not measured, which of a script takes {_DDP}"]


def with_energy(
    all_measurements: Sequence[TypeMeasurements], left_out: Sequence[str]
) -> tuple[list[TypeMeasurements], list[str]]:
    """Return the node types whose probes tell their energy, and what is to be said of the others beside what is already.

    Raises:
        Pending, BadMeasurements: no probe tells it yet, or none does.
    """
    known = [measurements for measurements in all_measurements if measurements.forecast.power is not None]
    if known:
        unknown = [measurements.type for measurements in all_measurements if measurements.forecast.power is None]
        return known, [*left_out, *(f"node type {name} is left out: no probe tells its energy" for name in unknown)]
    count = sum(len(measurements.forecast.probes) for measurements in all_measurements)
    raise _untold(
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
    return max(1, round(samples(spec.script, dataset_size) / dataset_size))


def epochs_of(chosen: Prediction, measurements: TypeMeasurements, objective: Objective) -> str:
    """Say how many epochs the times are for."""
    spec, found = measurements.part.spec, chosen.same_progress
    asked = train_length(spec)
    if objective != "accuracy-time" or found is None:
        return f"every time is for {asked}, whatever the batch"
    key = "train.epochs" if spec.script is None else "script.length.epochs"
    told = (
        f"batch {chosen.batch} needs about {found.epochs:.3g} epochs ({found.epochs_low:.3g} to {found.epochs_high:.3g}) for"
        f" the progress of {asked} at batch {spec.train.reference_batch}; tula train runs {asked}"
    )
    needed = math.ceil(found.epochs)
    if needed == trained_epochs(spec, measurements.forecast.dataset_size):
        return told
    if spec.script is not None and spec.script.length.epochs is None:
        return f"{told} as it is: script.length says how long"
    return f"{told} as it is: --set {key}={needed} trains to the same progress"


def rests_on(noise: Noise, measurements: TypeMeasurements) -> str:
    spec = measurements.part.spec
    epochs = trained_epochs(spec, measurements.forecast.dataset_size)
    return efficiency.words(noise, epochs=epochs, reference=spec.train.reference_batch)


def as_recommended(run: RunDir, spec: JobSpec) -> Forecast:
    """Return the forecast that a recommendation is made from.

    Args:
        run: measured on one type of nodes.
        spec: the job; of a comparison with another method.

    Raises:
        BadMeasurements, Infeasible: as `Forecast.from_results`.
    """
    results = run.results()
    calibration, _ = calibrated(run.path, spec.cluster.kind)
    told = told_by_trainings(run, spec, results)
    noise = noise_path([run], spec, results)
    return _forecast(Part(None, run, spec), results, told.found, calibration, noise=noise, pending=0)


def _forecast(
    part: Part,
    results: Results,
    trained: Sequence[TrainedSteps],
    calibration: Calibration,
    *,
    others: Sequence[Measured] = (),
    noise: NoisePath | None,
    pending: int,
) -> Forecast:
    attempts, saves = part.run.attempts(), saves_of(part.run)
    known = functools.partial(Forecast.from_results, attempts=attempts, saves=saves, trained=trained)
    try:
        return known(part.spec, results, calibration=calibration, others=others, noise=noise)
    except (TooFew, Infeasible) as error:
        if pending:
            raise _pending(pending, error.message) from error
        raise


def _untold(all_measurements: Sequence[TypeMeasurements], why: str, hint: str) -> Pending | BadMeasurements:
    """Return what is wrong where no probe tells something: those under way may yet."""
    pending = sum(measurements.pending for measurements in all_measurements)
    return _pending(pending, why) if pending else BadMeasurements(why, hint)


def _pending(pending: int, why: str) -> Pending:
    return Pending(
        f"{_under_way(pending)}, and those done do not tell enough: {why}",
        "tula status shows how far they are; run tula recommend again when they are done",
    )


def _under_way(pending: int) -> str:
    return "1 probe is still under way" if pending == 1 else f"{pending} probes are still under way"


def _unknown(forecast: Forecast, limits: Limits) -> tuple[Unknown, ...]:
    """Return the configurations within the limits whose step time the probes do not tell, by the reason."""
    nodes, batch = forecast.unknown(limits.wanted)
    nodes, batch = (column[limits.reach(nodes, batch)] for column in (nodes, batch))
    found: dict[str, Unknown] = {}  # whatever the batch, there is one reason on a number of nodes
    for count, first, many in zip(*np.unique(nodes, return_index=True, return_counts=True), strict=True):
        why = forecast.why_unknown(Config(int(count), int(batch[first])))
        others = found.get(why, Unknown(why, 0, ()))
        found[why] = Unknown(why, others.count + int(many), (*others.nodes, int(count)))
    return tuple(found.values())


def _require_enough(forecast: Forecast, unknown: Sequence[Unknown], *, pending: int) -> None:
    """Raise Pending or BadMeasurements where choosing among what is known would be no choice."""
    if not unknown:
        return
    why = unknown[0].why
    if pending:
        raise _pending(pending, why)
    if len(forecast.probes) < 2:
        raise BadMeasurements(
            f"one probe is too few to choose by: {why}", "run tula profile again; it measures what is missing"
        )


def state_of_the_probes(results: Results, unknown: Sequence[Unknown], *, pending: int) -> list[str]:
    """Say what is missing: probes under way, probes that failed, configurations left out of the table."""
    warnings = []
    if pending:
        warnings.append(f"{_under_way(pending)}: the answer may change when they are done")
    warnings += [
        f"the probe with {plural(result.nodes)} and local batch {result.local_batch} failed ({result.message});"
        " tula profile runs it again"
        for result in results
        if isinstance(result, Failed)
    ]
    for left_out in unknown[:_REASONS]:
        on = ", ".join(map(str, left_out.nodes))
        warnings.append(f"{left_out.count} configurations on {on} nodes are left out: {left_out.why}")
    if more := unknown[_REASONS:]:
        counts = [count for left_out in more for count in left_out.nodes]
        on = f"on {len(counts)} other numbers of nodes ({min(counts)} to {max(counts)})"
        warnings.append(f"{sum(one.count for one in more)} configurations more are left out, for like reasons, {on}")
    return warnings


def doubts(forecast: Forecast, choice: Choice, limits: Limits) -> list[str]:
    """Say why the choice may be less than it seems."""
    chosen, warnings = choice.prediction, []
    if forecast.steps.determined_exactly and not all(row.measured for row in (chosen, *choice.runners_up)):
        warnings.append(
            "the fit is exactly determined: as many parameters as probes, so nothing tells its error;"
            " measure more (search.strategy: sweep or full) to know it"
        )
    if chosen.further:
        warnings.append(_extrapolated(forecast, chosen))
    warnings += _second_opinion(forecast, chosen)
    margin = forecast.spec.search.memory_margin
    if chosen.headroom is not None and chosen.headroom < margin:
        warnings.append(
            f"the choice ran in its probe, but leaves only {chosen.headroom:.0%} of the memory free (wanted: {margin:.0%})"
        )
    late = limits.deadline_hours is not None and limits.latest(chosen) > limits.deadline_hours
    if late:
        warnings.append(f"the choice may miss the deadline: up to {limits.latest(chosen):.3g} hours (90 % interval)")
    if chosen.market == "on_demand" and forecast.spec.pricing.spot is not None and forecast.on_spot(chosen) is None:
        warnings.append(f"no spot nodes for {plural(chosen.nodes)}: {_why_no_spot(forecast)}")
    if chosen.market == "spot" and limits.deadline_hours is not None:
        warnings.append("the time on spot nodes is an expected one: a run with more interruptions takes longer")
    return warnings


def _extrapolated(forecast: Forecast, chosen: Prediction) -> str:
    most, gpus = plural(max(nodes for nodes, _ in forecast.probes)), forecast.spec.cluster.gpus_per_node
    had, follows = f"more than {most}", "how synchronisation has grown up to there"
    if forecast.steps.levels:
        had, follows = f"{plural(gpus, 'GPU')} a node on more than {most}", "probes with other numbers of GPUs a node"
    return (
        f"no probe had {had}: what {plural(chosen.nodes)} take follows from {follows}; a probe on as many would tell"
        " (search.nodes)"
    )


def _why_no_spot(forecast: Forecast) -> str:
    if forecast.saving is not None and not forecast.saving.known:
        return "how often the script saves is not known until it trains (or say script.resume.every)"
    return "interruptions would leave no time to get anywhere"


def _second_opinion(forecast: Forecast, chosen: Prediction) -> list[str]:
    """Say where a fit without overlap, which is right where little is overlapped, sees the choice quite differently."""
    gpus = forecast.spec.cluster.gpus_per_node
    other = None if chosen.measured else forecast.steps.second_opinion(chosen.nodes, gpus, chosen.local_batch)
    if other is None or chosen.step_low is None or chosen.step_high is None:
        return []
    if chosen.step_low <= other <= chosen.step_high or abs(other / chosen.step_time - 1) < _DISAGREE:
        return []
    return [
        f"a plain additive fit of the same probes gives {other * 1e3:.3g} ms a step for the choice, not"
        f" {chosen.step_time * 1e3:.3g} ms: measure it (search.strategy: full, or adaptive) before relying on it"
    ]
