"""The basis of a recommendation: measurements of each node type, models fitted to them, and what remains unknown."""

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, Infeasible, Pending
from tula_cli.models import efficiency
from tula_cli.models.choice.grid import Config
from tula_cli.models.efficiency import EARLY_SHARE, Noise, estimate_noise_scale
from tula_cli.models.estimator import Estimator
from tula_cli.models.observations import NO_OTHER_SIZES, OtherGpuCountMeasurements, TooFewMeasurements
from tula_cli.models.overheads import compute_median_queue_wait
from tula_cli.models.ramp import MEASURE_NOISE_HINT, NOISE_NOT_MEASURED, NoisePath, add_stage_epochs
from tula_cli.models.ramp_costs import StageObjective, build_ramp_on_nodes, choose_stage_objective
from tula_cli.models.time import stretches
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.models.time.stretches import TrainedConfiguration, TrainingObservations
from tula_cli.query import Objective, Query
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.probes import Failed, GradientStats, Measured, Result
from tula_cli.run.records.recommendations import Prediction, Recommendation, Stage, TrainedSteps
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.snapshot import Snapshot
from tula_cli.run.training_run import TrainingRun
from tula_cli.services import messages
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_measurement_signature
from tula_cli.words import capitalize_first_letter, describe_pending_probes, format_count, format_number


@dataclass(frozen=True)
class UnknownConfigurations:
    """Configurations within the limits whose step time does not follow from the probes, all for the same reason."""

    why: str
    count: int
    nodes: tuple[int, ...]  # the numbers of nodes among them, ascending


@dataclass(frozen=True)
class TypeMeasurements:
    """The measurements of one node type, and the models fitted to them."""

    run: Run
    snapshot: Snapshot  # its records
    estimator: Estimator
    unknown: tuple[UnknownConfigurations, ...]
    pending: int
    left_out: tuple[str, ...] = ()  # trainings whose steps are not used, with the reasons
    # measurements with other numbers of GPUs per node, used to fit the step time
    others: OtherGpuCountMeasurements = NO_OTHER_SIZES

    @property
    def type(self) -> str:
        """The node type as in records: empty if the job names none."""
        return self.run.type or ""

    def with_type_of_run(self) -> "TypeMeasurements":
        """Return these measurements with the run under the name of its node type, as later commands open it."""
        return replace(self, run=self.run.with_variant_name())

    @property
    def prefix(self) -> str:
        return f"{self.type}: " * bool(self.type)

    def add_type_to_warning(self, warning: Diagnostic) -> Diagnostic:
        """Return a warning with this node type added to its values and text, if the job names node types."""
        if not self.type:
            return warning
        return Diagnostic(warning.code, {**warning.values, "node_type": self.type}, f"{self.prefix}{warning.text}")

    @property
    def trained_steps(self) -> tuple[TrainedSteps, ...]:
        """The trainings whose steps are used in the fit, each with the step time of the probe of its configuration."""
        probes = self.estimator.probes
        return tuple(
            steps.model_copy(
                update={
                    "probed": compute_trimmed_mean(probes[configuration].step_times)
                    if configuration in probes
                    else None
                }
            )
            for configuration, steps_here in self.estimator.trained.items()
            for steps in steps_here
        )


def get_measurements_of_type(all_measurements: Iterable[TypeMeasurements], type_: str) -> TypeMeasurements:
    """Return the measurements of a node type, given as in records."""
    return next(measurements for measurements in all_measurements if measurements.type == type_)


def gather_measurements(
    runs: Sequence[Run],
    query: Query,
    pending: Mapping[str | None, int],
) -> tuple[list[TypeMeasurements], list[Diagnostic]]:
    """Return the measurements of each node type, and warnings about types that are left out.

    Args:
        pending: number of queued or running probes by node type.

    Raises:
        Pending, BadMeasurements, Infeasible: no node type is left.
    """
    all_measurements, errors = [], []
    snapshots = {run.type: run.read_snapshot() for run in runs}
    all_results = [result for snapshot in snapshots.values() for result in snapshot.results]
    noise = make_noise_path(runs, runs[0].spec, all_results)
    read_trainings = functools.cache(list_observations_from_trainings)  # a run is also one of its siblings' other sizes
    stage_objective = choose_stage_objective(query.quantity)
    for run in runs:
        snapshot, pending_here = snapshots[run.type], pending.get(run.type, 0)
        observations, sizes = read_trainings(run), read_measurements_of_other_sizes(run, read_trainings)
        try:
            estimator = _fit_estimator(run, snapshot, observations, sizes, noise, stage_objective)
            unknown = _list_unknown_configurations(estimator, query)
            _require_enough_configurations(estimator, unknown, pending=pending_here)
        except (Pending, BadMeasurements, Infeasible) as error:
            is_early = pending_here and isinstance(error, TooFewMeasurements | Infeasible)
            errors.append((run, _make_pending_error(pending_here, error.message) if is_early else error))
        else:
            all_measurements.append(
                TypeMeasurements(run, snapshot, estimator, unknown, pending_here, observations.left_out, sizes)
            )
    if not all_measurements:
        raise next((error for _, error in errors if isinstance(error, Pending)), errors[0][1])
    return all_measurements, [
        messages.node_type_left_out(node_type=run.type, problems=[f"{capitalize_first_letter(error.message)}."])
        for run, error in errors
    ]


def find_gradient_noise_of_job(all_measurements: Sequence[TypeMeasurements], *, needed: bool) -> Noise | None:
    """Return the gradient noise scale measured by a training, or else by the probes of all node types at its start.

    The noise is a property of the job, not of the hardware.

    Raises:
        Pending, BadMeasurements: the noise is needed, and pending probes may still measure it, or no probe has measured
            it.
    """
    probes = [probe for measurements in all_measurements for probe in measurements.snapshot.measured]
    gradient_stats = [probe.gradients for probe in probes if probe.gradients is not None]
    runs = [measurements.run for measurements in all_measurements]
    noise = read_noise_from_trainings(runs, all_measurements[0].run.spec) or efficiency.estimate_noise_scale(
        gradient_stats
    )
    if noise is not None or not needed:
        return noise
    hint = (
        "measure on two or more GPUs, or on one with a local batch of at least 2; if the results are from a version of tula"
        " without this objective, delete some files in results/ and run tula profile again"
    )
    raise _make_unknown_error(
        all_measurements,
        f"this objective needs the gradient noise, which no probe measured ({format_count(len(probes), 'probe')})",
        hint
        if gradient_stats
        else f"in a script, this requires {messages.GRADIENTS_OF_SCRIPT}; otherwise use another objective",
    )


def warn_no_gradients(all_measurements: Sequence[TypeMeasurements]) -> list[Diagnostic]:
    """Return a warning that the same progress cannot be predicted, if no probe has measured gradients."""
    if any(probe.gradients for measurements in all_measurements for probe in measurements.estimator.probes.values()):
        return []
    return [messages.same_progress_unknown()]


def select_measurements_with_energy(
    all_measurements: Sequence[TypeMeasurements], left_out: Sequence[Diagnostic]
) -> tuple[list[TypeMeasurements], list[Diagnostic]]:
    """Return the node types whose probes measured their energy, and warnings about the others, appended to `left_out`.

    Raises:
        Pending, BadMeasurements: no probe has measured it; pending probes may still do so, or there are none.
    """
    with_power = [measurements for measurements in all_measurements if measurements.estimator.power is not None]
    if with_power:
        unknown = [measurements.type for measurements in all_measurements if measurements.estimator.power is None]
        problems = ["No probe measured the energy of its steps."]
        return with_power, [
            *left_out,
            *(messages.node_type_left_out(node_type=name, problems=problems) for name in unknown),
        ]
    count = sum(len(measurements.estimator.probes) for measurements in all_measurements)
    raise _make_unknown_error(
        all_measurements,
        f"this objective needs the energy per step, which no probe measured ({format_count(count, 'probe')})",
        "use NVIDIA GPUs with an energy counter, and run pip install 'tula-cli[nvml]' in the jobs' environment. To repeat"
        " probes that were measured without it, delete their files in results/ and run tula profile",
    )


def describe_epochs(chosen: Prediction, measurements: TypeMeasurements, objective: Objective) -> str:
    """Describe the number of epochs that the times refer to."""
    spec, same_progress = measurements.run.spec, chosen.same_progress
    length = spec.workload.describe_length()
    if objective != "accuracy-time" or same_progress is None:
        return f"all times are for {length} at every batch"
    description = (
        f"batch {chosen.batch} needs about {same_progress.epochs:.3g} epochs ({same_progress.epochs_low:.3g} to {same_progress.epochs_high:.3g}) for"
        f" the progress of {length} at batch {spec.train.reference_batch}; tula train runs {length}"
    )
    needed = math.ceil(same_progress.epochs)
    if needed == spec.workload.count_epochs(measurements.estimator.dataset_size):
        return description
    if spec.workload.max_epochs is None:
        return f"{description}, as set by script.length"
    return f"{description}; to train to equal progress: --set {spec.workload.epochs_key}={needed}"


def describe_noise_basis(noise: Noise, measurements: TypeMeasurements) -> str:
    spec = measurements.run.spec
    epochs = spec.workload.count_epochs(measurements.estimator.dataset_size)
    return efficiency.describe_noise(noise, epochs=epochs, reference=spec.train.reference_batch)


def fit_estimator_of_recommendation(run: Run, *, stages_by: StageObjective = "time") -> Estimator:
    """Fit the models of a run as a recommendation does.

    Args:
        run: the run, in a comparison with another method in its job.
        stages_by: the quantity that the number of nodes of each stage of `train.ramp` minimises.

    Raises:
        BadMeasurements, Infeasible: as in `Estimator.fit`.
    """
    snapshot, sizes = run.read_snapshot(), read_measurements_of_other_sizes(run)
    noise = make_noise_path([run], run.spec, snapshot.results)
    return _fit_estimator(run, snapshot, list_observations_from_trainings(run), sizes, noise, stages_by)


def _fit_estimator(
    run: Run,
    snapshot: Snapshot,
    observations: TrainingObservations,
    sizes: OtherGpuCountMeasurements,
    noise: NoisePath | None,
    stages_by: StageObjective,
) -> Estimator:
    return Estimator.fit(
        run.spec,
        snapshot.results,
        attempts=snapshot.attempts,
        saves=run.find_newest_script_saves(),
        trained=observations.steps,
        trainings=observations.configurations,
        other_sizes=sizes,
        noise=noise,
        queue=compute_median_queue_wait(run.read_jobs(), snapshot.attempts),
        stages_by=stages_by,
    )


def _make_unknown_error(all_measurements: Sequence[TypeMeasurements], why: str, hint: str) -> Pending | BadMeasurements:
    """Return the error if no probe has measured a quantity: Pending if pending probes may still do so."""
    pending = sum(measurements.pending for measurements in all_measurements)
    return _make_pending_error(pending, why) if pending else BadMeasurements(why, hint)


def _make_pending_error(pending: int, why: str) -> Pending:
    return Pending(
        f"{describe_pending_probes(pending)}, and the finished ones are too few: {why}",
        "tula status shows the progress; run tula recommend again when they have finished",
    )


def _list_unknown_configurations(estimator: Estimator, query: Query) -> tuple[UnknownConfigurations, ...]:
    """Return the configurations within the limits whose step time does not follow from the probes, by reason."""
    nodes, batch = estimator.find_unknown_configurations(query.node_counts)
    max_nodes, max_batch = (np.inf if limit is None else limit for limit in (query.max_nodes, query.max_batch))
    is_within_limits = (nodes <= max_nodes) & (batch <= max_batch)
    nodes, batch = nodes[is_within_limits], batch[is_within_limits]
    groups: dict[str, UnknownConfigurations] = {}  # the reason depends on the number of nodes only
    for count, first_index, many in zip(*np.unique(nodes, return_index=True, return_counts=True), strict=True):
        why = estimator.describe_why_unknown(Config(int(count), int(batch[first_index])))
        group = groups.get(why, UnknownConfigurations(why, 0, ()))
        groups[why] = UnknownConfigurations(why, group.count + int(many), (*group.nodes, int(count)))
    return tuple(groups.values())


def _require_enough_configurations(
    estimator: Estimator, unknown: Sequence[UnknownConfigurations], *, pending: int
) -> None:
    if not unknown:
        return
    why = unknown[0].why
    if pending:
        raise _make_pending_error(pending, why)
    if len(estimator.probes) < 2:
        raise BadMeasurements(
            f"one probe is too few for a recommendation: {why}",
            "run tula profile to measure the missing configurations"
            + ("" if estimator.spec.script is None else ", or observe the script with another batch (tula observe)"),
        )


# --- Steps of trainings

MAX_TRAININGS = 5
"""Maximum number of trainings of one configuration that are used; older ones would add next to nothing."""
MAX_RATIO_TO_PROBE = 2.0
"""Largest ratio of the step times of a training and the probe of its configuration. No drift of a machine explains more:
one of the two shared it with other programs, as a probe, which waits for the machine, rarely does."""


def list_observations_from_trainings(run: Run) -> TrainingObservations:
    """Return the step times of a run's trainings, finished or not, and why some of them are left out.

    Trainings with another method, model or code (as in `tula compare`) are not used, and none without a measured probe.
    If no task records for which job the probes were made, that is the job of the run.
    """
    names, records = run.list_train_signatures(), run.read_snapshot()
    if not names or not (measured := records.measured):
        return TrainingObservations()
    train_tasks = records.train_tasks
    probed_job = next((task.spec for task in records.probe_tasks), run.spec)
    from tula_cli.run.code import find_measured_snapshot  # imported here: only runs with trainings need it

    try:
        snapshot = find_measured_snapshot(run)
    except BadMeasurements as error:
        return TrainingObservations((), (f"all trainings: {error.message}",))
    observations: list[TrainedSteps] = []
    left_out: list[str] = []
    configurations: list[TrainedConfiguration] = []
    for name in sorted(names):
        steps_here = [task for task in train_tasks if task.signature == name]
        if not steps_here or not _trains_probed_job(
            run, steps_here[-1], probed_job, code="" if snapshot is None else snapshot.digest
        ):
            continue
        rows = run.get_training(name).read_sampled_metrics()
        if any(row["kind"] == "step" for row in rows):
            configurations += _list_trained_configurations(run, steps_here, until=rows[-1].get("time", 0.0))
        train = steps_here[-1].spec.train
        if not train.training_method.runs_steps_of_probes(train.diagnostics):
            continue
        training_observations = stretches.list_observations_from_training(
            steps_here,
            rows,
            functools.partial(_describe_why_not_comparable, measured),
        )
        disagreements = {
            steps: why for steps in training_observations.steps if (why := _describe_disagreement(steps, measured))
        }
        observations += [steps for steps in training_observations.steps if steps not in disagreements]
        left_out += [f"training {name}: {why}" for why in (*training_observations.left_out, *disagreements.values())]
    newest = [
        steps
        for steps_here in stretches.group_trainings_by_configuration(observations).values()
        for steps in steps_here[-MAX_TRAININGS:]
    ]
    return TrainingObservations(
        tuple(sorted(newest, key=lambda steps: (steps.nodes, steps.batch, steps.until))),
        tuple(left_out),
        tuple(configurations),
    )


def _list_trained_configurations(run: Run, tasks: Sequence[TrainTask], *, until: float) -> list[TrainedConfiguration]:
    """Return the configurations of a training, with its hours if it has had the length of the job at one of them."""
    signature, gpus = tasks[-1].signature, run.spec.cluster.gpus_per_node
    configurations = list(dict.fromkeys((task.nodes, task.batch // (task.nodes * gpus)) for task in tasks))
    hours = None
    if len(configurations) == 1 and tasks[-1].spec.workload.describe_length() == run.spec.workload.describe_length():
        with contextlib.suppress(BadMeasurements):  # a damaged record, which list_measurement_warnings reports
            summary = run.get_training(signature).read_summary()
            hours = summary.actual_hours if summary is not None and not summary.ended else None
    return [TrainedConfiguration(signature, nodes, local_batch, until, hours) for nodes, local_batch in configurations]


def _describe_disagreement(steps: TrainedSteps, measured: Sequence[Measured]) -> str:
    """Return why steps of a training contradict the probe of their configuration; empty if they do not."""
    for probe in measured:
        if (probe.nodes, probe.local_batch) == (steps.nodes, steps.local_batch):
            seconds = compute_trimmed_mean(probe.step_times)
            if abs(math.log(steps.step_time / seconds)) > math.log(MAX_RATIO_TO_PROBE):
                return (
                    f"a step took {format_number(1000 * steps.step_time)} ms, but {format_number(1000 * seconds)} ms in the"
                    " probe, which is used instead"
                )
    return ""


def _trains_probed_job(run: RunDir, task: TrainTask, probed_job: JobSpec, *, code: str) -> bool:
    """Return whether a training has the job and the code of the probes."""
    snapshot = run.read_code(task.code)
    return (snapshot.digest if snapshot is not None else "") == code and compute_measurement_signature(
        task.spec
    ) == compute_measurement_signature(probed_job)


def _describe_why_not_comparable(
    measured: Sequence[Measured], task: TrainTask, environment: Mapping[str, Any] | None
) -> str:
    """Return why steps of an attempt cannot be fitted with the probes; empty if they can, or if nothing is known."""
    if environment is None:
        return ""
    probe_environment = measured[0].environment
    if environment["hardware"] != probe_environment.hardware:
        return f"it ran on {environment['hardware']}, the probes on {probe_environment.hardware}"
    versions = {probe.environment.torch for probe in measured}
    if environment["torch"] not in versions:
        return f"it ran with torch {environment['torch']}, the probes with {', '.join(sorted(versions))}"
    oversubscribed_probes = [probe.oversubscribed for probe in measured if probe.nodes == task.nodes] or [False]
    if environment.get("oversubscribed", False) and not all(oversubscribed_probes):
        return "the ranks of the training shared cores or GPUs"
    return ""


# --- Other numbers of GPUs per node


def read_measurements_of_other_sizes(
    run: Run, read_trainings: Callable[[Run], TrainingObservations] = list_observations_from_trainings
) -> OtherGpuCountMeasurements:
    """Return the measurements with other numbers of GPUs on the nodes of a run."""
    sizes = run.runs_of_other_sizes
    probes = [probe for other in sizes for probe in other.read_measurements()]
    return OtherGpuCountMeasurements(
        tuple(probes), tuple(steps for other in sizes for steps in read_trainings(other).steps)
    )


# --- Gradient noise


def list_trainings_with_noise(run: RunDir) -> list[TrainingRun]:
    """Return the trainings of a run that measure their gradient noise."""
    snapshot = run.read_snapshot()
    trainings = [snapshot.get_training(signature) for signature in run.list_train_signatures()]
    return [
        training
        for training in trainings
        if (task := training.read_newest_task()) and "gradient_noise" in task.spec.train.diagnostics
    ]


def read_noise_from_trainings(runs: Iterable[RunDir], spec: JobSpec) -> Noise | None:
    """Return the gradient noise measured by the trainings of runs, as in `find_noise_near_tenth`."""
    trainings = [training for run in runs for training in list_trainings_with_noise(run)]
    return find_noise_near_tenth(trainings, reference=spec.train.reference_batch, epochs=spec.train.epochs)


def find_noise_near_tenth(trainings: Iterable[TrainingRun], *, reference: int, epochs: int) -> Noise | None:
    """Return the noise measured nearest to a tenth of the epochs, at the reference batch if possible.

    Args:
        trainings: trainings that measure it.
        reference: the batch whose epochs are counted.
        epochs: number of epochs of the whole training.

    Returns:
        None if none has measured it yet, or the measurements do not determine it.
    """
    rows = [row for row in _list_noise_rows(trainings) if row["epoch"] > 0]

    def compute_distance(row: dict[str, Any]) -> tuple[bool, float]:
        return row["batch"] != reference, abs(math.log(row["epoch"] / (EARLY_SHARE * epochs)))

    for row in sorted(rows, key=compute_distance):
        noise = estimate_noise_scale([GradientStats.model_validate(row["stats"])])
        if noise is not None:
            return replace(noise, epoch=float(row["epoch"]))
    return None


def _list_noise_rows(trainings: Iterable[TrainingRun]) -> list[dict[str, Any]]:
    return [row for training in trainings for row in training.read_sampled_metrics() if row["kind"] == "noise"]


def make_noise_path(runs: Iterable[RunDir], spec: JobSpec, results: Iterable[Result]) -> NoisePath | None:
    """Return the known gradient noise over a training: at its start from probes, later from trainings that measure it.

    At each epoch, the rows at the reference batch are used, or all rows if there are none.

    Args:
        runs: runs of the job, one per node type: the noise does not depend on the hardware.

    Returns:
        None if the stages do not depend on the noise, or nothing has measured it.
    """
    if spec.train.stages != "noise":
        return None
    gradient_stats = [
        noise.gradients for noise in results if isinstance(noise, Measured) and noise.gradients is not None
    ]
    stats: dict[float, Sequence[GradientStats]] = {0.0: gradient_stats}
    by_epoch = defaultdict(list)
    for row in _list_noise_rows(training for run in runs for training in list_trainings_with_noise(run)):
        by_epoch[float(row["epoch"])].append(row)
    for epoch, rows in by_epoch.items():
        reference_rows = [row for row in rows if row["batch"] == spec.train.reference_batch]
        stats[epoch] = [GradientStats.model_validate(row["stats"]) for row in reference_rows or rows]
    scales = {
        epoch: noise.scale for epoch, stats_at_epoch in stats.items() if (noise := estimate_noise_scale(stats_at_epoch))
    }
    return NoisePath.from_measurements(scales, reference=spec.train.reference_batch)


def plan_stages(
    run: Run, nodes: int, batch: int, dataset_size: int, *, recommended: Recommendation | None
) -> tuple[Stage, ...]:
    """Return the ramp stages of a new training, the last one at its batch; empty if its batch does not grow.

    Args:
        recommended: the recommendation of just this configuration; with several node types, its stages also use the
            measurements of the other types.

    Raises:
        BadMeasurements: the stages depend on the gradient noise, which nothing has measured.
    """
    spec, stages_setting = run.spec, run.spec.train.stages
    if stages_setting is None:
        return ()
    if stages_setting == "noise" and recommended is not None and recommended.choice.type and recommended.stages:
        return recommended.stages
    noise = make_noise_path([run], spec, run.read_results())
    if stages_setting == "noise" and noise is None:
        raise BadMeasurements(NOISE_NOT_MEASURED, MEASURE_NOISE_HINT)
    ramp = build_ramp_on_nodes(spec, batch=batch, nodes=nodes, dataset_size=dataset_size, noise=noise)
    return add_stage_epochs(ramp.stages, dataset_size)


# --- Warnings

_MAX_REASONS = 5
"""Maximum number of reasons for leaving out configurations that are reported one by one."""


def warn_failed_probes(results: Sequence[Result], nodes: Container[int]) -> list[Diagnostic]:
    """Return a warning for the first failed probe of each reason on the numbers of nodes that are searched."""
    failed = [result for result in results if isinstance(result, Failed) and result.nodes in nodes]
    first_by_reason = {result.message: result for result in reversed(failed)}
    return [
        messages.probe_failed(nodes=result.nodes, local_batch=result.local_batch, reason=reason)
        for reason, result in reversed(first_by_reason.items())
    ]


def list_measurement_warnings(measurements: TypeMeasurements) -> Iterator[Diagnostic]:
    """Yield warnings about a node type: missing, failed and disturbed probes, the fits, and damaged files."""
    if measurements.pending:
        yield messages.probes_pending(probes=measurements.pending)
    snapshot = measurements.snapshot
    yield from warn_failed_probes(snapshot.results, measurements.run.spec.search.nodes)
    unknown = measurements.unknown
    for group in unknown[:_MAX_REASONS]:
        yield messages.configurations_left_out(configurations=group.count, nodes=group.nodes, reason=group.why)
    if remaining := unknown[_MAX_REASONS:]:
        yield messages.more_configurations_left_out(
            configurations=sum(group.count for group in remaining),
            nodes=[count for group in remaining for count in group.nodes],
        )
    for attempt in snapshot.attempts:
        if attempt.disturbed_by:
            yield messages.probe_disturbed(task=attempt.task, trainings=attempt.disturbed_by)
    yield from (*measurements.estimator.warnings, *snapshot.damage_warnings)
