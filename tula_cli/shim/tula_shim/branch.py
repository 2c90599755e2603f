"""A branch of a search for a learning rate: the losses of its steps, the shape of its learning rate, and its end."""

from __future__ import annotations

from typing import Any

from .function_hooks import hook_function
from .optimizers import get_scaler_class


class BranchSteps:
    """The steps of a branch (of section branch of the plan), or of the training up to the checkpoint of its start."""

    def __init__(self, plan_section: dict[str, Any]) -> None:
        # None: the training up to the checkpoint, with unchanged learning rate.
        self.steps: int | None = plan_section["steps"]
        self.norms = int(plan_section["norms"])  # number of first steps whose gradient norms are recorded
        self._factor = float(plan_section["factor"])
        self._losses: list[Any] = []
        self._rates: dict[int, Any] = {}  # id of a parameter group -> its learning rate before scaling

    def is_finished(self, step: int) -> bool:
        """Return whether the branch ends after `step` steps."""
        return self.steps is not None and step >= self.steps

    def compute_lr_factor(self, done: int) -> float:
        """Return the factor of the script's learning rate in the next step, after `done` steps.

        It rises in the first quarter, from the learning rate of the checkpoint, and falls to 0 in the second half.
        """
        if self.steps is None:
            return 1.0
        risen = min(1.0, 4 * done / self.steps)
        return (1 + (self._factor - 1) * risen) / self._factor * min(1.0, 2 * (self.steps - done) / self.steps)

    def scale_learning_rates(self, optimizer: Any, factor: float) -> None:
        """Multiply the learning rates of an optimizer by `factor` for one step."""
        for group in optimizer.param_groups:
            # Once only, because its step may call the step of another optimizer.
            if "lr" in group and id(group) not in self._rates:
                self._rates[id(group)] = group["lr"]
                group["lr"] = group["lr"] * factor

    def restore_learning_rates(self, optimizer: Any) -> None:
        """Restore the learning rates that the script and its schedule know."""
        for group in optimizer.param_groups:
            if id(group) in self._rates:
                group["lr"] = self._rates.pop(id(group))

    def record_backward(self, tensors: Any) -> None:
        """Record the losses that a backward pass starts from; those of micro-batches add up, until the step is over."""
        for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
            if hasattr(tensor, "numel") and tensor.numel() == 1:
                unscaled: Any = getattr(tensor, "_tula_unscaled", tensor)
                self._losses.append(unscaled.detach().reshape(()))

    def pop_loss(self) -> Any:
        """Return the sum of the losses recorded since the last call, and drop them; None without a backward pass."""
        losses, self._losses = self._losses, []
        return sum(losses[1:], losses[0]) if losses else None


def hook_branch(recorder: Any) -> None:
    """Hook torch's optimizers for the shape of the learning rate, and its gradient scaler for the loss before scaling."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(
        lambda optimizer, *_: recorder.branch.scale_learning_rates(
            optimizer, recorder.branch.compute_lr_factor(recorder.step)
        )
    )
    register_optimizer_step_post_hook(lambda optimizer, *_: recorder.branch.restore_learning_rates(optimizer))

    def scale_and_mark(original: Any, self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if scaled is not outputs and hasattr(scaled, "detach"):
            scaled._tula_unscaled = outputs
        return scaled

    hook_function(get_scaler_class(), "scale", scale_and_mark)
