"""What TulaOptimizer cannot do, said before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from tula_cli.optim.tula import TulaOptimizer

# These divide by the gradient's own magnitude (or keep its sign only), so a factor on the gradient cancels out.
NORMALISING = frozenset(
    {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "FusedAdam", "Adagrad", "Adadelta", "Adafactor"}
    | {"RMSprop", "Rprop", "Muon", "Lion", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars"}
)
# These keep each rank's own gradient or shard, so no rank holds the gradient that Eq. 5 speaks of.
SHARDING = frozenset(
    {"FullyShardedDataParallel", "FSDPModule", "DTensor", "ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
)
# Arguments that need not be given.
OPTIONAL = frozenset({"available", "steps_per_epoch", "max_grad_norm"})


def distributed(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that `model` is, compiled or not; else None."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def place(model: nn.Module) -> tuple[int, int]:
    """(rank, world size); (0, 1) for a module that this process trains alone."""
    ddp = distributed(model)
    if ddp is None:
        return 0, 1
    world = dist.get_world_size()
    if dist.get_world_size(ddp.process_group) != world:
        raise ValueError("TulaOptimizer needs DistributedDataParallel over the default process group")
    return dist.get_rank(), world


def whole_numbers(**arguments: object) -> None:
    """Raise ValueError where an argument is no whole number."""
    _refuse_kind(Integral, "a whole number", arguments)


def real_numbers(**arguments: object) -> None:
    """Raise ValueError where an argument is no number."""
    _refuse_kind(Real, "a number", arguments)


def _refuse_kind(kind: type, words: str, arguments: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        if (value is None and name in OPTIONAL) or (isinstance(value, kind) and not isinstance(value, bool)):
            continue
        raise ValueError(f"{name} must be {words}, got {value!r}")


def check(opt: TulaOptimizer) -> None:
    _refuse_base(opt)
    _refuse_other_model(opt)
    refuse_sharded(opt.base, opt.model)
    _refuse_range(opt)
    _refuse_choice("granularity", opt.granularity, ("element", "tensor", "static", "none"))
    _refuse_choice("source", opt.source, ("small_batch", "local_norms"))
    _refuse_choice("apply_to", opt.apply_to, ("gradient", "update"))
    _refuse_choice("consensus", opt.consensus, ("broadcast", "check", "off"))
    _refuse_choice("draw", opt.draw, ("source", "spread"))
    if opt.draw == "source" and opt._world > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in opt.model.modules()):
        raise ValueError('SyncBatchNorm needs every rank in the small batch: use draw="spread"')
    if opt.source == "local_norms" and opt.granularity == "element":
        raise ValueError('source="local_norms" knows one norm a tensor: use granularity="tensor"')
    if opt.compile and opt.apply_to == "update":
        raise ValueError('compile=True is about gradients: use it with apply_to="gradient"')


def _refuse_base(opt: TulaOptimizer) -> None:
    names, name = _names(opt.base), type(opt.base).__name__
    if names & NORMALISING and opt.apply_to == "gradient" and opt.granularity != "none":
        raise ValueError(
            f"{name} divides by the gradient's own magnitude, so that scaling the gradient changes nothing."
            f' Scale its update (apply_to="update"), use torch.optim.SGD as the base of TulaOptimizer, or {name} without'
            " AGS"
        )
    if "LBFGS" in names:
        raise ValueError(f"{name} evaluates its closure several times a step. Use torch.optim.SGD as the base")


def _refuse_other_model(opt: TulaOptimizer) -> None:
    own = set(opt.model.parameters())
    if not any(p in own for group in opt.base.param_groups for p in group["params"]):
        raise ValueError(
            f"model, {type(opt.model).__name__}, has none of the parameters that {type(opt.base).__name__} updates: both"
            " have to be of the same module"
        )


def refuse_sharded(base: torch.optim.Optimizer, model: nn.Module, who: str = "TulaOptimizer") -> None:
    params = [p for group in base.param_groups for p in group["params"]]
    for thing in (base, *model.modules(), *params):
        if _names(thing) & SHARDING:
            raise ValueError(
                f"{who} does not work with {type(thing).__name__}: it needs every rank to hold the whole,"
                " averaged gradient. Use DistributedDataParallel"
            )
    if any(p.is_complex() for p in params):
        raise ValueError(f"{who} does not work with complex parameters")


def _refuse_range(opt: TulaOptimizer) -> None:
    for name, value in (("b_large", opt.b_large), ("b_small", opt.b_small), ("available", opt.available)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 sample, got {value}")
    if not 0 <= opt.s_min <= 1:
        raise ValueError(f"s_min must be between 0 and 1, got {opt.s_min}")
    if not (opt.delta >= 0 and 0 <= opt.eps < math.inf):
        raise ValueError(f"delta and eps must not be negative or NaN, got {opt.delta} and {opt.eps}")
    for name, keep in (("norm_ewma", opt.norm_ewma), ("scale_ema", opt.scale_ema)):
        if not 0 <= keep < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {keep}")
    if not 0 < opt.factor < math.inf:
        raise ValueError(f"factor must be above 0, got {opt.factor}")
    if opt.max_grad_norm is not None and not opt.max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, got {opt.max_grad_norm}")


def _refuse_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _names(thing: object) -> set[str]:
    # by name, so that neither optional parts of torch nor other packages have to be imported
    return {cls.__name__ for cls in type(thing).__mro__}
