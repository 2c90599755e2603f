"""The script's torch optimizers, and in a resume test their schedulers. The steps of the optimizer with most
elements are counted."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import time
import warnings
import weakref
from typing import Any, Iterable


class Optimizers:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []  # name and number of elements of each optimizer, by first step
        self.declared: dict[str, Any] | None = None  # the same for an optimizer not of torch, declared by the loop
        self.bytes: dict[str, int] = {}
        self._places: dict[int, int] = {}  # id of an optimizer -> index in `seen`
        self._stepping: list[weakref.ref[Any]] = []
        self._main: weakref.ref[Any] | None = None
        self._largest = -1

    def record_step(self, optimizer: Any) -> bool | None:
        """Record a step; return whether its optimizer is the one whose steps are counted, or None if that has just changed."""
        index = self._places.get(id(optimizer))
        if index is None:
            index = self._places[id(optimizer)] = len(self.seen)
            self._stepping.append(weakref.ref(optimizer))
            self.seen.append({"name": get_full_name(optimizer), "elements": count_elements(optimizer)})
        entry = self.seen[index]
        if entry["elements"] <= self._largest:
            return self.main_optimizer is optimizer
        changed = self._largest >= 0
        self._largest = entry["elements"]
        self._main = weakref.ref(optimizer)
        return None if changed else True

    @property
    def main_optimizer(self) -> Any | None:
        """The optimizer whose steps are counted; None before the first step."""
        return self._main() if self._main is not None else None

    def describe_main_optimizer(self) -> dict[str, Any] | None:
        """Return the name and number of elements of the largest optimizer, or else of the one that the loop declared; or None."""
        return max(self.seen, key=lambda entry: int(entry["elements"]), default=self.declared)

    def measure_bytes(self) -> None:
        """Measure the bytes of the parameters, gradients and states of all optimizers on this rank."""
        optimizers = [optimizer for reference in self._stepping if (optimizer := reference()) is not None]
        if not optimizers:
            return
        trained = list({id(p): p for optimizer in optimizers for p in list_parameters(optimizer)}.values())
        entries = [entry for optimizer in optimizers for entry in optimizer.state.values() if isinstance(entry, dict)]
        states = [value for entry in entries for value in entry.values()]
        self.bytes = {
            "parameters": count_tensor_bytes(trained),
            "gradients": count_tensor_bytes(p.grad for p in trained if p.grad is not None),
            "optimizer": count_tensor_bytes(value for value in states if hasattr(value, "element_size")),
        }


def get_full_name(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def get_scaler_class() -> Any:
    """Return torch's GradScaler: that of torch.amp since torch 2.3, the base of the one in torch.cuda.amp."""
    import torch

    return getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler


def list_parameters(optimizer: Any) -> Iterable[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def count_elements(optimizer: Any) -> int:
    """Return the number of elements that an optimizer trains, over all ranks if parameters are sharded as DTensors."""
    return sum(int(parameter.numel()) for parameter in list_parameters(optimizer))


def get_learning_rate(optimizer: Any) -> Any:
    """Return the learning rate of the first group; None for an optimizer without one.

    A tensor is copied, not read: it may be on a GPU, and its schedule changes it in place.
    """
    groups = getattr(optimizer, "param_groups", None)
    rate: Any = groups[0].get("lr") if groups else None
    return rate.detach().clone() if hasattr(rate, "detach") else rate


def get_base_learning_rate(optimizer: Any) -> float | None:
    """Return the base learning rate that torch's schedulers multiply; None without a scheduler."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("initial_lr") if groups else None
    return None if rate is None else float(rate)


def count_tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return the total bytes of tensors; of a DTensor, only this rank's shard counts."""
    local_tensors = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in local_tensors)


# --- Schedulers

PROJECTED_STEPS = 20_000
PROJECTED_SECONDS = 1.0


class ScheduleReporter:
    """Describes the learning-rate scheduler for each row; searches for it once, at the first step, when it already exists."""

    def __init__(self) -> None:
        self._scheduler: Any | None = None
        self._report: dict[str, Any] = {}
        self._searched = False

    def describe_schedule(self, optimizer: Any) -> dict[str, Any]:
        """Return {"schedule": {"name", "at", "moves"}}, empty without a torch scheduler.

        `at` counts its steps; `moves` is None if it cannot be projected.
        """
        if not self._searched:
            self._searched = True
            self._scheduler = find_scheduler(optimizer)
            if self._scheduler is not None:
                self._report = {"name": get_full_name(self._scheduler), "moves": changes_lr_soon(self._scheduler)}
        if self._scheduler is None:
            return {}
        return {"schedule": {**self._report, "at": int(getattr(self._scheduler, "last_epoch", 0))}}


def find_scheduler(optimizer: Any) -> Any | None:
    """Return the scheduler that acts on an optimizer, not one within SequentialLR or ChainedScheduler.

    It inspects all objects of the process by their types: isinstance on an unknown object may run its code.
    """
    module = sys.modules.get("torch.optim.lr_scheduler")
    if module is None or optimizer is None:
        return None
    schedulers = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), module.LRScheduler) and _changes_optimizer(candidate, optimizer)
    ]
    wrapped_ids = {id(part) for outer in schedulers for part in vars(outer).get("_schedulers") or ()}
    return next((scheduler for scheduler in reversed(schedulers) if id(scheduler) not in wrapped_ids), None)


def _changes_optimizer(scheduler: Any, optimizer: Any) -> bool:
    """Return whether a scheduler changes the groups of an optimizer, which it may hold in a wrapper."""
    owner = vars(scheduler).get("optimizer")
    return owner is optimizer or getattr(owner, "param_groups", None) is optimizer.param_groups


class FakeOptimizer:
    """An optimizer without parameters, on which a copy of a scheduler acts."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self.defaults = dict(getattr(optimizer, "defaults", {}))
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        """Do nothing."""

    def get_learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]


def changes_lr_soon(scheduler: Any) -> bool | None:
    """Return whether a scheduler changes a learning rate in its next steps, by stepping a copy; None if that fails."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stand_in = FakeOptimizer(scheduler.optimizer)
        projected = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
        before, deadline = stand_in.get_learning_rates(), time.perf_counter() + PROJECTED_SECONDS
        for _ in range(PROJECTED_STEPS):
            projected.step()
            if stand_in.get_learning_rates() != before:
                return True
            if time.perf_counter() > deadline:
                return None
        return False
    return None
