"""`tula recommend`: choose a configuration from the measurements, and write the answer that `tula train` reads."""

import json
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import CannotWrite, Infeasible, NotYours, OtherFormat
from tula_cli.models import cost, efficiency
from tula_cli.models.choice.baseline import make_headline, predict_baseline, prefer_baseline
from tula_cli.models.choice.candidates import Candidates, Flags, Limit, list_limits
from tula_cli.models.choice.grid import Config
from tula_cli.models.choice.objective import (
    Choice,
    choose_configuration,
    describe_knee_shares,
    find_best_of_each_batch,
)
from tula_cli.models.efficiency import Noise
from tula_cli.models.estimator import Estimator
from tula_cli.models.ramp import add_stage_epochs, describe_stages
from tula_cli.models.ramp_costs import describe_stage_nodes
from tula_cli.query import QUANTITIES, Quantity, Query
from tula_cli.run.directory import Run
from tula_cli.run.format import require_current_format
from tula_cli.run.frames import make_frame
from tula_cli.run.job_runs import find_recommendation, find_settings_origin, mark_chosen_run, save_runs, select_runs
from tula_cli.run.owner import require_ownership
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, QueryLimits, Recommendation
from tula_cli.services import messages
from tula_cli.services.measurements import (
    TypeMeasurements,
    describe_epochs,
    describe_noise_basis,
    find_gradient_noise_of_job,
    gather_measurements,
    get_measurements_of_type,
    list_measurement_warnings,
    require_energy,
    warn_no_gradients,
)
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml
from tula_cli.spec.sections import MEMORY_MARGIN
from tula_cli.spec.workload import get_workload
from tula_cli.words import escape_spreadsheet_cell, format_count, format_duration, is_interval_too_wide, join_words

if TYPE_CHECKING:
    from tula_cli.cluster.launcher import Launcher
    from tula_cli.models.summaries import RegressionSummary
MAX_ROWS_LISTED = 40
"""Maximum number of configurations that are all listed by default."""


def describe_configuration(row: Prediction, currency: str) -> str:
    """Return nodes, batch, duration and cost of a configuration in words."""
    kind = f" of type {row.type}" * bool(row.type) + " on spot" * (row.market == "spot")
    return (
        f"{format_count(row.nodes)}{kind}, batch {row.batch} (local batch {row.local_batch}): {format_duration(3600 * row.hours)},"
        f" {row.cost:.4g} {currency}"
    )


def make_training_command(run: Run, choice: Prediction) -> str:
    """Return the command line that trains the choice from this run, valid in any working directory.

    It changes to the folder of the probes first, in which relative paths of the spec and the user's code are found.
    """
    where = f"--run {shlex.quote(str(run.path.absolute()))}"
    train = f"tula train {where} --nodes {choice.nodes} --batch {choice.batch}"
    folder = next((task.workdir for task in run.read_snapshot().probe_tasks), None)
    return train if folder is None else f"cd {shlex.quote(folder)} && {train}"


def write_answer(
    run: Run,
    all_measurements: Sequence[TypeMeasurements],
    recommendation: Recommendation,
    candidates: Candidates,
    forecasts: Candidates,
    *,
    every: bool,
) -> None:
    """Write the files of an answer; recommendation.json is written last, so that if it exists, the others do too.

    Args:
        run: the run to write to, with the job to train.
        candidates: the configurations within the limits.
        forecasts: the same and those beyond the limits.
        every: whether results.csv lists all configurations, not only the listed and measured ones.
    """
    run.write_text(
        "results.csv", _make_results_table(all_measurements, recommendation, candidates, forecasts, every=every)
    )
    run.write_text("recommended.yaml", _render_recommended_yaml(run, recommendation))
    run.write_recommendation(recommendation)


def _render_recommended_yaml(run: Run, recommendation: Recommendation) -> str:
    """Return the unchanged spec, below comments on the choice.

    The spec is unchanged so that it still identifies the same run, with its probes and this recommendation.
    """
    choice = recommendation.choice
    return (
        f"# tula recommends {describe_configuration(choice, recommendation.currency)}.\n"
        f"# Criteria: {recommendation.criteria}.\n"
        f"# Reason: {recommendation.reason}.\n"
        f"# To train: {make_training_command(run, choice)}\n"
        f"{dump_yaml(run.spec.without_bill())}"
    )


_KEYS = ["type", "nodes", "batch"]
"""Columns that identify a configuration."""
_FORECAST_COLUMNS = {
    "step_time": "step_time_s",
    "step_low": "step_time_low_s",
    "step_high": "step_time_high_s",
    "trained": "training",
    "trained_hours": "trained_hours",
    "hours": "training_hours",
    "hours_low": "training_hours_low",
    "hours_high": "training_hours_high",
    "cost": "cost_{currency}",
    "same_progress_epochs": "same_progress_epochs",
    "same_progress_hours": "same_progress_hours",
    "same_progress_hours_low": "same_progress_hours_low",
    "same_progress_hours_high": "same_progress_hours_high",
    "same_progress_cost": "same_progress_cost_{currency}",
    "energy": "step_energy_joules",
    "kwh": "energy_kwh",
    "kwh_low": "energy_kwh_low",
    "kwh_high": "energy_kwh_high",
    "spot_hours": "spot_hours",
    "spot_cost": "spot_cost_{currency}",
    "peak_memory": "peak_memory_bytes",
    "headroom": "memory_headroom_share",
}
"""Columns of candidates on demand, and of those on spot nodes, with their names in results.csv."""
_MEASURED_COLUMNS = {
    "sync_time": "sync_time_s",
    "compute_time": "compute_time_s",
    "data_wait": "data_wait_s",
    "cached_time": "cached_time_s",
    "loader_time": "loader_time_s",
}
"""Fields of a probe's result, with their names in results.csv."""


def _make_results_table(
    all_measurements: Sequence[TypeMeasurements],
    recommendation: Recommendation,
    candidates: Candidates,
    forecasts: Candidates,
    *,
    every: bool,
) -> str:
    """Return configurations and every result as CSV, ordered by node type, nodes and batch; Args: see `write_answer`."""
    by_market = {market: frame.set_index(_KEYS) for market, frame in forecasts.frame.groupby("market")}
    on_demand, spot = by_market["on_demand"], by_market.get("spot")
    on_demand = on_demand.assign(
        **{f"spot_{name}": np.nan if spot is None else spot[name] for name in ("hours", "cost")}
    )
    known = set(on_demand.index)
    rows = [
        row for measurements in all_measurements for row in _list_rows(measurements, recommendation, known, every=every)
    ]
    table = make_frame(rows).set_index(_KEYS).join(on_demand[list(_FORECAST_COLUMNS)])
    is_on_front = candidates.frame.groupby(_KEYS)["pareto"].any()
    choice = recommendation.choice
    table = table.assign(
        chosen=table.index == (choice.type, choice.nodes, choice.batch),
        within_limits=table.index.isin(is_on_front.index),
        pareto=table.index.isin(is_on_front[is_on_front].index),
        peak_memory=table["peak_memory"].astype("Int64"),
    )
    names = {old: new.format(currency=recommendation.currency) for old, new in _FORECAST_COLUMNS.items()}
    table = table.reset_index().rename(columns={"type": "node_type", **names, **_MEASURED_COLUMNS})
    for name in ("node_type", "training", "note"):
        table[name] = table[name].map(escape_spreadsheet_cell)
    step, training = list(names.values())[:5], list(names.values())[5:]
    head = [
        "node_type",
        "nodes",
        "gpus_per_node",
        "batch",
        "local_batch",
        "outcome",
        "chosen",
        "within_limits",
        "pareto",
    ]
    columns = [*head, *step, *_MEASURED_COLUMNS.values(), *training, "note"]
    return str(table[columns].to_csv(index=False, lineterminator="\n"))


def _list_rows(
    measurements: TypeMeasurements,
    recommendation: Recommendation,
    known: Collection[tuple[str, int, int]],
    *,
    every: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the configurations of a node type that results.csv lists, with what their probes measured.

    These are the probes and the listed configurations, and all candidates if there are few or `every` is set.

    Args:
        known: node type, nodes and batch of the configurations with a forecast.
        every: whether all are listed.
    """
    gpus, estimator = measurements.run.spec.cluster.gpus_per_node, measurements.estimator
    probes = {Config(result.nodes, result.local_batch * result.nodes * gpus): result for result in measurements.results}
    listed = [Config(row.nodes, row.batch) for row in recommendation.rows if row.type == measurements.type]
    many = estimator.list_configurations() if every or estimator.configuration_count <= MAX_ROWS_LISTED else ()
    for config in sorted({*probes, *listed, *many}):
        result, is_predicted = probes.get(config), (measurements.type, config.nodes, config.batch) in known
        note = ""
        if isinstance(result, OutOfMemory | Failed):
            note = result.message
        elif not is_predicted:
            note = estimator.describe_why_not_startable(config) or estimator.describe_why_unknown(config)
        yield {
            "type": measurements.type,
            "nodes": config.nodes,
            "batch": config.batch,
            "gpus_per_node": gpus,
            "local_batch": config.local_batch(gpus),
            "outcome": _describe_outcome(result, predicted=is_predicted),
            "note": note,
            **{field: getattr(result, field, None) for field in _MEASURED_COLUMNS},
        }


def _describe_outcome(result: Measured | OutOfMemory | Failed | None, *, predicted: bool) -> str:
    if isinstance(result, OutOfMemory):
        return "out_of_memory_assumed" if result.assumed else "out_of_memory"
    if predicted:
        return "measured" if isinstance(result, Measured) else "predicted"
    return "failed" if isinstance(result, Failed) else "left_out"


_BLOCK = 1000
"""Number of rows that are created at a time."""
_MAX_ROWS_DRAWN = 400
"""Maximum number of candidates that are all drawn in figures."""
_MAX_FRONT_ROWS = 200
"""Maximum number of rows of the Pareto front that are listed if there are many candidates."""


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

    def with_all_rows(self) -> Recommendation:
        """Return the recommendation with all feasible configurations as its rows, of which there may be 100,000."""
        return self.recommendation.model_copy(update={"rows": self.candidates.predictions()})

    def rows_as_json(self, *, every: bool = True) -> Iterator[str]:
        """Yield rows with their notes as JSON texts: the listed rows, or all, which are created in blocks."""
        if not every:
            yield from (_convert_row_to_json(row, self.recommendation) for row in self.recommendation.rows)
            return
        for at in range(0, len(self.candidates), _BLOCK):
            block = self.candidates.select_rows(np.arange(at, min(at + _BLOCK, len(self.candidates))))
            yield from (_convert_row_to_json(row, self.recommendation) for row in block.predictions())

    def with_figure_rows(self) -> Recommendation:
        """Return the recommendation with the rows of its figures: all if there are few, else the listed ones."""
        return self.with_all_rows() if len(self.candidates) <= _MAX_ROWS_DRAWN else self.recommendation


def _convert_row_to_json(row: Prediction, recommendation: Recommendation) -> str:
    return f"{row.model_dump_json()[:-1]}, {json.dumps(recommendation.get_notes(row)._asdict())[1:]}"


def answer_query(
    runs: Sequence[Run], query: Query, *, overrides: Sequence[str] = (), estimates_start: bool = True
) -> Answer:
    """Choose a configuration from the current measurements; nothing is written.

    Args:
        runs: the runs of a job, with the results.
        overrides: settings that override those of the job; the answer records them as assumptions.
        estimates_start: on SLURM, whether to ask the scheduler when a training with the choice would start.

    Raises:
        Pending, BadMeasurements, Infeasible, SpecError: as in `recommend`.
    """
    now = time.time()
    overrides = tuple(overrides) if overrides and any(run.exists and run.spec != run.read_job() for run in runs) else ()
    pending = count_pending_probes(runs, _make_launcher)
    answer = recommend(runs, query, overrides=overrides, pending=pending, now=now)
    choice, run = answer.recommendation.choice, answer.chosen_run
    if not estimates_start or run.spec.cluster.kind != "slurm":
        return answer
    from tula_cli.cluster.slurm.submit import estimate_start  # imported here: only SLURM jobs need it

    estimate = estimate_start(run, nodes=choice.nodes, batch=choice.batch, now=now)
    return replace(answer, recommendation=answer.recommendation.model_copy(update={"start_estimate": estimate}))


def _make_launcher(spec: JobSpec) -> "Launcher":
    from tula_cli.cluster import launcher  # imported here: only needed while jobs of the run may be active

    return launcher.make_launcher(spec, submits=False)


def count_pending_probes(runs: Sequence[Run], launcher_for: "Callable[[JobSpec], Launcher]") -> dict[str | None, int]:
    """Return the number of probes of each node type that are queued or running."""
    return {run.type: _count_pending_of_run(run, launcher_for) for run in select_runs(runs, None)}


def _count_pending_of_run(run: Run, launcher_for: "Callable[[JobSpec], Launcher]") -> int:
    if not run.read_jobs():
        return 0
    from tula_cli.services import status  # imported here: also imports the schedulers

    run_status = status.get_run_status(run, launcher_for(run.spec), now=time.time())
    return sum(
        job.total - job.done for job in run_status.jobs if job.kind == "probe" and job.state in status.ACTIVE_STATES
    )


def recommend(
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
        overrides: settings of the runs that override the job; for the record.
        pending: number of probes that are queued or running, by node type.
        now: Unix time.

    Raises:
        Pending: probes are queued or running, and those finished do not determine the answer yet.
        BadMeasurements: there are too few probes, or none that can be used together.
        Infeasible: no configuration is feasible, or none satisfies the limits; the message names the binding limit and
            the closest configuration.
        SpecError: the job names no such node type.
    """
    runs = [add_site_bill(run) for run in select_runs(runs, query.node_type)]
    all_measurements, warnings = gather_measurements(runs, query, pending)
    if query.objective == "energy":
        all_measurements, warnings = require_energy(all_measurements, warnings)
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
    of_job = all_measurements[0]
    spec, dataset_size = of_job.run.spec, of_job.estimator.dataset_size
    if spec.is_reference_batch_above(dataset_size):
        reference = spec.train.reference_batch
        warnings.append(messages.reference_batch_exceeds_dataset(reference_batch=reference, dataset_size=dataset_size))
    answer = _build_answer(
        all_measurements, candidates, forecasts, query, [*warnings, *no_gradients], noise, overrides=overrides, now=now
    )
    return replace(answer, by_type=by_type)


def _select_candidates_of_run(candidates: Candidates, measurements: TypeMeasurements) -> Candidates:
    """Return the candidates of one run under its node type."""
    of_run = candidates.select(type=measurements.type)
    return of_run.with_columns({"type": measurements.run.variant.type or ""})


def add_site_bill(run: Run) -> Run:
    """Return a run with the billing of SLURM if its price is taken from there."""
    if run.spec.pricing.kind != "billing":
        return run
    from tula_cli.services.site_charges import bill_run_by_site  # imported here: runs SLURM commands

    return bill_run_by_site(run)


# --- Candidates


def _predict_candidates(all_measurements: Sequence[TypeMeasurements], query: Query, noise: Noise | None) -> Candidates:
    """Return the forecasts of the configurations of all node types, and of those on the number of nodes of a query."""
    tables = []
    for measurements in all_measurements:
        estimator, spec = measurements.estimator, measurements.run.spec
        counts = None if query.nodes is None else sorted({*spec.search.nodes, query.nodes})
        table = estimator.candidates(counts).with_columns({"type": measurements.type})
        if noise is not None:
            epochs = get_workload(spec).count_epochs(estimator.dataset_size)
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
    candidates = forecasts if query.nodes is None else forecasts.select(nodes=query.nodes)
    if not len(candidates):
        raise _make_nothing_fits_error(all_measurements[0].estimator, query)
    satisfying = candidates.satisfying(query)
    if not len(satisfying):
        raise _make_binding_limit_error(candidates, query, all_measurements[0].run.spec.pricing.currency)
    return satisfying.sort_by_time()


def _make_nothing_fits_error(estimator: Estimator, query: Query) -> Infeasible:
    """Return an error with the reason why the first candidate on the requested nodes cannot run, or is not known."""
    on = f" on {format_count(query.nodes)}" if query.nodes is not None else ""
    tried = list(estimator.list_configurations(query.node_counts))
    startable = [config for config in tried if not estimator.describe_why_not_startable(config)]
    if startable:  # they can run, but their step times are unknown
        nodes = join_words(sorted({config.nodes for config in startable}))
        why = next(filter(None, map(estimator.describe_why_unknown, startable)), "")
        hint = f"measure more: tula profile --set search.nodes=[{nodes}]"
    else:
        why = next(
            filter(None, map(estimator.describe_why_not_startable, tried)),
            "no batch is divisible among the GPUs",
        )
        hint = (
            "leave out --nodes to see the numbers of nodes that are possible"
            if on
            else "run tula check to see which configurations are searched"
        )
    return Infeasible(f"no configuration is feasible{on}: {why}", hint)


def _make_binding_limit_error(candidates: Candidates, query: Query, currency: str) -> Infeasible:
    """Return an error with the first limit that excludes all candidates that are left, and the closest of these."""
    limits = list_limits(query)
    for limit in limits:
        within = limit.admits(candidates)
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
        f" {describe_configuration(closest, currency)}{efficiency_text}",
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
    choosable = _select_choosable(candidates, all_measurements)
    among = "feasible" if choosable is candidates else "measured"
    choice = choose_configuration(choosable, objective=query.objective, curve=query.curve, among=among)
    measurements = get_measurements_of_type(all_measurements, choice.prediction.type)
    run, estimator = measurements.run, measurements.estimator
    baseline = predict_baseline(estimator, noise, node_type=measurements.type)
    if query.objective == "knee":
        choice = prefer_baseline(choice, baseline, choosable)
    prediction = choice.prediction
    knees = _describe_knees(measurements, candidates, query) if query.objective == "knee" else ""
    epochs = describe_epochs(prediction, measurements, query.objective)
    stages = add_stage_epochs(
        estimator.stages.list_stages(Config(prediction.nodes, prediction.batch)), estimator.dataset_size
    )
    accuracy = None
    if run.read_snapshot().comparison is not None:
        from tula_cli.services.comparison.accuracy import find_accuracy_evidence

        accuracy = find_accuracy_evidence(run, batch=prediction.batch)
    other_market = _find_on_other_market(prediction, forecasts)
    quantity = QUANTITIES["accuracy-time" if query.objective == "accuracy-time" else "time"]
    all_warnings = (
        *warnings,
        *(of_type.with_type(warning) for of_type in all_measurements for warning in list_measurement_warnings(of_type)),
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
        rows=candidates.select_rows(select_rows(candidates, choice, quantity)).predictions(),
        candidates=int(candidates.number_configurations().max()) + 1,
        runners_up=choice.runners_up,
        warnings=tuple(warning.text for warning in all_warnings),
        currency=run.spec.pricing.currency,
        price=_join_by_type(all_measurements, lambda of_type: cost.describe_price(of_type.run.spec.pricing)),
        fit_error=estimator.steps.error,
        fit=_join_by_type(all_measurements, lambda of_type: of_type.estimator.steps.words),
        power=_join_by_type(
            all_measurements, lambda of_type: of_type.estimator.power.words if of_type.estimator.power else ""
        ),
        efficiency="" if noise is None else describe_noise_basis(noise, measurements),
        interruption=estimator.describe_interruption(prediction),
        stages=stages,
        ramp=". ".join(filter(None, [describe_stages(stages), describe_stage_nodes(prediction)])),
        accuracy=accuracy,
        other_market=other_market,
        trainings=tuple(steps for of_type in all_measurements for steps in of_type.trained),
        trainings_left_out=tuple(f"{of_type.prefix}{why}" for of_type in all_measurements for why in of_type.left_out),
        created_at=now,
    )
    return Answer(recommendation, all_warnings, {}, all_measurements, candidates, forecasts)


def _find_on_other_market(row: Prediction, forecasts: Candidates) -> Prediction | None:
    """Return the forecast of the same configuration on the other market; None if there is none."""
    market = "spot" if row.market == "on_demand" else "on_demand"
    matching = forecasts.select(type=row.type, nodes=row.nodes, batch=row.batch, market=market)
    return matching.prediction(0) if len(matching) else None


def _select_choosable(candidates: Candidates, all_measurements: Sequence[TypeMeasurements]) -> Candidates:
    """Return the configurations to choose among: on node types with delayed ranks only measured ones, if any."""
    delayed = [measurements.type for measurements in all_measurements if measurements.estimator.held_up]
    is_known = candidates["measured"] | ~np.isin(candidates["type"], delayed)
    return candidates.select_rows(is_known) if delayed and is_known.any() else candidates


def _describe_knees(measurements: TypeMeasurements, candidates: Candidates, query: Query) -> str:
    return describe_knee_shares(
        measurements.estimator.steps,
        candidates.select(type=measurements.type, market="on_demand"),
        gpus_per_node=measurements.estimator.spec.cluster.gpus_per_node,
        quantity=query.quantity,
    )


def _join_by_type(all_measurements: Sequence[TypeMeasurements], describe: Callable[[TypeMeasurements], str]) -> str:
    """Describe each node type on a line; node types with an empty description are left out."""
    return "\n".join(
        f"{measurements.prefix}{text}" for measurements in all_measurements if (text := describe(measurements))
    )


def select_rows(rows: Candidates, choice: Choice, quantity: Quantity) -> Flags:
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
        yield messages.time_too_uncertain(low_hours=max(low, 0.0), high_hours=high)
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


# --- Storing an answer


def should_replace(recommendation: Recommendation, stored: Recommendation | None) -> bool:
    """Return whether an answer is stored without a request.

    That is the case for the first answer without overrides, and for an answer to the same criteria as the stored one.

    Args:
        stored: the answer that the run has stored; None if there is none.
    """
    return not recommendation.overrides if stored is None else recommendation.criteria == stored.criteria


@dataclass(frozen=True)
class StoreResult:
    """Whether an answer was stored for `tula train`."""

    is_stored: bool
    earlier: Recommendation | None  # stored before
    warnings: tuple[Diagnostic, ...] = ()  # that the choice has changed, or why the answer could not be stored


def store_answer(
    runs: Sequence[Run],
    answer: Answer,
    *,
    requested: bool,
    overrides: Sequence[str] = (),
    job: Path | None = None,
    every: bool = False,
) -> StoreResult:
    """Store an answer if it is requested or `should_replace` the stored one.

    Args:
        runs, answer, overrides, job, every: as in `save_answer`.
        requested: whether the user wants it to be stored; if it then cannot be stored, that is an error.

    Raises:
        TulaError: as in `save_answer`.
    """
    recommendation, earlier = answer.recommendation, find_recommendation(runs)
    if not requested and not should_replace(recommendation, earlier):
        return StoreResult(is_stored=False, earlier=earlier)
    try:
        save_answer(runs, answer, overrides=overrides, job=job, every=every)
    except (CannotWrite, NotYours, OtherFormat) as error:
        if requested:
            raise
        warning = messages.recommendation_not_stored(reason=error.message)
        return StoreResult(is_stored=False, earlier=earlier, warnings=(warning,))
    return StoreResult(
        is_stored=True,
        earlier=earlier,
        warnings=() if earlier is None else tuple(_warn_changed_choice(earlier.choice, recommendation.choice)),
    )


def _warn_changed_choice(before: Prediction, after: Prediction) -> Iterator[Diagnostic]:
    if (before.nodes, before.batch, before.type) != (after.nodes, after.batch, after.type):
        yield messages.choice_changed(
            nodes=after.nodes,
            batch=after.batch,
            node_type=after.type,
            earlier_nodes=before.nodes,
            earlier_batch=before.batch,
            earlier_node_type=before.type,
        )


def save_answer(
    runs: Sequence[Run],
    answer: Answer,
    *,
    overrides: Sequence[str] = (),
    job: Path | None = None,
    every: bool = False,
) -> None:
    """Write recommendation.json, which `tula train` reads, recommended.yaml and results.csv.

    The chosen run gets the answer over all runs; each other run gets the best configuration on its hardware, for
    `tula train --type`. So does the chosen run if several have the same node type: later commands, which read it alone,
    do not know the runs by the names that they have here. The settings of the job are stored too, but not those that
    the answer only assumes.

    Args:
        overrides: settings of the runs that override their file.
        job: the file of the settings; None for those of the runs.
        every: whether results.csv lists all candidates, however many there are.

    Raises:
        OtherFormat: a run has an older format.
        TulaError: the files cannot be written, or a run belongs to another user.
    """
    for run in runs:
        require_ownership(run.path)
        require_current_format(run.path)
    assumed = bool(answer.recommendation.overrides)
    chosen = answer.chosen_run
    measured = {measurements.run.path: measurements for measurements in answer.all_measurements}
    stored = [run.with_spec(run.read_job()) if assumed else run for run in runs if run.exists]
    for run in sorted(stored, key=lambda run: run.path == chosen.path):  # the last one is the newest run
        of_run = measured.get(run.path)
        if run.path == chosen.path and chosen.type == chosen.variant.type:
            tables = answer.candidates, answer.forecasts
            write_answer(run, answer.all_measurements, answer.recommendation, *tables, every=every)
        elif of_run is not None and of_run.type in answer.by_type:
            tables = (
                _select_candidates_of_run(answer.candidates, of_run),
                _select_candidates_of_run(answer.forecasts, of_run),
            )
            write_answer(run, [of_run.with_type_of_run()], answer.by_type[of_run.type], *tables, every=every)
        file = find_settings_origin(run, None, ()) if assumed else find_settings_origin(run, job, overrides)
        save_runs([run], file)
    mark_chosen_run(chosen, runs)
