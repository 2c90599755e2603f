"""AdaScale against its formulas, on gradients of known noise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tula_cli.optim import gradient_stats
from tula_cli.optim.adascale_sgd import AdaScale, compute_gain, estimate_noise

BATCH, REFERENCE = 64, 8
S = BATCH / REFERENCE


class Noisy:
    """A linear loss whose gradient is `mean` plus noise of a known covariance: sigma^2 a sample in each of its elements."""

    def __init__(
        self,
        *,
        sigma: float = 3.0,
        dim: int = 20,
        lr: float = 0.1,
        seed: int = 0,
        fused: bool = False,
        **settings: float,
    ) -> None:
        self.weight = torch.zeros(dim, requires_grad=True)
        self.mean, self.sigma = torch.ones(dim) / 2, sigma
        self.generator = torch.Generator().manual_seed(seed)
        base = torch.optim.SGD([self.weight], lr=lr, momentum=0.9 * fused, fused=fused)
        self.optimizer = AdaScale(base, model=torch.nn.Module(), batch=BATCH, reference_batch=REFERENCE, **settings)

    def samples(self) -> torch.Tensor:
        return self.mean + self.sigma * torch.randn(BATCH, len(self.mean), generator=self.generator)

    def step(self, *, part: int = 16) -> None:
        drawn = self.samples()
        self.weight.grad = drawn.mean(0)
        self.optimizer.observe(drawn[:part].mean(0).square().sum(), part)
        self.optimizer.step()

    @property
    def true_gain(self) -> float:
        signal, trace = float(self.mean.square().sum()), self.sigma**2 * len(self.mean)
        return compute_gain(trace / REFERENCE, signal, S)


# Elsewhere the bounds of single estimates show: mu^2 >= 0 lowers the gain at much noise, sigma^2 > 0 raises it at little.
@pytest.mark.parametrize(("sigma", "part"), [(0.1, 8), (1.0, 8), (3.0, 8), (3.0, 32)])
def test_the_gain_is_that_of_the_known_noise(sigma: float, part: int) -> None:
    subject = Noisy(sigma=sigma, lr=1e-9)
    for _ in range(1500):
        subject.step(part=part)
    assert subject.optimizer.gain == pytest.approx(subject.true_gain, rel=0.1)


@pytest.mark.parametrize(("noise", "signal", "r"), [(0.0, 1.0, 1.0), (1.0, 0.0, 8.0), (1.0, 1.0, 2 / 1.125)])
def test_the_gain_is_between_one_and_the_scale(noise: float, signal: float, r: float) -> None:
    assert compute_gain(noise, signal, 8.0) == pytest.approx(r)


def test_estimates_are_the_papers_where_each_worker_has_the_reference_batch() -> None:
    random, workers = np.random.default_rng(0), 8
    g = random.normal(1.0, 2.0, size=(workers, 30))
    mean = g.mean(0)
    # Eq. 4 and below it
    sigma = (g**2).sum() / (workers - 1) - workers / (workers - 1) * (mean**2).sum()
    mu = (mean**2).sum() - sigma / workers
    small, large = torch.tensor((g**2).sum() / workers), torch.tensor((mean**2).sum())
    noise = estimate_noise(small, large, samples=REFERENCE, batch=workers * REFERENCE, reference_batch=REFERENCE)
    assert [float(value) for value in noise] == pytest.approx([sigma, mu])


def test_estimates_are_bounded() -> None:
    noise, _ = estimate_noise(torch.tensor(1.0), torch.tensor(2.0), samples=8, batch=64, reference_batch=8)
    _, signal = estimate_noise(torch.tensor(100.0), torch.tensor(1.0), samples=8, batch=64, reference_batch=8)
    assert float(noise) == pytest.approx(1e-6)
    assert float(signal) == 0


def test_a_step_takes_the_gain_of_the_steps_before_it() -> None:
    subject = Noisy(lr=0.5)
    moved, gains = [], []
    for _ in range(4):
        before = subject.weight.detach().clone()
        gains.append(subject.optimizer.gain)
        subject.step()
        moved.append(float((before - subject.weight.detach()).norm() / subject.weight.grad.norm()))
    assert gains[0] == 1.0 < gains[1] != gains[2]
    assert moved == pytest.approx([0.5 * value for value in gains], rel=1e-4)
    assert subject.optimizer.iterations == pytest.approx(sum(gains))
    assert subject.optimizer.param_groups[0]["lr"] == 0.5


def test_the_first_steps_are_averaged_evenly_and_later_ones_by_their_number_of_parts() -> None:
    subject, noises, expected = Noisy(lr=1e-9), [], 0.0
    theta = 1 - BATCH / 16 / 1000
    for count in range(1, 400):
        drawn = subject.samples()
        subject.weight.grad = drawn.mean(0)
        subject.optimizer.observe(drawn[:16].mean(0).square().sum(), 16)
        small, large = drawn[:16].mean(0).square().sum(), drawn.mean(0).square().sum()
        noises.append(float(estimate_noise(small, large, samples=16, batch=BATCH, reference_batch=REFERENCE)[0]))
        subject.optimizer.step()
        even = count <= 1 / (1 - theta)
        expected = float(np.mean(noises)) if even else theta * expected + (1 - theta) * noises[-1]
        assert float(subject.optimizer._noise) == pytest.approx(expected, rel=1e-3)  # type: ignore[arg-type]


def test_a_gradient_that_is_not_finite_tells_nothing() -> None:
    subject = Noisy()
    for _ in range(3):
        subject.step()
    before = subject.optimizer.gain
    subject.weight.grad = torch.full_like(subject.weight, float("nan"))
    subject.optimizer.observe(torch.tensor(float("nan")), 16)
    subject.optimizer.step()
    assert subject.optimizer.gain == before > 1


def test_a_first_gradient_that_is_not_finite_leaves_the_next_steps_their_gain() -> None:
    subject = Noisy()
    subject.weight.grad = torch.full_like(subject.weight, float("inf"))
    subject.optimizer.observe(torch.tensor(float("inf")), 16)
    subject.optimizer.step()
    assert subject.optimizer.gain == 1.0
    with torch.no_grad():
        subject.weight.zero_()
    for _ in range(30):
        subject.step()
    assert 1.0 < subject.optimizer.gain <= subject.optimizer.scale


def test_clipping_comes_after_the_norm() -> None:
    free, clipped = Noisy(lr=1e-9), Noisy(lr=1e-9, max_grad_norm=1e-3)
    for _ in range(5):
        free.step()
        clipped.step()
    assert clipped.optimizer.gain == free.optimizer.gain
    assert float(clipped.weight.grad.norm()) == pytest.approx(1e-3, rel=1e-2)


def assert_resumed_bit_by_bit(whole: Noisy, resumed: Noisy, state: Path) -> None:
    """Take three steps, save, and hold three more against those of another that begins with what was saved."""
    for _ in range(3):
        whole.step()
    torch.save(whole.optimizer.state_dict(), state)
    with torch.no_grad():
        resumed.weight.copy_(whole.weight)
    resumed.generator.set_state(whole.generator.get_state())
    resumed.optimizer.load_state_dict(torch.load(state, weights_only=True))
    for _ in range(3):
        whole.step()
        resumed.step()
    assert torch.equal(whole.weight, resumed.weight)
    assert whole.optimizer.report() == resumed.optimizer.report()


def test_a_saved_state_goes_on_bit_by_bit_also_at_another_batch(tmp_path: Path) -> None:
    whole, resumed = Noisy(), Noisy()
    assert_resumed_bit_by_bit(whole, resumed, tmp_path / "state.pt")
    base = torch.optim.SGD([resumed.weight], lr=0.1)
    smaller = AdaScale(base, model=torch.nn.Module(), batch=16, reference_batch=REFERENCE)
    smaller.load_state_dict(whole.optimizer.state_dict())
    assert 1 < smaller.gain < 2
    assert smaller.iterations == whole.optimizer.iterations


@pytest.mark.parametrize("fused", [True, False])
def test_on_a_gpu_the_gain_is_the_same(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = Noisy(fused=fused), Noisy(fused=fused)
    for _ in range(5):
        host.step()
    monkeypatch.setattr(gradient_stats, "on_device", lambda tensor: True)
    for _ in range(5):
        device.step()
    torch.testing.assert_close(device.weight, host.weight)
    assert device.optimizer.report() == pytest.approx(host.optimizer.report(), rel=1e-4)
    assert isinstance(device.optimizer._iterations, torch.Tensor) == fused
    assert device.optimizer.param_groups[0]["lr"] == 0.1


def test_on_a_gpu_a_saved_state_goes_on_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_stats, "on_device", lambda tensor: True)
    assert_resumed_bit_by_bit(Noisy(fused=True), Noisy(fused=True), tmp_path / "state.pt")


def test_a_skipped_step_leaves_nothing_behind() -> None:
    subject = Noisy()
    subject.optimizer.observe(torch.tensor(1.0), 16)
    subject.optimizer.zero_grad()
    subject.weight.grad = torch.ones_like(subject.weight)
    with pytest.raises(RuntimeError, match=r"call observe\(\)"):
        subject.optimizer.step()


def test_schedulers_and_groups_are_the_bases_own() -> None:
    subject = Noisy(lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(subject.optimizer, 1, gamma=0.5)
    subject.step()
    scheduler.step()
    assert subject.optimizer.base.param_groups[0]["lr"] == 0.2
    subject.optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    assert len(subject.optimizer.base.param_groups) == 2


def test_what_is_not_sgd_is_refused() -> None:
    weights = [torch.zeros(2, requires_grad=True)]
    with pytest.raises(ValueError, match="derived for SGD, not for Adam"):
        AdaScale(torch.optim.Adam(weights), model=torch.nn.Module(), batch=2, reference_batch=1)
    with pytest.raises(ValueError, match="at least 1 sample"):
        AdaScale(torch.optim.SGD(weights), model=torch.nn.Module(), batch=0, reference_batch=1)


@pytest.mark.parametrize("samples", [0, BATCH])
def test_a_part_has_to_be_one(samples: int) -> None:
    with pytest.raises(ValueError, match="1 to 63 samples"):
        Noisy().optimizer.observe(torch.tensor(1.0), samples)
