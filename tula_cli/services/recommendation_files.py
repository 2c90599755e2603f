"""The files of a recommendation: recommendation.json, which `tula train` reads, recommended.yaml and results.csv."""

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import CannotWrite, NotYours, OtherFormat
from tula_cli.models.choice.grid import Config
from tula_cli.run.directory import Run
from tula_cli.run.format import require_current_format
from tula_cli.run.frames import make_frame
from tula_cli.run.job_runs import find_recommendation, find_settings_origin, mark_chosen_run, save_runs
from tula_cli.run.owner import require_ownership
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory, Result
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.services import messages
from tula_cli.services.measurements import TypeMeasurements
from tula_cli.services.recommend import MAX_ROWS_LISTED, Answer, describe_prediction
from tula_cli.spec.load import dump_yaml
from tula_cli.words import escape_spreadsheet_cell


def make_training_command(run: Run, choice: Prediction) -> str:
    """Return the command line that trains the choice from this run, valid in any working directory.

    It changes to the folder of the probes first, in which relative paths of the spec and the user's code are found.
    """
    where = f"--run {shlex.quote(str(run.path.absolute()))}"
    train = f"tula train {where} --nodes {choice.nodes} --batch {choice.batch}"
    folder = next((task.workdir for task in run.read_snapshot().probe_tasks), None)
    return train if folder is None else f"cd {shlex.quote(folder)} && {train}"


def _write_answer(run: Run, answer: Answer, *, every: bool) -> None:
    """Write the files of an answer; recommendation.json is written last, so that if it exists, the others do too."""
    run.write_text("results.csv", _make_results_table(answer, every=every))
    run.write_text("recommended.yaml", _render_recommended_yaml(run, answer.recommendation))
    run.write_recommendation(answer.recommendation)


def _render_recommended_yaml(run: Run, recommendation: Recommendation) -> str:
    """Return the unchanged spec, below comments on the choice.

    The spec is unchanged so that it still identifies the same run, with its probes and this recommendation.
    """
    choice = recommendation.choice
    return (
        f"# tula recommends {describe_prediction(choice, recommendation.currency)}.\n"
        f"# Criteria: {recommendation.criteria}.\n"
        f"# Reason: {recommendation.reason}.\n"
        f"# To train: {make_training_command(run, choice)}\n"
        f"{dump_yaml(run.spec.without_slurm_billing())}"
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


def _make_results_table(answer: Answer, *, every: bool) -> str:
    """Return configurations and every result as CSV, ordered by node type, nodes and batch."""
    recommendation = answer.recommendation
    by_market = {market: frame.set_index(_KEYS) for market, frame in answer.forecasts.frame.groupby("market")}
    on_demand, spot = by_market["on_demand"], by_market.get("spot")
    on_demand = on_demand.assign(
        **{f"spot_{name}": np.nan if spot is None else spot[name] for name in ("hours", "cost")}
    )
    known = set(on_demand.index)
    rows = [
        row
        for measurements in answer.all_measurements
        for row in _list_rows(measurements, recommendation, known, every=every)
    ]
    table = make_frame(rows).set_index(_KEYS).join(on_demand[list(_FORECAST_COLUMNS)])
    is_on_front = answer.candidates.frame.groupby(_KEYS)["pareto"].any()
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

    These are the probes and the listed configurations, and all candidates if there are few or `every` is set. `known` has
    the configurations with a forecast (node type, nodes and batch).
    """
    gpus, estimator = measurements.run.spec.cluster.gpus_per_node, measurements.estimator
    results = measurements.snapshot.results
    probes = {Config(result.nodes, result.local_batch * result.nodes * gpus): result for result in results}
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
            "local_batch": config.compute_local_batch(gpus),
            "outcome": _describe_outcome(result, predicted=is_predicted),
            "note": note,
            **{field: getattr(result, field, None) for field in _MEASURED_COLUMNS},
        }


def _describe_outcome(result: Result | None, *, predicted: bool) -> str:
    if isinstance(result, OutOfMemory):
        return "out_of_memory_assumed" if result.assumed else "out_of_memory"
    if predicted:
        return "measured" if isinstance(result, Measured) else "predicted"
    return "failed" if isinstance(result, Failed) else "left_out"


def should_replace_recommendation(recommendation: Recommendation, stored: Recommendation | None) -> bool:
    """Return whether an answer is stored without a request.

    That is the case for the first answer without overrides, and for an answer to the same criteria as the stored one.
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
    overrides: Sequence[str],
    job: Path | None,
    every: bool,
) -> StoreResult:
    """Store an answer if it is requested or `should_replace_recommendation` the stored one.

    Args:
        runs, answer, overrides, job, every: as in `save_answer`.
        requested: whether the user wants it to be stored; if it then cannot be stored, that is an error.

    Raises:
        TulaError: as in `save_answer`.
    """
    recommendation, earlier = answer.recommendation, find_recommendation(runs)
    if not requested and not should_replace_recommendation(recommendation, earlier):
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
    `tula train --type`. If several runs have the same node type, the chosen run gets the best configuration on its
    hardware too, because later commands read it alone, without the names used here. The settings of the job are stored
    too, but not those that the answer only assumes.

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
            _write_answer(run, answer, every=every)
        elif of_run is not None and of_run.type in answer.by_type:
            _write_answer(run, answer.select_run(of_run), every=every)
        file = find_settings_origin(run, None, ()) if assumed else find_settings_origin(run, job, overrides)
        save_runs([run], file)
    mark_chosen_run(chosen, runs)
