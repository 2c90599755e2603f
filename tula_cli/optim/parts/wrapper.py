"""What every optimizer here has: a step with a closure; and what one around another has of its own, and passes on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch


class Optimizer(torch.optim.Optimizer):
    """What the optimizers of this package share: a step evaluates its closure once, before anything else."""

    # GradScaler must unscale before the step: a fused base would unscale after the gradients' norm was taken
    _step_supports_amp_scaling = False

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled, before any
                gradient is looked at.

        Returns:
            The closure's loss, None without one.
        """
        loss = _evaluated(closure)
        self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Take the step; gradients are disabled."""


def _evaluated(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Wrapper(Optimizer):
    """An optimizer whose `param_groups`, `state` and `defaults` are the base's objects, not copies.

    Hence learning-rate schedulers and GradScaler take it as they would take the base, and nothing goes stale when the
    base loads a state.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__setstate__({})  # Optimizer's hooks, without its own groups and state: those are the base's

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base's parameter groups, the same list."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base's state; what the wrapper keeps is not in it."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base's defaults."""
        return self.base.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base."""
        self.base.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the base's gradients, and drop what was seen of a step that was not taken."""
        self._drop()
        self.base.zero_grad(set_to_none)

    @abstractmethod
    def _drop(self) -> None:
        """Forget what was seen for the coming step."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()
