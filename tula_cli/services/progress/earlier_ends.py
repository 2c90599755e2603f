"""When `train.early_stopping` will end a training, as far as earlier trainings of the same job tell."""

import math
import statistics
from dataclasses import dataclass

from tula_cli.models.choice.early_stopping import end_of, shortened, tells
from tula_cli.run.directory import RunDir
from tula_cli.run.records.recommendations import Prediction
from tula_cli.run.records.tasks import TrainTask
from tula_cli.run.training_run import TrainingRun
from tula_cli.spec.job import JobSpec
from tula_cli.spec.signature import train_signature
from tula_cli.words import plural


@dataclass(frozen=True)
class ExpectedEnd:
    """Where a training is expected to end, and what it then takes."""

    epoch: int
    witnesses: tuple[int, ...]  # epochs after which earlier trainings ended, or would have, ascending
    batch: int  # at which they were trained, global
    prediction: Prediction  # up to that epoch

    @property
    def description(self) -> str:
        """Return what the value is based on."""
        least, most = self.witnesses[0], self.witnesses[-1]
        epochs = plural(least, "epoch") if least == most else f"{least} to {most} epochs"
        count = len(self.witnesses)
        return f"{plural(count, 'earlier training')} of this job at batch {self.batch} got there after {epochs}"


def expected_end(run: RunDir, task: TrainTask, *, code: str) -> ExpectedEnd | None:
    """Return where a training is expected to end before its last epoch; None where nothing tells.

    Trainings of the same job may have another seed, other nodes or another batch, and another `until` or none: those at the
    nearest batch count. One that went through all its epochs without getting there counts with all of them.

    Args:
        run: with earlier trainings, those of a comparison among them.
        task: the training.
        code: digest of the user's own code that it runs.
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
        if signature == task.signature or newest is None or not _trains_alike(run, newest, task.spec, code):
            continue
        epoch = _end_epoch(training, task.spec)
        if epoch is not None:
            batches_by_epoch.setdefault(newest.batch, []).append(epoch)
    if not batches_by_epoch:
        return None
    batch = min(batches_by_epoch, key=lambda batch: (abs(math.log2(batch / task.batch)), batch))
    epoch = statistics.median_high(batches_by_epoch[batch])
    prediction = shortened(task.prediction, epochs=epoch, of=train.epochs_at_most)
    return ExpectedEnd(epoch, tuple(sorted(batches_by_epoch[batch])), batch, prediction)


def _trains_alike(run: RunDir, earlier: TrainTask, spec: JobSpec, code: str) -> bool:
    snapshot = run.code(earlier.code)
    return (snapshot.digest if snapshot is not None else "") == code and _job_signature(earlier.spec) == _job_signature(
        spec
    )


def _job_signature(spec: JobSpec) -> str:
    """Return what trainings share that differ in seed, nodes, batch and what ends them."""
    train = spec.train.model_copy(update={"early_stopping": None, "seed": 0})
    return train_signature(spec.model_copy(update={"train": train}), nodes=1, batch=1)


def _end_epoch(training: TrainingRun, spec: JobSpec) -> int | None:
    """Return the epoch after which an earlier training got there, all epochs where it did not; None: it does not tell."""
    rows = training.metrics("epoch")
    if not tells(rows, spec.train):
        return None
    result = training.result()
    is_complete = result is not None and result.epochs >= spec.train.epochs_at_most
    return end_of(rows, spec.train) or (spec.train.epochs_at_most if is_complete else None)
