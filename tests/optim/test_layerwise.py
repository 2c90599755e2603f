"""LARS and LAMB against plain transcriptions of their papers' algorithms."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tula_cli.optim.layerwise import Lamb, Lars

Array = NDArray[np.float64]
SHAPES = ((4, 3), (5,), (2, 3, 3, 3), ())
RATES = (0.1, 0.1, 1.0, 0.4, 0.05)  # a schedule: what is inside of the momentum shows


def parameters(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in SHAPES]


def gradients(steps: int) -> Iterator[list[Array]]:
    random = np.random.default_rng(1)
    for _ in range(steps):
        yield [random.normal(size=shape) for shape in SHAPES]


def stepped(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> list[Array]:
    for lr, grads in zip(RATES, gradients(len(RATES)), strict=True):
        step(optimizer, params, lr, grads)
    return [p.detach().numpy() for p in params]


def step(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], lr: float, grads: list[Array]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = torch.as_tensor(g).to(p.dtype)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


# --- the papers' algorithms


def lars(weights: list[Array], *, m: float, beta: float, eta: float, nesterov: bool = False) -> list[Array]:
    """You, Gitman, Ginsburg 2017, Algorithm 1; biases and norms take SGD's step without decay."""
    weights = [w.copy() for w in weights]
    v = [np.zeros_like(w) for w in weights]
    for gamma, grads in zip(RATES, gradients(len(RATES)), strict=True):
        for i, g in enumerate(grads):
            w, decay, local = weights[i], 0.0, 1.0
            if w.ndim > 1:
                decay = beta
                local = eta * np.linalg.norm(w) / (np.linalg.norm(g) + beta * np.linalg.norm(w))
            update = gamma * local * (g + decay * w)
            v[i] = m * v[i] + update
            weights[i] = w - (update + m * v[i] if nesterov else v[i])
    return weights


def lamb(weights: list[Array], *, b1: float, b2: float, eps: float, decay: float) -> list[Array]:
    """You et al. 2020, Algorithm 2 with phi(z) = z; biases and norms take Adam's step without decay."""
    weights = [w.copy() for w in weights]
    m, v = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    for t, (lr, grads) in enumerate(zip(RATES, gradients(len(RATES)), strict=True), 1):
        for i, g in enumerate(grads):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            r = (m[i] / (1 - b1**t)) / (np.sqrt(v[i] / (1 - b2**t)) + eps)
            w, ratio = weights[i], 1.0
            if w.ndim > 1:
                r = r + decay * w
                ratio = np.linalg.norm(w) / np.linalg.norm(r)
            weights[i] = w - lr * ratio * r
    return weights


@pytest.mark.parametrize(
    "settings",
    [
        {"m": 0.9, "beta": 5e-4, "eta": 0.001},
        {"m": 0.0, "beta": 0.1, "eta": 0.02},
        {"m": 0.9, "beta": 0.0, "eta": 0.001},
        {"m": 0.8, "beta": 0.01, "eta": 0.01, "nesterov": True},
    ],
)
def test_lars_is_the_papers_algorithm(settings: dict[str, Any]) -> None:
    params = parameters()
    expected = lars([p.detach().numpy() for p in params], **settings)
    optimizer = Lars(
        params,
        lr=1.0,
        momentum=settings["m"],
        weight_decay=settings["beta"],
        trust_coefficient=settings["eta"],
        nesterov=settings.get("nesterov", False),
        eps=0.0,
    )
    for ours, theirs in zip(stepped(optimizer, params), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


@pytest.mark.parametrize(("decay", "betas", "eps"), [(0.01, (0.9, 0.999), 1e-6), (0.0, (0.5, 0.9), 1e-3)])
def test_lamb_is_the_papers_algorithm(decay: float, betas: tuple[float, float], eps: float) -> None:
    params = parameters()
    expected = lamb([p.detach().numpy() for p in params], b1=betas[0], b2=betas[1], eps=eps, decay=decay)
    optimizer = Lamb(params, lr=1.0, betas=betas, eps=eps, weight_decay=decay)
    for ours, theirs in zip(stepped(optimizer, params), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


# --- both


BOTH = [
    lambda params: Lars(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda params: Lamb(params, lr=0.1, weight_decay=0.01),
]
both = pytest.mark.parametrize("make", BOTH, ids=["lars", "lamb"])


@both
def test_a_tensor_of_zeros_moves_and_stays_finite(make: Any) -> None:
    params = parameters(dtype=torch.float32)
    with torch.no_grad():
        params[0].zero_()
    optimizer = make(params)
    first, *rest = gradients(3)
    step(optimizer, params, 0.1, first)
    assert params[0].abs().min() > 0
    for grads in rest:
        step(optimizer, params, 0.1, [np.zeros_like(g) for g in grads])
    assert all(p.isfinite().all() for p in params)


@both
def test_a_saved_state_goes_on_bit_by_bit(make: Any, tmp_path: Any) -> None:
    params = parameters(dtype=torch.float32)
    whole, *rest = gradients(4)
    optimizer = make(params)
    step(optimizer, params, 0.1, whole)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    copies = [p.detach().clone().requires_grad_() for p in params]
    resumed = make(copies)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for grads in rest:
        step(optimizer, params, 0.2, grads)
        step(resumed, copies, 0.2, grads)
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


@both
def test_gradients_are_left_as_they_are_and_none_is_skipped(make: Any) -> None:
    params = parameters()
    optimizer = make(params)
    before = deepcopy([p.detach() for p in params])
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert all(torch.equal(p.grad, torch.ones_like(p)) and not torch.equal(p, b) for p, b in zip(params[1:], before[1:], strict=True))  # type: ignore[arg-type]  # fmt: skip


@both
def test_a_sparse_gradient_is_refused(make: Any) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = make(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@both
def test_a_closure_is_called_once_with_gradients(make: Any) -> None:
    weight, calls = torch.ones(2, 2, requires_grad=True), []

    def closure() -> float:
        calls.append(1)
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert make([weight]).step(closure) == 4.0
    assert len(calls) == 1
    assert (weight < 1).all()


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (Lars, {"lr": -1.0}),
        (Lars, {"lr": 1.0, "trust_coefficient": 0.0}),
        (Lars, {"lr": 1.0, "nesterov": True}),
        (Lars, {"lr": 1.0, "weight_decay": float("nan")}),
        (Lamb, {"betas": (0.9, 1.0)}),
        (Lamb, {"eps": -1.0}),
    ],
)
def test_values_out_of_range_are_refused(make: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"got|needs"):
        make(parameters(), **wrong)


# --- weights in half precision


HALF = [torch.float16, torch.bfloat16]


@both
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", [1e-5, 300.0])
def test_half_weights_take_the_step_that_float32_would_round_to(make: Any, dtype: torch.dtype, size: float) -> None:
    """Squares of 1e-5 vanish in float16, the norm of many times 300 overflows."""
    half = [torch.nn.Parameter(torch.linspace(-1, 1, 64 * 1024).view(64, 1024).to(dtype))]
    full = [torch.nn.Parameter(half[0].detach().float())]
    for params in (half, full):
        optimizer = make(params)
        for sign in (1, 1, -1):
            params[0].grad = torch.full_like(params[0], sign * size)
            optimizer.step()
    assert half[0].isfinite().all()
    assert (half[0] != torch.linspace(-1, 1, 64 * 1024).view(64, 1024).to(dtype)).any(), "it has moved"
    torch.testing.assert_close(half[0].float(), full[0], rtol=0, atol=4 * torch.finfo(dtype).eps)


@both
def test_a_saved_state_of_half_weights_goes_on_bit_by_bit(make: Any) -> None:
    params = [torch.nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16())]
    optimizer = make(params)
    grads = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(4)]
    for grad in grads[:2]:
        params[0].grad = grad
        optimizer.step()
    copied = [torch.nn.Parameter(params[0].detach().clone())]
    other = make(copied)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for grad in grads[2:]:
        for value, stepping in ((params, optimizer), (copied, other)):
            value[0].grad = grad
            stepping.step()
    assert torch.equal(params[0], copied[0])
    assert all(
        torch.equal(optimizer.state[params[0]][k], other.state[copied[0]][k])
        for k in ("momentum_buffer", "exp_avg_sq")
        if k in other.state[copied[0]]
    )


@pytest.mark.parametrize("make", [lambda p: Lars(p, lr=0.1, eps=0.0), lambda p: Lamb(p, lr=0.1)], ids=["lars", "lamb"])
def test_a_gradient_of_zeros_leaves_weights_without_decay_as_they_are(make: Any) -> None:
    params = parameters(dtype=torch.float32)
    before = [p.detach().clone() for p in params]
    step(make(params), params, 0.1, [np.zeros(shape) for shape in SHAPES])
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
