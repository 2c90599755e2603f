"""The gradient noise that trainings have measured on their way (`train.gradient_noise`, `tula profile --progress`)."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tula_cli.models.efficiency import EARLY, Noise, noise_scale
from tula_cli.run.directory import RunDir
from tula_cli.run.records.probes import GradientStats
from tula_cli.run.training_run import TrainingRun


def noisy_trainings(run: RunDir) -> list[TrainingRun]:
    """Return the trainings of a run that measure their gradient noise."""
    found = [run.training(signature) for signature in run.train_signatures()]
    return [training for training in found if (task := training.newest_task()) and task.spec.train.gradient_noise]


def after_training(trainings: Iterable[TrainingRun], *, reference: int, epochs: int) -> Noise | None:
    """Return the noise that was measured nearest to a tenth of the epochs, at the reference batch if there is one.

    Args:
        trainings: that measure it.
        reference: the batch whose epochs are counted.
        epochs: of the whole training.

    Returns:
        None where none has measured it yet, or what was measured does not tell it.
    """
    rows = [row for training in trainings for row in training.metrics() if row["kind"] == "noise" and row["epoch"] > 0]

    def off(row: dict[str, Any]) -> tuple[bool, float]:
        return row["batch"] != reference, abs(math.log(row["epoch"] / (EARLY * epochs)))

    for row in sorted(rows, key=off):
        noise = noise_scale([GradientStats.model_validate(row["stats"])])
        if noise is not None:
            return replace(noise, epoch=float(row["epoch"]))
    return None
