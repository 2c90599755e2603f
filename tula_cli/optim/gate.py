"""Whether a step is scaled: the gate of Algorithm 1 (line 5), and what it has counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .parts.indicators import gradient_change, moving_average
from .parts.refusals import one_of, real_numbers

Consensus = Literal["broadcast", "check", "off"]


class Gate:
    """Lets the factors act where the squared gradient norm changed by less than `delta` since the step before (Eq. 5).

    A gate serves one TulaOptimizer.

    Args:
        delta: threshold on the relative change; 0 never scales, inf scales at any finite change.
        ewma: keeps a moving average of the squared norm, with this weight of the past, and gates on its change. The
            average moves slowly: at 0.9 the same `delta` means a tenfold change of a single norm.
        consensus: how ranks come to the same branch: "broadcast" rank 0's norm at each step, "check" at refreshes
            that they agree, or "off".

    Attributes:
        square: |G|^2 of the newest step, before scaling: 0-dim, on the device. None before the first step.
        level: what the next step is compared with: the same, or its moving average.
        change: Delta(G) of the newest step: 0-dim, on the device, infinite in the first. None before it.
        scaled: whether the newest step was scaled: 0-dim, bool, on the device. None before the first.

    Raises:
        ValueError: an argument of another kind or out of range.
    """

    def __init__(self, delta: float = 0.5, *, ewma: float = 0.0, consensus: Consensus = "broadcast") -> None:
        real_numbers(delta=delta, ewma=ewma)
        if not delta >= 0:
            raise ValueError(f"delta must not be negative or NaN, got {delta}")
        if not 0 <= ewma < 1:
            raise ValueError(f"ewma must be at least 0 and below 1, got {ewma}")
        one_of("consensus", consensus, ("broadcast", "check", "off"))
        self.delta, self.ewma, self.consensus = delta, ewma, consensus
        self.square: Tensor | None = None
        self.level: Tensor | None = None
        self.change: Tensor | None = None
        self.scaled: Tensor | None = None
        self._world: int | None = None
        self._counts = torch.zeros(3, dtype=torch.int64)  # steps scaled, jumps up, jumps down
        self._mark = (0, 0, 0, 0)  # steps and counts at the newest report

    def bind(self, world: int) -> None:
        """Serve an optimizer of so many ranks.

        Raises:
            ValueError: it serves one already.
        """
        if self._world is not None:
            raise ValueError("this Gate serves another TulaOptimizer; give each a gate of its own")
        self._world = world

    def decide(self, square: Tensor, *, has_factors: bool, refreshes: bool) -> Tensor:
        """Look at the squared norm of the raw gradients: whether this step is scaled (line 5), 0-dim, bool, on the device.

        Args:
            square: |G|^2, 0-dim.
            has_factors: whether there is anything to scale by; else no step counts as scaled.
            refreshes: whether this step refreshes the factors.

        Raises:
            RuntimeError: consensus is "check" and the ranks disagree.
        """
        square = self._agree_on_norm(square, refreshes)
        level = moving_average(square, self.level, self.ewma)
        rise = gradient_change(level, self.level)
        change = rise.abs()
        calm = change < self.delta
        self.scaled = calm if has_factors else torch.zeros_like(calm)
        self._count(rise, self.scaled)
        self.square, self.level, self.change = square, level, change
        return calm

    def _agree_on_norm(self, square: Tensor, refreshes: bool) -> Tensor:
        assert self._world is not None, "a gate is bound before it decides"
        if self._world > 1 and self.consensus == "broadcast":
            dist.broadcast(square, 0)
        elif self._world > 1 and self.consensus == "check" and refreshes:
            _assert_equal(torch.stack([square.double(), self._counts[0].to(square.device).double()]))
        return square

    def _count(self, rise: Tensor, scaled: Tensor) -> None:
        if self.level is None:  # nothing to rise from
            up = down = torch.zeros_like(scaled)
        else:
            least = max(self.delta, torch.finfo(rise.dtype).tiny)  # 0 is no jump
            up, down = rise >= least, rise <= -least
        self._counts = self._counts.to(rise.device) + torch.stack([scaled, up, down])

    def report(self, steps: int) -> dict[str, float]:
        """What `TulaOptimizer.report` says of the gate, after so many steps; waits for the device."""
        counts = (steps, *(int(n) for n in self._counts.tolist()))
        steps_taken, scaled, up, down = (a - b for a, b in zip(counts, self._mark, strict=True))
        self._mark = (counts[0], counts[1], counts[2], counts[3])
        shares = {"scaled": scaled, "jumps_up": up, "jumps_down": down}
        change = math.inf if self.change is None else float(self.change)
        return {name: n / max(1, steps_taken) for name, n in shares.items()} | {
            "steps": float(steps_taken),
            "delta": change,
        }

    def forget(self) -> None:
        """Compare the next step with none: the norms of the batches to come are others."""
        self.square = self.level = self.change = self.scaled = None

    def meaning(self) -> dict[str, Any]:
        """The settings without which a stored norm means something else."""
        return {"ewma": self.ewma}

    def state_dict(self) -> dict[str, Any]:
        return {"n_scaled": int(self._counts[0]), "prev_sq": self.level}

    def load_state_dict(self, state: Mapping[str, Any], *, steps: int, device: torch.device | None) -> None:
        """Go on from a `state_dict()`.

        Args:
            steps: optimizer steps until then.
            device: of the parameters; None where the norm means something else now, so that only the count is kept.
        """
        self._counts = torch.tensor([state["n_scaled"], 0, 0])
        self._mark = (steps, state["n_scaled"], 0, 0)
        level = state["prev_sq"]
        self.square = self.change = self.scaled = None
        self.level = None if device is None or level is None else level.to(device)


def _assert_equal(local_bits: Tensor) -> None:
    """Compares bits, so that NaN equals NaN."""
    gathered = [torch.empty_like(local_bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local_bits)
    if any(not torch.equal(bits.view(torch.int64), local_bits.view(torch.int64)) for bits in gathered):
        bits_by_rank = [tuple(bits.tolist()) for bits in gathered]
        raise RuntimeError(
            f"the ranks disagree on (squared gradient norm, steps scaled): {bits_by_rank}; their weights may have drifted"
            ' apart. Train with consensus="broadcast"'
        )
