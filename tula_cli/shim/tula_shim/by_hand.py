"""The functions that `tula_hooks.py` calls, for a loop that reports its steps itself."""

from __future__ import annotations

from typing import Any, Callable

from .install import count_step, get_recorder
from .optimizers import get_full_name, get_learning_rate
from .stopping import stop_process


def wrap(optimizer: Any, model: Any) -> Any:
    """Register an optimizer, of torch or not, and its model's parameters; return it. Methods ags and ortho act on
    it."""
    elements = sum(p.numel() for p in model.parameters()) if hasattr(model, "parameters") else None
    recorder = get_recorder()
    recorder.optimizers.declared = {"name": get_full_name(optimizer), "elements": elements}
    for steps in (recorder.ags, recorder.ortho):
        if steps is not None:
            steps.register_model(optimizer, model)
    return optimizer


def small_batch(loss: Callable[[int], Any]) -> None:
    """Offer AGS the loss of a given number of samples, for the small batch's gradient."""
    recorder = get_recorder()
    if recorder.ags is not None:
        recorder.ags.compute_small_batch_gradient(loss)


def step(samples: float | None, loss: Any, lr: Any) -> None:
    """Record a step. From the first call on, these calls are counted instead of the steps of torch's optimizers."""
    recorder = get_recorder()
    if recorder.over:
        return
    if not recorder.by_hand:
        recorder.restart(by_hand=True)
    if lr is None:
        lr = get_learning_rate(recorder.optimizers.main_optimizer)
    count_step(recorder, lr=lr, samples=samples, loss=loss.detach() if hasattr(loss, "detach") else loss)
    if recorder.asked_to and recorder.requests.save_training(recorder.step, recorder.count_samples(), recorder.rank):
        _stop_after_save(recorder)


def on_save(callback: Callable[[str], object]) -> None:
    """Register the function that writes a checkpoint.

    It is called with the path, on all ranks, after a step, whenever tula requests a checkpoint.
    """
    get_recorder().requests.callback = callback


def asked() -> str:
    """Return "save" or "stop" if that was requested after the last step, else ""."""
    return get_recorder().asked_to


def saved(path: str) -> None:
    """Record that the request from `asked` is fulfilled, with the checkpoint's path; stop if requested."""
    recorder = get_recorder()
    recorder.requests.report_saved(recorder.step, recorder.count_samples(), recorder.rank, path=path)
    _stop_after_save(recorder)


def _stop_after_save(recorder: Any) -> None:
    action, recorder.asked_to = recorder.asked_to, ""
    if action == "stop":
        stop_process(recorder, "saved")
