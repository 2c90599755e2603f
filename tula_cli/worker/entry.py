"""The start of a training on one rank: the training loop, or the tuner for methods that tune themselves."""

import contextlib

from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import TrainTask
from tula_cli.spec.job import get_default_beta1, set_beta1
from tula_cli.worker.build.samples import Datasets
from tula_cli.worker.energy import TrainingEnergy
from tula_cli.worker.preemption import Preempted, PreemptionHandler
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train.training import TrainContext, Training


def run_training(
    task: TrainTask,
    run: RunDir,
    ranks: Ranks,
    datasets: Datasets,
    *,
    attempt: int = 1,
    preemption: PreemptionHandler | None = None,
) -> None:
    """Train from the newest checkpoint (or the start) to the last epoch, or until the ranks have to stop early.

    Args:
        attempt: number of the attempt, for the marker that records why the ranks stopped early.
        preemption: decides when to stop early; None: a new handler.

    Raises:
        Diverged: loss or weights are not finite, or the loss of a growing batch has blown up; the newest checkpoint is
            from before.
    """
    preemption = preemption or PreemptionHandler(ranks)
    if ranks.broadcast(int(run.get_training(task.signature).read_result() is not None)):
        return
    if task.max_lr_factor is not None:
        limited = task.spec.train.model_copy(update={"max_lr_factor": task.max_lr_factor})
        task = task.model_copy(update={"spec": task.spec.model_copy(update={"train": limited})})
    if (beta1 := get_default_beta1(task.spec, task.batch)) is not None:
        optimizer = set_beta1(task.spec.optimizer, beta1)
        task = task.model_copy(update={"spec": task.spec.model_copy(update={"optimizer": optimizer})})
    energy = TrainingEnergy(run, task.signature, ranks)
    with contextlib.suppress(Preempted):
        _train_or_tune(task, TrainContext(run, ranks, datasets, preemption, attempt, energy, task))
    energy.save_energy()


def _train_or_tune(task: TrainTask, context: TrainContext) -> None:
    if task.spec.train.training_method.is_self_tuning:
        from tula_cli.worker.train import auto_tune  # imported here: only for self-tuning trainings

        auto_tune.train_with_tuning(task, context)
    else:
        Training(task, context).train()
