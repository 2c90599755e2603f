"""The schedules of tula's own loop as functions of fractional epochs."""

import math

from tula_cli.spec.sections import PEAK, Schedule

ONE_CYCLE_START = 25
"""The full learning rate by that with which one-cycle begins."""
WARMUP_START = 0.01
"""Share of the full learning rate at epoch 0 of a warm-up, where that is not scaled; it grows linearly to 1."""

ROUNDING = 1e-9
"""Relative, of a rate that has halved: milestones whose factors multiply to a half but for that are meant to."""


def compute_warmup_factor(epoch: float, warmup: float, scale: float = 1.0) -> float:
    """Return the share of the full learning rate, growing linearly to 1 at epoch `warmup`.

    A rate that was scaled up starts from the reference batch's (Goyal et al. 2017, 2.2), others near zero.
    """
    start = 1 / scale if scale > 1 else WARMUP_START
    return start + (1 - start) * epoch / warmup


def compute_scheduled_lr(schedule: Schedule, base: float, *, epoch: float, warmup: float, epochs: float) -> float:
    """Return the learning rate without warm-up.

    Args:
        schedule: multistep multiplies by gamma at each milestone; cosine and linear fall from the end of the warm-up to
            `min_lr` at the last epoch, linear from `decay_from` on; one-cycle (Smith and Topin 2018) grows as a cosine from 1/25 up to the full rate at
            `PEAK` of the epochs and falls as a cosine to `min_lr`; constant stays.
        base: learning rate that the schedule starts from.
        epoch: epochs done.
        warmup: epochs of warm-up, which the cosine leaves out.
        epochs: epochs of the whole training.
    """
    if schedule.kind == "multistep":
        return base * schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones)
    if schedule.kind == "one-cycle":
        top = PEAK * epochs
        if epoch < top:
            return _interpolate_cosine(base / ONE_CYCLE_START, base, epoch / top)
        return _interpolate_cosine(base, schedule.min_lr, min(1.0, (epoch - top) / (epochs - top)))
    start = max(warmup, schedule.decay_from * epochs)
    if schedule.kind in ("cosine", "linear") and epoch > start:
        share = min(1.0, (epoch - start) / (epochs - start)) if epochs > start else 1.0
        if schedule.kind == "linear":
            return base + (schedule.min_lr - base) * share
        return _interpolate_cosine(base, schedule.min_lr, share)
    return base


def compute_decayed_share(schedule: Schedule, base: float, *, epoch: float, warmup: float, epochs: float) -> float:
    """Return the share of the full learning rate that a schedule leaves; 1 while it rises, and then it never grows.

    Args: as of `scheduled`.
    """
    rises_until = PEAK * epochs if schedule.kind == "one-cycle" else warmup
    if epoch < rises_until:
        return 1.0
    return min(1.0, compute_scheduled_lr(schedule, base, epoch=epoch, warmup=warmup, epochs=epochs) / base)


def _interpolate_cosine(start: float, end: float, share: float) -> float:
    """Return what lies between two values on half a turn of a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
