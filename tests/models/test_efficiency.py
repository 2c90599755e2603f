import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_cli.models import efficiency
from tula_cli.models.choice.candidates import Candidates
from tula_cli.models.efficiency import (
    MIN_NOISE_GROWTH,
    Noise,
    compute_equivalent_constant_noise,
    describe_noise,
    estimate_noise_scale,
    summarize_gradient_norms,
)
from tula_cli.models.ramp import NOISE_GROWTH_EXPONENT
from tula_cli.run.records.probes import GradientStats
from tula_cli.run.records.recommendations import Prediction, SameProgress

SIGNAL, TRACE = 4.0, 4.0 * 50
"""|G|^2 and tr(Sigma): a noise scale of 50 samples."""

BATCHES = st.integers(1, 10**6)
NOISES = st.floats(0, 1e9)


def steps(
    rng: np.random.Generator, *, local: int, ranks: int, count: int, size: int = 400
) -> list[tuple[float, float]]:
    """Return (mean of the ranks' squared norms, squared norm of their mean) of `count` drawn steps."""
    true = np.full(size, math.sqrt(SIGNAL / size))
    drawn = true + rng.standard_normal((count, ranks, size)) * math.sqrt(TRACE / local / size)
    value, mean = (drawn**2).sum(axis=2).mean(axis=1), (drawn.mean(axis=1) ** 2).sum(axis=1)
    return list(zip(value.tolist(), mean.tolist(), strict=True))


def probe(rng: np.random.Generator, *, local: int = 16, ranks: int = 4, count: int = 40) -> GradientStats:
    return summarize_gradient_norms(
        steps(rng, local=local, ranks=ranks, count=count), local_batch=local, batch=local * ranks
    )


def stats(small: float, big: float, *, local: int, batch: int, count: int = 10, error: float = 0.0) -> GradientStats:
    covariance = (error**2, error**2, 0.0)
    return GradientStats(norm_sqr=big, local_norm_sqr=small, batch=batch, local_batch=local, steps=count, covariance=covariance)  # fmt: skip


def exact(local: int, batch: int, *, signal: float = SIGNAL, trace: float = TRACE, count: int = 10) -> GradientStats:
    """Return the norms as they are expected to be."""
    return stats(signal + trace / local, signal + trace / batch, local=local, batch=batch, count=count)


def found(of: list[GradientStats]) -> Noise:
    noise = estimate_noise_scale(of)
    assert noise is not None
    return noise


def test_expected_norms_give_the_noise_scale_exactly() -> None:
    noise = found([exact(8, 32), exact(64, 1024)])
    assert (noise.scale, noise.low, noise.high) == pytest.approx((50, 50, 50))
    assert noise.probes == 2


def test_probes_that_disagree_widen_the_interval() -> None:
    alike = found([exact(8, 16, trace=200), exact(8, 16, trace=200), exact(8, 16, trace=200)])
    apart = found([exact(8, 16, trace=trace) for trace in (100, 200, 300)])
    assert alike.error == pytest.approx(0, abs=1e-9)
    assert apart.scale == pytest.approx(alike.scale) and apart.error is not None
    assert apart.error == pytest.approx(25 / math.sqrt(3))  # their ratios are 25, 50 and 75


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    many = [found([probe(rng, count=20), probe(rng, local=32, count=20)]) for _ in range(300)]
    assert 0.85 < np.mean([noise.low <= 50 <= noise.high for noise in many]) < 0.95
    assert np.median([noise.scale for noise in many]) == pytest.approx(50, rel=0.02)


def test_the_standard_error_is_that_of_repeated_probes() -> None:
    rng = np.random.default_rng(2)
    many = [found([probe(rng)]) for _ in range(300)]
    assert np.mean([noise.error for noise in many]) == pytest.approx(np.std([n.scale for n in many]), rel=0.15)


def test_numerator_and_denominator_are_averaged_apart_and_weighted_by_samples() -> None:
    noise = found([exact(8, 16, signal=1, trace=10, count=30), exact(8, 48, signal=5, trace=90, count=10)])
    assert noise.scale == pytest.approx((10 + 90) / (1 + 5))  # both have seen 480 samples
    noise = found([exact(8, 16, signal=1, trace=10), exact(8, 48, signal=5, trace=90)])
    assert noise.scale == pytest.approx((10 + 3 * 90) / (1 + 3 * 5))


def test_a_gradient_lost_in_its_noise_leaves_the_scale_open() -> None:
    noise = found([stats(10.0, 5.0, local=8, batch=16, error=1.0)])  # their difference explains all of it
    assert (noise.high, noise.error) == (math.inf, None)
    assert 0 < noise.low <= noise.scale < math.inf
    lost = found([stats(10.0, 4.9, local=8, batch=16)])
    assert lost.high == math.inf
    assert 0 < predict_progress(256, epochs=10, noise=lost).epochs <= 10.0001


def test_what_tells_nothing_is_left_out() -> None:
    one_batch = exact(8, 16).model_copy(update={"covariance": None})  # also: an older result
    diverged = stats(0.0, 0.0, local=8, batch=16)
    upside_down = stats(1.0, 2.0, local=8, batch=16)
    assert (
        estimate_noise_scale([])
        is estimate_noise_scale([one_batch, diverged])
        is estimate_noise_scale([upside_down])
        is None
    )
    assert found([one_batch, diverged, exact(8, 16)]).scale == pytest.approx(50)


@given(BATCHES, BATCHES, NOISES)
def test_epochs_lie_between_perfect_scaling_and_none(batch: int, reference: int, noise: float) -> None:
    epochs = efficiency.compute_equivalent_epochs(10, batch, reference=reference, noise=noise)
    assert epochs == pytest.approx(10 * (batch + noise) / (reference + noise))
    ends = sorted([10.0, 10.0 * batch / reference])
    assert ends[0] * (1 - 1e-9) <= epochs <= ends[1] * (1 + 1e-9)


@given(BATCHES, NOISES)
def test_the_reference_batch_needs_what_it_is_given(batch: int, noise: float) -> None:
    assert efficiency.compute_steps_ratio(batch, reference=batch, noise=noise) == pytest.approx(1)
    assert efficiency.compute_steps_ratio(2 * batch, reference=batch, noise=math.inf) == 0.5


def test_the_noise_grows_with_the_length_of_the_training() -> None:
    assert efficiency.compute_equivalent_constant_noise(50, reference=128, epochs=1) == 50
    assert efficiency.compute_equivalent_constant_noise(50, reference=128, epochs=0.5) == 50
    assert efficiency.compute_equivalent_constant_noise(50, reference=128, epochs=90) == pytest.approx(
        178 * 90**NOISE_GROWTH_EXPONENT - 128
    )


def predict_progress(batch: int, *, epochs: int, noise: Noise) -> SameProgress:
    row = Prediction(
        nodes=2, batch=batch, local_batch=batch // 2, step_time=1.0, step_low=None, step_high=None, hours=3.0,
        hours_low=2.7, hours_high=3.6, cost=12.0, peak_memory=None, headroom=None, measured=False,
    )  # fmt: skip
    table = efficiency.add_same_progress(Candidates.from_predictions([row]), epochs=epochs, reference=128, noise=noise)
    progress = table.make_prediction(0).same_progress
    assert progress is not None
    return progress


NOISE = Noise(scale=100.0, low=80.0, high=120.0, error=10.0, probes=3)


@pytest.mark.parametrize("batch", [32, 64, 256, 4096])
def test_time_and_cost_go_with_the_epochs_and_lie_in_their_range(batch: int) -> None:
    answer = predict_progress(batch, epochs=30, noise=NOISE)
    assert answer.epochs_low <= answer.epochs <= answer.epochs_high
    assert answer.hours == pytest.approx(3.0 * answer.epochs / 30)
    assert answer.cost == pytest.approx(12.0 * answer.epochs / 30)
    assert answer.hours_low == pytest.approx(2.7 * answer.epochs_low / 30)
    assert answer.hours_high == pytest.approx(3.6 * answer.epochs_high / 30)
    assert (answer.epochs > 30) == (batch > 128)


def test_the_range_is_from_perfect_scaling_to_the_slowest_growth_of_the_lowest_noise() -> None:
    answer = predict_progress(4096, epochs=30, noise=NOISE)
    least = (128 + 80) * 30**MIN_NOISE_GROWTH - 128
    assert (answer.epochs_low, answer.epochs_high) == pytest.approx((30, 30 * (4096 + least) / (128 + least)))


def test_the_reference_batch_keeps_its_epochs() -> None:
    answer = predict_progress(128, epochs=30, noise=NOISE)
    assert answer.epochs == answer.epochs_low == answer.epochs_high == pytest.approx(30)


def test_the_words_tell_the_measured_from_the_assumed() -> None:
    words = efficiency.describe_noise(NOISE, reference=128, epochs=30)
    assert "80 to 120" in words and "3 probes" in words and "assumption" in words and "batch 128" in words
    assert "at least 80" in efficiency.describe_noise(Noise(100.0, 80.0, math.inf, None, 1), reference=128, epochs=30)


def test_steps_that_are_not_finite_are_left_out() -> None:
    kept = summarize_gradient_norms([(3.0, 1.0), (math.inf, 1.0), (5.0, math.nan), (5.0, 2.0)], local_batch=8, batch=16)
    assert (kept.local_norm_sqr, kept.norm_sqr, kept.steps) == (4.0, 1.5, 2)
    assert kept.covariance == pytest.approx((0.25, 1.0, 0.5))
    assert summarize_gradient_norms([(math.nan, 1.0)], local_batch=8, batch=16).norm_sqr == 0
    assert summarize_gradient_norms([(1.0, 1.0), (2.0, 2.0)], local_batch=8, batch=8).covariance is None


def test_noise_measured_on_the_way_is_carried_on_from_there() -> None:
    """Noise that grows by the rule is worth the same wherever it is measured."""
    start = 100.0
    for at in (1, 2, 10):
        then = compute_equivalent_constant_noise(start, reference=32, epochs=at)
        assert compute_equivalent_constant_noise(then, reference=32, epochs=50, measured_at=at) == pytest.approx(
            compute_equivalent_constant_noise(start, reference=32, epochs=50)
        )
    assert compute_equivalent_constant_noise(start, reference=32, epochs=5, measured_at=10) == pytest.approx(start), (
        "it never shrinks"
    )


def test_what_it_rests_on_says_when_the_noise_was_measured() -> None:
    noise = Noise(scale=840, low=600, high=1100, error=100, probes=1)
    assert "at the start of training (600 to 1.1e+03, 1 probe)" in describe_noise(noise, reference=128, epochs=20)
    later = describe_noise(replace(noise, epoch=2.0), reference=128, epochs=20)
    assert "after 2 of 20 epochs (600 to 1.1e+03, a training)" in later
