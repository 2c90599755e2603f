"""`tula recommend --from-training`: estimates from the steps of an unfinished training, for all configurations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, SchedulerError, SpecError
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.early_stopping import compute_remaining_share
from tula_cli.models.cost import compute_cost
from tula_cli.models.estimator import Estimator
from tula_cli.models.time.changes import compute_median_parts
from tula_cli.models.time.pace import TrainingPace, scale_results_to_pace
from tula_cli.run.directory import Part, RunDir
from tula_cli.run.jobfile import compare_jobs
from tula_cli.run.records.failures import Move, Recovery
from tula_cli.run.records.probes import Failed, Measured, OutOfMemory
from tula_cli.run.records.recommendations import Continuation, Prediction, Recommendation
from tula_cli.run.records.results import StepParts
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services import messages
from tula_cli.services.recommendation.doubts import Results
from tula_cli.spec.signature import compute_train_signature
from tula_cli.words import format_count, make_relative_path

MIN_ROWS = 5
"""Minimum number of step rows, about a second each, for which a pace is computed."""
MAX_ROWS = 60
"""Maximum number of rows that the pace is computed from."""


@dataclass(frozen=True)
class UnfinishedTraining:
    """A training that has not ended, and its pace."""

    part: Part
    task: TrainTask
    pace: TrainingPace
    samples: int  # trained
    left: float  # share of the training that is still to come


def find_unfinished_training(parts: Sequence[Part]) -> UnfinishedTraining:
    """Return the unfinished training with the newest progress, over all parts of a job.

    Raises:
        BadMeasurements: there is none, it has recorded too few steps since its step time changed, or the job has no
            probes.
        SpecError: it is a training by a script, which reports whole steps only.
    """
    trainings = [
        (rows[-1]["time"], part, task, rows) for part in parts for task, rows in _list_unfinished_trainings(part)
    ]
    if not trainings:
        raise BadMeasurements("no training of this run is under way", "tula train starts one")
    _, part, task, rows = max(trainings, key=lambda training: training[0])
    if task.spec.script is not None:
        raise SpecError("a training by a script tells whole steps alone", "tula recommend without --from-training")
    if not any(isinstance(result, Measured) for result in part.run.results()):
        raise BadMeasurements("nothing was measured for this job", "run tula profile first")
    samples = int(rows[-1]["samples"])
    remaining_share = max(0.0, 1 - float(rows[-1]["epoch"]) / task.spec.train.epochs_at_most)
    return UnfinishedTraining(part, task, _measure_training_pace(task, rows), samples, remaining_share)


def _list_unfinished_trainings(part: Part) -> list[tuple[TrainTask, list[dict[str, Any]]]]:
    """Return the newest task of each training that has not ended, with its rows of progress."""
    signatures = dict.fromkeys(task.signature for task in part.run.tasks() if isinstance(task, TrainTask))
    trainings = []
    for training in map(part.run.training, signatures):
        if training.result() is not None:
            continue
        task, rows = (
            training.newest_task(),
            [row for row in training.sampled_metrics() if row["kind"] in ("start", "step", "epoch", "change")],
        )
        if task is not None and rows:
            trainings.append((task, rows))
    return trainings


def _measure_training_pace(task: TrainTask, rows: Sequence[Mapping[str, Any]]) -> TrainingPace:
    """Return the step times since the newest start and since their last change."""
    start = max((at for at, row in enumerate(rows) if row["kind"] == "start"), default=0)
    since = max((row["change"]["began_at"] for row in rows[start:] if row["kind"] == "change"), default=0.0)
    steps = [row for row in rows[start:] if row["kind"] == "step" and row["time"] >= since]
    batch = steps[-1].get("batch", task.batch) if steps else task.batch  # an older tula wrote none; it may have grown
    # Refreshes of factors come on top of a step; an older log does not tell them apart.
    plain = [row for row in steps if row.get("plain_time", row["step_time"]) is not None]
    plain_rows = [row for row in plain if row.get("batch", batch) == batch][-MAX_ROWS:]
    if len(plain_rows) < MIN_ROWS:
        raise BadMeasurements(
            f"training {task.signature} has told its steps {len(plain_rows)} times since it started or changed, which is too few",
            f"run the same command again after {MIN_ROWS - len(plain_rows)} s or some steps more",
        )
    parts_by_row = [
        StepParts(
            step=row.get("plain_time", row["step_time"]),
            data=row["data_wait"],
            compute=row.get("compute"),
            sync=row.get("sync"),
        )
        for row in plain_rows
    ]
    gpus = task.spec.cluster.gpus_per_node
    local_batch = batch // (task.nodes * gpus)
    return TrainingPace(
        task.nodes,
        gpus,
        local_batch,
        tuple(step_parts.step for step_parts in parts_by_row),
        compute_median_parts(parts_by_row),
    )


def scale_results_now(
    training: UnfinishedTraining, results: Sequence[Measured | OutOfMemory | Failed]
) -> tuple[tuple[Measured | OutOfMemory | Failed, ...], tuple[str, ...]]:
    """Return the results of the probes scaled to the training's pace, and a description of the basis.

    Raises:
        BadMeasurements, Infeasible: the probes cannot be fitted.
    """
    steps, gpus = Estimator.fit(training.part.spec, results).steps, training.pace.gpus_per_node
    paced_results = scale_results_to_pace(
        results,
        training.pace,
        step_of=lambda nodes, local: steps.predict_all([nodes], [gpus], [local]).at(0).seconds,
        compute_of=lambda nodes, local: steps.compute(nodes, gpus, local),
    )
    return paced_results.results, tuple(map(str, paced_results.warnings))


def predict_continuation(training: UnfinishedTraining, choice: Prediction, stay: Prediction | None) -> Continuation:
    """Return the time and cost of the rest of a training, unchanged and at the recommended configuration.

    Args:
        training: the unfinished training.
        choice: the recommended configuration at the training's pace.
        stay: the training's configuration, likewise; None if it is no longer a candidate.
    """
    task, remaining_share = training.task, training.left
    moves = (choice.nodes, choice.batch) != (task.nodes, task.batch)
    restart = choice.parts.rest / 3600 if choice.parts and moves else 0.0
    spec = training.part.spec
    price = compute_cost(
        spec.pricing,
        hours=restart,
        nodes=choice.nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        reserved=choice.peak_memory or 0,
        market=choice.market,
    )
    return Continuation(
        signature=task.signature,
        attempt=task.attempt,
        nodes=task.nodes,
        batch=task.batch,
        samples=training.samples,
        left=remaining_share,
        moves=moves,
        hours=compute_remaining_share(choice, remaining_share) * choice.hours + restart,
        cost=compute_remaining_share(choice, remaining_share) * choice.cost + price,
        hours_as_it_is=None if stay is None else compute_remaining_share(stay, remaining_share) * stay.hours,
        cost_as_it_is=None if stay is None else compute_remaining_share(stay, remaining_share) * stay.cost,
    )


def with_continuation(
    training: UnfinishedTraining | None, recommendation: Recommendation, rows: Candidates
) -> Recommendation:
    """Return a recommendation with the prediction for the rest of a training, if it is based on the steps of one."""
    if training is None:
        return recommendation
    here = rows.select(
        type=training.part.type or "",
        nodes=training.task.nodes,
        batch=training.task.batch,
        market=recommendation.choice.market,
    )
    stay = here.prediction(0) if len(here) else None
    return recommendation.model_copy(
        update={"continuation": predict_continuation(training, recommendation.choice, stay)}
    )


def list_results_by_type(
    parts: Sequence[Part], training: UnfinishedTraining | None
) -> tuple[dict[str | None, Results], list[str]]:
    """Return the results of each node type, scaled to the pace of a training if there is one, and explanations."""
    results_by_type: dict[str | None, Results] = {part.type: part.run.results() for part in parts}
    if training is None:
        return results_by_type, []
    training_type = training.part.type
    results_by_type[training_type], explanations = scale_results_now(training, results_by_type[training_type])
    return results_by_type, list(explanations)


# --- Going on with it


def continue_training(run: RunDir, task: TrainTask, recommendation: Recommendation | None, *, code: str) -> TrainTask:
    """Return the task at the recommended configuration as the next attempt of the training behind the recommendation.

    Progress is counted in samples, so the newest checkpoint can be resumed at any nodes and batch, as after an
    out-of-memory error. The task is returned unchanged if the recommendation is not based on a training, or that
    training has ended.

    Args:
        run: the run.
        task: a separate training at the recommended nodes and batch.
        recommendation: the recommendation.
        code: digest of the current code.

    Raises:
        SpecError: settings or code differ from those of that training.
    """
    continuation = recommendation.continuation if recommendation is not None else None
    training = run.training(continuation.signature) if continuation is not None else None
    tasks = training.tasks() if training is not None and training.result() is None else []
    if recommendation is None or continuation is None or not tasks:
        return task
    if (
        compute_train_signature(task.spec, nodes=tasks[0].own_nodes, batch=tasks[0].batch, code=code)
        != continuation.signature
    ):
        raise SpecError(
            f"training {continuation.signature}, by which this was recommended, has other settings or code",
            "undo what was changed, or let tula recommend choose without --from-training",
        )
    newest_task, target = tasks[-1], (task.own_nodes, task.batch)
    update = {"job": newest_task.job, "signature": continuation.signature, "max_lr_factor": newest_task.max_lr_factor}
    if any(later.attempt > continuation.attempt and (later.own_nodes, later.batch) == target for later in tasks):
        return task.model_copy(update={**update, "id": newest_task.id, "attempt": newest_task.attempt})
    first_batch, *smaller = task.ladder
    rungs = (first_batch.model_copy(update={"prediction": recommendation.choice}), *smaller)
    attempt = newest_task.attempt + 1
    move = Move(nodes=task.own_nodes, batch=task.batch, nodes_before=newest_task.nodes, batch_before=newest_task.batch)
    return task.model_copy(
        update={
            **update,
            "id": f"{newest_task.job}-{attempt}",
            "attempt": attempt,
            "ladder": rungs,
            "recovery": Recovery(decision=move),
        }
    )


def warn_interrupted_training(run: RunDir, task: TrainTask) -> list[Diagnostic]:
    """Return a warning if an interrupted training differs from this new one only in settings."""
    if run.training(task.signature).newest_task() is not None:
        return []
    for signature in run.train_signatures():
        training = run.training(signature)
        newest, samples = training.newest_task(), training.newest_samples()
        if (
            newest is None
            or not samples
            or training.summary()
            or (newest.own_nodes, newest.batch) != (task.own_nodes, task.batch)
        ):
            continue
        keys = [key for key in compare_jobs(newest.spec, task.spec) if key.split(".")[0] not in _NOT_TRAINED_BY]
        if keys:
            return [messages.earlier_training_other_settings(training=signature, samples=samples, keys=keys)]
    return []


_NOT_TRAINED_BY = ("name", "search", "pricing", "cluster", "node_types")


def require_stopped(run: RunDir, task: TrainTask) -> None:
    """Raise an error if a training is to resume on other nodes while it is still running.

    Raises:
        SchedulerError: the task is not the one that is running.
    """
    newest = run.training(task.signature).newest_task()
    if newest is not None and task.attempt > newest.attempt:
        raise SchedulerError(
            f"training {task.signature} is under way on {format_count(newest.nodes)} at batch {newest.batch}",
            f"tula cancel {make_relative_path(run.path)} has it save and end; then the same command goes on from there",
        )
