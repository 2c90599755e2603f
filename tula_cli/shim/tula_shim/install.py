"""Hooks the recorder into torch, which has just been imported."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import sys
from typing import Any, Callable

from . import batches, ddp_split, failing
from .ags import AgsSteps, hook_steps
from .batches import DeliveredBatches
from .branch import hook_branch
from .optimizers import get_learning_rate
from .plan import OBSERVE_FILE, VARIABLE, PlanError, read_plan
from .recorder import EPOCH, EVAL, Recorder
from .stopping import stop, write_first_steps, write_result

_recorders: list[Recorder] = []
"""The recorder of this process, once it has been created."""


def get_recorder() -> Recorder:
    """Return the recorder of this process, created at the first call.

    Raises:
        PlanError: the plan cannot be followed.
    """
    if not _recorders:
        made = Recorder(read_plan())
        _recorders.append(made)
        failing.install_excepthook(made.plan, lambda: made.step)
        atexit.register(write_at_exit, made)
        os.register_at_fork(after_in_child=made.reset)
        # A forked child of multiprocessing exits with os._exit, which does not call atexit functions.
        multiprocessing.util.register_after_fork(
            made, lambda its: multiprocessing.util.Finalize(None, write_at_exit, (its,), exitpriority=0)
        )
    return _recorders[0]


def install() -> None:
    """Hook torch. Called after it has been imported; a second call does nothing.

    Raises:
        SystemExit: the plan cannot be followed; the reason is written to stderr.
    """
    if _recorders and _recorders[0].hooked:
        return
    try:
        mine = get_recorder()
    except Exception as error:
        if os.path.basename(os.environ[VARIABLE]) == OBSERVE_FILE:  # noqa: PTH119 - an observed job must not be stopped
            sys.stderr.write(f"tula: this job is not observed: {error}\n")
            return
        if isinstance(error, PlanError):
            sys.exit(str(error))
        raise
    mine.hooked = True
    if mine.files is not None:
        mine.files.record_writes()
    if mine.ags is not None:
        _hook_ags(mine)
    if mine.ortho is not None:
        mine.ortho.hook_steps()
    if mine.branch is not None:
        hook_branch(mine)  # before _hook_optimizers, which reports the script's own learning rate
    _hook_optimizers(mine)
    _hook_backward(mine)
    _hook_gaps(mine)
    batches.hook_loaders(_make_counter(mine), lambda: mine.record_disturbance(EPOCH))
    ddp_split.hook_ddp(lambda: mine.split)


def _make_counter(mine: Recorder) -> Callable[[], DeliveredBatches | None]:
    """Return a function that returns the counter of a new batch; None during an evaluation, whose batches are not
    trained on, and once recording is over."""
    from torch import is_grad_enabled

    def counts() -> DeliveredBatches | None:
        if mine.over:
            return None
        if not is_grad_enabled():
            mine.record_disturbance(EVAL)
            return None
        mine.record_activity()
        return mine.delivered

    return counts


def _hook_ags(mine: Recorder) -> None:
    def ags() -> AgsSteps:
        assert mine.ags is not None
        return mine.ags

    hook_steps(ags)


def _hook_optimizers(mine: Recorder) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def record_step(optimizer: Any, *_: object) -> None:
        if mine.over:
            return
        clock = mine.optimizers.record_step(optimizer)
        if mine.by_hand or clock is False:
            return
        if clock is None and mine.step <= mine.plan.warmup:
            mine.restart()
        count_step(mine, lr=get_learning_rate(optimizer))

    register_optimizer_step_post_hook(record_step)


def count_step(mine: Recorder, *, lr: Any, samples: float | None = None, loss: Any = None) -> None:
    """Record a step, and stop if the plan is complete.

    An error in the shim ends a probe, whose result would be useless; a training continues without the shim.
    """
    try:
        done = mine.after_step(lr=lr, samples=samples, loss=loss)
        if mine.begun:
            write_first_steps(mine)
    except Exception as error:
        if mine.plan.mode != "probe":
            stop_recording(mine, error)
            return
        failing.write_failure(mine.plan, error, step=mine.step, where="shim")
        raise
    if done:
        stop(mine, "stopped")


def stop_recording(mine: Recorder, error: Exception) -> None:
    """Stop recording, and report the reason to the supervisor."""
    sys.stderr.write(f"tula: this training is no longer monitored: {error!r}\n")
    mine.over = True
    mine.pulse.lost = repr(error)
    if mine.plan.observing and not mine.step:
        return  # the folder of an observed job has no name before its first step
    with contextlib.suppress(OSError):  # the disk may be the cause of the failure
        mine.pulse.write()
        failing.write_failure(mine.plan, error, step=mine.step, where="shim")


def _hook_backward(mine: Recorder) -> None:
    import torch

    run = torch.autograd.backward

    @functools.wraps(run)
    def backward(*arguments: Any, **named: Any) -> Any:
        done = run(*arguments, **named)
        mine.backwards += 1
        mine.delivered.count_backward()
        if mine.branch is not None:
            mine.branch.record_backward(named["tensors"] if "tensors" in named else arguments[0])
        mine.split.after_backward(mine.mark)
        return done

    torch.autograd.backward = backward


def _hook_gaps(mine: Recorder) -> None:
    """Hook evaluation, saving and loading, which make a step longer than others."""
    import torch

    train, save = torch.nn.Module.train, torch.save

    @functools.wraps(train)
    def record_and_switch_mode(self: Any, mode: bool = True) -> Any:
        if not mode:
            mine.record_disturbance(EVAL)
        return train(self, mode)

    @functools.wraps(save)
    def record_and_save(*arguments: Any, **named: Any) -> Any:
        mine.record_save(named["f"] if "f" in named else arguments[1] if len(arguments) > 1 else None)
        return save(*arguments, **named)

    load = torch.load

    @functools.wraps(load)
    def record_and_load(*arguments: Any, **named: Any) -> Any:
        mine.record_load(named["f"] if "f" in named else arguments[0] if arguments else None)
        return load(*arguments, **named)

    torch.load = record_and_load
    torch.nn.Module.train = record_and_switch_mode  # type: ignore[method-assign]
    torch.save = record_and_save


def write_at_exit(mine: Recorder) -> None:
    """Write the result if the script exits before the plan is complete."""
    if not mine.step or mine.over:
        return
    try:
        write_result(mine, "ended")
    except OSError as error:
        if not mine.plan.observing:
            raise
        sys.stderr.write(f"tula: the observation of this job was not written: {error}\n")
