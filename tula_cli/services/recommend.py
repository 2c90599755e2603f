"""`tula recommend`: choose a configuration from the measurements, and write the answer that `tula train` reads."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import Infeasible
from tula_cli.models import cost, efficiency
from tula_cli.models.choice.baseline import make_headline, predict_baseline, prefer_baseline
from tula_cli.models.choice.candidates import Candidates, Flags, Limit, list_limits
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import (
    Choice,
    choose_configuration,
    describe_knee_uncertainty,
    find_best_of_each_batch,
)
from tula_cli.models.efficiency import Noise
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp import add_stage_epochs, describe_stages
from tula_cli.models.ramp_costs import describe_stage_nodes
from tula_cli.query import QUANTITIES, Quantity, Query
from tula_cli.run.directory import Run
from tula_cli.run.job_runs import select_runs
from tula_cli.run.records.recommendations import Prediction, QueryLimits, Recommendation
from tula_cli.services import messages
from tula_cli.services.job_warnings import warn_large_reference_batch
from tula_cli.services.measurements import (
    TypeMeasurements,
    describe_epochs,
    describe_noise_basis,
    find_gradient_noise_of_job,
    gather_measurements,
    get_measurements_of_type,
    list_measurement_warnings,
    select_measurements_with_energy,
    warn_no_gradients,
)
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.words import format_count, format_duration, is_interval_too_wide, join_words

if TYPE_CHECKING:
    from tula_cli.cluster.launcher import Launcher
    from tula_cli.models.summaries import RegressionSummary
MAX_ROWS_LISTED = 40
"""Maximum number of configurations that are all listed by default."""
_BLOCK = 1000
"""Number of rows that are created at a time."""
_MAX_ROWS_DRAWN = 400
"""Maximum number of candidates that are all drawn in figures."""
_MAX_FRONT_ROWS = 200
"""Maximum number of rows of the Pareto front that are listed if there are many candidates."""


def describe_prediction(row: Prediction, currency: str) -> str:
    """Return nodes, batch, duration and cost of a configuration in words."""
    return (
        f"{format_count(row.nodes)}{row.kind_text}, batch {row.batch} (local batch {row.local_batch}):"
        f" {format_duration(3600 * row.hours)}, {row.cost:.4g} {currency}"
    )


@dataclass(frozen=True)
class Answer:
    """The recommendation and the estimates that it is based on."""

    recommendation: Recommendation
    warnings: Sequence[Diagnostic]  # warnings of the recommendation, with their codes
    by_type: Mapping[str, Recommendation]  # recommendation for each node type alone, by type; empty with only one
    all_measurements: Sequence[TypeMeasurements]
    candidates: Candidates  # every feasible configuration on each market, fastest first
    forecasts: Candidates  # `candidates`, and configurations beyond the limits of the query

    @property
    def chosen_run(self) -> Run:
        """The run of the hardware that was chosen."""
        return get_measurements_of_type(self.all_measurements, self.recommendation.choice.type).run

    def select_run(self, measurements: TypeMeasurements) -> "Answer":
        """Return the answer for one run alone, from `by_type`, with its configurations under the name of its node type."""
        return replace(
            self,
            recommendation=self.by_type[measurements.type],
            all_measurements=[measurements.with_type_of_run()],
            candidates=_select_candidates_of_run(self.candidates, measurements),
            forecasts=_select_candidates_of_run(self.forecasts, measurements),
        )

    def with_all_rows(self) -> Recommendation:
        """Return the recommendation with all feasible configurations as its rows, of which there may be 100,000."""
        return self.recommendation.model_copy(update={"rows": self.candidates.make_predictions()})

    def list_rows_as_json(self, *, every: bool = True) -> Iterator[str]:
        """Yield rows with their notes as JSON texts: the listed rows, or all, which are created in blocks."""
        if not every:
            yield from (_convert_row_to_json(row, self.recommendation) for row in self.recommendation.rows)
            return
        for at in range(0, len(self.candidates), _BLOCK):
            block = self.candidates.select_rows(np.arange(at, min(at + _BLOCK, len(self.candidates))))
            yield from (_convert_row_to_json(row, self.recommendation) for row in block.make_predictions())

    def with_figure_rows(self) -> Recommendation:
        """Return the recommendation with the rows of its figures: all if there are few, else the listed ones."""
        return self.with_all_rows() if len(self.candidates) <= _MAX_ROWS_DRAWN else self.recommendation


def _convert_row_to_json(row: Prediction, recommendation: Recommendation) -> str:
    return f"{row.model_dump_json()[:-1]}, {json.dumps(recommendation.get_notes(row)._asdict())[1:]}"


def _make_launcher(spec: JobSpec) -> "Launcher":
    from tula_cli.cluster import launcher  # imported here: only needed while jobs of the run may be active

    return launcher.make_launcher(spec, submits=False)


def count_pending_probes(
    runs: Sequence[Run], launcher_for: "Callable[[JobSpec], Launcher]" = _make_launcher
) -> dict[str | None, int]:
    """Return the number of probes of each node type that are queued or running."""
    return {run.type: _count_pending_probes_of_run(run, launcher_for) for run in select_runs(runs, None)}


def _count_pending_probes_of_run(run: Run, launcher_for: "Callable[[JobSpec], Launcher]") -> int:
    if not run.read_jobs():
        return 0
    from tula_cli.services import status  # imported here: also imports the schedulers

    run_status = status.read_run_status(run, launcher_for(run.spec), now=time.time())
    return sum(
        job.total - job.done for job in run_status.jobs if job.kind == "probe" and job.state in status.ACTIVE_STATES
    )


def recommend_configuration(
    runs: Sequence[Run],
    query: Query,
    *,
    overrides: Sequence[str] = (),
    pending: Mapping[str | None, int] = {},
    now: float,
) -> Answer:
    """Choose a configuration; nothing is written.

    If the job names node types, each has its own models, and the choice is made over all of them.

    Args:
        runs: the runs of a job, with the results.
        overrides: settings that override those of the job; if they change any, the answer records them as assumptions.
        pending: number of probes that are queued or running, by node type.
        now: Unix time.

    Raises:
        Pending: probes are queued or running, and those finished do not determine the answer yet.
        BadMeasurements: there are too few probes, or none that can be used together.
        Infeasible: no configuration is feasible, or none satisfies the limits; the message names the binding limit and
            the closest configuration.
        SpecError: the job names no such node type.
    """
    if overrides and not any(run.exists and run.spec != run.read_job() for run in runs):
        overrides = ()
    runs = select_runs(runs, query.node_type)
    if any(run.spec.pricing.kind == "billing" for run in runs):
        from tula_cli.services.site_charges import add_site_billing_to_run  # imported here: runs SLURM commands

        runs = [add_site_billing_to_run(run) for run in runs]
    all_measurements, warnings = gather_measurements(runs, query, pending)
    if query.objective == "energy":
        all_measurements, warnings = select_measurements_with_energy(all_measurements, warnings)
    noise = find_gradient_noise_of_job(all_measurements, needed=query.objective == "accuracy-time")
    forecasts, no_gradients = _predict_candidates(all_measurements, query, noise), warn_no_gradients(all_measurements)
    candidates = _select_candidates(forecasts, all_measurements, query)
    by_type = {
        measurements.type: _build_answer(
            [measurements.with_type_of_run()],
            _select_candidates_of_run(candidates, measurements).with_pareto_front(),
            _select_candidates_of_run(forecasts, measurements),
            query,
            no_gradients,
            noise,
            overrides=overrides,
            now=now,
        ).recommendation
        for measurements in all_measurements
        if measurements.type and np.any(candidates["type"] == measurements.type)
    }
    candidates = candidates.with_pareto_front()
    first_measurements = all_measurements[0]
    warnings += warn_large_reference_batch(first_measurements.run.spec, first_measurements.estimator.dataset_size)
    answer = _build_answer(
        all_measurements, candidates, forecasts, query, [*warnings, *no_gradients], noise, overrides=overrides, now=now
    )
    return replace(answer, by_type=by_type)


def add_start_estimate(answer: Answer) -> Answer:
    """Return the answer with the scheduler's estimate of when a training with the choice would start; only on SLURM."""
    recommendation, run = answer.recommendation, answer.chosen_run
    if run.spec.cluster.kind != "slurm":
        return answer
    from tula_cli.cluster.slurm.submit import estimate_job_start  # imported here: only SLURM jobs need it

    choice, now = recommendation.choice, recommendation.created_at
    estimate = estimate_job_start(run, nodes=choice.nodes, batch=choice.batch, now=now)
    return replace(answer, recommendation=recommendation.model_copy(update={"start_estimate": estimate}))


def _select_candidates_of_run(candidates: Candidates, measurements: TypeMeasurements) -> Candidates:
    """Return the candidates of one run under its node type."""
    run_candidates = candidates.select_matching_rows(type=measurements.type)
    return run_candidates.with_columns({"type": measurements.run.variant.type or ""})


# --- Candidates


def _predict_candidates(all_measurements: Sequence[TypeMeasurements], query: Query, noise: Noise | None) -> Candidates:
    """Predict the configurations of all node types, on the numbers of nodes of the search and, if given, that of the query."""
    tables = []
    for measurements in all_measurements:
        estimator, spec = measurements.estimator, measurements.run.spec
        counts = None if query.nodes is None else sorted({*spec.search.nodes, query.nodes})
        table = estimator.predict_candidates(counts).with_columns({"type": measurements.type})
        if noise is not None:
            epochs = spec.workload.count_epochs(estimator.dataset_size)
            table = efficiency.add_same_progress(
                table, epochs=epochs, reference=spec.train.reference_batch, noise=noise
            )
        tables.append(table)
    return Candidates.concatenate(tables)


def _select_candidates(forecasts: Candidates, all_measurements: Sequence[TypeMeasurements], query: Query) -> Candidates:
    """Return the forecasts that are within the limits of a query, fastest first.

    Raises:
        Infeasible: there is none; the message names the first limit that excludes all, and the configuration closest to
            it.
    """
    candidates = forecasts if query.nodes is None else forecasts.select_matching_rows(nodes=query.nodes)
    if not len(candidates):
        raise _make_nothing_fits_error(all_measurements[0].estimator, query)
    satisfying = candidates.satisfying(query)
    if not len(satisfying):
        raise _make_binding_limit_error(candidates, query, all_measurements[0].run.spec.pricing.currency)
    return satisfying.sort_by_time()


def _make_nothing_fits_error(estimator: Estimator, query: Query) -> Infeasible:
    """Return an error with the reason why the first candidate on the requested nodes cannot run, or is not known."""
    on = f" on {format_count(query.nodes)}" if query.nodes is not None else ""
    configs = list(estimator.list_configurations(query.node_counts))
    startable = [config for config in configs if not estimator.describe_why_not_startable(config)]
    if startable:  # they can run, but their step times are unknown
        nodes = join_words(sorted({config.nodes for config in startable}))
        why = next(filter(None, map(estimator.describe_why_unknown, startable)), "")
        hint = f"measure more: tula profile --set search.nodes=[{nodes}]"
    else:
        why = next(
            filter(None, map(estimator.describe_why_not_startable, configs)),
            "no batch is divisible among the GPUs",
        )
        hint = (
            "leave out [[--nodes]] to see the numbers of nodes that are possible"
            if on
            else "run tula check to see which configurations are searched"
        )
    return Infeasible(f"no configuration is feasible{on}: {why}", hint)


def _make_binding_limit_error(candidates: Candidates, query: Query, currency: str) -> Infeasible:
    """Return an error with the first limit that excludes all candidates that are left, and the closest of these."""
    limits = list_limits(query)
    for limit in limits:
        within = limit.flag_admitted_rows(candidates)
        if not within.any():
            break
        candidates = candidates.select_rows(within)
    closest = limit.find_closest(candidates)
    if query.compares_at_equal_progress and closest.same_progress is not None:
        progress = closest.same_progress
        closest = closest.model_copy(update={"hours": progress.hours, "cost": progress.cost})
    efficiency_text = ""
    if limit.option == "min_efficiency" and closest.scaling_efficiency is not None:
        efficiency_text = f", scaling efficiency {_format_below(closest.scaling_efficiency, limit.bound)}"
    return Infeasible(
        f"no configuration is within {_describe_limit(limit, query)}; the closest is"
        f" {describe_prediction(closest, currency)}{efficiency_text}",
        "relax that limit, or search other numbers of nodes and batches",
    )


def _format_below(value: float, bound: float) -> str:
    """Format a value as tables do, with two decimals, or with as many more as it takes to see that it is below a bound."""
    texts = (f"{value:.{decimals}f}" for decimals in range(2, 7))
    return next((text for text in texts if float(text) < bound), str(value))


def _describe_limit(limit: Limit, query: Query) -> str:
    progress = " to the same progress" if query.compares_at_equal_progress else ""
    if limit.option == "max_nodes":
        return f"at most {format_count(int(limit.bound))}"
    if limit.option == "max_batch":
        return f"a batch of at most {limit.bound:g}"
    if limit.option == "min_efficiency":
        return f"a scaling efficiency of at least {limit.bound:g}"
    if limit.option == "budget":
        return f"a budget of {limit.bound:g}{progress}"
    return f"a deadline of {format_duration(3600 * limit.bound)}{progress}"


# --- The recommendation


def _build_answer(
    all_measurements: Sequence[TypeMeasurements],
    candidates: Candidates,
    forecasts: Candidates,
    query: Query,
    warnings: Sequence[Diagnostic],
    noise: Noise | None,
    *,
    overrides: Sequence[str],
    now: float,
) -> Answer:
    """Choose among candidates, and describe the choice with its basis, warnings and alternatives."""
    choosable = _select_choosable_configurations(candidates, all_measurements)
    among = "feasible" if choosable is candidates else "measured"
    unlimited = None
    if query.deadline_hours is not None or query.budget is not None:
        unlimited = _select_candidates(forecasts, all_measurements, replace(query, deadline_hours=None, budget=None))
    choice = choose_configuration(
        choosable,
        objective=query.objective,
        curve=query.curve,
        among=among,
        unlimited=None if unlimited is None else _select_choosable_configurations(unlimited, all_measurements),
    )
    measurements = get_measurements_of_type(all_measurements, choice.prediction.type)
    run, estimator = measurements.run, measurements.estimator
    baseline = predict_baseline(estimator, noise, node_type=measurements.type)
    if query.objective == "knee":
        choice = prefer_baseline(choice, baseline, choosable)
    prediction = choice.prediction
    knees = (
        _describe_knees(measurements, candidates if unlimited is None else unlimited, query)
        if query.objective == "knee"
        else ""
    )
    epochs = describe_epochs(prediction, measurements, query.objective)
    stages = add_stage_epochs(
        estimator.stages.list_stages(Config(prediction.nodes, prediction.batch)), estimator.dataset_size
    )
    accuracy = None
    if measurements.snapshot.comparison is not None:
        from tula_cli.services.comparison.accuracy import find_accuracy_evidence

        accuracy = find_accuracy_evidence(run, batch=prediction.batch)
    other_market = _find_forecast_on_other_market(prediction, forecasts)
    quantity = QUANTITIES["accuracy-time" if query.objective == "accuracy-time" else "time"]
    all_warnings = (
        *warnings,
        *(
            of_type.add_type_to_warning(warning)
            for of_type in all_measurements
            for warning in list_measurement_warnings(of_type)
        ),
        *list_choice_warnings(estimator, choice, query, other_market=other_market),
    )
    recommendation = Recommendation(
        objective=query.objective,
        curve=query.curve,
        options=tuple(query.command_line_options),
        limits=QueryLimits.from_query(query),
        overrides=tuple(overrides),
        headline=make_headline(
            choice, baseline, candidates, estimator, noise, objective=query.objective, accuracy=accuracy
        ),
        choice=prediction,
        reason=f"{choice.reason}{knees}; {epochs}",
        rows=candidates.select_rows(flag_listed_rows(candidates, choice, quantity)).make_predictions(),
        candidates=int(candidates.number_configurations().max()) + 1,
        runners_up=choice.runners_up,
        warnings=tuple(warning.text for warning in all_warnings),
        currency=run.spec.pricing.currency,
        price=_describe_each_type(all_measurements, lambda of_type: cost.describe_price(of_type.run.spec.pricing)),
        fit_error=estimator.steps.error,
        fit=_describe_each_type(all_measurements, lambda of_type: of_type.estimator.steps.words),
        power=_describe_each_type(
            all_measurements, lambda of_type: of_type.estimator.power.words if of_type.estimator.power else ""
        ),
        efficiency="" if noise is None else describe_noise_basis(noise, measurements),
        interruption=estimator.describe_interruption(prediction),
        stages=stages,
        ramp=". ".join(filter(None, [describe_stages(stages), describe_stage_nodes(prediction)])),
        accuracy=accuracy,
        other_market=other_market,
        trainings=tuple(steps for of_type in all_measurements for steps in of_type.trained_steps),
        trainings_left_out=tuple(f"{of_type.prefix}{why}" for of_type in all_measurements for why in of_type.left_out),
        created_at=now,
    )
    return Answer(recommendation, all_warnings, {}, all_measurements, candidates, forecasts)


def _find_forecast_on_other_market(row: Prediction, forecasts: Candidates) -> Prediction | None:
    """Return the forecast of the same configuration on the other market; None if there is none."""
    market = "spot" if row.market == "on_demand" else "on_demand"
    matching = forecasts.select_matching_rows(type=row.type, nodes=row.nodes, batch=row.batch, market=market)
    return matching.make_prediction(0) if len(matching) else None


def _select_choosable_configurations(
    candidates: Candidates, all_measurements: Sequence[TypeMeasurements]
) -> Candidates:
    """Return the configurations to choose among: on node types with delayed ranks only measured ones, if any."""
    delayed = [measurements.type for measurements in all_measurements if measurements.estimator.held_up]
    is_known = candidates["measured"] | ~np.isin(candidates["type"], delayed)
    return candidates.select_rows(is_known) if delayed and is_known.any() else candidates


def _describe_knees(measurements: TypeMeasurements, candidates: Candidates, query: Query) -> str:
    return describe_knee_uncertainty(
        measurements.estimator.steps,
        candidates.select_matching_rows(type=measurements.type, market="on_demand"),
        gpus_per_node=measurements.estimator.spec.cluster.gpus_per_node,
        quantity=query.quantity,
    )


def _describe_each_type(
    all_measurements: Sequence[TypeMeasurements], describe: Callable[[TypeMeasurements], str]
) -> str:
    """Describe each node type on a line; node types with an empty description are left out."""
    return "\n".join(
        f"{measurements.prefix}{text}" for measurements in all_measurements if (text := describe(measurements))
    )


def flag_listed_rows(rows: Candidates, choice: Choice, quantity: Quantity) -> Flags:
    """Return which rows are listed, shape (n,); of each configuration, all markets or none.

    If there are many, these are the choice and the runners-up, the Pareto front (thinned out from the fastest to the
    cheapest if it is large), measured configurations, and the best of each batch.

    Args:
        rows: at least one row, fastest first, with the Pareto front marked.
        choice: the choice among them.
        quantity: the quantity that the best of a batch minimises.
    """
    numbers = rows.number_configurations()
    if numbers.max() < MAX_ROWS_LISTED:
        return np.ones(len(rows), dtype=bool)
    is_listed = rows["measured"].copy()
    (front,) = np.nonzero(rows["pareto"])
    is_listed[front[np.unique(np.linspace(0, len(front) - 1, _MAX_FRONT_ROWS).round().astype(int))]] = True
    is_listed[find_best_of_each_batch(rows, quantity)] = True
    for row in (choice.prediction, *choice.runners_up):
        is_listed |= (rows["nodes"] == row.nodes) & (rows["batch"] == row.batch) & (rows["type"] == row.type)
    return np.isin(numbers, numbers[is_listed])


def list_choice_warnings(
    estimator: Estimator, choice: Choice, query: Query, *, other_market: Prediction | None
) -> Iterator[Diagnostic]:
    """Yield the reasons why the choice may be worse than predicted.

    Args:
        estimator: the models of the node type of the choice.
        other_market: the forecast of the choice on the other market; None if there is none.
    """
    chosen, deadline = choice.prediction, query.deadline_hours
    if estimator.steps.is_exactly_determined and not all(row.measured for row in (chosen, *choice.runners_up)):
        yield messages.fit_error_unknown()
    low, high = chosen.hours_low, chosen.hours_high
    if low is not None and high is not None and is_interval_too_wide(low, high):
        yield messages.time_too_uncertain(
            low_hours=max(low, 0.0), high_hours=high, all_measured=not estimator.has_unmeasured_configurations
        )
    if estimator.held_up and estimator.has_unmeasured_configurations:
        yield messages.unmeasured_not_considered()
    if chosen.further:
        yield messages.beyond_probed_nodes(
            nodes=chosen.nodes,
            probed_nodes=max(nodes for nodes, _ in estimator.probes),
            gpus_per_node=estimator.spec.cluster.gpus_per_node if estimator.steps.has_several_gpu_counts else None,
        )
    if chosen.headroom is not None and chosen.headroom < MEMORY_MARGIN:
        yield messages.little_memory_free(free_share=chosen.headroom, wanted_share=MEMORY_MARGIN)
    timed = chosen.same_progress if query.compares_at_equal_progress and chosen.same_progress else chosen
    latest_hours = timed.hours_high or 0.0
    if deadline is not None and latest_hours > deadline:
        yield messages.may_miss_deadline(high_hours=latest_hours, deadline_hours=deadline)
    if chosen.market == "spot":
        if deadline is not None:
            yield messages.spot_time_is_expected()
    elif estimator.spec.pricing.spot is not None and other_market is None:
        if estimator.saving is not None and not estimator.saving.is_known:
            yield messages.no_spot_saves_unknown(nodes=chosen.nodes)
        else:
            yield messages.no_spot_too_many_interruptions(nodes=chosen.nodes)


# --- The basis of an answer, on request


def list_regressions(answer: Answer) -> "dict[str, tuple[RegressionSummary, ...]]":
    """Return the regressions that an answer is based on, by node type ("" if the job names none)."""
    from tula_cli.models.summaries import list_regression_summaries

    return {
        measurements.type: tuple(list_regression_summaries(measurements.estimator))
        for measurements in answer.all_measurements
    }
