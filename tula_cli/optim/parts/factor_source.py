"""What is common to the ways of finding factors."""

# ruff: noqa: B027  (a factor that is given needs nothing of what a refresh needs)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .indicators import Bounds
from .setup import Setup
from .small_batch import SmallLoss


class Factors(ABC):
    """One way to find factors. An object of it serves one TulaOptimizer.

    Attributes:
        reads_b_small: whether anything depends on how many samples the small batch has.
        n_refresh: refreshes so far.
    """

    kind: ClassVar[str]
    reads_b_small = True
    n_refresh = 0
    _setup: Setup | None = None

    def bind(self, setup: Setup) -> None:
        """Serve this training.

        Raises:
            ValueError: it serves one already, or cannot serve this one.
        """
        if self._setup is not None:
            raise ValueError(f"this {type(self).__name__} serves another TulaOptimizer; give each one of its own")
        self._setup = setup

    def change(self, setup: Setup) -> None:
        """Serve the same training at other batches; what was found is void, and the coming step refreshes."""
        self._setup = setup

    @property
    def setup(self) -> Setup:
        """The training that is served."""
        assert self._setup is not None, "factors are bound before they are asked"
        return self._setup

    @property
    @abstractmethod
    def identity(self) -> str | None:
        """Why every step is exactly the base's; None where the factors act."""

    @property
    @abstractmethod
    def bounds(self) -> Bounds:
        """The interval of the factors."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether there is anything to scale by."""

    @abstractmethod
    def in_force(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """The factor of each of these parameters that has one."""

    @abstractmethod
    def spread(self) -> dict[str, float]:
        """What `TulaOptimizer.report` says of the factors; waits for the device."""

    @property
    def limit(self) -> float:
        """s_max (line 12)."""
        return self.setup.limit

    @property
    def values(self) -> list[Tensor]:
        """The factors that have been found, one tensor a parameter that has any."""
        return []

    @property
    def mean(self) -> Tensor | float | None:
        """The mean of the factors, one an element or one a tensor; None where there are none. It waits for nothing."""
        values = self.values
        total = sum(factor.numel() for factor in values)
        if not values:
            return None
        if total == len(values):
            return torch.stack([factor.reshape(()) for factor in values]).mean()
        return torch.stack([f.mean(dtype=torch.float32) * (f.numel() / total) for f in values]).sum()

    # ---- the refresh

    @property
    def due(self) -> bool:
        """Whether the coming step refreshes the factors."""
        return False

    @property
    def wants_small_batch(self) -> bool:
        """Whether a small batch has to be taken before the coming step."""
        return False

    def start_epoch(self, steps: int, *, rest: bool | None) -> None:
        """Begin an epoch of so many steps, or the rest of one (`TulaOptimizer.start_epoch`)."""

    def refresh_soon(self) -> None:
        """Make the coming step refresh."""

    def take(
        self, loss: SmallLoss, params: Sequence[Tensor], *, step: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Take the small batch's gradient (lines 13 and 14) with regard to these parameters.

        Args: as `Setup.small_gradients` has them.
        """

    def find(self, grads: Mapping[Tensor, Tensor]) -> None:
        """Find the factors that act from the next step on, by the large batch's raw gradients; in steps that are due."""

    def advance(self) -> None:
        """End a step."""

    def drop(self) -> None:
        """Forget what was seen for the coming step."""

    # ---- what is kept

    def memory(self) -> int:
        """Bytes of the factors, once there are any."""
        return 0

    def meaning(self) -> dict[str, Any]:
        """The settings without which stored factors and norms mean something else."""
        return {"kind": self.kind, "s_max": self.limit}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, void: bool) -> None:
        """Go on from a `state_dict()`.

        Args:
            void: its factors mean something else now, so that the counts alone are kept.
        """
