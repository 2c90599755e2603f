"""The largest Hessian eigenvalue: against explicit Hessians, and without a trace in the training."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from worker_jobs import are_equal, copy_weights, make_spec, make_trainer

from tula_cli.errors import SpecError
from tula_cli.worker.build.batches import ModelCall
from tula_cli.worker.ranks import Ranks
from tula_cli.worker.train import hessian
from tula_cli.worker.train import loop as worker_train_loop
from tula_cli.worker.train.hessian import (
    EIGENVALUE_TOLERANCE,
    MAX_ITERATIONS,
    LossSurface,
    compute_missed_share_bound,
    compute_step_size_bound,
    measure_curvature,
    run_lanczos,
)

SMALL = {"model": {"args": {"norm": True, "dropout": 0.5, "width": 3}}}


def symmetric(*eigenvalues: float, seed: int = 0) -> Tensor:
    """Return a matrix with these eigenvalues in a random basis."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(eigenvalues),) * 2))
    return torch.from_numpy(basis @ np.diag(eigenvalues) @ basis.T)


def start(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def times(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda vector: matrix @ vector


def explicit(surface: LossSurface) -> np.ndarray[Any, Any]:
    """Return the whole Hessian of the mean loss, by torch's own double derivative of a function of the weights."""
    named = {name: p for name, p in surface.model.named_parameters() if p.requires_grad}
    flat = torch.cat([p.detach().flatten() for p in named.values()])

    def loss(vector: Tensor) -> Tensor:
        pieces = vector.split([p.numel() for p in named.values()])
        values = {name: piece.view_as(p) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        inputs = torch.cat([inputs for _, (inputs, _) in surface.batches])
        targets = torch.cat([targets for _, (_, targets) in surface.batches])
        return surface.call.loss(functional_call(surface.model, values, inputs), targets)

    result: np.ndarray[Any, Any] = torch.autograd.functional.hessian(loss, flat).numpy()  # type: ignore[no-untyped-call]
    return result


# --- the iteration


# Rounded: norms of numbers whose squares underflow are of no use to any iteration.
@given(st.lists(st.floats(-100, 100).map(lambda value: round(value, 6)), min_size=2, max_size=12), st.integers(0, 1000))
@example([60.0, 61.0, -3.0, 0.5], 7)
@settings(max_examples=60)
def test_both_extremes_are_those_of_the_spectrum(eigenvalues: list[float], seed: int) -> None:
    matrix = symmetric(*eigenvalues, seed=seed)
    true = np.linalg.eigvalsh(matrix.numpy())
    result = run_lanczos(times(matrix), start(len(eigenvalues)), tolerance=0.01)
    rounding = 1e-9 * np.abs(true).max() + 1e-300
    assert result.converged and result.error <= 0.01 * result.magnitude
    assert -rounding <= true.max() - result.largest <= result.error + rounding
    assert -rounding <= result.smallest - true.min() <= result.error + rounding


def test_an_extreme_that_the_start_hardly_has_is_found() -> None:
    """The residual beside the inner eigenvalue 60 is small long before the extreme one, 61, comes up."""
    spectrum = torch.tensor([61.0, 60.0, *np.linspace(-5, 5, 200)], dtype=torch.float64)
    vector = start(len(spectrum))
    vector[0] = 1e-3
    result = run_lanczos(lambda v: spectrum * v, vector, tolerance=0.01)
    assert result.largest == pytest.approx(61.0, rel=1e-6)


@pytest.mark.parametrize("size", [1_000, 30_000])
def test_no_spectrum_misses_its_bound(size: int) -> None:
    """With an edge that thins out, as of random matrices, one that is dense, and one eigenvalue far outside."""
    grid = torch.linspace(0, 1, size, dtype=torch.float64)
    for spectrum in (grid, (math.pi * grid).cos(), grid**6, torch.cat([grid[:-1], torch.tensor([50.0])])):
        for seed in range(3):
            vector = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            result = run_lanczos(lambda v, d=spectrum: d * v, vector)  # type: ignore[misc]
            assert result.converged and result.error <= EIGENVALUE_TOLERANCE * result.magnitude
            assert -1e-12 <= float(spectrum.max()) - result.largest <= result.error
            assert -1e-12 <= result.smallest - float(spectrum.min()) <= result.error


def test_the_bound_falls_with_the_square_of_the_products_and_hardly_grows_with_the_size() -> None:
    assert compute_missed_share_bound(40, 10**6) == pytest.approx(
        compute_missed_share_bound(79, 10**6) * (157 / 79) ** 2
    )
    assert compute_missed_share_bound(40, 10**8) < 1.5 * compute_missed_share_bound(40, 10**6) < 0.06


def test_few_eigenvalues_end_the_iteration_early_and_a_tolerance_decides_otherwise() -> None:
    assert run_lanczos(times(symmetric(5.0, 5.0, 5.0)), start(3)).iterations == 1
    assert run_lanczos(times(symmetric(3.0, -3.0, 1.0)), start(3)).iterations == 3
    matrix = times(symmetric(1.0, *np.linspace(0.1, 0.9, 299)))
    near, far = (run_lanczos(matrix, start(300), tolerance=tolerance) for tolerance in (0.02, 0.2))
    assert far.iterations < near.iterations < MAX_ITERATIONS
    assert far.converged and near.converged and near.largest == pytest.approx(1.0, rel=1e-6)


def test_too_few_products_are_reported() -> None:
    result = run_lanczos(times(symmetric(1.0, *[0.1 * k for k in range(30)])), start(31), max_iterations=8)
    assert not result.converged and result.iterations == 8
    assert result.error > EIGENVALUE_TOLERANCE * result.magnitude


def test_contending_signs_are_reported_apart() -> None:
    result = run_lanczos(times(symmetric(3.0, -3.0, 1.0)), start(3))
    assert result.converged and (result.largest, result.smallest) == (pytest.approx(3.0), pytest.approx(-3.0))


def test_a_negative_extreme_is_the_smoothness_and_not_the_largest_eigenvalue() -> None:
    result = run_lanczos(times(symmetric(-8.0, 2.0, 0.5)), start(3))
    assert result.largest == pytest.approx(2.0)
    assert result.magnitude == pytest.approx(8.0)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_flat_or_broken_surface_ends_the_iteration(value: float) -> None:
    result = run_lanczos(lambda vector: torch.full_like(vector, value), start(4))
    assert result.iterations == 1
    assert result.converged is (value == 0.0)


# --- the derivatives


def test_the_eigenvalue_is_that_of_the_explicit_hessian_with_batchnorm_and_dropout(alone: Ranks) -> None:
    subject = make_trainer(make_spec(**SMALL), alone)
    for _, _ in zip(worker_train_loop.run_steps(subject), range(3), strict=False):  # running statistics of its own
        pass
    subject.parallel.module.eval()
    batches = hessian._load_batches(subject, 40)
    assert [(count, len(targets)) for count, (_, targets) in batches] == [(4, 4)] * 10  # a quarter of a micro-batch
    surface = LossSurface(subject.parallel.module, subject.call, batches, alone, seed=0)
    matrix = explicit(surface)
    vector = surface.make_direction()
    torch.testing.assert_close(
        surface.multiply_hessian(vector), torch.from_numpy(matrix) @ vector, rtol=1e-3, atol=1e-4
    )
    curvature = measure_curvature(subject, samples=40)
    true = np.linalg.eigvalsh(matrix)
    assert curvature.error <= EIGENVALUE_TOLERANCE * curvature.smoothness
    assert curvature.eigenvalue == pytest.approx(true.max(), abs=curvature.error)
    assert curvature.smoothness == pytest.approx(np.abs(true).max(), abs=curvature.error)
    assert curvature.converged and curvature.batch == 40
    assert curvature.gradient_norm == pytest.approx(float(surface.compute_gradient()[1].norm()), rel=1e-5)


def test_the_loss_and_gradient_are_means_over_all_samples_whatever_the_batches(alone: Ranks) -> None:
    subject = make_trainer(make_spec(), alone)
    inputs, targets = torch.randn(10, 1, 4, 4), torch.randint(3, (10,))
    parts = [(3, (inputs[:3], targets[:3])), (7, (inputs[3:], targets[3:]))]
    model = subject.parallel.module
    whole = LossSurface(model, subject.call, [(10, (inputs, targets))], alone, seed=0)
    split = LossSurface(model, subject.call, parts, alone, seed=0)
    for first, other in zip(whole.compute_gradient(), split.compute_gradient(), strict=True):
        torch.testing.assert_close(first, other)
    vector = whole.make_direction()
    torch.testing.assert_close(whole.multiply_hessian(vector), split.multiply_hessian(vector))


def test_more_samples_than_there_are_is_all_of_them(alone: Ranks) -> None:
    assert measure_curvature(make_trainer(make_spec(), alone), samples=1000).batch == 100


class Linear(nn.Module):
    """A model whose loss is linear in one parameter and independent of another; a third is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.slope + self.frozen.sum()


def test_a_linear_loss_has_no_curvature(alone: Ranks) -> None:
    model, batch = Linear(), (torch.randn(5, 4), torch.zeros(5))
    surface = LossSurface(model, ModelCall.from_model(model, lambda out, _: out.mean()), [(5, batch)], alone, seed=0)
    assert surface.multiply_hessian(surface.make_direction()).tolist() == [0.0] * 6


# --- what cannot be differentiated twice, and what can


class OnceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.square()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return 2 * value * grad


class Once(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = OnceFunction.apply(value)
        return result


class Attention(nn.Module):
    """Attention by torch's fused kernel over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(4, 12), nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        query, key, value = self.project(images).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.head(attended.flatten(1))
        return result


def surface_of(model: nn.Module, ranks: Ranks) -> LossSurface:
    torch.manual_seed(0)
    batch = (torch.randn(6, 1, 4, 4), torch.randint(3, (6,)))
    return LossSurface(model, ModelCall.from_model(model, nn.CrossEntropyLoss()), [(6, batch)], ranks, seed=0)


def test_a_layer_without_a_second_derivative_is_named_in_one_line(alone: Ranks) -> None:
    surface = surface_of(nn.Sequential(nn.Flatten(), nn.Linear(16, 3), Once()), alone)
    with pytest.raises(
        SpecError,
        match=r"train.diagnostics hessian needs second derivatives, but a layer of the model has none: .*@once_diff",
    ):
        surface.multiply_hessian(surface.make_direction())


def test_another_error_stays_what_it_is(alone: Ranks) -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    surface = surface_of(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), alone)
    surface.call = ModelCall.from_model(surface.model, broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        surface.multiply_hessian(surface.make_direction())


def test_attention_has_a_second_derivative_where_fast_kernels_are_off(alone: Ranks) -> None:
    surface = surface_of(Attention(), alone)
    vector = surface.make_direction()
    with pytest.raises(SpecError, match=r"of the model has none: derivative for .* is not implemented"):
        surface.multiply_hessian(vector)
    with hessian._use_plain_attention():
        expected = torch.from_numpy(explicit(surface)) @ vector
        torch.testing.assert_close(surface.multiply_hessian(vector), expected, rtol=1e-3, atol=1e-4)


def test_recomputed_activations_change_nothing(alone: Ranks) -> None:
    jobs = [
        make_spec(model={"name": "worker_jobs:blocks"}, train={"activation_checkpointing": on}) for on in (False, True)
    ]
    plain, again = (measure_curvature(make_trainer(job, alone), samples=20) for job in jobs)
    assert again.eigenvalue == pytest.approx(plain.eigenvalue, rel=1e-4)
    assert plain.converged


# --- the training does not see it


def test_nothing_of_the_trainer_changes(alone: Ranks) -> None:
    subject = make_trainer(make_spec(**SMALL), alone)
    steps = worker_train_loop.run_steps(subject)
    next(steps)
    subject.parallel.module[1].eval()  # a mode of its own, as a frozen normalisation has
    before, state = copy_weights(subject), torch.get_rng_state()
    modes = [module.training for module in subject.parallel.modules()]
    measure_curvature(subject, samples=20)
    assert are_equal(copy_weights(subject), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in subject.parallel.modules()] == modes
    assert all(p.grad is None for p in subject.parallel.parameters())


def test_it_repeats_itself_and_may_be_broken_off(alone: Ranks) -> None:
    class Gone(Exception):
        pass

    def leave() -> None:
        raise Gone

    subject = make_trainer(make_spec(**SMALL), alone)
    first, other = measure_curvature(subject, samples=30), measure_curvature(subject, samples=30)
    assert (first.eigenvalue, first.gradient_norm, first.loss) == (other.eigenvalue, other.gradient_norm, other.loss)
    with pytest.raises(Gone):
        measure_curvature(subject, samples=30, after_product=leave)
    assert subject.parallel.module.training


def test_the_bound_on_the_step_size_is_that_of_lemma_1() -> None:
    """Eq. 11: the largest step for which gradient descent with factors in the interval still descends a quadratic."""
    curvature, s_min, s_max = 5.0, 0.5, 2.0
    bound = compute_step_size_bound(curvature, s_min, s_max)
    assert bound == pytest.approx(2 * 0.5 / (5 * 4))
    assert compute_step_size_bound(curvature, 1.0, 1.0) == pytest.approx(2 / curvature)
    assert compute_step_size_bound(0.0, 1.0, 1.0) is None
