"""The costs of AGS beside its arithmetic: no step waits for the device, and memory is as documented."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest
import torch
from ags_checks import register_as_rank, simulate_ranks
from ags_models import (
    STEPS,
    branch_on_device,
    compute_loss,
    make_batch,
    make_mlp,
    make_tula_optimizer,
    stage_small_batch_gradients,
    train,
    train_step,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tula_cli import optim
from tula_cli.optim import PRESETS, gradient_stats
from tula_cli.optim.ddp_hook import NormListener
from tula_cli.worker.measure.fake_tensor_step import LiveStorages

pytestmark = pytest.mark.torch
WAYS: dict[str, dict[str, Any]] = {
    "element": {},
    "tensor": {"granularity": "tensor"},
    "static": {"granularity": "static", "factor": 3.0},
    "update": {"apply_to": "update"},
    "smoothed": {"scale_ema": 0.5, "refresh": 1},
    "clipped": {"max_grad_norm": 1.0},
}


# ---- no host synchronisation


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for the device: a number or a shape that depends on a tensor's content."""

    REFUSED_OPTIMIZERS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED_OPTIMIZERS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def step_without_waiting(model: nn.Module, opt: Any, step: int) -> None:
    x, y = make_batch(step)
    opt.zero_grad()
    compute_loss(model, x, y).backward()
    stage_small_batch_gradients(model, opt, x, y)
    with NoWaiting():
        opt.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_does_not_wait_for_the_device(way: str) -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, delta=math.inf, **WAYS[way])
    with branch_on_device(optim, True):
        train(model, opt, STEPS)  # the bounds are rounded to the dtype once
        for step in range(STEPS, 3 * STEPS):
            step_without_waiting(model, opt, step)
    assert opt.report()["steps"] == 3 * STEPS


def test_a_step_on_the_host_would_wait() -> None:
    model = make_mlp()
    opt = make_tula_optimizer(model, delta=math.inf, refresh=1)
    train(model, opt, STEPS)
    with pytest.raises(AssertionError, match="waits"):
        step_without_waiting(model, opt, STEPS)


def test_factors_from_local_norms_do_not_wait() -> None:
    model = make_mlp()
    params: list[Tensor] = list(model.parameters())
    opt = make_tula_optimizer(model, **PRESETS["robust"])
    listener = register_as_rank(optim, opt, 2)
    opt.bounds.round_inwards(torch.float64)  # once, on the host
    for step in range(4):
        opt.zero_grad()
        compute_loss(model, *make_batch(step)).backward()
        listen_to_all(listener, params)
        grads = [p.grad for p in params if p.grad is not None]
        with simulate_ranks(optim, [grads]), branch_on_device(optim, True), NoWaiting():
            opt.step()
    assert opt.report()["refreshes"] == 4


def listen_to_all(listener: NormListener, params: list[Tensor]) -> None:
    """As the hook does with a bucket of all gradients."""

    class Bucket:
        index = staticmethod(lambda: 0)
        buffer = staticmethod(lambda: torch.zeros(()))
        parameters = staticmethod(lambda: params)
        gradients = staticmethod(lambda: [p.grad for p in params])

    after = listener(Bucket())  # type: ignore[arg-type]
    assert after is not None
    after()


# ---- memory, in copies of the parameters


WIDTHS = (5, 200, 200, 200, 200, 3)


class Memory:
    """The bytes that a wrapped step takes beyond the model, its gradients and the base, in copies of the parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_on_accelerator: bool, **kwargs: Any) -> None:
        monkeypatch.setattr(gradient_stats, "CHUNK_BYTES", 1)
        monkeypatch.setattr(gradient_stats, "is_on_accelerator", lambda tensor: is_on_accelerator)
        self.model = make_mlp(widths=WIDTHS)
        self.copy = sum(p.numel() * p.element_size() for p in self.model.parameters())
        base = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.opt = make_tula_optimizer(self.model, base, refresh=1, delta=math.inf, **kwargs)
        for step in range(2):  # gradients and factors are there
            train_step(self.model, self.opt, step)
        self.opt.zero_grad()

    def lasting(self) -> float:
        state = self.opt.factors.tensors
        return sum(s.untyped_storage().nbytes() for s in state) / self.copy

    def peak(self) -> float:
        """Beyond the gradients and the factors, from backward() to the end of the step."""
        x, y = make_batch(2)
        compute_loss(self.model, x, y).backward()
        gc.collect()
        params = list(self.model.parameters())
        with LiveStorages() as storages:
            storages.track_storages([*params, *(p.grad for p in params), *self.opt.factors.tensors])
            storages.restart()
            before = storages.live_bytes
            stage_small_batch_gradients(self.model, self.opt, x, y)
            self.opt.step()
        return (storages.peak - before) / self.copy


LARGEST = 200 * 200 / sum(a * b for a, b in itertools.pairwise(WIDTHS))
SLACK = 0.1  # activations of the small pass, 0-dim tensors


@pytest.mark.parametrize("is_on_accelerator", [False, True])
def test_elements_take_one_copy_and_two_at_the_peak(monkeypatch: pytest.MonkeyPatch, is_on_accelerator: bool) -> None:
    memory = Memory(monkeypatch, is_on_accelerator=is_on_accelerator)
    assert memory.lasting() == pytest.approx(1.0)
    assert memory.lasting() + memory.peak() <= 2 + 2 * LARGEST + SLACK


@pytest.mark.parametrize("is_on_accelerator", [False, True])
def test_tensors_take_nothing_that_lasts(monkeypatch: pytest.MonkeyPatch, is_on_accelerator: bool) -> None:
    memory = Memory(monkeypatch, granularity="tensor", is_on_accelerator=is_on_accelerator)
    assert memory.lasting() < 0.001
    assert memory.peak() <= 1 + SLACK  # the small gradient, gone before the step


@pytest.mark.parametrize("is_on_accelerator", [False, True])
def test_without_a_small_batch_there_is_nothing_to_hold(
    monkeypatch: pytest.MonkeyPatch, is_on_accelerator: bool
) -> None:
    memory = Memory(monkeypatch, granularity="static", factor=2.0, is_on_accelerator=is_on_accelerator)
    assert memory.lasting() == 0 and memory.peak() < 0.01


@pytest.mark.parametrize("is_on_accelerator", [False, True])
def test_an_update_takes_a_copy_for_a_moment(monkeypatch: pytest.MonkeyPatch, is_on_accelerator: bool) -> None:
    memory = Memory(
        monkeypatch, granularity="static", factor=2.0, apply_to="update", is_on_accelerator=is_on_accelerator
    )
    assert memory.peak() <= 1 + is_on_accelerator * 2 * LARGEST + SLACK
