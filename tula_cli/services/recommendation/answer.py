"""What `tula recommend` writes: the recommended job, the command to train it, the table of results."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tula_cli.models.choice.grid import Config
from tula_cli.run.directory import RunDir
from tula_cli.run.frames import frame
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.tasks import ProbeTask
from tula_cli.services.recommendation.limits import described_limits
from tula_cli.services.recommendation.measured import TypeMeasurements
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import dump_yaml


@dataclass(frozen=True)
class Answer:
    """What was chosen, and what it rests on."""

    recommendation: Recommendation
    by_type: Mapping[str, Recommendation]  # of each node type alone, where the job names any
    all_measurements: Sequence[TypeMeasurements]


def command(run: RunDir, spec: JobSpec, choice: Prediction) -> str:
    """Return the command line that trains the choice from this run, wherever it is typed.

    It goes to the folder of the probes first: relative paths of the spec and the user's code are found there.
    """
    kind = f" --type {choice.type}" if spec.node_types else ""
    where = f"--run {shlex.quote(str(run.path.absolute()))}{kind}"
    train = f"tula train {where} --nodes {choice.nodes} --batch {choice.batch}"
    tasks = (task for part in run.parts(spec) for task in part.run.tasks())
    folder = next((task.workdir for task in tasks if isinstance(task, ProbeTask)), None)
    return train if folder is None else f"cd {shlex.quote(folder)} && {train}"


def write(
    run: RunDir, spec: JobSpec, all_measurements: Sequence[TypeMeasurements], recommendation: Recommendation
) -> None:
    """Write the files; recommendation.json last, so that where it stands the others do too."""
    run.write_text("results.csv", _table(all_measurements, recommendation))
    train = command(run, spec, recommendation.choice)
    run.write_text("recommended.yaml", _recommended_yaml(spec, recommendation, train=train))
    run.write_text("cmd.txt", f"{train}\n")
    run.write_recommendation(recommendation)


def _recommended_yaml(spec: JobSpec, recommendation: Recommendation, *, train: str) -> str:
    """Return the spec, unchanged, below the choice.

    It stays unchanged so that it names the same run: its probes and this recommendation are found again.
    """
    choice = recommendation.choice
    return (
        f"# tula recommends {described_limits(choice, recommendation.currency)}.\n"
        f"# Asked by: {recommendation.criteria}.\n"
        f"# Why: {recommendation.reason}.\n"
        f"# Train it: {train}\n"
        f"{dump_yaml(spec)}"
    )


def _table(all_measurements: Sequence[TypeMeasurements], recommendation: Recommendation) -> str:
    """Return every candidate and every result as CSV, ordered by node type, nodes and local batch."""
    by_config: dict[tuple[str, Config], list[Prediction]] = {}
    for row in recommendation.rows:
        by_config.setdefault((row.type, Config(row.nodes, row.batch)), []).append(row)
    rows = []
    for measurements in all_measurements:
        known = {Config(row.nodes, row.batch): row for row in measurements.forecast.predictions()}
        for config, result in _configs(measurements, by_config).items():
            within = by_config.get((measurements.type, config), [])
            rows.append(_row(measurements, config, known.get(config), result, recommendation, within))
    return frame(rows).to_csv(index=False)


def _configs(
    measurements: TypeMeasurements, within: Iterable[tuple[str, Config]]
) -> dict[Config, Measured | OutOfMemory | Failed | None]:
    """Return all candidates of a node type and what was asked for besides, each with its probe."""
    gpus = measurements.part.spec.cluster.gpus_per_node
    probes = {Config(result.nodes, result.local_batch * result.nodes * gpus): result for result in measurements.results}
    found = {
        *probes,
        *measurements.forecast.candidates(),
        *(config for name, config in within if name == measurements.type),
    }
    return {config: probes.get(config) for config in sorted(found)}


def _row(
    measurements: TypeMeasurements,
    config: Config,
    known: Prediction | None,
    result: Measured | OutOfMemory | Failed | None,
    recommendation: Recommendation,
    within: Sequence[Prediction],
) -> dict[str, Any]:
    """Return one line of results.csv; every line has the same columns. `within`: its forecasts within the limits."""
    forecast = measurements.forecast
    why = "" if known else forecast.why_not(config) or forecast.why_unknown(config)
    row = known or (None if why else forecast.predict(config))
    spot = forecast.on_spot(row) if row else None
    probe = result if isinstance(result, Measured) else None
    gpus = forecast.spec.cluster.gpus_per_node
    return {
        "node_type": measurements.type,
        "nodes": config.nodes,
        "gpus_per_node": gpus,
        "batch": config.batch,
        "local_batch": config.local_batch(gpus),
        "outcome": _outcome(result, predicted=row is not None),
        "chosen": recommendation.choice in within,
        "within_limits": bool(within),
        "pareto": any(offer.pareto for offer in within),
        "step_time_s": row and row.step_time,
        "step_time_low_s": row and row.step_low,
        "step_time_high_s": row and row.step_high,
        **_measured_cells(probe),
        "training_hours": row and row.hours,
        "training_hours_low": row and row.hours_low,
        "training_hours_high": row and row.hours_high,
        f"cost_{recommendation.currency}": row and row.cost,
        **_progress_cells(within, recommendation.currency),
        "step_energy_joules": row and row.energy,
        "energy_kwh": row and row.kwh,
        "energy_kwh_low": row and row.kwh_low,
        "energy_kwh_high": row and row.kwh_high,
        "spot_hours": spot and spot.hours,
        f"spot_cost_{recommendation.currency}": spot and spot.cost,
        "peak_memory_bytes": row and row.peak_memory,
        "memory_headroom_share": row and row.headroom,
        "note": result.message if isinstance(result, OutOfMemory | Failed) else why,
    }


def _measured_cells(probe: Measured | None) -> dict[str, Any]:
    return {
        "sync_time_s": probe and probe.sync_time,
        "compute_time_s": probe and probe.compute_time,
        "data_wait_s": probe and probe.data_wait,
        "cached_time_s": probe and probe.cached_time,
        "loader_time_s": probe and probe.loader_time,
    }


def _progress_cells(within: Sequence[Prediction], currency: str) -> dict[str, float | None]:
    """Return the columns of the same progress, of the first forecast within the limits."""
    found = within[0].same_progress if within else None
    names = {name: name for name in ("epochs", "hours", "hours_low", "hours_high")} | {"cost": f"cost_{currency}"}
    return {
        f"same_progress_{column}": None if found is None else getattr(found, name) for name, column in names.items()
    }


def _outcome(result: Measured | OutOfMemory | Failed | None, *, predicted: bool) -> str:
    if isinstance(result, OutOfMemory):
        return "out_of_memory_assumed" if result.assumed else "out_of_memory"
    if predicted:
        return "measured" if isinstance(result, Measured) else "predicted"
    return "failed" if isinstance(result, Failed) else "left_out"
