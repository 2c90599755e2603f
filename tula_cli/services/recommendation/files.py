"""The output files of `tula recommend`: the recommended job, the command that trains it, the table of results."""

import csv
import io
import itertools
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.columns import to_columns
from tula_cli.models.choice.grid import Config
from tula_cli.run.directory import Run
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services.recommendation.measurements import TypeMeasurements
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml
from tula_cli.words import escape_spreadsheet_cell, format_count, format_duration

_BLOCK = 1000
"""Number of rows that are created at a time."""
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
    folder = next((task.workdir for task in run.tasks() if isinstance(task, ProbeTask)), None)
    return train if folder is None else f"cd {shlex.quote(folder)} && {train}"


def write_answer(
    run: Run,
    all_measurements: Sequence[TypeMeasurements],
    recommendation: Recommendation,
    every: Candidates | None = None,
) -> None:
    """Write the files of an answer; recommendation.json is written last, so that if it exists, the others do too.

    Args:
        run: the run to write to, with the job to train.
        all_measurements: the measurements of each node type.
        recommendation: the recommendation.
        every: all feasible configurations, for a table of all candidates; None for a table of the listed and measured
            ones.
    """
    run.write_text("results.csv", _make_results_table(all_measurements, recommendation, every))
    train = make_training_command(run, recommendation.choice)
    run.write_text("recommended.yaml", _render_recommended_yaml(run.spec, recommendation, train=train))
    run.write_text("cmd.txt", f"{train}\n")
    run.write_recommendation(recommendation)


def _render_recommended_yaml(spec: JobSpec, recommendation: Recommendation, *, train: str) -> str:
    """Return the unchanged spec, below comments on the choice.

    The spec is unchanged so that it still identifies the same run, with its probes and this recommendation.
    """
    choice = recommendation.choice
    return (
        f"# tula recommends {describe_configuration(choice, recommendation.currency)}.\n"
        f"# Criteria: {recommendation.criteria}.\n"
        f"# Reason: {recommendation.reason}.\n"
        f"# To train: {train}\n"
        f"{dump_yaml(spec.without_bill())}"
    )


def _make_results_table(
    all_measurements: Sequence[TypeMeasurements], recommendation: Recommendation, every: Candidates | None
) -> str:
    """Return candidates and every result as CSV, ordered by node type, nodes and local batch.

    All candidates are included if there are few or `every` is given, else those that the recommendation lists.
    """
    rows = recommendation.rows if every is None else every
    within: dict[tuple[str, Config], list[int]] = {}
    for index, (kind, config) in enumerate(_list_row_keys(rows)):
        within.setdefault((kind, config), []).append(index)
    lines = (
        line
        for measurements in all_measurements
        for line in _list_table_lines(measurements, recommendation, rows, within)
    )
    text, first_line = io.StringIO(), next(lines)
    table = csv.DictWriter(text, first_line, lineterminator="\n")
    table.writeheader()
    for line in itertools.chain([first_line], lines):
        table.writerow({name: escape_spreadsheet_cell(value) for name, value in line.items()})
    return text.getvalue()


def _list_row_keys(rows: Sequence[Prediction] | Candidates) -> Iterator[tuple[str, Config]]:
    """Yield the node type and the configuration of each forecast."""
    if isinstance(rows, Candidates):
        columns = zip(rows["type"].tolist(), rows["nodes"].tolist(), rows["batch"].tolist(), strict=True)
        yield from ((kind, Config(nodes, batch)) for kind, nodes, batch in columns)
    else:
        yield from ((row.type, Config(row.nodes, row.batch)) for row in rows)


def _take_rows(rows: Sequence[Prediction] | Candidates, indices: Sequence[int]) -> Sequence[Prediction]:
    return rows.take(indices).predictions() if isinstance(rows, Candidates) else [rows[index] for index in indices]


def _list_table_lines(
    measurements: TypeMeasurements,
    recommendation: Recommendation,
    rows: Sequence[Prediction] | Candidates,
    within: Mapping[tuple[str, Config], Sequence[int]],
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a node type, created in blocks: 100,000 records would take more than a gigabyte.

    `rows` are the forecasts within the limits; `within` maps a configuration to the indices of its forecasts.
    """
    estimator = measurements.estimator
    listed = [config for kind, config in within if kind == measurements.type]
    configs = _select_listed_configs(measurements, listed, every=isinstance(rows, Candidates))
    names = list(configs)
    for at in range(0, len(names), _BLOCK):
        block = names[at : at + _BLOCK]
        whys = {
            config: estimator.describe_why_not_startable(config) or estimator.describe_why_unknown(config)
            for config in block
        }
        candidates = estimator.estimate(*to_columns([config for config, why in whys.items() if not why]))
        on_demand, on_spot = (
            {Config(row.nodes, row.batch): row for row in forecasts.predictions()}
            for forecasts in (candidates, estimator.on_spot(candidates))
        )
        indices = [within.get((measurements.type, config), ()) for config in block]
        records = iter(_take_rows(rows, list(itertools.chain.from_iterable(indices))))
        for config, indices_here in zip(block, indices, strict=True):
            result, records_here = configs[config], list(itertools.islice(records, len(indices_here)))
            cells = _make_table_row(
                measurements, config, result, recommendation, on_demand.get(config), on_spot.get(config), records_here
            )
            cells["note"] = result.message if isinstance(result, OutOfMemory | Failed) else whys[config]
            yield {name: None if cell != cell else cell for name, cell in cells.items()}  # nan is written as nothing


def _select_listed_configs(
    measurements: TypeMeasurements, listed: Collection[Config], *, every: bool
) -> dict[Config, Measured | OutOfMemory | Failed | None]:
    """Return the configurations of a node type in the table, each with the result of its probe.

    These are the probes and the listed configurations, and all candidates if there are few or `every` is set.
    """
    gpus = measurements.run.spec.cluster.gpus_per_node
    probes = {Config(result.nodes, result.local_batch * result.nodes * gpus): result for result in measurements.results}
    estimator = measurements.estimator
    configurations = {
        *probes,
        *listed,
        *(estimator.configurations() if every or estimator.count <= MAX_ROWS_LISTED else ()),
    }
    return {config: probes.get(config) for config in sorted(configurations)}


def _make_table_row(
    measurements: TypeMeasurements,
    config: Config,
    result: Measured | OutOfMemory | Failed | None,
    recommendation: Recommendation,
    row: Prediction | None,
    spot: Prediction | None,
    within: Sequence[Prediction],
) -> dict[str, Any]:
    """Return one line of results.csv except its note; every line has the same columns.

    `within` are the forecasts of the configuration within the limits; `row` and `spot` are its forecasts on either
    market, whether within the limits or not.
    """
    probe = result if isinstance(result, Measured) else None
    gpus = measurements.estimator.spec.cluster.gpus_per_node
    return {
        "node_type": measurements.type,
        "nodes": config.nodes,
        "gpus_per_node": gpus,
        "batch": config.batch,
        "local_batch": config.local_batch(gpus),
        "outcome": _describe_outcome(result, predicted=row is not None),
        "chosen": recommendation.choice in within,
        "within_limits": bool(within),
        "pareto": any(offer.pareto for offer in within),
        "step_time_s": row and row.step_time,
        "step_time_low_s": row and row.step_low,
        "step_time_high_s": row and row.step_high,
        "training": row and row.trained,
        **_list_measured_cells(probe),
        "training_hours": row and row.hours,
        "training_hours_low": row and row.hours_low,
        "training_hours_high": row and row.hours_high,
        f"cost_{recommendation.currency}": row and row.cost,
        **_list_progress_cells(within, recommendation.currency),
        "step_energy_joules": row and row.energy,
        "energy_kwh": row and row.kwh,
        "energy_kwh_low": row and row.kwh_low,
        "energy_kwh_high": row and row.kwh_high,
        "spot_hours": spot and spot.hours,
        f"spot_cost_{recommendation.currency}": spot and spot.cost,
        "peak_memory_bytes": row and row.peak_memory,
        "memory_headroom_share": row and row.headroom,
    }


def _list_measured_cells(probe: Measured | None) -> dict[str, Any]:
    return {
        "sync_time_s": probe and probe.sync_time,
        "compute_time_s": probe and probe.compute_time,
        "data_wait_s": probe and probe.data_wait,
        "cached_time_s": probe and probe.cached_time,
        "loader_time_s": probe and probe.loader_time,
    }


def _list_progress_cells(within: Sequence[Prediction], currency: str) -> dict[str, float | None]:
    """Return the columns for the same progress, from the first forecast within the limits."""
    progress = within[0].same_progress if within else None
    names = {name: name for name in ("epochs", "hours", "hours_low", "hours_high")} | {"cost": f"cost_{currency}"}
    return {
        f"same_progress_{column}": None if progress is None else getattr(progress, name)
        for name, column in names.items()
    }


def _describe_outcome(result: Measured | OutOfMemory | Failed | None, *, predicted: bool) -> str:
    if isinstance(result, OutOfMemory):
        return "out_of_memory_assumed" if result.assumed else "out_of_memory"
    if predicted:
        return "measured" if isinstance(result, Measured) else "predicted"
    return "failed" if isinstance(result, Failed) else "left_out"
