"""Hooks the recorder into torch, which has just been imported."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
from typing import Any

from . import batches, ddp_split, failing
from .ags import hook_steps
from .branch import hook_branch
from .function_hooks import hook_function
from .optimizers import get_learning_rate
from .plan import OBSERVE_FILE, PLAN_VARIABLE, PlanError, read_plan
from .recorder import EPOCH, EVAL, Recorder
from .stopping import stop_process, write_first_steps, write_result

_recorders: list[Recorder] = []
"""The recorder of this process, once it has been created."""


def get_recorder() -> Recorder:
    """Return the recorder of this process, created at the first call.

    Raises:
        PlanError: the plan cannot be followed.
    """
    if not _recorders:
        recorder = Recorder(read_plan())
        _recorders.append(recorder)
        failing.install_excepthook(recorder.plan, lambda: recorder.step)
        atexit.register(write_at_exit, recorder)
        os.register_at_fork(after_in_child=recorder.reset)
        # A forked child of multiprocessing exits with os._exit, which does not call atexit functions.
        multiprocessing.util.register_after_fork(
            recorder, lambda its: multiprocessing.util.Finalize(None, write_at_exit, (its,), exitpriority=0)
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
        recorder = get_recorder()
    except Exception as error:
        if os.path.basename(os.environ[PLAN_VARIABLE]) == OBSERVE_FILE:  # noqa: PTH119 - an observed job must not be stopped
            sys.stderr.write(f"tula: this job is not observed: {error}\n")
            return
        if isinstance(error, PlanError):
            sys.exit(str(error))
        raise
    recorder.hooked = True
    if recorder.files is not None:
        recorder.files.record_writes()
    if recorder.ags is not None:
        hook_steps(recorder)
    if recorder.ortho is not None:
        recorder.ortho.hook_steps()
    if recorder.branch is not None:
        hook_branch(recorder)  # before _hook_optimizers, which reports the script's own learning rate
    _hook_optimizers(recorder)
    _hook_backward(recorder)
    _hook_gaps(recorder)
    batches.hook_loaders(recorder.get_batch_counter, lambda: recorder.record_disturbance(EPOCH))
    ddp_split.hook_ddp(recorder)


def _hook_optimizers(recorder: Recorder) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def record_step(optimizer: Any, *_: object) -> None:
        if recorder.over:
            return
        is_counted = recorder.optimizers.record_step(optimizer)
        if recorder.by_hand or is_counted is False:
            return
        if is_counted is None and recorder.step <= recorder.plan.warmup:
            recorder.restart()
        count_step(recorder, lr=get_learning_rate(optimizer))

    register_optimizer_step_post_hook(record_step)


def count_step(recorder: Recorder, *, lr: Any, samples: float | None = None, loss: Any = None) -> None:
    """Record a step, and stop if the plan is complete.

    An error in the shim ends a probe, whose result would be useless; a training continues without the shim.
    """
    try:
        done = recorder.after_step(lr=lr, samples=samples, loss=loss)
        if recorder.begun:
            write_first_steps(recorder)
    except Exception as error:
        if recorder.plan.mode != "probe":
            stop_recording(recorder, error)
            return
        failing.write_failure(recorder.plan, error, step=recorder.step, where="shim")
        raise
    if done:
        stop_process(recorder, "stopped")


def stop_recording(recorder: Recorder, error: Exception) -> None:
    """Stop recording, and report the reason to the supervisor."""
    sys.stderr.write(f"tula: this training is no longer monitored: {error!r}\n")
    recorder.over = True
    recorder.pulse.lost = repr(error)
    if recorder.plan.is_observing and not recorder.step:
        return  # the folder of an observed job has no name before its first step
    with contextlib.suppress(OSError):  # the disk may be the cause of the failure
        recorder.pulse.write()
        failing.write_failure(recorder.plan, error, step=recorder.step, where="shim")


def _hook_backward(recorder: Recorder) -> None:
    import torch

    def run_and_record_backward(original: Any, *arguments: Any, **named: Any) -> Any:
        done = original(*arguments, **named)
        recorder.backwards += 1
        recorder.delivered.count_backward()
        if recorder.branch is not None:
            recorder.branch.record_backward(named["tensors"] if "tensors" in named else arguments[0])
        recorder.split.after_backward(recorder.clock.mark)
        return done

    hook_function(torch.autograd, "backward", run_and_record_backward)


def _hook_gaps(recorder: Recorder) -> None:
    """Hook evaluation, saving and loading, which make a step longer than others."""
    import torch

    def record_and_switch_mode(original: Any, self: Any, mode: bool = True) -> Any:
        if not mode:
            recorder.record_disturbance(EVAL)
        return original(self, mode)

    def record_and_save(original: Any, *arguments: Any, **named: Any) -> Any:
        recorder.record_save(named["f"] if "f" in named else arguments[1] if len(arguments) > 1 else None)
        return original(*arguments, **named)

    def record_and_load(original: Any, *arguments: Any, **named: Any) -> Any:
        recorder.record_load(named["f"] if "f" in named else arguments[0] if arguments else None)
        return original(*arguments, **named)

    hook_function(torch.nn.Module, "train", record_and_switch_mode)
    hook_function(torch, "save", record_and_save)
    hook_function(torch, "load", record_and_load)


def write_at_exit(recorder: Recorder) -> None:
    """Write the result if the script exits before the plan is complete."""
    if not recorder.step or recorder.over:
        return
    try:
        write_result(recorder, "ended")
    except OSError as error:
        if not recorder.plan.is_observing:
            raise
        sys.stderr.write(f"tula: the observation of this job was not written: {error}\n")
