"""Has torch tell of what AGS needs: new optimizers, backward passes, steps, and those that a GradScaler skips."""

from __future__ import annotations

import functools
from typing import Any, Callable

from .ags_steps import AgsSteps


def listen(ags: Callable[[], AgsSteps]) -> None:
    """Have torch tell the AGS of this process. Called before the hooks that count steps."""
    import torch
    from torch.optim import optimizer as module

    init, run = torch.optim.Optimizer.__init__, torch.autograd.backward

    @functools.wraps(init)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        ags().made(self)

    @functools.wraps(run)
    def backward(*arguments: Any, **named: Any) -> Any:
        ags().seek()
        return run(*arguments, **named)

    torch.optim.Optimizer.__init__ = __init__  # type: ignore[method-assign]
    torch.autograd.backward = backward
    module.register_optimizer_step_pre_hook(lambda *step: ags().before_step(*step))
    module.register_optimizer_step_post_hook(lambda optimizer, *_: ags().after_step(optimizer))
    _listen_to_skips(ags)


def _listen_to_skips(ags: Callable[[], AgsSteps]) -> None:
    from torch.cuda.amp import GradScaler

    scaler = next(base for base in GradScaler.__mro__[::-1] if "step" in vars(base))
    step = scaler.step  # type: ignore[attr-defined]

    @functools.wraps(step)
    def stepping(self: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        mine = ags()
        before = mine._taken
        done = step(self, optimizer, *arguments, **named)
        if mine.tula is not None and optimizer is mine.tula.base and mine._taken == before:
            mine.skipped()
        return done

    scaler.step = stepping  # type: ignore[attr-defined]
