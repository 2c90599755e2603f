"""Whether a training still computes with finite numbers, as all its ranks see it.

Reading a loss waits for the device, so losses stay there and are looked at together, where the ranks meet anyway. Under
fp16 a step whose gradient overflows is skipped, as ever: there the loss counts, which is never scaled, and a loss scale
that has collapsed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tula_cli.optim.parts.shares import share
from tula_cli.worker.build.sampling import Position
from tula_cli.worker.train.loop import Step, Trainer

LEAST_SCALE = 1e-4
"""Of fp16's loss, from 65536 on: 30 overflows in a row and no step between them (fairseq's --min-loss-scale)."""


@dataclass
class DivergenceDetector:
    """Looks at the losses, and where something is to be saved at the weights, of one training on this rank."""

    trainer: Trainer
    losses: list[tuple[Position, torch.Tensor]] = field(
        default_factory=list
    )  # since the last look, still on the device
    spoilt: bool = False  # weights that are not finite were seen on this rank

    def follow(self, step: Step) -> None:
        """Keep the loss of the step that has just been made."""
        self.losses.append((self.trainer.position, step.loss))

    def may_save(self) -> bool:
        """Return whether this rank's weights are finite: a gradient that was not is in them, whatever the loss says."""
        self.spoilt = self.spoilt or not _are_finite(self.trainer.parallel.parameters())
        return not self.spoilt

    def look(self, *, weights: bool = False) -> str:
        """Return what is not finite, since when, in the same words on every rank; empty where all is well.

        Every rank takes part.

        Args:
            weights: look at them too.
        """
        if weights:
            self.may_save()
        losses, self.losses = self.losses, []
        seen = [-_first_bad(losses), float(self.spoilt), float(self._scale_has_collapsed())]
        first, spoilt, collapsed = self.trainer.ranks.maxima(seen)  # the earliest step of all ranks
        if math.isfinite(first):
            return f"the loss is not finite at {self._place(next(at for at, _ in losses if at.steps == -first))}"
        if spoilt:
            return f"the weights are not finite at {self._place(self.trainer.position)}: a gradient was not"
        if collapsed:
            return f"the gradient overflows fp16 at every step, up to {self._place(self.trainer.position)}"
        return ""

    def _scale_has_collapsed(self) -> bool:
        scaler = self.trainer.scaler
        return scaler.is_enabled() and scaler.get_scale() < LEAST_SCALE

    def _place(self, at: Position) -> str:
        epoch = at.epoch + at.done / len(self.trainer.datasets.train)
        return f"epoch {epoch:.2f}, step {at.steps}, {at.samples} samples"


def _first_bad(losses: list[tuple[Position, torch.Tensor]]) -> float:
    """Return the number of the first step whose loss is not finite; infinity where there is none."""
    if not losses:
        return math.inf
    finite = torch.stack([loss for _, loss in losses]).isfinite().tolist()
    return next((float(at.steps) for (at, _), good in zip(losses, finite, strict=True) if not good), math.inf)


@torch.no_grad()
def _are_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether all that is trained is finite; nothing as large as a parameter is allocated for it."""
    mine = [share(p) for p in parameters if p.requires_grad]
    trained = [torch.view_as_real(p) if p.is_complex() else p for p in mine if p.numel()]
    bounds = [bound.isfinite() for p in trained for bound in torch.aminmax(p)]
    return bool(torch.stack(bounds).all()) if bounds else True
