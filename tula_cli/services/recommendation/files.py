"""The output files of `tula recommend`: the recommended job, with the command that trains it, and the table of results."""

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.grid import Config
from tula_cli.run.directory import Run
from tula_cli.run.frames import make_frame
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services.recommendation.measurements import TypeMeasurements
from tula_cli.spec.load import dump_yaml
from tula_cli.words import escape_spreadsheet_cell, format_count, format_duration

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
    folder = next((task.workdir for task in run.read_tasks() if isinstance(task, ProbeTask)), None)
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
        all_measurements: the measurements of each node type.
        recommendation: the recommendation.
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
    """Return configurations and every result as CSV, ordered by node type, nodes and batch. Args: as of `write_answer`."""
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
    step, training = list(names.values())[:4], list(names.values())[4:]
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
        measurements: of the node type.
        recommendation: with the listed configurations.
        known: node type, nodes and batch of the configurations with a forecast.
        every: whether all are listed.
    """
    gpus, estimator = measurements.run.spec.cluster.gpus_per_node, measurements.estimator
    probes = {Config(result.nodes, result.local_batch * result.nodes * gpus): result for result in measurements.results}
    listed = [Config(row.nodes, row.batch) for row in recommendation.rows if row.type == measurements.type]
    many = estimator.configurations() if every or estimator.count <= MAX_ROWS_LISTED else ()
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
