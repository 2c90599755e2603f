"""Parameters, numbers and curves of a run and its trainings, in the form in which they are sent to a tracker."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from tula_cli.run.records.recommendations import Prediction, Recommendation
from tula_cli.run.records.results import CountedEnergy, EvaluationRecord, Summary, TrainResult, Tuning
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.secrets import may_be_secret, without_secrets
from tula_cli.run.snapshot import Result, Snapshot
from tula_cli.run.step_series import StepSeries
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.job import JobSpec
from tula_cli.spec.merge import flatten
from tula_cli.words import describe_configuration, format_count, get_first_line
from tula_cli.words import format_number as number_word

# --- A run and its probes


@dataclass(frozen=True)
class RunPayload:
    """The values of one run that are sent to a tracker, without its curves."""

    run: TrackerRun
    state: State
    ended: float  # Unix time, of its end so far
    params: Mapping[str, Scalar] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    artifacts: tuple[Path, ...] = ()

    def compute_digest(self) -> str:
        """Return a digest of all values and files, to compare it with that of what was sent before."""
        files = {path.name: compute_digest(path.read_bytes()) for path in self.artifacts}
        return compute_digest([dict(self.params), dict(self.tags), dict(self.numbers), self.state, files])


def list_settings(spec: JobSpec) -> dict[str, Scalar]:
    """Return a job's settings by their keys, `a.b.c`, without empty values and possible secrets."""
    content = spec.model_dump(mode="json", exclude={"export"})
    return {key: value for key, given in flatten(content) if (value := _format_setting(key, given)) is not None}


def _format_setting(key: str, value: Any) -> Scalar | None:
    if isinstance(value, bool | int | float):
        return value if not isinstance(value, float) or math.isfinite(value) else None
    if value is None or value in ("", [], {}):
        return None
    name = key.rpartition(".")[2]
    if isinstance(value, list):  # the words and lines of a command keep what is no secret
        return None if may_be_secret(name, "") else without_secrets(" ".join(map(str, value)))
    return None if may_be_secret(name, str(value)) else str(value)


def list_environment(environment: Environment | None) -> dict[str, Scalar]:
    """Return the software and hardware of an environment; empty if it is not known."""
    if environment is None:
        return {}
    names = (
        "hardware",
        "driver",
        "backend",
        "python",
        "torch",
        "torchvision",
        "tula",
        "cuda",
        "nccl",
        "system",
        "workers",
    )
    environment_values = {
        f"env.{name}": value for name in names if (value := getattr(environment, name)) not in (None, "")
    }
    variables = {
        f"env.{name}": value for name, value in environment.variables.items() if not may_be_secret(name, value)
    }
    return {**environment_values, "env.hosts": " ".join(environment.hosts), **variables}


def read_environment(row: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the environment of a training from a row of metrics.jsonl; empty if the row is damaged."""
    try:
        return list_environment(Environment.model_validate(row))
    except ValidationError:
        return {}


def make_run_payload(run: Run, look: Snapshot, name: str, *, active: bool, artifacts: tuple[Path, ...]) -> RunPayload:
    """Return the payload of a whole run: its settings, environment and recommendation.

    Args:
        run: the run of one hardware.
        look: snapshot of the run.
        name: name of the run.
        active: whether a job of it is queued or running.
        artifacts: files to send.
    """
    answer, results = look.recommendation, look.results
    measured = [result for result in results if isinstance(result, Measured)]
    moments = [job.submitted_at for job in look.jobs] + [result.measured_at for result in measured]
    ran_on = measured[0].environment if measured else None
    return RunPayload(
        TrackerRun("run", "run", name, min(moments, default=0.0)),
        "running" if active else "finished",
        max([*moments, *([answer.created_at] if answer else [])], default=0.0),
        {**list_settings(run.spec), **list_environment(ran_on)},
        _list_answer_words(answer),
        {"probes/measured": len(measured), "probes/in_all": len(results), **_list_answer_numbers(answer)},
        artifacts,
    )


def _list_answer_words(answer: Recommendation | None) -> dict[str, str]:
    if answer is None:
        return {}
    texts = {
        "recommended": describe_configuration(answer.choice.nodes, answer.choice.batch, answer.choice.local_batch),
        "objective": answer.objective,
        "reason": answer.reason,
        "price": answer.price,
        "fit": answer.fit,
        "node_type": answer.choice.type,
    }
    warnings = {f"warning.{number:02d}": text for number, text in enumerate(answer.warnings, 1)}
    return {f"recommendation.{key}": text for key, text in {**texts, **warnings}.items() if text}


def _list_answer_numbers(answer: Recommendation | None) -> dict[str, float]:
    if answer is None:
        return {}
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
    return {f"recommended/{name}": value for name, value in _select_numbers(answer.choice, names)}


def _select_numbers(row: Prediction, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for name in names:
        if (value := getattr(row, name)) is not None and math.isfinite(value):
            yield name, float(value)


def make_probe_payload(result: Result, name: str, parent: str, *, at: float) -> RunPayload:
    """Return the payload of a probe: its configuration and step time.

    Args:
        result: result of the probe.
        name: name of the whole run.
        parent: the tracker's id of the whole run.
        at: Unix time for a probe that has no time of measurement.
    """
    nodes, gpus, local = result.nodes, result.gpus_per_node, result.local_batch
    sizes = {"nodes": nodes, "gpus_per_node": gpus, "batch": nodes * gpus * local, "local_batch": local}
    if isinstance(result, Measured):
        run = TrackerRun(result.id, "probe", name, result.measured_at - sum(result.step_times), parent)
        params = {**sizes, "accumulate": result.accumulate, **list_environment(result.environment)}
        return RunPayload(
            run, "finished", result.measured_at, params, {"outcome": result.kind}, list_probe_numbers(result)
        )
    run = TrackerRun(result.id, "probe", name, at, parent)
    state: State = "failed" if result.kind == "failed" else "finished"
    words = {"outcome": result.kind, "message": without_secrets(get_first_line(result.message))}
    return RunPayload(run, state, at, sizes, {key: value for key, value in words.items() if value})


def list_probe_numbers(probe: Measured) -> dict[str, float]:
    """Return the known measurements of a probe: seconds, samples per second, bytes of one GPU, joules."""
    step, gradients = compute_trimmed_mean(probe.step_times), probe.gradients
    numbers = {
        "step_time": step,
        "samples_per_second": probe.batch / step,
        "sync_time": probe.sync_time,
        "compute_time": probe.compute_time,
        "data_wait": probe.data_wait,
        "peak_memory": probe.memory.peak,
        "capacity": probe.capacity,
        "joules_a_step": probe.energy,
        "gradient_norm_sqr": None if gradients is None else gradients.norm_sqr,
        "checkpoint_time": probe.overheads.checkpoint,
        "eval_batch_time": probe.overheads.eval_batch,
        "startup_time": probe.overheads.startup,
    }
    return {key: float(value) for key, value in numbers.items() if value is not None and math.isfinite(value)}


# --- A training

_STEP = ("loss", "lr", "batch", "step_time", "data_wait", "compute", "sync", "tokens_per_second", "padding")
_EVALUATED = {"eval_loss": "loss", "top1": "top1", "top5": "top5", "perplexity": "perplexity"}
_PLACE = ("kind", "time", "samples")
_OF_PREDICTION = ("step_time", "predicted_step", "step_low", "step_high", "eval_seconds", "within")


def get_training_state(training: TrainingRun, *, active: bool, cancelled: bool) -> State:
    """Return the state of a training, from its files.

    Args:
        training: the training.
        active: whether a job of it is queued or running.
        cancelled: whether the user has cancelled its job.
    """
    if training.result() is not None:
        return "finished"
    if active:
        return "running"
    attempts = training.attempts()
    return "killed" if cancelled or (attempts and attempts[-1].outcome in ("cancelled", "signal")) else "failed"


def make_training_payload(
    look: Snapshot, tasks: Sequence[TrainTask], name: str, parent: str, *, active: bool
) -> RunPayload:
    """Return the payload of a training, without its curves.

    Args:
        look: snapshot of the run.
        tasks: tasks of the training, first attempt first.
        name: name of the whole run.
        parent: the tracker's id of the whole run.
        active: whether its job is queued or running.
    """
    first, task = tasks[0], tasks[-1]
    training = look.training(task.signature)
    attempts, summary, result = training.attempts(), training.summary(), training.result()
    began = min((attempt.started_at for attempt in attempts), default=0.0)
    ended = max([began, *(attempt.ended_at or attempt.started_at for attempt in attempts)])
    sizes = {"nodes": first.nodes, "batch": first.batch, "gpus_per_node": first.spec.cluster.gpus_per_node}
    return RunPayload(
        TrackerRun(task.job, "training", name, began, parent),
        get_training_state(training, active=active, cancelled=bool(look.cancelled_by(task.job))),
        ended,
        {**list_settings(first.spec), **sizes, **_list_predicted_values(first)},
        {**_list_attempt_words(attempts, tasks), **_list_tuning_words(training.tuning()), **_list_end_words(summary)},
        dict(_select_finite_numbers(_list_end_numbers(summary, result, training.energy(), training.evaluations()))),
    )


def _list_predicted_values(task: TrainTask) -> dict[str, float]:
    names = ("hours", "hours_low", "hours_high", "cost", "step_time", "kwh")
    prediction = task.prediction
    predicted_values = {} if prediction is None else {f"predicted.{name}": getattr(prediction, name) for name in names}
    return {name: value for name, value in predicted_values.items() if value is not None}


def _list_attempt_words(attempts: Iterable[Attempt], tasks: Sequence[TrainTask]) -> dict[str, str]:
    """Return one tag per start of the ranks, with its configuration and outcome."""
    by_id = {task.id: task for task in tasks}
    texts = {}
    for number, attempt in enumerate(attempts, 1):
        task = by_id.get(attempt.task)
        where = f"{format_count(task.nodes)}, batch {task.batch}" if task else attempt.task
        goes_on = f", from sample {attempt.samples}" if attempt.samples else ""
        why = f" ({task.cause})" if task and task.cause and attempt.number == 1 else ""
        ended = attempt.outcome or "running"
        words = without_secrets(get_first_line(attempt.message)) if attempt.message else ""
        texts[f"attempt.{number:02d}"] = f"{where}{goes_on}{why}: {ended}" + f": {words}" * bool(words)
    return texts


def _list_tuning_words(tuning: Tuning | None) -> dict[str, str]:
    """Return the results of the branches of a self-tuning training."""
    if tuning is None:
        return {}
    texts = {
        f"branch.{number:02d}": f"{branch.arm}, rung {branch.rung}: loss {number_word(branch.loss)}"
        + " (diverged)" * branch.diverged
        for number, branch in enumerate(tuning.branches, 1)
    }
    return {**texts, **({"branch.chosen": tuning.chosen.name} if tuning.chosen else {})}


def _list_end_words(summary: Summary | None) -> dict[str, str]:
    if summary is None:
        return {}
    texts = {"ended": summary.ended, "relaunches": "; ".join(summary.causes), "currency": summary.currency}
    return {key: without_secrets(text) for key, text in texts.items() if text}


def _list_end_numbers(
    summary: Summary | None,
    result: TrainResult | None,
    energy: CountedEnergy | None,
    evaluations: Iterable[EvaluationRecord],
) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    if result is not None:
        numbers |= {f"final/{name}": value for name, value in result.metrics.items()}
        numbers |= {"best/epoch": result.best_epoch, "best/top1": result.best_top1, "best/loss": result.best_loss}
        numbers |= {f"best/{result.best.metric}": result.best.value} if result.best else {}
        numbers |= {"samples": result.samples, "steps": result.steps}
    if summary is not None:
        for name in ("hours", "cost", "step", "kwh"):
            numbers |= {f"{when}/{name}": getattr(summary, f"{when}_{name}") for when in ("predicted", "actual")}
        numbers["attempts"] = summary.attempts
    if energy is not None:
        numbers["energy/kwh"] = energy.kwh
    for evaluation in evaluations:
        which = f"{'test' if evaluation.test else 'eval'}/{evaluation.weights if evaluation.weights in ('best', 'last') else evaluation.key}"
        numbers |= {f"{which}/{name}": value for name, value in evaluation.metrics.items()}
    return numbers


# --- curves


_NO_CURVE = ("warning", "environment", "change", "branch")
"""Kinds of rows that are not part of a curve: they are text, or concern weights other than the training's."""


def collect_points(rows: Iterable[Mapping[str, Any]], *, batch: int) -> list[Point]:
    """Return one point for all rows at one position, in the order of the rows.

    Args:
        rows: rows of metrics.jsonl; values that are not finite numbers are left out.
        batch: global batch of rows that have none.
    """
    points: list[Point] = []
    curves = (row for row in rows if row["kind"] not in _NO_CURVE and "samples" in row)
    for samples, at_position in groupby(curves, key=itemgetter("samples")):
        time, values = 0.0, dict[str, float]()
        for row in at_position:
            time, batch = float(row["time"]), row.get("batch") or batch
            values |= _select_finite_numbers(_list_row_values({"batch": batch, **row}))
        points += [Point(int(samples), time, values)] if values else []
    return points


_KEPT = {"norm": "gradients/norm", "delta": "gradients/delta", "scaled": "ags/step_scaled", "factor": "ags/factor"}
"""Columns of `StepSeries`, mapped to their names at a tracker."""


def with_steps(points: Sequence[Point], kept: StepSeries, *, after: int) -> list[Point]:
    """Return points merged with the values stored for the steps between them, ascending, as trackers require.

    Args:
        points: ascending by samples, from the rows of metrics.jsonl, which are written after the steps that they
            describe.
        kept: values of every step.
        after: samples up to which everything was sent.
    """
    if not points:
        return []
    places = [point.samples for point in points]
    points_by_samples = {point.samples: point for point in points}
    for at, samples in enumerate(kept.samples):
        if after < samples <= places[-1]:
            nearest = points[bisect_left(places, samples)]
            existing = points_by_samples.get(samples, Point(samples, nearest.time, {}))
            values = _select_finite_numbers({name: getattr(kept, column)[at] for column, name in _KEPT.items()})
            points_by_samples[samples] = Point(samples, existing.time, {**values, **existing.values})
    return [points_by_samples[samples] for samples in sorted(points_by_samples) if points_by_samples[samples].values]


def _list_row_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row by their names at a tracker."""
    kind = row["kind"]
    values: dict[str, Any] = {"epoch": row.get("epoch")}
    if kind == "step":
        values |= (
            {f"train/{name}": row.get(name) for name in _STEP}
            | _compute_samples_per_second(row)
            | _list_ags_values(row)
        )
    elif kind == "epoch":
        values |= {f"eval/{name}": row.get(key) for key, name in _EVALUATED.items()}
        values |= {f"eval/{name}": value for name, value in (row.get("metrics") or {}).items()}
        values |= {f"per_epoch/{name}": row.get(name) for name in _OF_PREDICTION}
        values |= {"train/loss": row.get("loss"), "train/lr": row.get("lr"), "train/batch": row.get("batch")}
        values |= _list_ags_values(row) | _list_gradient_quantiles(row.get("diagnostics")) | _list_method_values(row)
    elif kind in ("start", "stage"):
        values |= {f"train/{name}": row.get(name) for name in ("batch", "lr", "beta2", "nodes")}
        values |= {"attempt": row.get("attempt"), "stage": row.get("stage")}
    else:
        values |= {f"{kind}/{name}": value for name, value in _flatten_numbers(row) if name not in (*_PLACE, "epoch")}
    return values


def _compute_samples_per_second(row: Mapping[str, Any]) -> dict[str, float | None]:
    step, batch = row.get("step_time"), row.get("batch")
    return {"train/samples_per_second": batch / step if batch and step else None}


def _list_ags_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of gradient scaling: mean factor, share of steps scaled, shares of factors at their bounds."""
    ags_row = row.get("ags") or {}
    return {f"ags/{name}": value for name, value in ags_row.items() if name not in ("so_far", "factors")}


def _list_gradient_quantiles(gradients: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the quantiles of |G| and of Delta(G) over the steps of an epoch."""
    parts = {name: (gradients or {}).get(name) or {} for name in ("norm", "delta")}
    return {f"gradients/{name}_{which}": value for name, part in parts.items() for which, value in part.items()}


_EPOCH = {*_PLACE, *_EVALUATED, *_OF_PREDICTION, "epoch", "loss", "lr", "batch", "ags", "diagnostics", "metrics"}


def _list_method_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a user-defined training method reports for an epoch."""
    return {f"method/{name}": value for name, value in _flatten_numbers(row) if name.partition(".")[0] not in _EPOCH}


def _flatten_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten_numbers(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _select_finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers; booleans become 1 or 0."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }
