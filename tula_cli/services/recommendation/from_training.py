"""`tula recommend --from-training`: estimates from the steps of an unfinished training, for all configurations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import BadMeasurements, SpecError
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.choice.early_stopping import compute_remaining_share
from tula_cli.models.cost import compute_cost
from tula_cli.models.estimator import Estimator
from tula_cli.models.time.changes import compute_median_parts
from tula_cli.models.time.pace import TrainingPace, scale_results_to_pace
from tula_cli.run.directory import Run
from tula_cli.run.records.probes import Measured
from tula_cli.run.records.recommendations import Continuation, Prediction
from tula_cli.run.records.results import StepParts
from tula_cli.run.records.tasks import TrainTask
from tula_cli.services.recommendation.measurements import Results

MIN_ROWS = 5
"""Minimum number of step rows, about a second each, for which a pace is computed."""
MAX_ROWS = 60
"""Maximum number of rows that the pace is computed from."""


@dataclass(frozen=True)
class UnfinishedTraining:
    """A training that has not ended, and its pace."""

    run: Run
    task: TrainTask
    pace: TrainingPace
    samples: int  # trained
    left: float  # share of the training that is still to come


def find_unfinished_training(runs: Sequence[Run]) -> UnfinishedTraining:
    """Return the unfinished training with the newest progress, over all variants of a job.

    Raises:
        BadMeasurements: there is none, it has recorded too few steps since its step time changed, or the job has no
            probes.
        SpecError: it is a training by a script, which reports whole steps only.
    """
    trainings = [(rows[-1]["time"], run, task, rows) for run in runs for task, rows in _list_unfinished_trainings(run)]
    if not trainings:
        raise BadMeasurements("no training of this run is under way", "tula train starts one")
    _, run, task, rows = max(trainings, key=lambda training: training[0])
    if task.spec.script is not None:
        raise SpecError("the training of a script reports only whole steps", "tula recommend without --from-training")
    if not any(isinstance(result, Measured) for result in run.results()):
        raise BadMeasurements("nothing was measured for this job", "run tula profile first")
    samples = int(rows[-1]["samples"])
    remaining_share = max(0.0, 1 - float(rows[-1]["epoch"]) / task.spec.train.epochs_at_most)
    return UnfinishedTraining(run, task, _measure_training_pace(task, rows), samples, remaining_share)


def _list_unfinished_trainings(run: Run) -> list[tuple[TrainTask, list[dict[str, Any]]]]:
    """Return the newest task of each training that has not ended, with its rows of progress."""
    signatures = dict.fromkeys(task.signature for task in run.tasks() if isinstance(task, TrainTask))
    trainings = []
    for training in map(run.training, signatures):
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
            f"training {task.signature} has reported its steps only {len(plain_rows)} times since it started or changed",
            f"run the same command again after {MIN_ROWS - len(plain_rows)} s or a few more steps",
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


def scale_results_now(training: UnfinishedTraining) -> tuple[Results, tuple[Diagnostic, ...]]:
    """Return the results of the probes scaled to the training's pace, and a description of the basis.

    Raises:
        BadMeasurements, Infeasible: the probes cannot be fitted.
    """
    results, gpus = training.run.results(), training.pace.gpus_per_node
    steps = Estimator.fit(training.run.spec, results).steps
    paced_results = scale_results_to_pace(
        results,
        training.pace,
        step_of=lambda nodes, local: steps.predict_all([nodes], [gpus], [local]).at(0).seconds,
        compute_of=lambda nodes, local: steps.compute(nodes, gpus, local),
    )
    return paced_results.results, paced_results.warnings


def predict_continuation(training: UnfinishedTraining, choice: Prediction, candidates: Candidates) -> Continuation:
    """Return the time and cost of the rest of a training, unchanged and at the recommended configuration.

    Args:
        training: the unfinished training.
        choice: the recommended configuration at the training's pace.
        candidates: all candidates, likewise; the training's configuration may no longer be among them.
    """
    task, remaining_share = training.task, training.left
    here = candidates.select(type=training.run.type or "", nodes=task.nodes, batch=task.batch, market=choice.market)
    stay = here.prediction(0) if len(here) else None
    moves = (choice.nodes, choice.batch) != (task.nodes, task.batch)
    restart = choice.parts.rest / 3600 if choice.parts and moves else 0.0
    spec = training.run.spec
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
