"""Orthogonalised steps of the script's own optimizers: a hook before each step keeps the weights, one after it sets the
update.

tula's library of optimizers, which is copied into the run, does the computation. A script in which nothing can be
orthogonalised fails with `CannotOrthogonaliseError`, so that no training silently runs without the method.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

from .ags import MethodHooks, evaluate_closure
from .function_hooks import hook_function
from .optimizers import get_full_name, get_scaler_class, list_parameters

if TYPE_CHECKING:
    from .plan import Plan


MAX_STEPS_WITHOUT_MATRIX = 3
"""Steps of optimizers without a matrix after which the training fails."""
BETA2_STATE_KEY = "tula_reference_beta2"
"""Key in the optimizer's parameter groups, hence in checkpoints: beta2 as the script has set it."""


class CannotOrthogonaliseError(RuntimeError):
    """No step can be orthogonalised in this script; the message is for the user."""


class OrthoHooks(MethodHooks):
    """Method ortho in one process, for each of its optimizers.

    Args:
        plan: with "code", the folder of the library, and "beta2_power", batch / reference batch.
    """

    method, title, error = "ortho", "method ortho", CannotOrthogonaliseError

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        # optimizer -> (number of parameters, its Ortho; None if nothing can be orthogonalised)
        self._wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._declared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._open: Any | None = None  # (optimizer, context manager) of the step in progress, else None
        self._without = 0

    def hook_steps(self) -> None:
        """Hook the steps of torch's optimizers. Must be called before the hooks that count steps."""
        from torch.optim import optimizer as module

        module.register_optimizer_step_pre_hook(self.before_step)
        module.register_optimizer_step_post_hook(lambda optimizer, *_: self.after_step(optimizer))

        def step_without_fused_scaling(original: Any, self: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
            # Otherwise a fused step would unscale gradients within the step.
            optimizer._step_supports_amp_scaling = False
            return original(self, optimizer, *arguments, **named)

        hook_function(get_scaler_class(), "step", step_without_fused_scaling)

    def register_model(self, optimizer: Any, model: Any) -> None:
        """Store the module of an optimizer that the loop declares, so that it need not be searched for."""
        if model is not None:
            # A trainer's wrapper has the torch optimizer as `optimizer`.
            self._declared[getattr(optimizer, "optimizer", optimizer)] = model

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Keep the weights; return replacement arguments of the optimizer's step if it has a closure, else None.

        Raises:
            CannotOrthogonaliseError: nothing in this script can be orthogonalised.
        """
        if self.failed is not None:
            raise self.failed  # raised again, because the script caught the first one
        if self._open is not None and self._open[0] is not optimizer:
            return None  # a step within that of another optimizer
        self._finish_step(RuntimeError("the step was aborted"))
        ortho = self._get_ortho(optimizer)
        if ortho is None:
            return None
        from torch import no_grad

        changed = evaluate_closure(args, kwargs)
        self._set_beta2(optimizer)
        self._open = (optimizer, ortho.wrap_base_step())
        with no_grad():
            self._open[1].__enter__()
        return changed

    def after_step(self, optimizer: Any) -> None:
        """Orthogonalise the update."""
        if self._open is not None and self._open[0] is optimizer:
            self._finish_step(None)

    def _finish_step(self, error: RuntimeError | None) -> None:
        """Complete a step; after an error the weights are restored."""
        if self._open is None:
            return
        from torch import no_grad

        (_, step), self._open = self._open, None
        with no_grad(), contextlib.suppress(*([] if error is None else [type(error)])):
            step.__exit__(error and type(error), error, None)

    def _get_ortho(self, optimizer: Any) -> Any | None:
        """Return the Ortho of an optimizer, rebuilt if its number of parameters has changed; None if it cannot have
        one.

        Raises:
            CannotOrthogonaliseError: the library cannot be used, or no optimizer of the script has a matrix.
        """
        count = sum(1 for _ in list_parameters(optimizer))
        count_and_ortho = self._wrapped.get(optimizer)
        if count_and_ortho is None or count_and_ortho[0] != count:
            count_and_ortho = self._wrapped[optimizer] = (count, self._make_ortho(optimizer))
        self._without = 0 if count_and_ortho[1] is not None else self._without + 1
        if self._without > MAX_STEPS_WITHOUT_MATRIX and all(ortho is None for _, ortho in self._wrapped.values()):
            self.fail("no optimizer of the script updates a matrix or a convolution that could be orthogonalised")
        return count_and_ortho[1]

    def _make_ortho(self, optimizer: Any) -> Any | None:
        assert self.plan.ortho is not None
        library = self.import_library(self.plan.ortho["code"], "orthogonal")
        if why := library.describe_why_not_orthogonalizable(optimizer):
            self._notes.append(f"not orthogonalised: {why}")
            return None
        model = self._declared.get(optimizer)
        try:
            ortho = library.Ortho(optimizer, model=find_module(optimizer) if model is None else model)
        except ValueError as error:
            self.fail(str(error))
        if matrices := ortho.matrices():
            numbers, total = sum(p.numel() for p in matrices), sum(p.numel() for p in list_parameters(optimizer))
            self._notes.append(
                f"train.method ortho orthogonalises the updates of {len(matrices)} matrices of {get_full_name(optimizer)}"
                f" ({numbers:,} of {total:,} parameters)"
            )
            return ortho
        return None

    def _set_beta2(self, optimizer: Any) -> None:
        """Keep the second moment's half-life in samples: raise the script's beta2 to batch / reference batch."""
        assert self.plan.ortho is not None
        if not any("Adam" in kind.__name__ for kind in type(optimizer).__mro__):
            return
        for group in optimizer.param_groups:
            if len(group.get("betas") or ()) == 2:
                reference = group.setdefault(BETA2_STATE_KEY, group["betas"][1])
                group["betas"] = (group["betas"][0], reference ** self.plan.ortho["beta2_power"])


def find_module(optimizer: Any) -> Any:
    """Return the module whose parameters an optimizer updates; if there are several or none, a ModuleList of them."""
    from torch import nn

    updated = {id(parameter) for parameter in list_parameters(optimizer)}
    modules = [
        instance
        for instance in gc.get_objects()
        if issubclass(type(instance), nn.Module)
        and "_parameters" in vars(instance)
        and any(id(parameter) in updated for parameter in instance.parameters())
    ]
    child_ids = {id(child) for module in modules for child in module.modules() if child is not module}
    roots = [module for module in modules if id(module) not in child_ids]
    return roots[0] if len(roots) == 1 else nn.ModuleList(roots)
