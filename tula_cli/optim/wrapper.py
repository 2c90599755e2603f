"""Base class of optimizers that wrap another optimizer, and the checks that they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from numbers import Integral, Real
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tula_cli.presets import NORMALISING_OPTIMIZERS

from .sharding import is_sharded

# --- Checks

# With these classes no rank holds the averaged gradient of Eq. 5.
CLASSES_OF_SHARDS = frozenset({"FullyShardedDataParallel", "ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"})
# With these only if they shard over other ranks than all.
CLASSES_OF_FULLY_SHARD = frozenset({"FSDPModule", "DTensor"})
# Arguments that may be None.
OPTIONAL_ARGUMENTS = frozenset({"available", "steps_per_epoch", "max_grad_norm", "factor"})


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return `model` if it is a DistributedDataParallel, or the one that was compiled; else None."""
    wrapped = getattr(model, "_orig_mod", model)
    return wrapped if isinstance(wrapped, DistributedDataParallel) else None


def get_rank_and_world(model: nn.Module) -> tuple[int, int]:
    """Return (rank, world size); (0, 1) for a module that this process trains alone."""
    if is_sharded(model):
        return dist.get_rank(), dist.get_world_size()
    ddp = find_ddp(model)
    if ddp is None:
        return 0, 1
    world = dist.get_world_size()
    if dist.get_world_size(ddp.process_group) != world:
        raise ValueError("TulaOptimizer needs DistributedDataParallel over the default process group")
    return dist.get_rank(), world


def require_whole_numbers(**arguments: object) -> None:
    """Raise a ValueError if an argument is not a whole number."""
    _require_type(Integral, "an integer", arguments)


def require_real_numbers(**arguments: object) -> None:
    """Raise a ValueError if an argument is not a number."""
    _require_type(Real, "a number", arguments)


def _require_type(kind: type, words: str, arguments: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        if (value is None and name in OPTIONAL_ARGUMENTS) or (isinstance(value, kind) and not isinstance(value, bool)):
            continue
        raise ValueError(f"{name} must be {words}, got {value!r}")


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError if an argument is not among its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_base_can_be_scaled(base: torch.optim.Optimizer, *, of_gradients: bool) -> None:
    """Raise a ValueError if scaling has no effect through this base optimizer.

    Args:
        base: the base optimizer.
        of_gradients: whether gradients are scaled; else updates.
    """
    names, name = list_class_names(base), type(base).__name__
    if names & NORMALISING_OPTIMIZERS and of_gradients:
        raise ValueError(
            f"{name} divides by the magnitude of the gradient, so scaling the gradient has no effect."
            f' Scale its update (apply_to="update"), use torch.optim.SGD as the base of TulaOptimizer, or {name} without'
            " AGS"
        )
    if "LBFGS" in names:
        raise ValueError(f"{name} evaluates its closure several times per step. Use torch.optim.SGD as the base")


def check_model_has_parameters_of_base(base: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise a ValueError if the model has none of the parameters that the base optimizer updates."""
    parameters = set(model.parameters())
    if not any(p in parameters for group in base.param_groups for p in group["params"]):
        raise ValueError(
            f"{type(base).__name__} updates none of the parameters of the model {type(model).__name__}: create the optimizer"
            " from the parameters of this model"
        )


def check_sharding(base: torch.optim.Optimizer, model: nn.Module, who: str = "TulaOptimizer") -> None:
    """Raise a ValueError if gradients are sharded otherwise than by fully_shard over all ranks, or parameters are complex."""
    params = [p for group in base.param_groups for p in group["params"]]
    has_allowed_shards = is_sharded(model) and all(_is_sharded_over_all_ranks(p) for p in params)
    refused = CLASSES_OF_SHARDS if has_allowed_shards else CLASSES_OF_SHARDS | CLASSES_OF_FULLY_SHARD
    for instance in (base, *model.modules(), *params):
        if list_class_names(instance) & refused:
            raise ValueError(
                f"{who} does not work with {type(instance).__name__}, because every rank needs the whole"
                " averaged gradient. Use DistributedDataParallel"
            )
    if any(p.is_complex() for p in params):
        raise ValueError(f"{who} does not work with complex parameters")


def _is_sharded_over_all_ranks(param: Any) -> bool:
    """Return whether a parameter is sharded over all ranks of the default process group, without replicas."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None or mesh.ndim != 1 or mesh.size() != dist.get_world_size():
        return False
    return all(placement.is_shard() for placement in param.placements)


def list_class_names(instance: object) -> set[str]:
    """Return the names of an object's class and its bases: no optional part of torch and no other package is imported."""
    return {cls.__name__ for cls in type(instance).__mro__}


# --- Base classes


class Optimizer(torch.optim.Optimizer):
    """Base class of the optimizers of this package: a step evaluates its closure once, before anything else."""

    # GradScaler must unscale before the step: a fused base would unscale after the gradients' norm is computed
    _step_supports_amp_scaling = False

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one optimizer step.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled, before any
                gradient is read.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @abstractmethod
    def _take_step(self) -> None:
        """Take the step; gradients are disabled."""


class OptimizerWrapper(Optimizer):
    """An optimizer whose `param_groups`, `state` and `defaults` are the base optimizer's objects, not copies.

    Learning-rate schedulers and GradScaler therefore accept it, and nothing is outdated after the base loads a state.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__setstate__({})  # Optimizer's hooks alone: groups and state are the base's

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's parameter groups, the same list."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's state, without that of the wrapper."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base optimizer's defaults."""
        return self.base.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base."""
        self.base.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and drop everything gathered for a step that was not taken."""
        self._discard_pending_gradients()
        self.base.zero_grad(set_to_none)

    def _discard_pending_gradients(self) -> None:
        """Drop everything gathered for the coming step; by default that is nothing."""

    def _take_step(self) -> None:
        with self.wrap_base_step():
            self.base.step()

    @abstractmethod
    def wrap_base_step(self) -> AbstractContextManager[None]:
        """Turn a step that the caller takes with the base optimizer inside this context into a step of this optimizer."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()
