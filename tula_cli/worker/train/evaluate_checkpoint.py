"""`tula evaluate` on the nodes: evaluates a training's weights on a test set or on the training's evaluation set."""

import dataclasses
import math
import time
from pathlib import Path

from tula_cli.errors import JobFailed
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import EvaluationRecord
from tula_cli.run.records.tasks import EvaluateTask
from tula_cli.spec.job import JobSpec
from tula_cli.spec.sections import Dataset, Optimizer
from tula_cli.worker.build import finetune
from tula_cli.worker.build.data import Datasets, build_test_dataset
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.evaluation import Evaluator


def evaluate_checkpoint(task: EvaluateTask, run: RunDir, ranks: Ranks, datasets: Datasets) -> None:
    """Evaluate the weights and write the result; does nothing if it has been written already.

    Args:
        task: the evaluation.
        run: of the training.
        ranks: the process group; each rank evaluates its share of the samples.
        datasets: of the task.

    Raises:
        SpecError: the test set cannot be built, or the weights do not fit the model.
        JobFailed: the checkpoint no longer exists.
    """
    training = run.get_training(task.signature)
    if ranks.broadcast(int(training.read_evaluation(task.key) is not None)):
        return
    samples = build_test_dataset(task.spec, datasets)
    trainer = worker_train_loop.build_trainer(
        task.model_copy(update={"spec": _remove_training_state(task.spec)}),
        ranks,
        dataclasses.replace(datasets, eval=samples),
        batch=task.local_batch * ranks.world,
        workers=task.spec.train.workers,
        refresh=False,
    )
    _load_weights(task, trainer, ranks)
    began = time.monotonic()
    evaluation = Evaluator(trainer).evaluate()
    if not ranks.is_first:
        return
    training.write_evaluation(
        EvaluationRecord(
            **task.model_dump(include={"signature", "key", "weights", "path", "samples", "nodes", "local_batch"}),
            test=task.spec.dataset.test is not None,
            dataset=_describe_dataset(task.spec.dataset),
            size=evaluation.samples,
            metrics={name: value for name, value in evaluation.values.items() if math.isfinite(value)},
            seconds=time.monotonic() - began,
            evaluated_at=time.time(),
        )
    )


def _remove_training_state(spec: JobSpec) -> JobSpec:
    """Return a job with the same model, and a method and optimizer that hold no state, because no step is taken."""
    plain = {"method": "lbt", "lr_scaling": "auto", "accumulate": 1, "compile": False}
    train = spec.train.model_copy(update={**plain, "activation_checkpointing": False})
    return spec.model_copy(update={"train": train, "optimizer": Optimizer(name="SGD", lr=1.0)})


def _load_weights(task: EvaluateTask, trainer: worker_train_loop.Trainer, ranks: Ranks) -> None:
    if task.samples is not None and not Path(task.path).exists():
        raise JobFailed(
            f"the checkpoint {task.path} no longer exists: the training has saved newer ones",
            "run the same command again",
        )
    section = task.spec.model.model_copy(update={"weights": task.path, "strict": True})
    finetune.load_weights(section, trainer.parallel.module, first=ranks.is_first, key="--weights")


def _describe_dataset(dataset: Dataset) -> str:
    name = dataset if dataset.test is None else dataset.tested
    return name.name if ":" in name.name else f"{name.name} in {name.root}"
