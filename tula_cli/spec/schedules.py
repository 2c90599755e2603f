"""The learning-rate schedules of tula's loop as functions of fractional epochs."""

import math

from tula_cli.spec.sections import ONE_CYCLE_PEAK, Schedule

ONE_CYCLE_INITIAL_DIVISOR = 25
"""Ratio of the full learning rate to the initial rate of one-cycle."""
WARMUP_START = 0.01
"""Share of the full rate at epoch 0 of a warm-up whose rate is not scaled; the rate grows linearly from there."""

RELATIVE_TOLERANCE = 1e-9
"""Relative tolerance of comparisons of floats: sums and products, such as 10 x 0.3, are exact only up to rounding."""


def compute_warmup_factor(epoch: float, warmup: float, scale: float = 1.0) -> float:
    """Return the share of the full learning rate, growing linearly to 1 at epoch `warmup`.

    A rate that was scaled up starts from the rate of the reference batch (Goyal et al. 2017, 2.2), others near zero.
    """
    start = 1 / scale if scale > 1 else WARMUP_START
    return start + (1 - start) * epoch / warmup


def compute_scheduled_lr(schedule: Schedule, base: float, *, epoch: float, warmup: float, epochs: float) -> float:
    """Return the learning rate without warm-up.

    Args:
        schedule: multistep multiplies by gamma at each milestone; cosine and linear fall from the end of the warm-up,
            or from `decay_from` if later, to `min_lr` at the last epoch; one-cycle (Smith and Topin 2018) grows as a
            cosine from 1/25 to the full rate at `ONE_CYCLE_PEAK` of the epochs and falls as a cosine to `min_lr`; constant does
            not change.
        base: learning rate from which the schedule starts.
        epoch: finished epochs, with fraction.
        warmup: epochs of warm-up, before which cosine and linear do not fall.
        epochs: epochs of the whole training.
    """
    if schedule.kind == "multistep":
        return base * schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones)
    if schedule.kind == "one-cycle":
        top = ONE_CYCLE_PEAK * epochs
        if epoch < top:
            return _interpolate_cosine(base / ONE_CYCLE_INITIAL_DIVISOR, base, epoch / top)
        return _interpolate_cosine(base, schedule.min_lr, min(1.0, (epoch - top) / (epochs - top)))
    start = max(warmup, schedule.decay_from * epochs)
    if schedule.kind in ("cosine", "linear") and epoch > start:
        share = min(1.0, (epoch - start) / (epochs - start)) if epochs > start else 1.0
        if schedule.kind == "linear":
            return base + (schedule.min_lr - base) * share
        return _interpolate_cosine(base, schedule.min_lr, share)
    return base


def compute_lr_decay_factor(schedule: Schedule, base: float, *, epoch: float, warmup: float, epochs: float) -> float:
    """Return the factor by which a schedule has reduced the learning rate: 1 while the rate rises, then at most 1.

    Args: as for `compute_scheduled_lr`.
    """
    rises_until = ONE_CYCLE_PEAK * epochs if schedule.kind == "one-cycle" else warmup
    if epoch < rises_until:
        return 1.0
    return min(1.0, compute_scheduled_lr(schedule, base, epoch=epoch, warmup=warmup, epochs=epochs) / base)


def _interpolate_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
