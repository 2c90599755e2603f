"""The learning rate as a function of fractional epochs, so that samples are the clock whatever the batch is."""

import functools
import json
import math
from collections.abc import Callable

from tula_cli.errors import JobFailed
from tula_cli.plugins import is_import_string, load
from tula_cli.spec.job import JobSpec, lr_scale, warmup_epochs
from tula_cli.spec.sections import Schedule
from tula_cli.worker.build.construct import accepts, construct

ONE_CYCLE_START = 25
"""The full learning rate by that with which one-cycle begins."""
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
    if is_import_string(spec.schedule.kind):
        return base * own_factor(spec)(epoch)
    return scheduled(spec.schedule, base, epoch=epoch, warmup=warmup, epochs=spec.train.epochs)


def own_factor(spec: JobSpec) -> Callable[[float], float]:
    """Return the user's own schedule: a factor of the learning rate at epochs done, 0 to those of the training.

    Raises:
        SpecError: it cannot be imported or built. JobFailed, when it is called: it fails, or returns no number from 0 on.
    """
    return _own_factor(spec.schedule.kind, json.dumps(spec.schedule.args), spec.train.epochs)


def try_schedule(spec: JobSpec) -> None:
    """Ask a schedule of the user's own for its factors at the beginning, in the middle and at the end; `own_factor`'s errors."""
    if is_import_string(spec.schedule.kind):
        for epoch in (0.0, spec.train.epochs / 2, float(spec.train.epochs)):
            own_factor(spec)(epoch)


@functools.lru_cache(maxsize=8)
def _own_factor(name: str, args: str, epochs: int) -> Callable[[float], float]:
    target, own = load(name, {}, kind="schedule"), json.loads(args)
    if "epochs" not in own and accepts(target, "epochs"):
        own["epochs"] = epochs
    is_class = isinstance(target, type)
    made = construct(target, own, path="schedule.args", name=name) if is_class else functools.partial(target, **own)

    def factor(epoch: float) -> float:
        try:
            found = float(made(epoch))
        except Exception as error:  # whatever the user's code raises
            raise JobFailed(f"schedule {name} fails at epoch {epoch:g}: {type(error).__name__}: {error}") from error
        if not (math.isfinite(found) and found >= 0):
            raise JobFailed(
                f"schedule {name} returns {found} at epoch {epoch:g}",
                "a factor of the learning rate is a number from 0 on",
            )
        return found

    return factor


def warmup_factor(epoch: float, warmup: float, scale: float = 1.0) -> float:
    """Return the share of the full learning rate, growing linearly to 1 at epoch `warmup`.

    A rate that was scaled up starts from the reference batch's (Goyal et al. 2017, 2.2), others near zero.
    """
    start = 1 / scale if scale > 1 else WARMUP_START
    return start + (1 - start) * epoch / warmup


def scheduled(schedule: Schedule, base: float, *, epoch: float, warmup: float, epochs: float) -> float:
    """Return the learning rate without warm-up.

    Args:
        schedule: multistep multiplies by gamma at each milestone; cosine and linear fall from the end of the warm-up to
            `min_lr` at the last epoch, linear from `decay_from` on; one-cycle (Smith and Topin 2018) grows as a cosine from 1/25 up to the full rate at
            `peak` and falls as a cosine to `min_lr`; constant stays.
        base: learning rate that the schedule starts from.
        epoch: epochs done.
        warmup: epochs of warm-up, which the cosine leaves out.
        epochs: epochs of the whole training.
    """
    if schedule.kind == "multistep":
        return base * schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones)
    if schedule.kind == "one-cycle":
        top = schedule.peak * epochs
        if epoch < top:
            return _cosine(base / ONE_CYCLE_START, base, epoch / top)
        return _cosine(base, schedule.min_lr, min(1.0, (epoch - top) / (epochs - top)))
    start = max(warmup, schedule.decay_from * epochs)
    if schedule.kind in ("cosine", "linear") and epoch > start:
        share = min(1.0, (epoch - start) / (epochs - start)) if epochs > start else 1.0
        if schedule.kind == "linear":
            return base + (schedule.min_lr - base) * share
        return _cosine(base, schedule.min_lr, share)
    return base


def _cosine(start: float, end: float, share: float) -> float:
    """Return what lies between two values on half a turn of a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
