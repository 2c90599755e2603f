"""Going on with a training at another configuration, as `tula recommend --from-training --save` has chosen."""

from tula_cli.errors import SchedulerError, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.jobfile import job_changes
from tula_cli.run.records.recommendations import Recommendation
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.signature import train_signature
from tula_cli.words import near, plural


def continue_training(run: RunDir, task: TrainTask, recommendation: Recommendation | None, *, code: str) -> TrainTask:
    """Return the task at the recommended configuration as one of the training that the recommendation was asked by.

    Samples are the clock of a training, so its newest checkpoint goes on at any nodes and batch; it is the next attempt, as
    after an out-of-memory. The task itself is returned where no training was asked by, or that has ended.

    Args:
        run: the run.
        task: at the recommended nodes and batch, as a training of its own.
        recommendation: what is trained.
        code: the digest of what is trained with now.

    Raises:
        SpecError: settings or code are not those of that training.
    """
    continuation = recommendation.continuation if recommendation is not None else None
    training = run.training(continuation.signature) if continuation is not None else None
    tasks = training.tasks() if training is not None and training.result() is None else []
    if recommendation is None or continuation is None or not tasks:
        return task
    if train_signature(task.spec, nodes=tasks[0].own_nodes, batch=tasks[0].batch, code=code) != continuation.signature:
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
    cause = (
        f"goes on with {plural(task.own_nodes)} at batch {task.batch} instead of {plural(newest_task.nodes)} at {newest_task.batch}, as its own"
        " steps recommend"
    )
    return task.model_copy(
        update={**update, "id": f"{newest_task.job}-{attempt}", "attempt": attempt, "ladder": rungs, "cause": cause}
    )


def describe_interrupted_training(run: RunDir, task: TrainTask) -> str:
    """Say which interrupted training this one is not, and by which settings; empty where it is begun, or there is none."""
    if run.training(task.signature).newest_task() is not None:
        return ""
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
        keys = [key for key in job_changes(newest.spec, task.spec) if key.split(".")[0] not in _NOT_TRAINED_BY]
        if keys:
            return (
                f"training {signature} stands at {samples} samples, with another {' and '.join(keys)}: this is a training of"
                " its own, from the beginning (with the settings as they were, the same command goes on there)"
            )
    return ""


_NOT_TRAINED_BY = ("name", "search", "pricing", "cluster", "node_types")


def require_stopped(run: RunDir, task: TrainTask) -> None:
    """Refuse to go on elsewhere with a training that is under way.

    Raises:
        SchedulerError: the task is not the one that runs.
    """
    newest = run.training(task.signature).newest_task()
    if newest is not None and task.attempt > newest.attempt:
        raise SchedulerError(
            f"training {task.signature} is under way on {plural(newest.nodes)} at batch {newest.batch}",
            f"tula cancel {near(run.path)} has it save and end; then the same command goes on from there",
        )
