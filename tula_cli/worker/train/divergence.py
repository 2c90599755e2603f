"""Detection of a training whose loss or weights are not finite on any rank, or whose loss has blown up.

Reading a loss waits for the device, so losses stay there and are checked together, when the ranks communicate anyway.
Under fp16 a step whose gradient overflows is skipped as usual; there the criteria are the unscaled loss, and a loss
scale that has collapsed. Finite losses are judged by rank 0, in a training whose batch grows, and with it its learning
rate.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tula_cli.models.loss_level import compute_max_spike_steps
from tula_cli.optim.sharding import get_local_shard
from tula_cli.spec.job import compute_lr_scale
from tula_cli.words import format_number
from tula_cli.worker.build.loaders import TrainingPosition
from tula_cli.worker.train.loop import Step, Trainer

MIN_LOSS_SCALE = 1e-4
"""Smallest scale of fp16's loss, which starts at 65536: 30 overflows in a row without a step (fairseq's
--min-loss-scale)."""
NO_RISE = (-math.inf, -math.inf)
"""Levels of a loss that has not blown up; over several ranks the maximum counts."""


@dataclass
class DivergenceDetector:
    """Checks the losses, and before a checkpoint is saved also the weights, of one training on this rank."""

    trainer: Trainer
    # position, batch and loss of the steps since the last check, on the device
    losses: list[tuple[TrainingPosition, int, torch.Tensor]] = field(default_factory=list)
    judged: int = 0  # number of `losses` already added to the loss level by rank 0
    blown_up: tuple[float, float] = NO_RISE  # lowest level of the loss, and the level to which it rose for good
    non_finite_weights: bool = False  # whether non-finite weights were found on this rank

    def record_loss(self, step: Step) -> None:
        """Record the loss of the step that has just been made."""
        self.losses.append((self.trainer.position, step.batch, step.loss))

    def has_finite_weights(self) -> bool:
        """Return whether this rank's weights are finite: they show a non-finite gradient, whatever the loss is."""
        self.non_finite_weights = self.non_finite_weights or not _are_parameters_finite(
            self.trainer.parallel.parameters()
        )
        return not self.non_finite_weights

    @property
    def should_judge_finite_losses(self) -> bool:
        """Return whether finite losses are judged: on rank 0, if the batch grows, so a lower learning rate may help."""
        return self.trainer.ranks.is_first and self.trainer.spec.train.stages is not None

    def update_loss_level(self) -> None:
        """Add the losses since the last call to the loss level, which determines the checkpoints from before a rise."""
        if not self.should_judge_finite_losses:
            return
        trainer, steps = self.trainer, self.losses[self.judged :]
        size, epochs = len(trainer.datasets.train), trainer.spec.train.epochs
        longest = compute_max_spike_steps(
            sum(trainer.sizes.ramp.count_remaining_steps(size=size, epochs=epochs).values())
        )
        for (at, batch, _), loss in zip(steps, _list_loss_values(steps), strict=True):
            trainer.losses.add_loss(loss, samples=at.samples, lr_factor=compute_lr_scale(trainer.spec, batch))
            if trainer.losses.above >= longest:
                self.blown_up = (trainer.losses.lowest, trainer.losses.level)
        self.judged = len(self.losses)

    def describe_divergence(self, *, weights: bool = False) -> str:
        """Describe what is not finite or has blown up, and since when, in the same words on every rank; empty if all is
        well.

        Every rank must call this.
        """
        if weights:
            self.has_finite_weights()
        self.update_loss_level()
        losses, self.losses, self.judged = self.losses, [], 0
        scaler = self.trainer.scaler
        local_values = [
            -_find_first_non_finite(losses),
            float(self.non_finite_weights),
            float(scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE),
            *self.blown_up,
        ]
        # the maximum is the earliest step, as its number is negative
        first_step, non_finite_weights, collapsed, lowest, level = self.trainer.ranks.compute_elementwise_max(
            local_values
        )
        if math.isfinite(first_step):
            diverged_at = next(at for at, *_ in losses if at.steps == -first_step)
            return f"the loss is not finite at {self._describe_position(diverged_at)}"
        at = self._describe_position(self.trainer.position)
        if non_finite_weights:
            return f"the weights are not finite at {at}, because a gradient was not finite"
        if collapsed:
            return f"the gradient overflows fp16 in every step, most recently at {at}"
        if math.isfinite(level):
            return f"the loss rose from {format_number(lowest)} and has not recovered: {format_number(level)} at {at}"
        return ""

    def _describe_position(self, at: TrainingPosition) -> str:
        epoch = at.epoch + at.done / len(self.trainer.datasets.train)
        return f"epoch {epoch:.2f}, step {at.steps}, {at.samples} samples"


def _list_loss_values(steps: list[tuple[TrainingPosition, int, torch.Tensor]]) -> list[float]:
    return torch.stack([loss for *_, loss in steps]).tolist() if steps else []


def _find_first_non_finite(losses: list[tuple[TrainingPosition, int, torch.Tensor]]) -> float:
    """Return the number of the first step whose loss is not finite; infinity if there is none."""
    values = zip(losses, _list_loss_values(losses), strict=True)
    return next((float(at.steps) for (at, *_), loss in values if not math.isfinite(loss)), math.inf)


@torch.no_grad()
def _are_parameters_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether all trainable parameters are finite, without allocating anything as large as a parameter."""
    local_tensors = [get_local_shard(p) for p in parameters if p.requires_grad]
    trained = [torch.view_as_real(p) if p.is_complex() else p for p in local_tensors if p.numel()]
    bounds = [bound.isfinite() for p in trained for bound in torch.aminmax(p)]
    return bool(torch.stack(bounds).all()) if bounds else True
