"""TulaOptimizer against a plain reference and its properties, over random models, dtypes, seeds and settings."""

from __future__ import annotations

import copy
import math
from typing import Any

import ags_checks
import ags_edge_checks  # noqa: F401  (adds its checks)
import ags_reference as reference
import numpy as np
import pytest
import torch
from ags_models import (
    B_LARGE,
    B_SMALL,
    DTYPES,
    STEPS,
    HandSetGradient,
    are_equal,
    branch_on_device,
    compute_loss,
    get_ags_state,
    make_batch,
    make_mlp,
    make_sgd,
    make_tula_optimizer,
    stage_small_batch_gradients,
    train,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tula_cli import optim
from tula_cli.optim import gradient_stats
from tula_cli.optim.ags import count_samples_per_rank
from tula_cli.optim.gradient_stats import Bounds, scale_on_device_, scale_on_host_
from tula_cli.spec.ags import Ags
from tula_cli.worker.methods.ags import Scaling

# where only the gate is tested there is no small batch
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:an AGS refresh was due")]


@pytest.mark.parametrize("check", ags_checks.CHECKS)
def test_check(check: str) -> None:
    ags_checks.CHECKS[check](optim)


@pytest.mark.parametrize("refresh", [None, 1, 3])
@pytest.mark.parametrize("delta", [0.3, 10.0])
@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("granularity", ["element", "tensor"])
def test_equals_the_reference(granularity: str, bn: bool, delta: float, refresh: int | None) -> None:
    ags_checks.train_with_reference(optim, bn=bn, every=refresh, granularity=granularity, delta=delta)


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_a_preset_is_the_specs(preset: Any) -> None:
    of_spec, by_name = Scaling().make_arguments(Ags(preset=preset)), optim.configure_ags(optim.PRESETS[preset])
    assert of_spec["apply_to"] == by_name["apply_to"]
    for part in ("factors", "gate"):
        result, expected = vars(of_spec[part]), vars(by_name[part])
        assert type(of_spec[part]) is type(by_name[part]) and are_equal(
            result | {"_counts": 0}, expected | {"_counts": 0}
        )


@pytest.mark.parametrize("delta", [0.3, math.inf])
@pytest.mark.parametrize("granularity", ["element", "tensor"])
def test_first_epoch_is_bitwise_the_base(granularity: str, delta: float) -> None:
    plain, wrapped = make_mlp(bn=True), make_mlp(bn=True)
    train(plain, make_sgd(plain), STEPS)
    opt = make_tula_optimizer(wrapped, granularity=granularity, delta=delta)
    train(wrapped, opt, STEPS)
    assert are_equal(plain.state_dict(), wrapped.state_dict())
    assert get_ags_state(opt)["n_refresh"] == 1


def test_half_precision_factors_are_computed_in_float32() -> None:
    """float16 has no 1e-8: eps would vanish, and 0/0 would not come out as the floor."""
    large, small = torch.zeros(2, dtype=torch.float16), torch.tensor([0.0, 1.0], dtype=torch.float16)
    factor = gradient_stats.compute_element_factor(small, large, 1e-8, Bounds(1e-3, 4.0))
    assert factor.dtype is torch.float16
    assert factor.tolist() == pytest.approx([1e-3, 4.0], rel=1e-3)


def test_s_min_zero_is_the_printed_algorithm() -> None:
    hand = HandSetGradient(s_min=0.0)
    hand.step([1.0] * 4, small=[0.0] * 4)
    assert hand.factors == [0.0] * 4


@pytest.mark.parametrize("base", [{"nesterov": True}, {"momentum": 0.0, "weight_decay": 0.0}, {"fused": True}, "asgd"])
def test_delta_zero_is_bitwise_the_base(base: Any) -> None:
    runs = []
    for wrap in (False, True):
        model = make_mlp(bn=True, dropout=0.3)
        opt: torch.optim.Optimizer = torch.optim.ASGD(model.parameters()) if base == "asgd" else make_sgd(model, **base)
        opt = make_tula_optimizer(model, opt, delta=0.0, refresh=1) if wrap else opt
        torch.manual_seed(5)
        train(model, opt, 3 * STEPS)
        base_state = opt.state_dict()["base"] if wrap else opt.state_dict()
        runs.append((model.state_dict(), base_state, torch.get_rng_state()))
    assert are_equal(*runs)


# ---- properties over random models, dtypes, seeds and settings


SETTINGS: dict[str, dict[str, Any]] = {
    "paper": optim.PRESETS["paper"],
    "robust": optim.PRESETS["robust"],
    "tensor": {"granularity": "tensor"},
    "static": {"granularity": "static", "factor": 3.0},
    "smoothed": {"scale_ema": 0.7},
    "update": {"apply_to": "update"},
    "robust update": optim.PRESETS["robust"] | {"apply_to": "update"},
}


class Twin:
    """The plain way beside TulaOptimizer: the base on the same gradients, scaled by hand, in the same precision."""

    def __init__(self, model: nn.Module, way: dict[str, Any], delta: float) -> None:
        self.model, self.way, self.delta = copy.deepcopy(model), way, delta
        self.base = make_sgd(self.model)
        self.square: Tensor | None = None

    def step(self, x: Tensor, y: Tensor, factors: dict[int, Tensor]) -> bool:
        """One step with these factors; returns whether the gate let them act."""
        self.base.zero_grad()
        compute_loss(self.model, x, y).backward()
        params = list(self.model.parameters())
        self.raw = [p.grad.clone() for p in params if p.grad is not None]
        scaled = self._is_calm()
        if self.way.get("granularity") == "static":
            factors = {k: torch.tensor(self.way["factor"]) for k in range(len(params))}
        used = factors if scaled else {}
        before = [p.detach().clone() for p in params]
        with torch.no_grad():
            if self.way.get("apply_to") != "update":
                for k, s in used.items():
                    params[k].grad.mul_(s)  # type: ignore[union-attr]
            self.base.step()
            if self.way.get("apply_to") == "update":
                for k, s in used.items():
                    params[k].sub_(before[k]).mul_(s).add_(before[k])
        return scaled

    def _is_calm(self) -> bool:
        now = gradient_stats.compute_squared_norm(self.raw)
        change = gradient_stats.compute_gradient_change(now, self.square).abs()
        self.square = now
        return bool(change < self.delta)


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(SETTINGS)),
    dtype=st.sampled_from(DTYPES),
    hidden=st.lists(st.integers(1, 9), max_size=2),
    delta=st.sampled_from([0.0, 0.2, 0.5, math.inf]),
    refresh=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    is_on_accelerator=st.booleans(),
)
def test_every_step_is_the_base_on_what_the_factors_make_of_it(
    name: str, dtype: torch.dtype, hidden: list[int], delta: float, refresh: int, seed: int, is_on_accelerator: bool
) -> None:
    way = SETTINGS[name] | {"delta": delta, "refresh": refresh}
    model = make_mlp(widths=(5, *hidden, 3), seed=seed).to(dtype)
    opt, twin = make_tula_optimizer(model, **way), Twin(model, way, delta)
    for step in range(6):
        before = get_ags_state(opt)
        x, y = make_batch(step, dtype, seed)
        opt.zero_grad()
        compute_loss(model, x, y).backward()
        stage_small_batch_gradients(model, opt, x, y)
        small = torch.autograd.grad(compute_loss(twin.model, x[:B_SMALL], y[:B_SMALL]), list(twin.model.parameters()))
        with branch_on_device(optim, is_on_accelerator):
            opt.step()
        scaled = twin.step(x, y, before["scale"])
        now = get_ags_state(opt)
        assert now["n_scaled"] - before["n_scaled"] == (scaled and (name == "static" or bool(before["scale"])))
        assert are_equal(list(model.parameters()), list(twin.model.parameters()))
        assert are_equal(now["prev_sq"], twin.square)
        if now["n_refresh"] > before["n_refresh"]:
            assert_factors(now["scale"], before["scale"], small, twin.raw, way)


def assert_factors(
    scale: dict[int, Tensor],
    before: dict[int, Tensor],
    small: tuple[Tensor, ...],
    large: list[Tensor],
    way: dict[str, Any],
) -> None:
    setting = reference.Setting(B_LARGE, B_SMALL, way.get("granularity", "element"))
    arrays = [[g.double().numpy() for g in grads] for grads in (small, large)]
    for k, fresh in enumerate(reference.update_gradscale(*arrays, setting)):
        low, high = scale[k].double().min(), scale[k].double().max()
        assert setting.s_min <= low and high <= math.sqrt(B_LARGE / B_SMALL)
        old = before[k].double().expand(fresh.shape).numpy() if k in before else fresh
        expected = reference.average(fresh, old, way.get("scale_ema", 0.0))
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2**-6}[scale[k].dtype]
        result = np.broadcast_to(scale[k].double().numpy(), expected.shape)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=1e-9)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([*DTYPES, torch.float16]),
    zero_dim=st.booleans(),
    should_scale=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_the_device_branch_is_bitwise_the_host_branch(
    dtype: torch.dtype, zero_dim: bool, should_scale: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (5,), ()]
    grads = [torch.randn(s, generator=rng).to(dtype) for s in shapes]
    factors = [torch.rand(() if zero_dim else s, generator=rng) * 5.6 for s in shapes]
    factors = [f if zero_dim else f.to(dtype) for f in factors]
    on_host, is_on_accelerator = copy.deepcopy(grads), copy.deepcopy(grads)
    scale_on_host_(on_host, factors, torch.tensor(should_scale))
    scale_on_device_(is_on_accelerator, factors, torch.tensor(should_scale))
    assert are_equal(on_host, is_on_accelerator)
    assert are_equal(
        on_host, [(g * f).to(dtype) for g, f in zip(grads, factors, strict=True)] if should_scale else grads
    )


@settings(max_examples=60)
@given(dtype=st.sampled_from([*DTYPES, torch.float16]), b_small=st.integers(1, 500), seed=st.integers(0, 10_000))
def test_stored_factors_never_leave_the_bounds(dtype: torch.dtype, b_small: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    small, large = ((torch.randn(50, generator=rng) * 10 ** torch.randn(50, generator=rng)).to(dtype) for _ in "ab")
    bounds = Bounds(1e-3, gradient_stats.compute_factor_limit(501, b_small))
    (of_tensor,) = gradient_stats.compute_tensor_factors([small], [large], 1e-8, bounds)
    for factor in (of_tensor, gradient_stats.compute_element_factor(small, large, 1e-8, bounds)):
        assert bounds.low <= factor.min().item() and factor.max().item() <= bounds.high


@settings(max_examples=60)
@given(
    b_small=st.integers(1, 64),
    available=st.integers(1, 16),
    world=st.integers(1, 8),
    turn=st.integers(0, 20),
)
def test_the_draw_takes_the_small_batch_from_as_few_ranks_as_can_hold_it(
    b_small: int, available: int, world: int, turn: int
) -> None:
    counts = count_samples_per_rank(b_small, available, world, turn)
    assert len(counts) == world and max(counts) <= available
    assert sum(counts) == min(b_small, available * world)
    assert sum(n > 0 for n in counts) == min(world, -(-b_small // available))
    assert counts[turn % world] == max(counts) and max(counts) - min(n for n in counts if n) <= 1
