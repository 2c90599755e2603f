"""Checks of AGS as functions of the package that implements it: tula_cli.optim, or a copy with a planted error.

test_verification runs them on the package; test_mutants checks that each planted error fails at least one check.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ags_reference as reference
import numpy as np
import torch
from ags_models import (
    B_LARGE,
    B_SMALL,
    STEPS,
    HandSetGradient,
    are_equal,
    branch_on_device,
    compute_loss,
    get_ags_state,
    make_arguments,
    make_batch,
    make_mlp,
    make_sgd,
    make_tula_optimizer,
    stage_small_batch_gradients,
    train,
)
from torch import Tensor, nn

Check = Callable[[Any], None]
CHECKS: dict[str, Check] = {}


def register_check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def assert_close(result: Any, expected: Any, *, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


# ---- Algorithm 1 against the reference


def copy_weights(model: nn.Module) -> reference.Arrays:
    return [p.detach().double().numpy().copy() for p in model.parameters()]


def make_gradient_function(model: nn.Module) -> reference.Gradient:
    twin = copy.deepcopy(model)

    def gradient(weights: reference.Arrays, step: int, small: bool) -> reference.Arrays:
        with torch.no_grad():
            for p, w in zip(twin.parameters(), weights, strict=True):
                p.copy_(torch.from_numpy(w))
        x, y = make_batch(step)
        n = B_SMALL if small else B_LARGE
        grads = torch.autograd.grad(compute_loss(twin, x[:n], y[:n]), list(twin.parameters()))
        return [g.numpy() for g in grads]

    return gradient


def train_with_reference(package: Any, *, bn: bool = False, every: int | None = None, **kwargs: Any) -> list[bool]:
    """Train with the package and with the reference, compare weights, branch and factors after each step; return the branches.

    Args:
        every: refresh interval in steps; None: once per epoch.
        kwargs: of TulaOptimizer and of the reference's Setting.
    """
    model, steps = make_mlp(bn), 5 * STEPS
    setting = reference.Setting(B_LARGE, B_SMALL, **{"lr": 0.1, "momentum": 0.9, "decay": 1e-3} | kwargs)
    refreshes = range((every or STEPS) - 1, steps, every or STEPS)
    expected = reference.run(copy_weights(model), make_gradient_function(model), steps, refreshes, setting)
    opt = make_tula_optimizer(model, package=package, refresh=every or "epoch", **kwargs)
    for i in range(steps):
        before = get_ags_state(opt)["n_scaled"]
        x, y = make_batch(i)
        opt.zero_grad()
        compute_loss(model, x, y).backward()
        stage_small_batch_gradients(model, opt, x, y)
        opt.step()
        state = get_ags_state(opt)
        assert state["n_scaled"] - before == expected.scaled[i], f"branch of step {i}"
        for ours, theirs in zip(copy_weights(model), expected.weights[i], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-8)
        if setting.granularity == "static":
            continue
        for k, theirs in enumerate(expected.factors[i]):
            ours = state["scale"].get(k, torch.ones(())).numpy()
            assert_close(np.broadcast_to(ours, theirs.shape), theirs)
    assert state["n_refresh"] == (0 if setting.granularity == "static" else len(refreshes))
    return expected.scaled


@register_check
def elements_equal_the_reference(package: Any) -> None:
    branches = train_with_reference(package, delta=0.3)
    assert {*branches[STEPS:]} == {True, False}


@register_check
def tensors_equal_the_reference(package: Any) -> None:
    branches = train_with_reference(package, granularity="tensor", delta=0.3, bn=True)
    assert {*branches[STEPS:]} == {True, False}


@register_check
def smoothed_factors_equal_the_reference(package: Any) -> None:
    train_with_reference(package, granularity="tensor", delta=10.0, every=1, scale_ema=0.8)
    train_with_reference(package, delta=10.0, every=3, scale_ema=0.3)


@register_check
def a_scaled_update_equals_the_reference(package: Any) -> None:
    branches = train_with_reference(package, delta=0.3, apply_to="update", bn=True)
    assert {*branches[STEPS:]} == {True, False}
    train_with_reference(package, delta=10.0, apply_to="update", granularity="tensor", every=3)


@register_check
def static_scaling_equals_the_reference(package: Any) -> None:
    for apply_to in ("gradient", "update"):
        train_with_reference(package, granularity="static", factor=3.0, delta=0.3, apply_to=apply_to)


# ---- the gate


@register_check
def the_threshold_is_strict_and_on_squared_norms(package: Any) -> None:
    first, second = [4.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]  # |G|^2 from 16 to 4: a change of exactly 0.75
    for delta, scaled in ((0.75, 0), (math.nextafter(0.75, 1), 1)):
        hand = HandSetGradient(package, delta=delta, granularity="static")
        hand.step(first)
        hand.step(second)
        assert hand.scaled == scaled


@register_check
def an_undefined_change_is_not_scaled(package: Any) -> None:
    for first in ([0.0] * 4, [math.nan] * 4, [math.inf] * 4):
        hand, result = HandSetGradient(package, delta=math.inf, granularity="static"), []
        for grads in (first, [0.0] * 4, [1.0] * 4, [1.0] * 4):
            hand.step(grads)
            result.append(hand.scaled)
        assert result == [0, 0, 0, 1]


@register_check
def only_steps_with_factors_count_as_scaled(package: Any) -> None:
    hand, result = HandSetGradient(package, refresh=2), []
    for small in (None, [2.0] * 4, None):
        hand.step([1.0] * 4, small=small)
        result.append(hand.scaled)
    assert result == [0, 0, 1]


@register_check
def the_norm_is_kept_after_unscaled_steps_too(package: Any) -> None:
    hand = HandSetGradient(package)
    hand.step([1.0] * 4, small=[2.0] * 4)
    assert_close(hand.step([10.0] * 4, small=[20.0] * 4), [10.0] * 4)
    assert_close(hand.step([10.0] * 4, small=[20.0] * 4), [20.0] * 4)


@register_check
def norm_and_factors_are_of_the_unscaled_gradient(package: Any) -> None:
    hand = HandSetGradient(package)
    hand.step([1.0] * 4, small=[3.0] * 4)
    assert_close(hand.step([1.0] * 4, small=[2.0] * 4), [3.0] * 4)
    assert_close(float(get_ags_state(hand.opt)["prev_sq"]), 4.0)
    assert_close(hand.factors, [2.0] * 4)


@register_check
def new_factors_act_from_the_next_step_on(package: Any) -> None:
    hand = HandSetGradient(package, refresh=2)
    hand.step([1.0] * 4)
    assert_close(hand.step([1.0] * 4, small=[2.0] * 4), [1.0] * 4)
    assert_close(hand.step([1.0] * 4), [2.0] * 4)


@register_check
def delta_zero_is_bitwise_the_base(package: Any) -> None:
    for kwargs in ({}, {"granularity": "tensor"}, {"apply_to": "update"}, {"granularity": "static", "factor": 4.0}):
        runs = []
        for wrap in (False, True):
            model = make_mlp(bn=True, dropout=0.3)
            opt: Any = make_sgd(model, nesterov=True)
            opt = make_tula_optimizer(model, opt, package, delta=0.0, refresh=1, **kwargs) if wrap else opt
            torch.manual_seed(5)
            train(model, opt, 2 * STEPS)
            base_state = opt.state_dict()["base"] if wrap else opt.state_dict()
            runs.append((model.state_dict(), base_state, torch.get_rng_state()))
        assert are_equal(*runs), kwargs


# ---- factors


@register_check
def degenerate_ratios_and_bounds(package: Any) -> None:
    hand = HandSetGradient(package, b_large=32, b_small=2)
    hand.step([0.0, 0.0, -1e-8, 2.0], small=[0.0, 5.0, 0.0, -3.0])
    assert_close(
        hand.factors, [1e-3, 4.0, 1.0, 1.5]
    )  # 0/0: the lower bound; x/0: s_max; 0/(-eps + eps): 1; absolute values
    hand.step([1.0, -1.0, 1.0, 1e-8], small=[100.0, 100.0, 1e-9, 2e-8])
    assert_close(hand.factors, [4.0, 4.0, 1e-3, 1.0])  # the last: eps is added to g_large, not to the quotient


@register_check
def tensor_factors_are_ratios_of_norms(package: Any) -> None:
    bounds = package.gradient_stats.Bounds(1e-3, 4.0)
    for small, large, expected in (([3.0, 4.0], [6.0, 8.0], 0.5), ([3.0], [0.0], 4.0), ([0.0], [0.0], 1e-3)):
        (factor,) = package.gradient_stats.compute_tensor_factors(
            [torch.tensor(small)], [torch.tensor(large)], 1e-8, bounds
        )
        assert factor.shape == ()
        assert_close(float(factor), expected)


@register_check
def factors_leave_the_gradients_alone(package: Any) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        small, large = torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([4.0, 4.0]).to(dtype)
        bounds = package.gradient_stats.Bounds(1e-3, 4.0)
        factor = package.gradient_stats.compute_element_factor(small, large, 1e-8, bounds)
        assert small.tolist() == [1.0, 2.0] and large.tolist() == [4.0, 4.0] and factor.dtype is dtype
        reused = package.gradient_stats.compute_element_factor(small, large, 1e-8, bounds, overwrite=True)
        assert reused is small and large.tolist() == [4.0, 4.0] and are_equal(reused, factor)
        assert_close(factor.double().tolist(), [0.25, 0.5])


@register_check
def large_tensors_are_taken_in_parts_that_are_the_whole(package: Any) -> None:
    rng, rules = torch.Generator().manual_seed(0), package.gradient_stats
    bounds, size = rules.Bounds(1e-3, 4.0), rules.CPU_PART_ELEMENTS + 7
    small, large = (torch.randn(size, generator=rng).to(torch.float16).view(1, 1, -1, 1) for _ in "ab")
    factor = rules.compute_element_factor(small, large, 1e-8, bounds)
    known = (small.float() / (large.float() + 1e-8)).abs().nan_to_num(nan=1.0, posinf=4.0).clamp(1e-3, 4.0)
    assert factor.shape == small.shape and torch.allclose(factor.float(), known, rtol=2e-3, atol=1e-3)
    # Uninitialised memory may by chance hold the correct factors of an earlier call.
    reused = rules.compute_element_factor(small, large, 1e-8, bounds, overwrite=True)
    assert torch.allclose(reused.float(), known, rtol=2e-3, atol=1e-3)
    image = torch.randn(2, 3, 4, 5, generator=rng)
    strided = rules.compute_element_factor(image, image.contiguous(memory_format=torch.channels_last) * 2, 1e-8, bounds)
    assert_close(strided.flatten().tolist(), [0.5] * 120)


@register_check
def the_static_factor_is_by_default_the_cap(package: Any) -> None:
    hand = HandSetGradient(package, granularity="static", b_large=32, b_small=2)
    hand.step([1.0] * 4)
    assert not hand.opt.needs_small_batch and hand.opt.compute_memory() == 0
    assert_close(hand.step([1.0] * 4), [4.0] * 4)
    assert_close(hand.step([2.0] * 4), [2.0] * 4)
    assert HandSetGradient(package, granularity="static", factor=1.0).opt.identity
    assert HandSetGradient(package, granularity="static", b_large=4, b_small=4).opt.identity


@register_check
def clipping_comes_after_scaling(package: Any) -> None:
    hand = HandSetGradient(package, max_grad_norm=1.0)
    hand.step([3.0, 0.0, 0.0, 4.0], small=[3.0, 0.0, 0.0, 8.0])
    assert_close(float(get_ags_state(hand.opt)["prev_sq"]), 25.0)
    clipped = [3 / math.sqrt(73), 0.0, 0.0, 8 / math.sqrt(73)]
    assert_close(hand.step([3.0, 0.0, 0.0, 4.0], small=[0.0] * 4), clipped)


# ---- on the device


@register_check
def the_device_branch_is_bitwise_the_host_branch(package: Any) -> None:
    ways: list[dict[str, Any]] = [{}, {"granularity": "tensor"}, {"granularity": "static", "factor": 3.0}]
    for way in [way | {"apply_to": to} for way in ways for to in ("gradient", "update")]:
        runs = []
        for is_on_accelerator in (False, True):
            model = make_mlp()
            opt = make_tula_optimizer(model, package=package, delta=0.3, refresh=2, **way)
            with branch_on_device(package, is_on_accelerator):
                train(model, opt, 3 * STEPS)
            runs.append((model.state_dict(), opt.state_dict()))
        assert are_equal(*runs), way


# ---- the small pass


@register_check
def the_small_pass_leaves_everything_as_it_was(package: Any) -> None:
    model = make_mlp(bn=True, dropout=0.4)
    opt = make_tula_optimizer(model, package=package, refresh=1)
    x, y = make_batch(0)
    compute_loss(model, x, y).backward()

    def snapshot() -> Any:
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        return grads, copy.deepcopy(model.state_dict()), torch.get_rng_state()

    before = snapshot()
    opt.small_batch(lambda n: compute_loss(model, x[:n], y[:n]))
    assert are_equal(before, snapshot())


@register_check
def a_small_batch_that_is_not_finite_puts_the_refresh_off(package: Any) -> None:
    hand = HandSetGradient(package, refresh="epoch", steps_per_epoch=2)
    hand.step([1.0] * 4)
    hand.step([1.0] * 4, small=[math.nan, 1.0, 1.0, 1.0])
    assert hand.factors is None and hand.opt.needs_small_batch
    hand.step([1.0] * 4, small=[1.0] * 4)
    assert_close(hand.factors, [1.0] * 4)


@register_check
def a_staged_gradient_is_used_once_or_dropped(package: Any) -> None:
    hand = HandSetGradient(package, refresh=2)
    hand.step([1.0] * 4)
    hand.step([1.0] * 4, small=[2.0] * 4)
    hand.step([4.0] * 4)
    assert_close(hand.factors, [2.0] * 4)
    hand = HandSetGradient(package)
    hand.p.grad = torch.ones(4, dtype=torch.float64)
    hand.small([2.0] * 4)
    hand.opt.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hand.step([1.0] * 4)
    assert hand.factors is None


@register_check
def grad_scaler_changes_nothing(package: Any) -> None:
    runs = []
    for scaled in (False, True):
        model = make_mlp()
        opt = make_tula_optimizer(model, make_sgd(model, fused=True), package, delta=math.inf)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(2 * STEPS):
            x, y = make_batch(step)
            opt.zero_grad()
            scaler.scale(compute_loss(model, x, y)).backward()
            if opt.needs_small_batch:
                opt.small_batch(lambda n, m=model, x=x, y=y: compute_loss(m, x[:n], y[:n]), scaler=scaler)
            scaler.step(opt)
            scaler.update()
        runs.append((model.state_dict(), get_ags_state(opt)))
    assert are_equal(*runs)


# ---- checkpoints


@register_check
def resume_is_bitwise(package: Any) -> None:
    ways: list[dict[str, Any]] = [{}, {"granularity": "tensor", "scale_ema": 0.5, "refresh": 1}]
    for way in ways:
        runs = []
        for stop in (3 * STEPS, STEPS + 2):
            model = make_mlp(bn=True)
            opt = make_tula_optimizer(model, package=package, **way)
            train(model, opt, stop)
            again = make_mlp(bn=True, seed=9)
            resumed = make_tula_optimizer(again, package=package, **way)
            again.load_state_dict(copy.deepcopy(model.state_dict()))
            resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
            train(again, resumed, 3 * STEPS - stop, start=stop)
            runs.append((again.state_dict(), resumed.state_dict()))
        assert are_equal(*runs), way
        assert get_ags_state(opt)["n_scaled"] > 0


@register_check
def factors_of_other_settings_are_discarded(package: Any) -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, package=package)
    train(model, opt, STEPS + 2)
    changes: list[dict[str, Any]] = [
        *({"b_large": 8}, {"b_small": 2}, {"granularity": "tensor"}, {"apply_to": "update"}),
        *({"scale_ema": 0.5}, {"granularity": "tensor", "source": "local_norms"}, {"available": 2}),
    ]
    for other in changes:
        resumed = make_tula_optimizer(model, package=package, **other)
        resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert get_ags_state(resumed)["scale"] == {} and get_ags_state(resumed)["prev_sq"] is None, other
        assert are_equal(resumed.state_dict()["base"], opt.state_dict()["base"])
    for kept in ({}, {"delta": 0.1}, {"s_min": 0.1}):
        resumed = make_tula_optimizer(model, package=package, **kept)
        resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert len(get_ags_state(resumed)["scale"]) == 4, kept


# ---- gradients of separate ranks


class OtherRanks:
    """Stand-in for torch.distributed in one process: the contributions of the other ranks are given in advance."""

    def __init__(self, others: list[list[Tensor]]) -> None:
        self.others = others

    def get_world_size(self) -> int:
        return len(self.others) + 1

    def all_reduce(self, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """Sum gradients of a bucket (averaged by the hook beforehand), or their squared norms."""
        if async_op:
            tensor += sum(torch.cat(other) for other in self.others) / self.get_world_size()
            future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
            future.set_result([tensor])
            return SimpleNamespace(get_future=lambda: future)
        tensor += sum(torch.stack([g.square().sum() for g in other]) for other in self.others)
        return None


@contextmanager
def simulate_ranks(package: Any, others: list[list[Tensor]]) -> Iterator[None]:
    module = package.ddp_hook
    kept, module.dist = module.dist, OtherRanks(others)
    yield
    module.dist = kept


def register_as_rank(package: Any, opt: Any, world: int) -> Any:
    """Make an optimizer with local norms act as one of several ranks; return its listener for reductions."""
    listener = package.ddp_hook.NormListener(lambda: True)
    opt.factors._setup = dataclasses.replace(opt.setup, world=world)
    opt.factors._listener, opt.factors.reads_b_small = listener, False
    return listener


def reduce_bucket(package: Any, listener: Any, params: list[Tensor], own: list[Tensor], world: int) -> list[Tensor]:
    """Pass one bucket through the hook and return the averaged gradients."""
    buffer = torch.cat([g.flatten() for g in own])
    views = [v.view(p.shape) for v, p in zip(buffer.split([p.numel() for p in params]), params, strict=True)]
    bucket = SimpleNamespace(buffer=lambda: buffer, gradients=lambda: views, parameters=lambda: params, index=lambda: 0)
    group = SimpleNamespace(size=lambda: world)
    package.ddp_hook._reduce_bucket(package.ddp_hook.ReductionHook(group, listeners=[listener]), bucket).wait()
    return views


@register_check
def local_norms_equal_the_reference(package: Any) -> None:
    """Three ranks with gradients of two parameters: the ranks agree about the first and differ in the second."""
    rng = torch.Generator().manual_seed(3)
    common = torch.randn(5, generator=rng, dtype=torch.float64)
    value = [[common + 0.5 * torch.randn(5, generator=rng, dtype=torch.float64), torch.zeros(3)] for _ in range(3)]
    for grads in value:
        grads[1] = torch.randn(3, generator=rng, dtype=torch.float64)
    params: list[Tensor] = [nn.Parameter(torch.zeros_like(g)) for g in value[0]]
    opt = package.TulaOptimizer(
        torch.optim.SGD(params, lr=1.0),
        model=nn.ParameterList(params),
        b_large=3,
        b_small=1,
        **make_arguments(package, **package.PRESETS["robust"]),
    )
    listener = register_as_rank(package, opt, 3)
    expected = [reference.local_factor([grads[k].numpy() for grads in value], 1e-3) for k in range(2)]
    before = [0.0, 0.0]
    for turn in range(3):
        factor = 2.0**turn  # like a loss scale: unknown to the optimizer
        with simulate_ranks(package, [[g * factor for g in grads] for grads in value[1:]]):
            views = reduce_bucket(package, listener, params, [g * factor for g in value[0]], 3)
            for p, g in zip(params, views, strict=True):
                p.grad = g / factor
            start = [p.detach().clone() for p in params]
            opt.step()
        seen = [
            float((w - p.detach()).norm() / (g / factor).norm()) for w, p, g in zip(start, params, views, strict=True)
        ]
        assert_close(seen, [1.0, 1.0] if turn == 0 else before)
        before = [float(s) for s in opt.factors.tensors]
        assert_close(before, expected)
    assert 1 < expected[0] < math.sqrt(3) and expected[1] > expected[0]


@register_check
def local_factors_keep_what_is_not_finite_and_their_bounds(package: Any) -> None:
    small = torch.tensor([4.0, math.inf, 1.0, 0.0, 1.0, 100.0])
    large = torch.tensor([1.0, 1.0, math.nan, 0.0, 0.0, 1.0])
    bounds = package.gradient_stats.Bounds(1e-3, 3.0)
    result = package.gradient_stats.compute_local_factors(small, large, torch.full((6,), 0.5), bounds)
    assert_close(result.tolist(), [2.0, 0.5, 0.5, 1.0, 3.0, 3.0])


@register_check
def the_presets_are_the_documented_ones(package: Any) -> None:
    paper, robust = (describe_settings(package, **given) for given in ({}, {"preset": "robust"}))
    assert (paper.factors.kind, paper.factors.per, paper.factors.refresh) == ("small_batch", "element", "epoch")
    assert (paper.factors.s_min, paper.factors.eps, paper.factors.ema) == (1e-3, 1e-8, 0.0)
    assert (paper.gate.delta, paper.apply_to) == (0.5, "gradient")
    assert (robust.factors.kind, robust.factors.per, robust.factors.refresh) == ("local_norms", "tensor", 1)
    assert (robust.factors.s_min, robust.factors.ema, robust.gate.delta) == (1e-3, 0.9, math.inf)
    assert robust.needs_small_batch  # in one process


def describe_settings(package: Any, **kwargs: Any) -> Any:
    model = make_mlp()
    return package.TulaOptimizer(make_sgd(model), model=model, b_large=B_LARGE, b_small=B_SMALL, **kwargs)
