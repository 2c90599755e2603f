"""Predict where train.early_stopping ends a training, by earlier trainings of the same job."""

import math
import statistics
from dataclasses import dataclass

from tula_cli.models.choice.early_stopping import find_end_epoch, has_metrics, shorten_prediction
from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import compute_train_signature
from tula_cli.words import format_count


@dataclass(frozen=True)
class ExpectedEnd:
    """The epoch at which a training is expected to end, and the prediction up to there."""

    epoch: int
    witnesses: tuple[int, ...]  # epochs after which earlier trainings ended, or would have, ascending
    batch: int  # at which they were trained, global
    prediction: Prediction  # up to that epoch

    @property
    def description(self) -> str:
        """Return a description of the earlier trainings that the expectation is based on."""
        least, most = self.witnesses[0], self.witnesses[-1]
        epochs = format_count(least, "epoch") if least == most else f"{least} to {most} epochs"
        count = len(self.witnesses)
        return f"{format_count(count, 'earlier training')} of this job at batch {self.batch} reached it after {epochs}"


def predict_end(run: RunDir, task: TrainTask, *, code: str) -> ExpectedEnd | None:
    """Return the expected end of a training with early stopping; None if no earlier training shows it.

    Earlier trainings of the same job may have another seed, number of nodes, batch or early-stopping rule; those at the
    nearest batch are used. One that finished all its epochs without meeting the rule counts with all of them.

    Args:
        run: the run with earlier trainings, including those of a comparison.
        task: the training.
        code: digest of the user code that it runs.
    """
    train = task.spec.train
    if (
        train.early_stopping is None
        or not train.early_stopping.by_metric
        or task.prediction is None
        or task.spec.script is not None
    ):
        return None
    batches_by_epoch: dict[int, list[int]] = {}
    for signature in run.train_signatures():
        training = run.training(signature)
        newest = training.newest_task()
        if (
            signature == task.signature
            or newest is None
            or not _differs_only_in_scale_and_seed(run, newest, task.spec, code)
        ):
            continue
        epoch = _find_end_epoch(training, task.spec)
        if epoch is not None:
            batches_by_epoch.setdefault(newest.batch, []).append(epoch)
    if not batches_by_epoch:
        return None
    batch = min(batches_by_epoch, key=lambda batch: (abs(math.log2(batch / task.batch)), batch))
    epoch = statistics.median_high(batches_by_epoch[batch])
    prediction = shorten_prediction(task.prediction, epochs=epoch, of=train.epochs_at_most)
    return ExpectedEnd(epoch, tuple(sorted(batches_by_epoch[batch])), batch, prediction)


def _differs_only_in_scale_and_seed(run: RunDir, earlier: TrainTask, spec: JobSpec, code: str) -> bool:
    """Return whether a training runs the same code and settings, except seed, nodes, batch and early stopping."""
    snapshot = run.code(earlier.code)
    return (snapshot.digest if snapshot is not None else "") == code and _compute_job_signature(
        earlier.spec
    ) == _compute_job_signature(spec)


def _compute_job_signature(spec: JobSpec) -> str:
    """Return a signature shared by trainings that differ only in seed, nodes, batch and early stopping."""
    train = spec.train.model_copy(update={"early_stopping": None, "seed": 0})
    return compute_train_signature(spec.model_copy(update={"train": train}), nodes=1, batch=1)


def _find_end_epoch(training: TrainingRun, spec: JobSpec) -> int | None:
    """Return the epoch after which a training met the early-stopping rule, or all epochs if it did not.

    None if its metrics are missing, or if it has neither met the rule nor finished.
    """
    rows = training.metrics("epoch")
    if not has_metrics(rows, spec.train):
        return None
    result = training.result()
    is_complete = result is not None and result.epochs >= spec.train.epochs_at_most
    return find_end_epoch(rows, spec.train) or (spec.train.epochs_at_most if is_complete else None)
