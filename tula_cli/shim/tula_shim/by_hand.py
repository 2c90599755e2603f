"""The functions that `tula_hooks.py` calls: a loop that reports its steps itself."""

from __future__ import annotations

from typing import Any, Callable

from .install import count_step, get_recorder
from .optimizers import get_full_name, get_learning_rate
from .stopping import enforce_stop, stop


def wrap(optimizer: Any, model: Any = None) -> Any:
    """Take note of an optimizer, torch's or not, and of the parameters of the model; return it. Methods ags and ortho act on it."""
    counted = [parameter.numel() for parameter in model.parameters()] if hasattr(model, "parameters") else None
    facts = {"name": get_full_name(optimizer), "elements": sum(counted) if counted is not None else None}
    mine = get_recorder()
    mine.optimizers.declared = facts
    for steps in (mine.ags, mine.ortho):
        if steps is not None:
            steps.declare(optimizer, model)
    return optimizer


def small_batch(loss: Callable[[int], Any]) -> None:
    """Give AGS the loss on some samples, from which it takes the small batch's gradient where it wants one."""
    mine = get_recorder()
    if mine.ags is not None:
        mine.ags.offer(loss)


def step(samples: float | None, loss: Any, lr: Any) -> None:
    """Take note of a step. The first call makes the loop the clock: torch's optimizers no longer are."""
    mine = get_recorder()
    if mine.over:
        enforce_stop(mine)
        return
    if not mine.by_hand:
        mine.restart(by_hand=True)
    if lr is None:
        lr = get_learning_rate(mine.optimizers.clock)
    count_step(mine, lr=lr, samples=samples, loss=loss.detach() if hasattr(loss, "detach") else loss)
    obey(mine)


def obey(mine: Any) -> None:
    """Save where that is asked for, and stop after it where that is."""
    if mine.asked_to and mine.requests.save(mine.step, mine.samples(), mine.rank):
        _stop_after_save(mine)


def on_save(callback: Callable[[str], object]) -> None:
    """Keep what saves the training; it is called with a path, on all ranks, after a step."""
    get_recorder().requests.callback = callback


def asked() -> str:
    """Return "save" or "stop" where that was asked for after the step that is over, else ""."""
    return get_recorder().asked_to


def saved(path: str) -> None:
    """Tell that what `asked` asked for is done, and where the checkpoint is."""
    mine = get_recorder()
    mine.requests.saved(mine.step, mine.samples(), mine.rank, path=path)
    _stop_after_save(mine)


def _stop_after_save(mine: Any) -> None:
    wanted, mine.asked_to = mine.asked_to, ""
    if wanted == "stop":
        stop(mine, "saved")
