"""What AGS costs beside the arithmetic: no waiting for the device inside a step, memory as documented, one pass."""

from __future__ import annotations

import gc
import itertools
import math
import shutil
from typing import Any

import pytest
import torch
from ags_checks import several_ranks
from ags_models import STEPS, batch, loss_of, mlp, same, take_small_batch, train, train_step, tula
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tula_cli import optim
from tula_cli.optim import PRESETS
from tula_cli.optim.parts import gradient_scaling
from tula_cli.optim.parts.gradient_scaling import scale_compiled_, scale_on_host_
from tula_cli.optim.parts.local_norms import LocalNorms
from tula_cli.worker.footprint import LiveStorages

pytestmark = pytest.mark.torch
WAYS: dict[str, dict[str, Any]] = {
    "element": {},
    "tensor": {"granularity": "tensor"},
    "static": {"granularity": "static", "factor": 3.0},
    "none": {"granularity": "none"},
    "update": {"apply_to": "update"},
    "smoothed": {"norm_ewma": 0.5, "scale_ema": 0.5, "refresh": 1},
    "clipped": {"max_grad_norm": 1.0},
}


# ---- no host synchronisation


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for the device: a number or a shape that depends on a tensor's content."""

    REFUSED = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def step_without_waiting(model: nn.Module, opt: Any, step: int) -> None:
    x, y = batch(step)
    opt.zero_grad()
    loss_of(model, x, y).backward()
    take_small_batch(model, opt, x, y)
    with NoWaiting():
        opt.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_does_not_wait_for_the_device(way: str) -> None:
    model = mlp()
    opt = tula(model, _on_device=True, delta=math.inf, **WAYS[way])
    train(model, opt, STEPS)  # the bounds are rounded to the dtype once
    for step in range(STEPS, 3 * STEPS):
        step_without_waiting(model, opt, step)
    assert opt.report()["steps"] == 3 * STEPS


def test_a_step_on_the_host_would_wait() -> None:
    model = mlp()
    opt = tula(model, _on_device=False, delta=math.inf, refresh=1)
    train(model, opt, STEPS)
    with pytest.raises(AssertionError, match="waits"):
        step_without_waiting(model, opt, STEPS)


def test_factors_from_local_norms_do_not_wait() -> None:
    model = mlp()
    params: list[Tensor] = list(model.parameters())
    opt = tula(model, _on_device=True, consensus="off", **PRESETS["robust"])
    opt._world, opt._local = 2, LocalNorms(lambda: True)
    opt.bounds.rounded(torch.float64)  # once, on the host
    for step in range(4):
        opt.zero_grad()
        loss_of(model, *batch(step)).backward()
        listen_to_all(opt._local, params)
        with several_ranks(optim, [[p.grad for p in params if p.grad is not None]]), NoWaiting():
            opt.step()
    assert opt.report()["refreshes"] == 4


def listen_to_all(listener: LocalNorms, params: list[Tensor]) -> None:
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> None:
        monkeypatch.setattr(gradient_scaling, "CHUNK", 1)
        self.model = mlp(widths=WIDTHS)
        self.copy = sum(p.numel() * p.element_size() for p in self.model.parameters())
        base = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.opt = tula(self.model, base, refresh=1, delta=math.inf, **kwargs)
        for step in range(2):  # gradients and factors are there
            train_step(self.model, self.opt, step)
        self.opt.zero_grad()

    def lasting(self) -> float:
        state = self.opt.state_dict()["ags"]["scale"].values()
        return sum(s.untyped_storage().nbytes() for s in state) / self.copy

    def peak(self) -> float:
        """Beyond the gradients and the factors, from backward() to the end of the step."""
        x, y = batch(2)
        loss_of(self.model, x, y).backward()
        gc.collect()
        params = list(self.model.parameters())
        with LiveStorages() as storages:
            storages.hold([*params, *(p.grad for p in params), *self.opt.factors])
            storages.restart()
            before = storages.live
            take_small_batch(self.model, self.opt, x, y)
            self.opt.step()
        return (storages.peak - before) / self.copy


LARGEST = 200 * 200 / sum(a * b for a, b in itertools.pairwise(WIDTHS))
SLACK = 0.1  # activations of the small pass, 0-dim tensors


@pytest.mark.parametrize("on_device", [False, True])
def test_elements_take_one_copy_and_two_at_the_peak(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    memory = Memory(monkeypatch, _on_device=on_device)
    assert memory.lasting() == pytest.approx(1.0)
    assert memory.lasting() + memory.peak() <= 2 + 2 * LARGEST + SLACK


@pytest.mark.parametrize("on_device", [False, True])
def test_tensors_take_nothing_that_lasts(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    memory = Memory(monkeypatch, granularity="tensor", _on_device=on_device)
    assert memory.lasting() < 0.001
    assert memory.peak() <= 1 + SLACK  # the small gradient, gone before the step


@pytest.mark.parametrize("kwargs", [{"granularity": "static", "factor": 2.0}, {"granularity": "none"}])
def test_without_a_small_batch_there_is_nothing_to_hold(monkeypatch: pytest.MonkeyPatch, kwargs: Any) -> None:
    for on_device in (False, True):
        memory = Memory(monkeypatch, _on_device=on_device, **kwargs)
        assert memory.lasting() == 0 and memory.peak() < 0.01


@pytest.mark.parametrize(("on_device", "copies"), [(False, 1), (True, 2)])
def test_an_update_takes_a_copy_for_a_moment(monkeypatch: pytest.MonkeyPatch, on_device: bool, copies: int) -> None:
    memory = Memory(monkeypatch, granularity="static", factor=2.0, apply_to="update", _on_device=on_device)
    assert memory.peak() <= copies + on_device * LARGEST + SLACK


# ---- a single pass


def test_compile_takes_the_single_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def plainly(tensors: list[Tensor], factors: list[Tensor], calm: Tensor) -> None:
        calls.append(len(tensors))
        gradient_scaling._scale_each_(tensors, factors, calm)

    monkeypatch.setattr(gradient_scaling, "_single_pass", lambda: plainly)
    runs = []
    for compiled in (False, True):
        model = mlp()
        opt = tula(model, delta=0.3, compile=compiled)
        train(model, opt, 3 * STEPS)
        runs.append((model.state_dict(), opt.state_dict()))
    assert same(*runs) and calls == [4] * (2 * STEPS)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler")
def test_the_compiled_pass_is_bitwise_the_host_branch() -> None:
    rng = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        grads = [torch.randn(s, generator=rng).to(dtype) for s in ((33, 7), (5,))]
        factors = [(5 * torch.rand(g.shape, generator=rng)).to(dtype) for g in grads]
        for calm in (True, False):
            hosts, compiled = [g.clone() for g in grads], [g.clone() for g in grads]
            scale_on_host_(hosts, factors, torch.tensor(calm))
            scale_compiled_(compiled, factors, torch.tensor(calm))
            assert same(hosts, compiled)
