"""The learning rate as a function of fractional epochs, so that samples are the clock whatever the batch is."""

import math

from tula_cli.spec.job import JobSpec, lr_scale, warmup_epochs
from tula_cli.spec.sections import Schedule

WARMUP_START = 0.01
"""Share of the full learning rate at epoch 0 of a warm-up, where that is not scaled; it grows linearly to 1."""


def learning_rate(spec: JobSpec, epoch: float, batch: int) -> float:
    """Return the learning rate at a point of training.

    Args:
        spec: `optimizer.lr` belongs to `train.reference_batch` and is scaled from there to the batch.
        epoch: epochs done, with fraction: samples seen / dataset size.
        batch: global batch, samples an optimizer step.
    """
    scale, warmup = lr_scale(spec, batch), warmup_epochs(spec)
    base = spec.optimizer.lr * scale
    if epoch < warmup:
        base *= warmup_factor(epoch, warmup, scale)
    return scheduled(spec.schedule, base, epoch=epoch, warmup=warmup, epochs=spec.train.epochs)


def warmup_factor(epoch: float, warmup: float, scale: float = 1.0) -> float:
    """Return the share of the full learning rate, growing linearly to 1 at epoch `warmup`.

    A rate that was scaled up starts from the reference batch's (Goyal et al. 2017, 2.2), others near zero.
    """
    start = 1 / scale if scale > 1 else WARMUP_START
    return start + (1 - start) * epoch / warmup


def scheduled(schedule: Schedule, base: float, *, epoch: float, warmup: float, epochs: float) -> float:
    """Return the learning rate without warm-up.

    Args:
        schedule: multistep multiplies by gamma at each milestone; cosine falls from the end of the warm-up to `min_lr`
            at the last epoch; constant stays.
        base: learning rate that the schedule starts from.
        epoch: epochs done.
        warmup: epochs of warm-up, which the cosine leaves out.
        epochs: epochs of the whole training.
    """
    if schedule.kind == "multistep":
        return base * schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones)
    if schedule.kind == "cosine" and epoch > warmup:
        share = min(1.0, (epoch - warmup) / (epochs - warmup)) if epochs > warmup else 1.0
        return schedule.min_lr + (base - schedule.min_lr) * (1 + math.cos(math.pi * share)) / 2
    return base
