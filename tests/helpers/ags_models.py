"""Small models, data and training loops for the tests of TulaOptimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tula_cli import optim
from tula_cli.optim import TulaOptimizer

B_LARGE, B_SMALL, STEPS = 16, 4, 4  # STEPS: optimizer steps per epoch
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def make_mlp(
    bn: bool = False, dropout: float = 0.0, widths: tuple[int, ...] = (5, 7, 3), seed: int = 0
) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        last = i == len(widths) - 2
        # a bias before BatchNorm has only round-off as gradient, so its ratio is meaningless
        layers += [nn.Linear(a, b, bias=last or not bn)]
        layers += [] if last else [nn.BatchNorm1d(b)] * bn + [nn.Tanh()] + [nn.Dropout(dropout)] * (dropout > 0)
    return nn.Sequential(*layers).double()


def make_batch(step: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(B_LARGE, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(0, 3, (B_LARGE,), generator=rng)
    return x.to(dtype), y


def compute_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float() if x.dtype is torch.bfloat16 else model(x), y)


def make_sgd(model: nn.Module, **kwargs: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3} | kwargs))


NOT_SETTINGS = {"b_large", "b_small", "steps_per_epoch", "available", "max_grad_norm", "seed", "exclude"}


def make_arguments(package: Any = optim, factor: float | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of TulaOptimizer; arguments of factors and gate have the names of the preset.

    Args:
        package: a copy of tula_cli.optim, for tests of changed copies.
        factor: of granularity "static", which is in no preset.
    """
    others = {name: value for name, value in kwargs.items() if name in NOT_SETTINGS}
    settings = {**package.PRESETS["paper"], **{name: value for name, value in kwargs.items() if name not in others}}
    if settings["granularity"] != "static":
        return others | package.configure_ags(settings)
    return others | package.configure_ags(settings | {"granularity": "element"}) | {"factors": package.Static(factor)}


@contextmanager
def branch_on_device(package: Any, is_on_accelerator: bool) -> Iterator[None]:
    """Select the code for a GPU or that for the CPU, whatever device the tensors are on."""
    module = package.gradient_stats
    kept, module.is_on_accelerator = module.is_on_accelerator, lambda tensor: is_on_accelerator
    try:
        yield
    finally:
        module.is_on_accelerator = kept


def make_tula_optimizer(
    model: nn.Module, base: torch.optim.Optimizer | None = None, package: Any = optim, **kwargs: Any
) -> TulaOptimizer:
    """Return a TulaOptimizer of `package`, tula_cli.optim or a changed copy."""
    default: dict[str, Any] = {"b_large": B_LARGE, "b_small": B_SMALL, "steps_per_epoch": STEPS}
    arguments = make_arguments(package, **(default | kwargs))
    optimizer: TulaOptimizer = package.TulaOptimizer(base or make_sgd(model), model=model, **arguments)
    return optimizer


def train_step(model: nn.Module, opt: torch.optim.Optimizer, step: int, dtype: torch.dtype = torch.float64) -> None:
    x, y = make_batch(step, dtype)
    opt.zero_grad()
    compute_loss(model, x, y).backward()
    stage_small_batch_gradients(model, opt, x, y)
    opt.step()


def stage_small_batch_gradients(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    if getattr(opt, "needs_small_batch", False):
        opt.small_batch(lambda n: compute_loss(model, x[:n], y[:n]))  # type: ignore[attr-defined]


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int, start: int = 0, **kwargs: Any) -> None:
    for step in range(start, start + steps):
        train_step(model, opt, step, **kwargs)


def get_ags_state(opt: TulaOptimizer) -> dict[str, Any]:
    """Return the state of AGS: gate and factors in one dictionary."""
    state = opt.state_dict()["ags"]
    return {"n_refresh": 0, "scale": {}} | state | state["gate"] | state["factors"]


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two values are bitwise equal, including dicts and lists."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(are_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(are_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class HandSetGradient:
    """One parameter of four numbers whose gradient the test sets, trained by plain SGD with a step size of 1."""

    def __init__(self, package: Any = optim, **kwargs: Any) -> None:
        self.p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.model = nn.ParameterList([self.p])
        base = torch.optim.SGD([self.p], lr=1.0)
        settings = {"b_large": 16, "b_small": 1, "refresh": 1, "delta": 0.5} | kwargs
        self.opt = package.TulaOptimizer(base, model=self.model, **make_arguments(package, **settings))

    def step(self, large: list[float], small: list[float] | None = None) -> list[float]:
        """Return the gradient that the base optimizer received."""
        self.p.grad = torch.tensor(large, dtype=torch.float64)
        if small is not None:
            self.small(small)
        before = self.p.detach().clone()
        self.opt.step()
        return (before - self.p.detach()).tolist()

    def small(self, values: list[float]) -> None:
        grad = torch.tensor(values, dtype=torch.float64)
        self.opt.small_batch(lambda n: (self.p * grad).sum())

    @property
    def scaled(self) -> int:
        return int(get_ags_state(self.opt)["n_scaled"])

    @property
    def factors(self) -> Any:
        scale = get_ags_state(self.opt)["scale"]
        return scale[0].tolist() if scale else None
