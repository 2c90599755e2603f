"""Parameters, numbers and curves of a run and its trainings, in the form in which they are sent to a tracker."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tula_cli.extras.trackers.destination import Point, Scalar, State, TrackerRun, compute_digest
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.run.directory import Run
from tula_cli.run.records.jobs import Attempt
from tula_cli.run.records.probes import Environment, Measured
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.secrets import may_be_secret, redact_secrets
from tula_cli.run.snapshot import Snapshot
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.merge import flatten_mapping
from tula_cli.words import describe_configuration, format_count, get_first_line

# --- A run


@dataclass(frozen=True)
class RunPayload:
    """The values of one run that are sent to a tracker."""

    run: TrackerRun
    state: State
    ended: float  # Unix time of the end, or of the newest value if it is running
    params: Mapping[str, Scalar]
    tags: Mapping[str, str]
    numbers: Mapping[str, float]
    artifacts: tuple[Path, ...] = ()
    points: Sequence[Point] = ()  # points of the curves

    def compute_digest(self) -> str:
        """Return a digest of all values and files except the curves, to compare it with that of the values sent before."""
        files = {path.name: compute_digest(path.read_bytes()) for path in self.artifacts}
        return compute_digest([dict(self.params), dict(self.tags), dict(self.numbers), self.state, files])


def list_settings(content: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return nested settings by their keys, `a.b.c`, without empty values and possible secrets."""
    return {key: value for key, given in flatten_mapping(content) if (value := _format_setting(key, given)) is not None}


def _format_setting(key: str, value: Any) -> Scalar | None:
    if isinstance(value, bool | int | float):
        return value if math.isfinite(value) else None
    if value is None or value in ("", [], {}):
        return None
    name = key.rpartition(".")[2]
    if isinstance(value, list):  # words and lines of a command, without secrets
        return None if may_be_secret(name, "") else redact_secrets(" ".join(map(str, value)))
    return None if may_be_secret(name, str(value)) else str(value)


def _read_environment(row: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return hardware, software and variables of a training, from a row of metrics.jsonl; empty if the row is damaged."""
    try:
        return _list_environment(Environment.model_validate(row))
    except ValidationError:
        return {}


def _list_environment(environment: Environment) -> dict[str, Scalar]:
    content = environment.model_dump(mode="json", exclude={"nodes", "allreduce", "variables"})
    return list_settings({"env": {**content, **environment.variables}})


def make_run_payload(run: Run, snapshot: Snapshot, *, active: bool, artifacts: tuple[Path, ...]) -> RunPayload:
    """Return the payload of a whole run: its settings, environment, probes and recommendation."""
    answer, measured = snapshot.recommendation, snapshot.measured
    moments = [job.submitted_at for job in snapshot.jobs] + [result.measured_at for result in measured]
    environment = _list_environment(measured[0].environment) if measured else {}
    counts = {"probes/measured": len(measured), "probes/in_all": len(snapshot.results)}
    answer_numbers = {} if answer is None else _collect_recommendation_metrics(answer)
    return RunPayload(
        TrackerRun("run", "run", run.id, min(moments, default=0.0)),
        "running" if active else "finished",
        max([*moments, *([answer.created_at] if answer else [])], default=0.0),
        {**list_settings(run.spec.model_dump(mode="json", exclude={"export"})), **environment},
        {} if answer is None else _list_recommendation_tags(answer),
        select_finite_numbers({**counts, **answer_numbers, **dict(_list_probe_metrics(measured))}),
        artifacts,
    )


def _list_recommendation_tags(answer: Recommendation) -> dict[str, str]:
    texts = {
        "recommended": describe_configuration(answer.choice.nodes, answer.choice.batch, answer.choice.local_batch),
        "objective": answer.objective,
        "reason": answer.reason,
        "price": answer.price,
        "node_type": answer.choice.type,
        "warnings": "; ".join(answer.warnings),
    }
    return {f"recommendation.{key}": text for key, text in texts.items() if text}


def _collect_recommendation_metrics(answer: Recommendation) -> dict[str, Any]:
    names = (
        "nodes",
        "batch",
        "local_batch",
        "hours",
        "hours_low",
        "hours_high",
        "cost",
        "step_time",
        "kwh",
        "peak_memory",
    )
    return {f"recommended/{name}": getattr(answer.choice, name) for name in names}


def _list_probe_metrics(probes: Iterable[Measured]) -> Iterator[tuple[str, Any]]:
    """Yield step time (seconds), samples per second and peak memory (bytes of one GPU) of each probe."""
    for probe in probes:
        prefix, step = f"probes/{probe.id.removeprefix('probe-')}", compute_trimmed_mean(probe.step_times)
        yield from ((f"{prefix}/step_time", step), (f"{prefix}/samples_per_second", probe.batch / step))
        yield f"{prefix}/peak_memory", probe.memory.peak


# --- A training


def make_training_payload(
    snapshot: Snapshot, tasks: Sequence[TrainTask], group: str, parent: str, *, active: bool
) -> RunPayload:
    """Return the payload of a training.

    The newest point of a running training is held back, because more rows at its position may follow.

    Args:
        group: name of the whole run.
        parent: the tracker's id of the whole run.
    """
    first, task = tasks[0], tasks[-1]
    training = snapshot.get_training(task.signature)
    attempts, summary = training.read_attempts(), training.read_summary()
    began = min((attempt.started_at for attempt in attempts), default=0.0)
    state = _get_training_state(
        training, attempts, active=active, cancelled=bool(snapshot.read_cancel_command(task.job))
    )
    rows = training.read_metrics()
    environment = [_read_environment(row) for row in rows if row["kind"] == "environment"]
    points = collect_points(rows, batch=task.batch)
    params = {
        **list_settings(first.spec.model_dump(mode="json", exclude={"export"})),
        "nodes": first.nodes,
        "batch": first.batch,
        "gpus_per_node": first.spec.cluster.gpus_per_node,
        **_list_predicted_values(first),
        **(environment[-1] if environment else {}),
    }
    texts: dict[str, str] = {}
    if summary is not None:
        texts = {"ended": summary.ended, "relaunches": "; ".join(summary.causes), "currency": summary.currency}
    outcome_tags = {key: redact_secrets(text) for key, text in texts.items() if text}
    return RunPayload(
        run=TrackerRun(task.job, "training", group, began, parent),
        state=state,
        ended=max([began, *(attempt.ended_at or attempt.started_at for attempt in attempts)]),
        params=params,
        tags={**_list_attempt_tags(attempts, tasks), **outcome_tags},
        numbers=select_finite_numbers(dict(_list_result_metrics(training))),
        points=points[:-1] if state == "running" else points,
    )


def _get_training_state(training: TrainingRun, attempts: Sequence[Attempt], *, active: bool, cancelled: bool) -> State:
    if training.read_result() is not None:
        return "finished"
    if active:
        return "running"
    return "killed" if cancelled or (attempts and attempts[-1].outcome in ("cancelled", "signal")) else "failed"


def _list_predicted_values(task: TrainTask) -> dict[str, float]:
    names = ("hours", "hours_low", "hours_high", "cost", "step_time", "kwh")
    return select_finite_numbers({f"predicted.{name}": getattr(task.prediction, name, None) for name in names})


def _list_attempt_tags(attempts: Iterable[Attempt], tasks: Sequence[TrainTask]) -> dict[str, str]:
    """Return one tag per start of the ranks, with its configuration and outcome."""
    by_id = {task.id: task for task in tasks}
    texts = {}
    for number, attempt in enumerate(attempts, 1):
        task = by_id.get(attempt.task)
        where = f"{format_count(task.nodes)}, batch {task.batch}" if task else attempt.task
        start = f", from sample {attempt.samples}" if attempt.samples else ""
        why = f" ({task.cause})" if task and task.cause and attempt.number == 1 else ""
        message = f": {redact_secrets(get_first_line(attempt.message))}" if attempt.message else ""
        texts[f"attempt.{number:02d}"] = f"{where}{start}{why}: {attempt.outcome or 'running'}{message}"
    return texts


def _list_result_metrics(training: TrainingRun) -> Iterator[tuple[str, Any]]:
    """Yield the results of a training, its time and cost as predicted and actual, and metrics of evaluated weights."""
    if (result := training.read_result()) is not None:
        yield from ((f"final/{name}", value) for name, value in result.metrics.items())
        yield from (("best/epoch", result.best_epoch), ("best/top1", result.best_top1), ("best/loss", result.best_loss))
        yield from (("samples", result.samples), ("steps", result.steps))
        if result.best is not None:
            yield f"best/{result.best.metric}", result.best.value
    if (summary := training.read_summary()) is not None:
        for name in ("hours", "cost", "step", "kwh"):
            yield from ((f"{when}/{name}", getattr(summary, f"{when}_{name}")) for when in ("predicted", "actual"))
        yield "attempts", summary.attempts
    if (energy := training.read_energy()) is not None:
        yield "energy/kwh", energy.kwh
    for evaluation in training.read_evaluations():
        weights = evaluation.weights if evaluation.weights in ("best", "last") else evaluation.key
        prefix = f"{'test' if evaluation.test else 'eval'}/{weights}"
        yield from ((f"{prefix}/{name}", value) for name, value in evaluation.metrics.items())


# --- Curves

_ROW_KINDS_WITHOUT_CURVE = ("warning", "environment", "change", "branch")
"""Kinds of rows that are not part of a curve: they are text, or concern weights other than the training's."""
_NAME_PREFIXES = {"ags": "ags/", "diagnostics": "gradients/", "metrics": "eval/"}
"""Mappings in a row, with the beginning of their values' names at a tracker."""
_CURVE_NAMES = {
    "epoch": "epoch",
    "attempt": "attempt",
    "stage": "stage",
    "eval_loss": "eval/loss",
    "top1": "eval/top1",
    "top5": "eval/top5",
    "perplexity": "eval/perplexity",
}


def collect_points(rows: Iterable[Mapping[str, Any]], *, batch: int) -> list[Point]:
    """Return one point for all rows at one position, in the order of the rows.

    Args:
        rows: rows of metrics.jsonl; values that are not finite numbers are left out.
        batch: global batch of rows that have none.
    """
    points: list[Point] = []
    curves = (row for row in rows if row["kind"] not in _ROW_KINDS_WITHOUT_CURVE and "samples" in row)
    for samples, at_position in groupby(curves, key=itemgetter("samples")):
        time, values = 0.0, dict[str, float]()
        for row in at_position:
            time, batch = float(row["time"]), row.get("batch") or batch
            values |= select_finite_numbers(dict(_list_row_values({"batch": batch, **row})))
        points += [Point(int(samples), time, values)] if values else []
    return points


def _list_row_values(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a row by their names at a tracker."""
    kind = row["kind"]
    prefix = "train" if kind in ("step", "epoch", "start", "stage") else kind
    for key, value in flatten_mapping(
        {key: value for key, value in row.items() if key not in ("kind", "time", "samples")}
    ):
        first, _, rest = key.partition(".")
        if rest and first in _NAME_PREFIXES:
            yield _NAME_PREFIXES[first] + rest.replace(".", "_"), value
        else:
            yield _CURVE_NAMES.get(key, f"{prefix}/{key}"), value
    if kind == "step" and row.get("step_time"):
        yield "train/samples_per_second", row["batch"] / row["step_time"]


def select_finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers; booleans become 1 or 0."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }
