"""The learning rate as a function of fractional epochs, so that schedules depend on samples, whatever the batch."""

import functools
import math
from collections.abc import Callable

from tula_cli.errors import JobFailed
from tula_cli.plugins import is_import_string, load_named_object
from tula_cli.spec.job import JobSpec, compute_lr_scale, compute_reference_lr
from tula_cli.spec.schedules import compute_scheduled_lr, compute_warmup_factor
from tula_cli.worker.build.construct import accepts_argument, call_with_arguments


def compute_learning_rate(spec: JobSpec, epoch: float, batch: int) -> float:
    """Return the learning rate at a point of training.

    Args:
        spec: `optimizer.lr` applies to `train.reference_batch` and is scaled from there to the batch.
        epoch: epochs done, with fraction: samples seen / dataset size.
        batch: global batch, samples per optimizer step.
    """
    scale, warmup = compute_lr_scale(spec, batch), spec.workload.warmup_epochs
    if spec.train.stages == "decay":  # always a multiple of the reference batch's learning rate
        return scale * compute_reference_lr(spec, epoch)
    base = spec.optimizer.lr * scale
    if epoch < warmup:
        base *= compute_warmup_factor(epoch, warmup, scale)
    if is_import_string(spec.schedule.kind):
        return base * load_user_schedule(spec.schedule.kind, spec.train.epochs)(epoch)
    return compute_scheduled_lr(spec.schedule, base, epoch=epoch, warmup=warmup, epochs=spec.train.epochs)


def check_user_schedule(spec: JobSpec) -> None:
    """Evaluate a user's schedule at its start, middle and end; raises the errors of `load_user_schedule`."""
    if is_import_string(spec.schedule.kind):
        for epoch in (0.0, spec.train.epochs / 2, float(spec.train.epochs)):
            load_user_schedule(spec.schedule.kind, spec.train.epochs)(epoch)


@functools.lru_cache(maxsize=8)
def load_user_schedule(name: str, epochs: int) -> Callable[[float], float]:
    """Return a user's schedule: a factor of the learning rate as a function of the epochs done, 0 to `epochs`.

    Raises:
        SpecError: it cannot be imported or built. JobFailed, when it is called: it fails, or returns no number from 0
            on.
    """
    target = load_named_object(name, {}, kind="schedule")
    arguments = {"epochs": epochs} if accepts_argument(target, "epochs") else {}
    if isinstance(target, type):
        schedule = call_with_arguments(target, arguments, path="schedule.kind", name=name)
    else:
        schedule = functools.partial(target, **arguments)

    def compute_factor(epoch: float) -> float:
        try:
            value = float(schedule(epoch))
        except Exception as error:  # the user's code may raise anything
            raise JobFailed(f"schedule {name} fails at epoch {epoch:g}: {type(error).__name__}: {error}") from error
        if not (math.isfinite(value) and value >= 0):
            raise JobFailed(
                f"schedule {name} returns {value} at epoch {epoch:g}",
                "make it return a finite number of at least 0, by which the learning rate is multiplied",
            )
        return value

    return compute_factor
