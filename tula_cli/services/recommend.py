"""`tula recommend`: choose a configuration from the measurements, and store the answer for `tula train`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tula_cli.cluster.launcher import Launcher
from tula_cli.models import cost
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import choose, describe_open_knees
from tula_cli.models.efficiency import Noise
from tula_cli.models.overheads import compute_median_queue_wait
from tula_cli.models.ramp.by_noise import describe_stages, with_epochs
from tula_cli.models.ramp.stage_nodes import choose_stage_objective, describe_stage_nodes
from tula_cli.models.summaries import RegressionSummary, list_regression_summaries
from tula_cli.query import Query
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.format import require_current_format
from tula_cli.run.jobfile import find_settings_origin, list_parts_with_data, save_job
from tula_cli.run.owner import require_own
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.services import status
from tula_cli.services.comparison.accuracy import find_accuracy_evidence
from tula_cli.services.recommendation.alternatives import (
    describe_alternatives,
    describe_decay_savings,
    predict_first_fallback,
    predict_ramp_alternatives,
)
from tula_cli.services.recommendation.answer import Answer, write_answer
from tula_cli.services.recommendation.doubts import list_choice_warnings, list_probe_warnings, warn_disturbed_probes
from tula_cli.services.recommendation.from_training import (
    UnfinishedTraining,
    find_unfinished_training,
    list_results_by_type,
    with_continuation,
)
from tula_cli.services.recommendation.lengths import predict_lengths
from tula_cli.services.recommendation.listed import describe_chain, select_offers_within_limits, select_rows
from tula_cli.services.recommendation.measured import (
    TypeMeasurements,
    describe_epochs,
    describe_noise_basis,
    find_gradient_noise_of_job,
    gather_measurements,
    require_energy,
    warn_no_gradients,
)
from tula_cli.services.recommendation.validation import Validation
from tula_cli.services.site_charges import with_site_billing
from tula_cli.services.status import ACTIVE
from tula_cli.spec.job import JobSpec


def recommend(
    run: RunDir,
    spec: JobSpec,
    query: Query,
    *,
    overrides: Sequence[str] = (),
    pending: int | Mapping[str | None, int] = 0,
    now: float,
) -> Answer:
    """Choose a configuration; nothing is written.

    If the job names node types, each has its own models, and the choice is made over all of them.

    Args:
        run: the run with the results.
        spec: the job.
        query: objective and limits.
        overrides: settings of `spec` that override the job; for the record.
        pending: number of probes that are queued or running; by node type if the job names any.
        now: Unix time.

    Raises:
        Pending: probes are queued or running, and those finished do not determine the answer yet.
        BadMeasurements: there are too few probes, or none that can be used together.
        Infeasible: no configuration is feasible, or none satisfies the limits; the message names the binding limit and
            the closest configuration.
        SpecError: the job names no such node type.
    """
    training, parts = _select_parts_of_query(
        run.parts(with_site_billing(spec, run.path.parent), query.node_type), query
    )
    all_measurements, all_warnings = _gather_by_type(parts, query, pending, training)
    if query.objective == "energy":
        all_measurements, all_warnings = require_energy(all_measurements, all_warnings)
    noise = find_gradient_noise_of_job(all_measurements, needed=query.objective == "accuracy-time")
    allowed, untold = select_offers_within_limits(all_measurements, query, noise), warn_no_gradients(all_measurements)

    def answer(
        all_measurements: Sequence[TypeMeasurements], rows: Candidates, warnings: Sequence[str]
    ) -> Recommendation:
        recommendation = _build_recommendation(all_measurements, rows, query, warnings, noise, now=now)
        query_fields = {"options": tuple(query.options), "overrides": tuple(overrides)}
        return recommendation.model_copy(update={**query_fields, **_list_training_fields(all_measurements)})

    by_type = {
        measurements.part.type: answer([measurements], allowed.take(rows_of_type).with_pareto_front(), untold)
        for measurements in all_measurements
        if measurements.part.type is not None and (rows_of_type := allowed["type"] == measurements.type).any()
    }
    allowed, spoken = allowed.with_pareto_front(), [*all_warnings, *untold]
    final_answer = with_continuation(training, answer(all_measurements, allowed, spoken), allowed)
    return Answer(final_answer, by_type, all_measurements, allowed)


def _list_training_fields(all_measurements: Sequence[TypeMeasurements]) -> dict[str, Any]:
    """Return the trainings used in the fit, and those left out, as fields of a recommendation."""
    trained = [steps for measurements in all_measurements for steps in measurements.trained]
    left_out = [f"{measurements.prefix}{why}" for measurements in all_measurements for why in measurements.left_out]
    return {"trainings": tuple(trained), "trainings_left_out": tuple(left_out)}


def _gather_by_type(
    parts: Sequence[Part],
    query: Query,
    pending: int | Mapping[str | None, int],
    training: UnfinishedTraining | None,
) -> tuple[list[TypeMeasurements], list[str]]:
    """Return the measurements of each node type, and explanations and warnings about them."""
    waiting = pending if isinstance(pending, Mapping) else {part.type: pending for part in parts}
    results, explanations = list_results_by_type(parts, training)
    at_a_pace = training is not None
    measurements_found, left_out = gather_measurements(parts, query, waiting, results, at_a_pace=at_a_pace)
    waits = [
        compute_median_queue_wait(measurements.part.run.jobs(), measurements.part.run.attempts())
        for measurements in measurements_found
    ]
    stage_objective = choose_stage_objective(query.objective, query.curve)
    forecasts = [
        replace(measurements.estimator, stages_by=stage_objective, queue=wait)
        for measurements, wait in zip(measurements_found, waits, strict=True)
    ]
    return [
        replace(measurements, estimator=estimator)
        for measurements, estimator in zip(measurements_found, forecasts, strict=True)
    ], [*explanations, *left_out]


def _select_parts_of_query(parts: Sequence[Part], query: Query) -> tuple[UnfinishedTraining | None, Sequence[Part]]:
    """Return the unfinished training and its part if the query is `from_training`, else None and all parts.

    A training stays on its node type.
    """
    training = find_unfinished_training(parts) if query.from_training else None
    return training, parts if training is None else (training.part,)


def count_pending_probes(
    run: RunDir, spec: JobSpec, launcher_for: Callable[[JobSpec], Launcher]
) -> dict[str | None, int]:
    """Return the number of probes of each node type that are queued or running."""
    return {part.type: _count_pending_of_part(part, launcher_for) for part in run.parts(spec)}


def _count_pending_of_part(part: Part, launcher_for: Callable[[JobSpec], Launcher]) -> int:
    if not part.run.jobs():
        return 0
    run_status = status.run_status(part.run, launcher_for(part.spec), now=time.time())
    return sum(job.total - job.done for job in run_status.jobs if job.kind == "probe" and job.state in ACTIVE)


def answer_query(
    run: RunDir,
    spec: JobSpec,
    query: Query,
    *,
    launcher_for: Callable[[JobSpec], Launcher],
    overrides: Sequence[str] = (),
) -> Answer:
    """Choose a configuration from the current measurements, as `recommend` does; nothing is written.

    On SLURM, the scheduler is asked when a training with the choice would start.

    Args:
        run: the run with the results.
        spec: the job.
        query: objective and limits.
        launcher_for: returns the launcher that reports whether probes are running.
        overrides: settings that override those of the job; the answer records them as assumptions.

    Raises:
        Pending, BadMeasurements, Infeasible, SpecError: as in `recommend`.
    """
    now = time.time()
    answer = recommend(
        run,
        spec,
        query,
        overrides=tuple(overrides) if overrides and spec != run.spec() else (),
        pending=count_pending_probes(run, spec, launcher_for),
        now=now,
    )
    return _with_start_estimate(answer, now=now)


def _with_start_estimate(answer: Answer, *, now: float) -> Answer:
    """Return an answer with SLURM's estimate of when a training of its choice would start; without SLURM, unchanged."""
    choice = answer.recommendation.choice
    part = next(measurements.part for measurements in answer.all_measurements if measurements.type == choice.type)
    if part.spec.cluster.kind != "slurm":
        return answer
    from tula_cli.cluster.slurm.start_estimate import estimate_start  # submitit: of use to jobs of SLURM alone

    estimate = estimate_start(part.run, part.spec, nodes=choice.nodes, batch=choice.batch, now=now)
    return replace(answer, recommendation=answer.recommendation.model_copy(update={"start_estimate": estimate}))


def cross_validate(answer: Answer) -> dict[str, tuple[Validation, ...]]:
    """Return how well each search strategy would have predicted the probes, by node type ("" if the job names none).

    Raises:
        BadMeasurements: there are too few probes.
    """
    return {measurements.type: measurements.cross_validate() for measurements in answer.all_measurements}


def explain_fits(answer: Answer) -> dict[str, tuple[RegressionSummary, ...]]:
    """Return the regressions that an answer is based on, by node type ("" if the job names none)."""
    return {
        measurements.type: tuple(list_regression_summaries(measurements.estimator))
        for measurements in answer.all_measurements
    }


def should_replace(recommendation: Recommendation, stored: Recommendation | None) -> bool:
    """Return whether an answer is stored without a request.

    That is the case for the first answer without overrides, and for an answer to the same criteria as the stored one.

    Args:
        recommendation: the new answer.
        stored: the answer that the run has stored; None if there is none.
    """
    if recommendation.continuation is not None:  # it moves a training
        return False
    return not recommendation.overrides if stored is None else recommendation.criteria == stored.criteria


def store_answer(run: RunDir, job: JobSpec, answer: Answer, *, every: bool = False) -> None:
    """Write recommendation.json, recommended.yaml, results.csv and cmd.txt, which `tula train` reads.

    Args:
        run: the run to write to; each of its node types gets the files for `tula train --type`.
        job: the job without settings that the answer only assumes.
        answer: the answer to store.
        every: whether results.csv lists all candidates, however many there are.

    Raises:
        TulaError: the files cannot be written.
    """
    all_measurements = {measurements.part.type: measurements for measurements in answer.all_measurements}
    for part in run.parts(job):
        if part.type is not None and part.type in answer.by_type:
            candidates = answer.candidates.select(type=part.type).with_pareto_front() if every else None
            write_answer(part.run, part.spec, [all_measurements[part.type]], answer.by_type[part.type], candidates)
    write_answer(run, job, answer.all_measurements, answer.recommendation, answer.candidates if every else None)


def save_answer(
    run: RunDir,
    spec: JobSpec,
    answer: Answer,
    *,
    overrides: Sequence[str] = (),
    job: Path | None = None,
    every: bool = False,
) -> None:
    """Store an answer for `tula train`, with the settings of the job but not those that the answer only assumes.

    Args:
        run: the run.
        spec: the settings of the query.
        answer: the answer to store.
        overrides: settings of `spec` that override its file or run.
        job: the file of the settings; None for those of the run.
        every: whether results.csv lists all candidates, however many there are.

    Raises:
        OtherFormat: the run has an older format.
        TulaError: the files cannot be written, or the run belongs to another user.
    """
    require_own(run.path)
    require_current_format(run.path)
    assumed = bool(answer.recommendation.overrides)
    own_spec = run.spec() if assumed else spec
    store_answer(run, own_spec, answer, every=every)
    file = find_settings_origin(run, None, ()) if assumed else find_settings_origin(run, job, overrides)
    save_job(run, own_spec, list_parts_with_data(run, own_spec), file)


def _build_recommendation(
    all_measurements: Sequence[TypeMeasurements],
    rows: Candidates,
    query: Query,
    warnings: Sequence[str],
    noise: Noise | None,
    *,
    now: float,
) -> Recommendation:
    choosable = _select_choosable_offers(rows, all_measurements)
    among = "feasible" if choosable is rows else "measured"
    choice = choose(choosable, objective=query.objective, curve=query.curve, among=among)
    choice_measurements = next(
        measurements for measurements in all_measurements if measurements.type == choice.prediction.type
    )
    spec = choice_measurements.part.spec
    warnings_told = [
        f"{measurements.prefix}{text}"
        for measurements in all_measurements
        for text in _list_measurement_warnings(measurements)
    ]
    return Recommendation(
        objective=query.objective,
        curve=query.curve,
        choice=choice.prediction,
        reason=f"{choice.reason}{_describe_knees(choice_measurements, rows, query)}; {describe_epochs(choice.prediction, choice_measurements, query.objective)}"
        f"{describe_chain(choice.prediction, choice_measurements)}",
        rows=rows.take(
            select_rows(rows, choice, "accuracy-time" if query.objective == "accuracy-time" else "time")
        ).predictions(),
        candidates=int(rows.number_configurations().max()) + 1,
        beaten_by_none=int(rows["pareto"].sum()),
        runners_up=choice.runners_up,
        warnings=(*warnings, *warnings_told, *list_choice_warnings(choice_measurements.estimator, choice, query)),
        currency=spec.pricing.currency,
        price=_join_by_type(all_measurements, lambda measurements: cost.describe_price(measurements.part.spec.pricing)),
        fit_error=choice_measurements.estimator.steps.error,
        fit=_join_by_type(all_measurements, lambda measurements: measurements.estimator.steps.words),
        power=_join_by_type(
            all_measurements,
            lambda measurements: measurements.estimator.power.words if measurements.estimator.power else "",
        ),
        efficiency="" if noise is None else describe_noise_basis(noise, choice_measurements),
        interruption=choice_measurements.estimator.describe_interruption(choice.prediction),
        fallback=predict_first_fallback(choice_measurements.estimator, choice.prediction),
        **_list_growth_fields(choice_measurements, choice.prediction),
        other_market=choice_measurements.other_market(choice.prediction),
        created_at=now,
    )


def _list_growth_fields(measurements: TypeMeasurements, choice: Prediction) -> dict[str, Any]:
    """Return the fields of a recommendation on sequence lengths, the batch ramp with its alternatives, and accuracy."""
    lengths, growth = predict_lengths(measurements)
    stages = measurements.estimator.stages.stage_positions(Config(choice.nodes, choice.batch))
    written = with_epochs(stages, measurements.estimator.dataset_size)
    alternatives = predict_ramp_alternatives(measurements.estimator, choice)
    sentences = [
        describe_stages(written),
        describe_stage_nodes(choice),
        describe_decay_savings(measurements.estimator.spec, alternatives),
        describe_alternatives(alternatives),
    ]
    ramp = ". ".join(filter(None, sentences))
    accuracy = find_accuracy_evidence(measurements.part.run, measurements.part.spec, batch=choice.batch)
    fields = {"lengths": lengths, "growth": growth, "stages": written, "ramp": ramp, "beside": alternatives}
    return {**fields, "accuracy": accuracy}


def _describe_knees(measurements: TypeMeasurements, rows: Candidates, query: Query) -> str:
    line = rows.select(type=measurements.type, market="on_demand")
    gpus = measurements.estimator.spec.cluster.gpus_per_node
    return (
        describe_open_knees(measurements.estimator.steps, line, gpus_per_node=gpus, curve=query.curve)
        if query.objective == "knee"
        else ""
    )


def _join_by_type(all_measurements: Sequence[TypeMeasurements], describe: Callable[[TypeMeasurements], str]) -> str:
    """Describe each node type on a line; node types with an empty description are left out."""
    return "\n".join(
        f"{measurements.prefix}{text}" for measurements in all_measurements if (text := describe(measurements))
    )


def _select_choosable_offers(rows: Candidates, all_measurements: Sequence[TypeMeasurements]) -> Candidates:
    """Return the configurations to choose among: on node types with delayed ranks only measured ones, if any."""
    doubtful = [measurements.type for measurements in all_measurements if measurements.estimator.held_up]
    is_known = rows["measured"] | ~np.isin(rows["type"], doubtful)
    return rows.take(is_known) if doubtful and is_known.any() else rows


def _list_measurement_warnings(measurements: TypeMeasurements) -> list[str]:
    missing = list_probe_warnings(measurements.results, measurements.unknown, pending=measurements.pending)
    snapshot = measurements.part.run.read()
    return [
        *missing,
        *warn_disturbed_probes(snapshot.attempts),
        *map(str, measurements.estimator.warnings),
        *map(str, snapshot.job_warnings),
        *map(str, snapshot.training_warnings),
    ]
