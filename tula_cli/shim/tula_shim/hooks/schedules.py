"""In a resume test: the torch scheduler of the script's optimizer, where it stands and whether it will change the learning rate."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import time
import warnings
from typing import Any

from .optimizers import full_name

PROJECTED_STEPS = 20_000
PROJECTED_SECONDS = 1.0


class Schedule:
    """Reports the scheduler with each row. It is looked for once, at the first step: schedulers are made before that."""

    def __init__(self) -> None:
        self._scheduler: Any | None = None
        self._report: dict[str, Any] = {}
        self._searched = False

    def report(self, optimizer: Any) -> dict[str, Any]:
        """Return {"schedule": {"name", "at", "moves"}}, or nothing without a scheduler of torch.

        `at` counts its steps; `moves` is None if it cannot be projected.
        """
        if not self._searched:
            self._searched = True
            self._scheduler = find_scheduler(optimizer)
            if self._scheduler is not None:
                self._report = {"name": full_name(self._scheduler), "moves": will_change(self._scheduler)}
        if self._scheduler is None:
            return {}
        return {"schedule": {**self._report, "at": int(getattr(self._scheduler, "last_epoch", 0))}}


def find_scheduler(optimizer: Any) -> Any | None:
    """Return the scheduler that acts on an optimizer, not one within SequentialLR or ChainedScheduler.

    It looks at all objects there are, by their types: to ask an object of somebody else's what it is may run its code.
    """
    module = sys.modules.get("torch.optim.lr_scheduler")
    if module is None or optimizer is None:
        return None
    schedulers = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), module.LRScheduler) and _acts_on(candidate, optimizer)
    ]
    inner = {id(part) for outer in schedulers for part in vars(outer).get("_schedulers") or ()}
    return next((scheduler for scheduler in reversed(schedulers) if id(scheduler) not in inner), None)


def _acts_on(scheduler: Any, optimizer: Any) -> bool:
    """Return whether a scheduler changes the groups of an optimizer, which it may hold in a wrapper."""
    owner = vars(scheduler).get("optimizer")
    return owner is optimizer or getattr(owner, "param_groups", None) is optimizer.param_groups


class _StandIn:
    """An optimizer without parameters, for a copy of a scheduler to act on."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self.defaults = dict(getattr(optimizer, "defaults", {}))
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        """Do nothing."""

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]


def will_change(scheduler: Any) -> bool | None:
    """Return whether a scheduler changes a learning rate in its next steps, by stepping a copy; None if that fails."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stand_in = _StandIn(scheduler.optimizer)
        projected = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
        before, deadline = stand_in.rates(), time.perf_counter() + PROJECTED_SECONDS
        for _ in range(PROJECTED_STEPS):
            projected.step()
            if stand_in.rates() != before:
                return True
            if time.perf_counter() > deadline:
                return None
        return False
    return None
