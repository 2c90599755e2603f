from __future__ import annotations

import copy
import math
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    compute_loss,
    get_ags_state,
    make_batch,
    make_mlp,
    make_sgd,
    make_tula_optimizer,
    train,
    train_step,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tula_cli.optim import (
    PRESETS,
    Gate,
    LocalNorms,
    MissedRefreshWarning,
    SmallBatch,
    Static,
    TulaOptimizer,
    configure_ags,
    explain_small_effect,
    gradient_stats,
)

# where only the gate is tested there is no small batch
pytestmark = pytest.mark.filterwarnings("ignore:an AGS refresh was due")


# ---- indicators


def test_squared_norm_takes_dense_and_sparse_gradients_of_all_dtypes() -> None:
    sparse = torch.sparse_coo_tensor(
        [[0, 2, 0]], torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 0.0]]), (4, 2), check_invariants=True
    )
    grads = [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.tensor(3.0), sparse]
    assert gradient_stats.compute_squared_norm(grads).item() == pytest.approx(12 + 9 + (4 + 4 + 9))
    assert gradient_stats.compute_squared_norm(grads).dtype is torch.float32
    grads.append(torch.ones(2, dtype=torch.float64))
    assert gradient_stats.compute_squared_norm(grads).dtype is torch.float64
    assert gradient_stats.compute_squared_norm(grads).item() == pytest.approx(40)


def test_squared_norm_of_bfloat16_is_summed_in_float32() -> None:
    assert gradient_stats.compute_squared_norm([torch.ones(1000, dtype=torch.bfloat16)]).item() == pytest.approx(1000)


def test_squared_norm_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        gradient_stats.compute_squared_norm([])


@given(now=st.floats(1e-6, 1e6), before=st.floats(1e-6, 1e6))
def test_gradient_change_is_equation_5(now: float, before: float) -> None:
    change = gradient_stats.compute_gradient_change(*(torch.tensor(q, dtype=torch.float64) for q in (now, before)))
    assert abs(change.item()) == pytest.approx(reference.relative_change(now, before))
    assert (change.item() < 0) == (now < before)


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clip_is_torchs(max_norm: float) -> None:
    grads = [torch.randn(3, 2), torch.randn(4)]
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    gradient_stats.clip_(grads, max_norm)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(p.grad, g)


# ---- the small pass


class Moody(nn.Module):
    """Keeps buffers in every awkward way: updated in place, replaced, created late, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp(bn=True, dropout=0.4)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.late = torch.ones(1)
        return self.net(x + 0.01 * torch.randn_like(x))


def test_the_small_pass_leaves_everything_as_it_was() -> None:
    model = Moody()
    opt = make_tula_optimizer(model, refresh=1)
    x, y = make_batch(0)
    compute_loss(model, x, y).backward()
    model.net[3].eval()  # one module in another mode than the rest
    model.late = None

    def snapshot() -> Any:
        modes = [m.training for m in model.modules()]
        grads = [p.grad.clone() for p in model.parameters()]
        state = {k: v.clone() for k, v in model.state_dict().items()}
        return modes, grads, state, torch.get_rng_state(), model.late is None

    before = snapshot()
    identities = [id(b) for b in model.buffers()]
    opt.small_batch(lambda n: compute_loss(model, x[:n], y[:n]))
    assert are_equal(before, snapshot())
    assert identities == [id(b) for b in model.buffers()]


def test_a_failing_small_pass_puts_buffers_and_generators_back() -> None:
    model = make_mlp(bn=True)
    opt = make_tula_optimizer(model, refresh=1)
    x, y = make_batch(0)
    compute_loss(model, x, y).backward()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def fail(n: int) -> Tensor:
        model(x[:n] + torch.randn(()))
        raise KeyError("lost")

    with pytest.raises(KeyError):
        opt.small_batch(fail)
    assert are_equal(before, model.state_dict()) and torch.equal(rng, torch.get_rng_state())


def test_the_small_pass_draws_from_the_seed() -> None:
    drawn = []
    for seed in (0, 0, 1):
        model = make_mlp()
        opt = make_tula_optimizer(model, refresh=1, seed=seed)
        x, y = make_batch(0)
        compute_loss(model, x, y).backward()
        torch.manual_seed(len(drawn))
        opt.small_batch(
            lambda n, x=x, y=y, model=model: drawn.append(torch.rand(()).item()) or compute_loss(model, x, y)
        )
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_small_batch_has_b_small_samples_or_what_is_available() -> None:
    for kwargs, n, high in (({}, B_SMALL, 2.0), ({"available": 2}, 2, math.sqrt(8)), ({"available": 8}, B_SMALL, 2.0)):
        model, requested = make_mlp(), []
        opt = make_tula_optimizer(model, refresh=1, **kwargs)
        x, y = make_batch(0)
        compute_loss(model, x, y).backward()
        opt.small_batch(lambda n, a=requested, m=model, x=x, y=y: a.append(n) or compute_loss(m, x[:n], y[:n]))
        assert requested == [n] and opt.setup.small_batch_size == n and opt.bounds.high == pytest.approx(high)


def test_the_small_pass_works_under_no_grad_and_autocast() -> None:
    model = make_mlp().float()
    opt = make_tula_optimizer(model, refresh=1)
    x, y = make_batch(0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        compute_loss(model, x, y).backward()

    def small(n: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compute_loss(model, x[:n], y[:n])

    with torch.no_grad():
        opt.small_batch(small)
    opt.step()
    assert {s.dtype for s in get_ags_state(opt)["scale"].values()} == {torch.float32}


def test_a_small_batch_that_is_not_finite_puts_the_refresh_off() -> None:
    hand = HandSetGradient(refresh="epoch", steps_per_epoch=2)
    hand.step([1.0] * 4)
    hand.step([1.0] * 4, small=[math.nan, 1.0, 1.0, 1.0])
    assert hand.factors is None and hand.opt.needs_small_batch
    hand.step([1.0] * 4, small=[1.0] * 4)
    assert hand.factors == pytest.approx([1.0] * 4)


def test_small_batch_out_of_turn_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs_small_batch"):
        HandSetGradient(refresh=2).small([1.0] * 4)


def test_a_forgotten_small_batch_is_said_once() -> None:
    hand = HandSetGradient()
    with pytest.warns(UserWarning, match="small_batch"):
        hand.step([1.0] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hand.step([1.0] * 4)


# ---- when


def wanted(opt: TulaOptimizer, model: nn.Module, steps: int) -> list[bool]:
    result = []
    for step in range(steps):
        result.append(opt.needs_small_batch)
        train_step(model, opt, step)
    return result


def test_refresh_at_the_last_step_of_each_epoch() -> None:
    model = make_mlp()
    assert wanted(make_tula_optimizer(model, steps_per_epoch=3), model, 7) == [False, False, True] * 2 + [False]


def test_start_epoch_changes_the_length() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, steps_per_epoch=None)
    for steps, pattern in ((3, [False, False, True]), (2, [False, True]), (1, [True])):
        opt.start_epoch(steps)
        assert wanted(opt, model, steps) == pattern
    assert wanted(opt, model, 2) == [True, True]


def test_start_epoch_is_about_one_epoch_where_the_usual_length_is_known() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, steps_per_epoch=3)
    opt.start_epoch(2)
    assert wanted(opt, model, 5) == [False, True, False, False, True]


def test_refresh_every_k_steps_counts_through_epochs() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, refresh=3)
    results = []
    for _ in range(3):
        opt.start_epoch(2)
        results += wanted(opt, model, 2)
    assert results == [False, False, True] * 2


def test_an_unknown_epoch_length_is_an_error() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, steps_per_epoch=None)
    with pytest.raises(RuntimeError, match="start_epoch"):
        _ = opt.needs_small_batch
    with pytest.raises(RuntimeError, match="start_epoch"):
        train_step(model, opt, 0)
    with pytest.raises(ValueError, match="at least 1"):
        opt.start_epoch(0)


def test_an_epoch_cut_short_by_skipped_steps_refreshes_in_the_next() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, steps_per_epoch=None)
    opt.start_epoch(3)
    assert wanted(opt, model, 2) == [False, False]
    opt.start_epoch(3)
    assert wanted(opt, model, 3) == [True, False, True]


# ---- it is an optimizer


def test_it_shares_the_bases_objects() -> None:
    model = make_mlp()
    base = make_sgd(model)
    opt = make_tula_optimizer(model, base)
    assert isinstance(opt, torch.optim.Optimizer)
    for _ in range(2):
        assert opt.param_groups is base.param_groups and opt.state is base.state and opt.defaults is base.defaults
        opt.load_state_dict(opt.state_dict())
    assert "lr: 0.1" in repr(opt)


def test_a_scheduler_takes_the_wrapper_or_the_base() -> None:
    for outer in (True, False):
        runs = []
        for wrap in (True, False):
            model = make_mlp()
            base = make_sgd(model)
            opt: torch.optim.Optimizer = make_tula_optimizer(model, base, delta=0.0) if wrap else base
            scheduler = torch.optim.lr_scheduler.StepLR(opt if outer else base, 2, 0.5)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for step in range(5):
                    train_step(model, opt, step)
                    scheduler.step()
            opt.load_state_dict(opt.state_dict())
            scheduler.step()
            assert base.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
            runs.append(model.state_dict())
        assert are_equal(*runs)


def test_two_groups_and_a_group_added_later() -> None:
    model = make_mlp()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    base = torch.optim.SGD([{"params": first, "lr": 0.1}], lr=0.01, momentum=0.9)
    opt = make_tula_optimizer(model, base, refresh=2, delta=math.inf)
    train(model, opt, 2)
    opt.add_param_group({"params": second})
    assert [g["lr"] for g in base.param_groups] == [0.1, 0.01]
    assert [*get_ags_state(opt)["scale"]] == [0, 1]
    train(model, opt, 2, start=2)
    assert [*get_ags_state(opt)["scale"]] == [0, 1, 2, 3]


def test_hooks_run() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model)
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *_: seen.append("before step"))
    opt.register_step_post_hook(lambda *_: seen.append("after step"))
    opt.register_state_dict_pre_hook(lambda *_: seen.append("before save"))
    opt.register_state_dict_post_hook(lambda _, state: state | {"note": 1})
    opt.register_load_state_dict_pre_hook(lambda _, state: seen.append(f"before load {state['note']}"))
    opt.register_load_state_dict_post_hook(lambda _: seen.append("after load"))
    train_step(model, opt, 0)
    opt.load_state_dict(opt.state_dict())
    assert seen == ["before step", "after step", "before save", "before load 1", "after load"]


def test_a_closure_is_evaluated_once_with_gradients() -> None:
    plain, closed = make_mlp(), make_mlp()
    first, second = make_tula_optimizer(plain, delta=math.inf), make_tula_optimizer(closed, delta=math.inf)
    for step in range(6):
        train_step(plain, first, step)
        x, y = make_batch(step)
        calls: list[float] = []

        def closure(x: Tensor = x, y: Tensor = y, calls: list[float] = calls) -> float:
            second.zero_grad()
            loss = compute_loss(closed, x, y)
            loss.backward()
            if second.needs_small_batch:
                second.small_batch(lambda n: compute_loss(closed, x[:n], y[:n]))
            calls.append(loss.item())
            return loss.item()

        assert second.step(closure) == calls[0] and len(calls) == 1
    assert are_equal(plain.state_dict(), closed.state_dict())


def test_it_can_be_copied_with_its_model() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, delta=math.inf)
    train(model, opt, 6)
    twin, twin_opt = copy.deepcopy((model, opt))
    for m, o in ((model, opt), (twin, twin_opt)):
        train(m, o, 6, start=6)
    assert are_equal(model.state_dict(), twin.state_dict()) and are_equal(get_ags_state(opt), get_ags_state(twin_opt))


# ---- GradScaler


def overflow(model: nn.Module) -> None:
    next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]


def train_scaled(
    model: nn.Module,
    opt: TulaOptimizer,
    steps: int,
    spoil: Callable[[nn.Module], None] | None = None,
    unscale: bool = False,
) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(steps):
        x, y = make_batch(step)
        opt.zero_grad()
        scaler.scale(compute_loss(model, x, y)).backward()
        if spoil is not None:
            spoil(model)
        if opt.needs_small_batch:
            opt.small_batch(lambda n, x=x, y=y: compute_loss(model, x[:n], y[:n]), scaler=scaler)
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    return scaler


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_changes_nothing(fused: bool, unscale: bool) -> None:
    plain, scaled = make_mlp(), make_mlp()
    first = make_tula_optimizer(plain, make_sgd(plain, fused=fused), delta=math.inf)
    second = make_tula_optimizer(scaled, make_sgd(scaled, fused=fused), delta=math.inf)
    train(plain, first, 3 * STEPS)
    train_scaled(scaled, second, 3 * STEPS, unscale=unscale)
    assert are_equal(plain.state_dict(), scaled.state_dict())
    assert are_equal(get_ags_state(first), get_ags_state(second))


def test_a_skipped_step_changes_nothing_but_puts_the_refresh_off() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, delta=math.inf)
    train_scaled(model, opt, STEPS - 1)
    before, weights = get_ags_state(opt), copy.deepcopy(model.state_dict())
    scaler = train_scaled(model, opt, 1, overflow)
    assert scaler.get_scale() == 2.0**9
    assert are_equal(weights, model.state_dict()) and are_equal(before, get_ags_state(opt))
    assert opt.needs_small_batch
    train_scaled(model, opt, 1)
    assert get_ags_state(opt)["n_refresh"] == 1


def test_zero_grad_drops_a_staged_gradient() -> None:
    hand = HandSetGradient()
    hand.p.grad = torch.ones(4, dtype=torch.float64)
    hand.small([2.0] * 4)
    hand.opt.zero_grad()
    assert hand.p.grad is None
    with pytest.warns(UserWarning, match="small_batch"):
        hand.step([1.0] * 4)
    assert hand.factors is None


def test_a_staged_gradient_is_used_once() -> None:
    hand = HandSetGradient(refresh=2)
    hand.step([1.0] * 4)
    hand.step([1.0] * 4, small=[2.0] * 4)
    hand.step([4.0] * 4)
    assert hand.factors == pytest.approx([2.0] * 4) and get_ags_state(hand.opt)["n_refresh"] == 1


# ---- parameters of all kinds


class Partial(nn.Module):
    """A frozen layer, one that never takes part, and one that only large batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused, self.rare = (nn.Linear(5, 3) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(x) + self.used(x)
        return result + self.rare(x) if len(x) == B_LARGE else result


def test_frozen_and_unused_parameters_are_left_out() -> None:
    torch.manual_seed(0)
    model = Partial().double()
    start = copy.deepcopy(model.state_dict())
    opt = make_tula_optimizer(model, make_sgd(model), delta=math.inf)
    train(model, opt, 3 * STEPS)
    names = [name for name, _ in model.named_parameters()]
    assert [names[k] for k in get_ags_state(opt)["scale"]] == ["used.weight", "used.bias"]
    changed = {name for name, p in model.state_dict().items() if not torch.equal(p, start[name])}
    assert changed == {"used.weight", "used.bias", "rare.weight", "rare.bias"}


def test_no_gradient_at_all_is_the_bases_step() -> None:
    hand = HandSetGradient()
    hand.small([1.0] * 4)
    hand.opt.step()
    assert hand.p.tolist() == [0.0] * 4 and get_ags_state(hand.opt)["prev_sq"] is None


@pytest.mark.parametrize("granularity", ["element", "tensor"])
def test_sparse_gradients_count_in_the_norm_and_stay_unscaled(granularity: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(10, 4, mode="sum", sparse=True), "head": nn.Linear(4, 1)})
    twin = copy.deepcopy(model)
    base = torch.optim.SGD(twin.parameters(), lr=0.1)
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = make_tula_optimizer(model, wrapped, b_large=8, b_small=2, refresh=1, delta=math.inf, granularity=granularity)
    index = torch.randint(0, 10, (8, 3))

    def loss(m: nn.ModuleDict, n: int) -> Tensor:
        return m["head"](m["bag"](index[:n])).square().mean()

    with pytest.warns(UserWarning, match="sparse") as caught:
        for step in range(3):
            before = get_ags_state(opt)["scale"]
            for m, o in ((model, opt), (twin, base)):
                o.zero_grad()
                loss(m, 8).backward()
            opt.small_batch(lambda n: loss(model, n))
            square = gradient_stats.compute_squared_norm([p.grad for p in model.parameters() if p.grad is not None])
            opt.step()
            for k, p in enumerate(twin.parameters()):
                if step and k:
                    p.grad.mul_(before[k])  # type: ignore[union-attr]
            base.step()
            assert [*get_ags_state(opt)["scale"]] == [1, 2]
            assert are_equal(model.state_dict(), twin.state_dict()) and are_equal(get_ags_state(opt)["prev_sq"], square)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:AGS counts sparse")
def test_a_gradient_that_becomes_sparse_is_not_scaled() -> None:
    hand = HandSetGradient()
    hand.step([1.0] * 4, small=[2.0] * 4)
    hand.p.grad = torch.ones(4, dtype=torch.float64).to_sparse()
    hand.small([2.0] * 4)
    hand.opt.step()
    assert hand.scaled == 1 and hand.p.tolist() == [-2.0] * 4
    assert hand.factors is None


@pytest.mark.parametrize("b_small", [B_SMALL, B_LARGE])
def test_max_grad_norm_clips_what_the_base_sees(b_small: int) -> None:
    hand = HandSetGradient(max_grad_norm=1.0, b_small=b_small)
    if b_small == B_LARGE:
        assert hand.step([3.0, 0.0, 0.0, 4.0]) == pytest.approx([0.6, 0.0, 0.0, 0.8], abs=1e-6)
        return
    hand.step([3.0, 0.0, 0.0, 4.0], small=[3.0, 0.0, 0.0, 8.0])
    assert get_ags_state(hand.opt)["prev_sq"].item() == pytest.approx(25.0)
    assert hand.step([3.0, 0.0, 0.0, 4.0], small=[0.0] * 4) == pytest.approx(
        [3 / math.sqrt(73), 0.0, 0.0, 8 / math.sqrt(73)], abs=1e-6
    )


# ---- checkpoints


def saved(path: Path, model: nn.Module, opt: TulaOptimizer) -> Any:
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@pytest.mark.parametrize("stop", [1, STEPS - 1, STEPS, 2 * STEPS + 2])
@pytest.mark.parametrize("told", [False, True])
def test_resume_is_bitwise(tmp_path: Path, granularity: str, stop: int, told: bool) -> None:
    model, total = make_mlp(bn=True), 4 * STEPS
    opt = make_tula_optimizer(model, granularity=granularity)
    train(model, opt, stop)
    checkpoint = saved(tmp_path / "c.pt", model, opt)
    train(model, opt, total - stop, start=stop)
    again = make_mlp(bn=True, seed=9)
    resumed = make_tula_optimizer(again, granularity=granularity, steps_per_epoch=None if told else STEPS)
    again.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["opt"])
    if told:
        rest = STEPS - stop % STEPS
        resumed.start_epoch(rest)
        train(again, resumed, rest, start=stop)
        stop += rest
        resumed.start_epoch(STEPS)
    train(again, resumed, total - stop, start=stop)
    assert are_equal(model.state_dict(), again.state_dict())
    assert are_equal(get_ags_state(opt), get_ags_state(resumed)) and are_equal(
        opt.state_dict()["base"], resumed.state_dict()["base"]
    )
    assert get_ags_state(opt)["n_scaled"] > 0 and get_ags_state(opt)["n_refresh"] == 4


def test_resume_scales_in_its_first_step(tmp_path: Path) -> None:
    hand, again = HandSetGradient(refresh=2), HandSetGradient(refresh=2)
    hand.step([1.0] * 4)
    hand.step([1.0] * 4, small=[2.0] * 4)
    again.opt.load_state_dict(saved(tmp_path / "c.pt", hand.model, hand.opt)["opt"])
    assert again.step([1.0] * 4) == pytest.approx([2.0] * 4)


@pytest.mark.parametrize("other", [{"b_large": 8}, {"b_small": 2}, {"granularity": "tensor"}])
def test_another_batch_voids_the_factors_and_keeps_the_base(other: dict[str, Any]) -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model)
    train(model, opt, STEPS + 2)
    state = copy.deepcopy(opt.state_dict())
    resumed = make_tula_optimizer(model, **other)
    resumed.load_state_dict(state)
    result = get_ags_state(resumed)
    assert result["scale"] == {} and result["prev_sq"] is None
    assert are_equal(resumed.state_dict()["base"], state["base"]) and result["n_steps"] == STEPS + 2
    assert wanted(resumed, model, STEPS) == [False] * (STEPS - 1) + [True]


@pytest.mark.parametrize("other", [{"b_large": 8}, {"b_small": 2}])
def test_another_batch_on_the_way_is_that_of_a_resumed_one_and_refreshes_at_once(other: dict[str, int]) -> None:
    sizes = {"b_large": B_LARGE, "b_small": B_SMALL, **other}
    model = make_mlp()
    opt, resumed = make_tula_optimizer(model), make_tula_optimizer(model, **other)
    train(model, opt, STEPS + 2)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.report()
    opt.change_batch(**sizes)
    resumed.request_refresh()
    assert are_equal(get_ags_state(opt), get_ags_state(resumed)) and get_ags_state(opt)["scale"] == {}
    assert opt.bounds == resumed.bounds and opt.needs_small_batch
    train(model, opt, 1)
    before = get_ags_state(opt)
    opt.change_batch(**sizes)
    assert are_equal(get_ags_state(opt), before) and before["scale"], "the same batch changes nothing"


def test_a_constant_factor_follows_the_batch() -> None:
    def made(factor: float | None) -> TulaOptimizer:
        model = make_mlp()
        return TulaOptimizer(make_sgd(model), model=model, b_large=B_LARGE, b_small=B_SMALL, factors=Static(factor))

    opt, value = made(None), made(3.0)
    assert opt.bounds.high == pytest.approx(math.sqrt(B_LARGE / B_SMALL))
    opt.change_batch(b_large=4 * B_LARGE, b_small=B_SMALL)
    assert opt.bounds.high == pytest.approx(2 * math.sqrt(B_LARGE / B_SMALL))
    value.change_batch(b_large=4 * B_LARGE, b_small=B_SMALL)
    assert value.bounds.high == 3
    with pytest.raises(ValueError, match="b_small must be at most b_large"):
        value.change_batch(b_large=2, b_small=4)


def test_a_loaded_state_drops_what_was_staged() -> None:
    hand = HandSetGradient()
    state = hand.opt.state_dict()
    hand.p.grad = torch.ones(4, dtype=torch.float64)
    hand.small([2.0] * 4)
    hand.opt.load_state_dict(state)
    with pytest.warns(UserWarning, match="small_batch"):
        hand.step([1.0] * 4)
    assert hand.factors is None


def test_a_refresh_owed_survives_a_checkpoint() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, steps_per_epoch=None)
    opt.start_epoch(3)
    wanted(opt, model, 2)
    resumed = make_tula_optimizer(model, steps_per_epoch=None)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    resumed.start_epoch(3)
    assert resumed.needs_small_batch


def test_a_foreign_state_is_refused() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model)
    with pytest.raises(ValueError, match="this is not the state of a TulaOptimizer"):
        opt.load_state_dict(make_sgd(model).state_dict())
    state = opt.state_dict()
    state["ags"]["version"] = 99
    with pytest.raises(ValueError, match="format 99"):
        opt.load_state_dict(state)


# ---- what is refused, and what is the identity


@pytest.mark.parametrize(
    "name",
    [
        *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Adafactor", "SparseAdam"),
        *("Rprop", "Muon", "LBFGS"),
    ],
)
def test_bases_that_undo_a_factor_are_refused(name: str) -> None:
    base = getattr(torch.optim, name, None)
    if base is None:
        pytest.skip(f"this torch has no {name}")
    kind = type(f"My{name}", (base,), {})
    model = nn.Linear(3, 3, bias=False)
    for cls in (base, kind):
        with pytest.raises(ValueError, match=rf"{cls.__name__} .*torch\.optim\.SGD"):
            make_tula_optimizer(model, cls(model.parameters()))


def test_such_bases_are_taken_where_the_gradient_is_not_scaled() -> None:
    runs = []
    for delta in (0.0, math.inf):
        model = make_mlp()
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, make_tula_optimizer(model, base, delta=delta, refresh=1, apply_to="update"), STEPS)
        runs.append(model.state_dict())
    assert not are_equal(*runs)


def test_a_scaled_update_of_adam_is_the_factor_times_adams() -> None:
    """Weight decay is part of the update; Adam's own state is what it would be without."""
    model = make_mlp()
    opt = make_tula_optimizer(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), delta=math.inf, refresh=1, apply_to="update"
    )
    train(model, opt, 2)
    twin, factors = copy.deepcopy(model), get_ags_state(opt)["scale"]
    adam = torch.optim.AdamW(twin.parameters(), lr=0.01)
    adam.load_state_dict(copy.deepcopy(opt.state_dict()["base"]))
    start = [p.detach().clone() for p in twin.parameters()]
    train(model, opt, 1, start=2)
    train(twin, adam, 1, start=2)
    for k, (p, q, w) in enumerate(zip(model.parameters(), twin.parameters(), start, strict=True)):
        torch.testing.assert_close(p.detach() - w, factors[k] * (q.detach() - w))
    assert are_equal(opt.state_dict()["base"], adam.state_dict())


@pytest.mark.parametrize("name", ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"])
def test_sharding_bases_are_refused(name: str) -> None:
    kind = type(name, (torch.optim.SGD,), {})
    model = make_mlp()
    with pytest.raises(ValueError, match=f"{name}.*DistributedDataParallel"):
        make_tula_optimizer(model, kind(model.parameters(), lr=0.1))


def test_sharded_modules_are_refused() -> None:
    kind = type("FSDPModule", (nn.Linear,), {})
    model = nn.Sequential(kind(3, 3))
    with pytest.raises(ValueError, match="FSDPModule"):
        make_tula_optimizer(model)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        make_tula_optimizer(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"b_large": 0}, {"b_small": 0}, {"available": 0}, {"steps_per_epoch": 0}, {"max_grad_norm": 0.0},
        {"preset": "fast"}, {"apply_to": "weights"}, {"steps_per_epoch": 2.5}, {"b_large": 16.0}, {"b_small": "4"},
        {"b_small": None}, {"available": 2.5}, {"max_grad_norm": "1"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    model = make_mlp()
    with pytest.raises(ValueError, match=name):
        TulaOptimizer(make_sgd(model), model=model, **({"b_large": B_LARGE, "b_small": B_SMALL} | wrong))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((Gate, {"delta": delta}) for delta in (-1.0, math.nan, "0.5", None)),
        *((SmallBatch, wrong) for wrong in ({"eps": -1.0}, {"eps": "tiny"}, {"per": "layer"}, {"ema": -0.1})),
        *((SmallBatch, {"s_min": s_min}) for s_min in (2.0, -0.1, True)),
        *((SmallBatch, {"refresh": refresh}) for refresh in (0, "step", 2.5, True)),
        *((LocalNorms, wrong) for wrong in ({"ema": 1.0}, {"refresh": 0})),
        *((Static, {"factor": factor}) for factor in (0.0, math.nan, "cap")),
    ],
)
def test_wrong_settings_are_named(kind: type, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        kind(**wrong)


def test_a_wrong_kind_is_named_with_what_is_wanted() -> None:
    with pytest.raises(ValueError, match=r"^delta must be a number, got '0\.5'$"):
        Gate("0.5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"an integer of at least 1 \(steps\), got 2\.5$"):
        SmallBatch(refresh=2.5)  # type: ignore[arg-type]


def test_settings_that_local_norms_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match="granularity tensor"):
        configure_ags({**PRESETS["robust"], "granularity": "element"})


@pytest.mark.parametrize("kind", [Gate, SmallBatch, LocalNorms, Static])
def test_what_serves_one_optimizer_is_not_for_another(kind: type) -> None:
    model, given = make_mlp(), {"gate" if kind is Gate else "factors": kind()}
    TulaOptimizer(make_sgd(model), model=model, b_large=B_LARGE, b_small=B_SMALL, **given)
    with pytest.raises(ValueError, match=f"this {kind.__name__} belongs to another"):
        TulaOptimizer(make_sgd(model), model=model, b_large=B_LARGE, b_small=B_SMALL, **given)


def test_what_is_given_takes_the_presets_place() -> None:
    model, gate, factors = make_mlp(), Gate(0.1), SmallBatch("tensor")
    opt = TulaOptimizer(make_sgd(model), model=model, b_large=B_LARGE, b_small=B_SMALL, preset="robust", gate=gate)
    assert opt.gate is gate and opt.factors.kind == "local_norms"
    opt = TulaOptimizer(make_sgd(model), model=model, b_large=B_LARGE, b_small=B_SMALL, factors=factors)
    assert opt.factors is factors and opt.gate.delta == 0.5


def test_a_model_without_the_bases_parameters_is_refused() -> None:
    model, other = make_mlp(), make_mlp()
    with pytest.raises(ValueError, match="SGD updates none of the parameters of the model Sequential"):
        make_tula_optimizer(model, make_sgd(other))
    make_tula_optimizer(
        model, torch.optim.SGD([*other.parameters(), next(model.parameters())], lr=0.1)
    )  # one is enough


def test_a_small_batch_above_the_large_one_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"b_small must be at most b_large \({B_LARGE}\), got {4 * B_LARGE}"):
        make_tula_optimizer(make_mlp(), b_small=4 * B_LARGE)


def test_no_smaller_batch_is_the_identity_and_says_so() -> None:
    plain, wrapped = make_mlp(bn=True, dropout=0.2), make_mlp(bn=True, dropout=0.2)
    with pytest.warns(UserWarning) as text:
        opt = make_tula_optimizer(wrapped, b_small=B_LARGE, steps_per_epoch=None, delta=math.inf)
    assert opt.identity is not None and str(B_LARGE) in opt.identity
    assert [str(warning.message) for warning in text] == [opt.identity]
    for model, optimizer in ((plain, make_sgd(plain)), (wrapped, opt)):
        torch.manual_seed(3)
        train(model, optimizer, 2 * STEPS)
    assert are_equal(plain.state_dict(), wrapped.state_dict())
    assert not opt.needs_small_batch and opt.compute_memory() == 0
    assert get_ags_state(opt)["n_refresh"] == 0 and opt.report()["scaled"] == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_tula_optimizer(wrapped).identity is None


# ---- numbers for the log


def test_report_before_anything_happened() -> None:
    assert HandSetGradient().opt.report() == {
        "mean": 1.0, "at_cap": 0.0, "at_floor": 0.0, "scaled": 0.0, "jumps_up": 0.0, "jumps_down": 0.0,
        "delta": math.inf, "refreshes": 0.0, "steps": 0.0, "factors": 0.0,
    }  # fmt: skip


def report_of(**changed: float) -> dict[str, float]:
    usual = {"steps": 100.0, "factors": 10.0, "scaled": 0.5, "at_floor": 0.1, "jumps_up": 0.2, "jumps_down": 0.3}
    return usual | changed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"scaled": 0.2, "jumps_up": 0.5, "at_floor": 0.3}, []),
        (
            {"scaled": 0.19, "jumps_up": 0.4, "jumps_down": 0.41},
            ["19 % of 100 steps, because in 81 % of the steps.*delta"],
        ),
        ({"scaled": 0.0}, []),  # but for the gate: there were no factors yet
        ({"at_floor": 0.31}, ["31 % of the AGS factors.*s_min"]),
        ({"scaled": 0.0, "jumps_up": 1.0, "at_floor": 1.0}, ["0 % of 100 steps", "100 % of the AGS factors"]),
        ({"scaled": 0.0, "jumps_up": 1.0, "factors": 0.0}, []),
        ({"scaled": 0.0, "jumps_up": 1.0, "steps": 0.0}, []),
    ],
)
def test_advice_is_given_where_ags_hardly_acts(changed: dict[str, float], words: list[str]) -> None:
    result = list(explain_small_effect(report_of(**changed)).values())
    assert len(result) == len(words)
    assert all(re.search(word, line) for word, line in zip(words, result, strict=True))


def test_advice_reads_a_report() -> None:
    hand = HandSetGradient(delta=0.01)
    for size in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):  # all but the first are jumps
        hand.step([size] * 4, small=[0.0] * 4)
    assert [*explain_small_effect(hand.opt.report())] == ["scaled", "at_floor"]
    assert explain_small_effect(hand.opt.report()) == {}  # no step since


def test_settings_in_force_are_in_the_report() -> None:
    static = HandSetGradient(granularity="static", factor=3.0).opt.report()
    assert (static["factors"], static["mean"], static["at_floor"]) == (1.0, 3.0, 0.0)


def test_report_counts_since_the_report_before() -> None:
    hand = HandSetGradient(refresh=4)
    hand.step([1.0] * 4)
    hand.step([10.0] * 4)
    hand.step([1.0] * 4)
    hand.step([1.0] * 4, small=[0.0, 1.0, 9.0, 9.0])
    first = hand.opt.report()
    assert first["mean"] == pytest.approx((1e-3 + 1 + 4 + 4) / 4)
    assert (first["at_cap"], first["at_floor"]) == (0.5, 0.25)
    assert (first["scaled"], first["jumps_up"], first["jumps_down"]) == (0.0, 0.25, 0.25)
    assert first["delta"] == 0.0 and first["refreshes"] == 1.0
    for size in (1.0, 1.0, 1.0, 2.0):
        hand.step([size] * 4, small=[1.0] * 4 if size == 2.0 else None)
    second = hand.opt.report()
    assert (second["scaled"], second["jumps_up"], second["jumps_down"]) == (0.75, 0.25, 0.0)
    assert {type(v) for v in first.values()} == {float}


@pytest.mark.parametrize("called", [True, False])
def test_without_factors_no_step_counts_as_scaled(called: bool) -> None:
    hand = HandSetGradient(delta=math.inf, refresh=2)
    for step in range(4):
        hand.step([1.0] * 4, small=[2.0] * 4 if called and step % 2 else None)
        assert hand.opt.report()["scaled"] == (called and step > 1)
    assert hand.scaled == (2 if called else 0)


def test_report_does_not_touch_the_training() -> None:
    quiet, loud = make_mlp(), make_mlp()
    first, second = make_tula_optimizer(quiet), make_tula_optimizer(loud)
    for step in range(3 * STEPS):
        train_step(quiet, first, step)
        train_step(loud, second, step)
        second.report()
    assert are_equal(quiet.state_dict(), loud.state_dict()) and are_equal(get_ags_state(first), get_ags_state(second))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["element", "tensor"])
def test_memory_is_that_of_the_factors(granularity: str, dtype: torch.dtype) -> None:
    model = make_mlp().to(dtype)
    opt = make_tula_optimizer(model, granularity=granularity)
    expected = opt.compute_memory()
    train(model, opt, STEPS, dtype=dtype)
    assert (
        expected
        == opt.compute_memory()
        == sum(s.numel() * s.element_size() for s in get_ags_state(opt)["scale"].values())
    )
    if granularity == "element":
        assert expected == sum(p.numel() * p.element_size() for p in model.parameters())


def test_python_and_numpy_generators_are_left_alone() -> None:
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    train(model := make_mlp(), make_tula_optimizer(model), STEPS)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]


# ---- what is left out


def test_what_is_left_out_takes_the_steps_of_the_base() -> None:
    model, plain = make_mlp(), make_mlp()
    plain.load_state_dict(model.state_dict())
    first, *others = model.parameters()
    bases = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
    before = [p.detach().clone() for p in model.parameters()]
    settings: dict[str, Any] = {"factors": Static(2.0), "gate": Gate(math.inf), "b_large": B_LARGE, "b_small": B_SMALL}
    opt = TulaOptimizer(bases[0], model=model, exclude=[first], **settings)
    for step in range(2):  # the gate scales from the second on
        for net, optimizer in ((model, opt), (plain, bases[1])):
            net.load_state_dict(dict(zip(net.state_dict(), before, strict=True)))
            train_step(net, optimizer, step)
    assert torch.equal(first, next(plain.parameters()))
    moved = [(p - old, q - old) for p, q, old in zip(others, [*plain.parameters()][1:], before[1:], strict=True)]
    assert all(torch.allclose(ours, 2 * theirs) for ours, theirs in moved)


@pytest.mark.parametrize("per", ["element", "tensor"])
def test_no_factor_is_found_or_held_for_what_is_left_out(per: str) -> None:
    model = make_mlp()
    first = next(model.parameters())
    opt = make_tula_optimizer(model, granularity=per, refresh={"every": 1}, delta=math.inf, exclude=[first])
    whole = make_tula_optimizer(make_mlp(), granularity=per, refresh={"every": 1}, delta=math.inf)
    train(model, opt, 3)
    assert [*get_ags_state(opt)["scale"]] == [*range(1, len([*model.parameters()]))]
    assert opt.compute_memory() < whole.compute_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole.load_state_dict(opt.state_dict())
    assert not get_ags_state(whole)["scale"], "factors of another choice are void"


def test_a_missed_refresh_is_reported_once_also_after_others_that_were_not() -> None:
    model, (x, y) = make_mlp(), make_batch(2)
    opt = make_tula_optimizer(model, refresh=1, delta=math.inf)

    def step_without_small_batch() -> None:
        opt.zero_grad()
        compute_loss(model, x, y).backward()
        opt.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, 2)
    with pytest.warns(MissedRefreshWarning, match=r"small_batch\(\) was not called"):
        step_without_small_batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_without_small_batch()


def test_parameters_that_share_a_gradient_have_the_same_factors() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
    opt = make_tula_optimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), granularity="element", refresh=1, delta=math.inf
    )
    x = torch.arange(1.0, 3 * B_LARGE + 1).reshape(B_LARGE, 3)

    def loss(n: int) -> Tensor:
        return ((model[0] + model[1]) * x[:n]).sum(1).mean()  # autograd returns one tensor as the gradient of both

    loss(B_LARGE).backward()
    opt.small_batch(loss)
    opt.step()
    expected = x[:B_SMALL].mean(0) / x.mean(0)
    for factor in (get_ags_state(opt)["scale"][k] for k in range(2)):
        torch.testing.assert_close(factor, expected)


def test_leaving_everything_out_is_refused() -> None:
    model = make_mlp()
    with pytest.raises(ValueError, match="no parameter to scale"):
        make_tula_optimizer(model, exclude=list(model.parameters()))
