"""Further checks of AGS for zero values and for many tensors; they register in the CHECKS of ags_checks."""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from ags_checks import assert_close, register_check
from ags_models import compute_loss, make_batch, make_mlp, make_tula_optimizer
from torch import Tensor


def import_module(package: Any, name: str) -> Any:
    """Return a module of the package or of its copy."""
    return importlib.import_module(f"{package.__name__}.{name}")


# ---- layer-wise steps of zero gradients


def parameter(gradient: float) -> Tensor:
    weight = torch.full((2, 2), 3.0, requires_grad=True)
    weight.grad = torch.full((2, 2), gradient)
    return weight


@register_check
def a_lamb_step_of_nothing_moves_nothing(package: Any) -> None:
    weight = parameter(0.0)
    import_module(package, "layerwise").Lamb([weight], lr=0.1).step()
    assert_close(weight.detach(), 3.0)


@register_check
def lars_without_a_gradient_takes_the_plain_step_of_the_decay(package: Any) -> None:
    weight = parameter(0.0)
    import_module(package, "layerwise").Lars([weight], lr=0.5, weight_decay=0.1).step()
    assert_close(weight.detach(), 3.0 * (1 - 0.5 * 0.1))


# ---- the refresh schedule


@register_check
def a_schedule_resumed_from_another_interval_begins_anew(package: Any) -> None:
    RefreshSchedule = import_module(package, "ags").RefreshSchedule
    before, after = RefreshSchedule.from_settings(5, None), RefreshSchedule.from_settings(3, None)
    for _ in range(4):
        before.count_step(refreshed=False)
    before.request_refresh()
    after.load_state_dict(before.state_dict())
    assert (after.taken, after.steps, after.owed, after.is_due) == (0, 3, False, False)
    same = RefreshSchedule.from_settings(5, None)
    same.load_state_dict(before.state_dict())
    assert (same.taken, same.owed) == (4, True)


@register_check
def a_restarted_schedule_owes_nothing(package: Any) -> None:
    schedule = import_module(package, "ags").RefreshSchedule.from_settings(3, None)
    schedule.request_refresh()
    schedule.restart()
    assert not schedule.is_due


# ---- random numbers of the small pass


def read_small_pass_seed(opt: Any, *, step: int, rank: int = 0) -> int:
    """Return the random seed at the start of a small pass on one rank."""
    seen: list[int] = []
    x, y = make_batch(0)
    setup = dataclasses.replace(opt.setup, rank=rank, world=2 if rank else 1)
    params = list(setup.model.parameters())
    small = find_small_pass_module(setup)

    def loss(n: int) -> Tensor:
        seen.append(torch.initial_seed())
        return compute_loss(setup.model, x[:n], y[:n])

    combined = small._average_over_ranks
    small._average_over_ranks = lambda grads, *_: grads
    try:
        setup.compute_small_batch_gradients(loss, params, refresh_index=rank, step=step, scaler=None)
    finally:
        small._average_over_ranks = combined
    return seen[0]


def find_small_pass_module(setup: Any) -> Any:
    """Return the module with the small pass of a setup's package."""
    return importlib.import_module(type(setup).__module__)


@register_check
def a_small_pass_draws_anew_at_each_step_and_on_each_rank(package: Any) -> None:
    opt = make_tula_optimizer(make_mlp(dropout=0.4), package=package, refresh=1)
    seeds = {read_small_pass_seed(opt, step=step, rank=rank) for step in (0, 1) for rank in (0, 1)}
    assert len(seeds) == 4
    assert read_small_pass_seed(opt, step=1, rank=1) in seeds, "and the same again at the same place"


# ---- gradients without a reduction


@register_check
def listeners_hear_of_gradients_while_the_replicas_are_apart(package: Any) -> None:
    reduction = import_module(package, "ddp_hook")
    heard: list[str] = []

    def listener(bucket: Any) -> Any:
        heard.append("before")
        return lambda: heard.append("after")

    state = reduction.ReductionHook(group=None, local=True, listeners=[listener])
    gradient = torch.ones(3)
    value = reduction._reduce_bucket(state, SimpleNamespace(buffer=lambda: gradient)).wait()
    assert heard == ["before", "after"]
    assert value is gradient and value.tolist() == [1.0] * 3


# ---- many tensors


@register_check
def many_tensors_are_scaled_on_the_device_as_on_the_host(package: Any) -> None:
    scaling = import_module(package, "gradient_stats")
    kept, draw = scaling.CHUNK_BYTES, torch.Generator().manual_seed(0)
    start = [torch.randn(3, generator=draw) for _ in range(150)]
    factors = [torch.rand(3, generator=draw) + 0.5 for _ in start]
    for should_scale, chunk in ((True, kept), (True, 70 * 12), (False, kept)):
        here, there, moved = ([t.clone() for t in start] for _ in range(3))
        scaling.CHUNK_BYTES = chunk
        try:
            scaling.scale_on_host_(here, factors, torch.tensor(should_scale))
            scaling.scale_on_device_(there, factors, torch.tensor(should_scale))
            torch._foreach_add_(moved, 1.0)
            scaling._scale_change_on_device_(moved, start, factors, torch.tensor(should_scale))
        finally:
            scaling.CHUNK_BYTES = kept
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
        expected = [s + (f if should_scale else 1.0) for s, f in zip(start, factors, strict=True)]
        for result, wanted in zip(moved, expected, strict=True):
            assert_close(result, wanted, tolerance=1e-5)
