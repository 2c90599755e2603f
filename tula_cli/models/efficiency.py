"""Statistical efficiency: the epochs that each batch needs for the same progress, from the gradient noise scale.

The noise scale B_noise = tr(Sigma) / |G|^2 is the batch at which the noise of the gradient is as large as the gradient
itself (McCandlish et al. 2018). For the same progress a batch B needs steps ~ 1 + B_noise / B, so samples ~ B +
B_noise, if the learning rate suits each batch, as with a well-tuned SGD.

The noise scale grows during training, and more in a longer one: of the epochs E that the reference batch needs, only a
share of about E^-GROWTH is as inefficient for large batches as the first epoch. The noise that probes measure at the
initial weights is extended to the whole run by that rule (`compute_equivalent_constant_noise`). A measurement after
some epochs of a training is extended from there and is more informative: for some jobs the first epoch says nothing.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tula_cli.models.choice.candidates import NO_STAGES, Candidates
from tula_cli.models.choice.grid import Number
from tula_cli.models.ramp import NOISE_GROWTH_EXPONENT
from tula_cli.models.time.noise import Z90
from tula_cli.run.records.probes import GradientStats
from tula_cli.words import format_count, format_number

Pair = tuple[float, float]
"""Squared gradient norms of one step: the mean over small batches, and that of their average gradient."""

MIN_NOISE_GROWTH = 0.5
"""Exponent assumed for the upper bound of an interval; the application whose noise grew slowest had 0.54."""

EARLY_SHARE = 0.1
"""Share of a training's epochs after which a noise measurement is most informative for its cost (same benchmark as for
`NOISE_GROWTH_EXPONENT`: p90 error reduced from 156 to 44 %)."""


@dataclass(frozen=True)
class Noise:
    """A gradient noise scale in samples, with a 90 % interval.

    `high` is inf if the gradient cannot be distinguished from its noise.
    """

    scale: float
    low: float
    high: float
    error: float | None  # standard error; None if the gradient cannot be distinguished from its noise
    probes: int
    epoch: float = 0.0  # epoch of the measurement; 0: start of the training


@dataclass(frozen=True)
class _Moments:
    """Unbiased estimates of |G|^2 and tr(Sigma), and the covariance of the two."""

    sqr: float
    trace: float
    sqr_variance: float
    trace_variance: float
    covariance: float


def summarize_gradient_norms(pairs: Sequence[Pair], *, local_batch: int, batch: int) -> GradientStats:
    """Return the mean squared norms over the steps with their covariance; steps that are not finite are left out.

    A training that diverges still has a step time: if no step is finite, the norms are 0.

    Args:
        local_batch: samples of each small-batch gradient.
        batch: samples of the average gradient.
    """
    finite_pairs = np.array([pair for pair in pairs if np.isfinite(pair).all()]).reshape(-1, 2)
    small, big = (float(value) for value in finite_pairs.mean(axis=0)) if len(finite_pairs) else (0.0, 0.0)
    enough = len(finite_pairs) > 1 and batch > local_batch
    spread = np.cov(finite_pairs, rowvar=False) / len(finite_pairs) if enough else None
    return GradientStats(
        norm_sqr=big,
        local_norm_sqr=small,
        batch=batch,
        local_batch=local_batch,
        steps=len(finite_pairs),
        covariance=None if spread is None else (float(spread[1, 1]), float(spread[0, 0]), float(spread[0, 1])),
    )


def estimate_noise_scale(stats: Iterable[GradientStats]) -> Noise | None:
    """Return the noise scale estimated from all probes together, or None if no probe can determine it.

    Numerator and denominator are averaged over the probes separately, because a mean of ratios would be biased; each
    probe is weighted by its number of samples. Probes that disagree by more than the spread of their steps explains
    (their weights are not the same) widen the interval.
    """
    usable = [
        probe_stats
        for probe_stats in stats
        if probe_stats.covariance is not None
        and probe_stats.local_norm_sqr > 0
        and probe_stats.batch > probe_stats.local_batch
    ]
    if not usable:
        return None
    moments = [_solve_moments(probe_stats) for probe_stats in usable]
    weights = [float(probe_stats.batch * probe_stats.steps) for probe_stats in usable]
    shares = [samples / sum(weights) for samples in weights]
    total = _combine_moments(moments, shares)
    if not total.trace > 0:
        return None
    scatter = _estimate_relative_scatter(moments, shares, total)
    return _compute_noise_from_moments(total, scatter=scatter, probes=len(usable))


def _solve_moments(stats: GradientStats) -> _Moments:
    """Solve E |G_B|^2 = |G|^2 + tr(Sigma) / B at two batches (McCandlish et al., appendix A.1)."""
    assert stats.covariance is not None
    big, small = float(stats.batch), float(stats.local_batch)
    of_big, of_small, of_both = stats.covariance
    span, inverse = big - small, 1 / small - 1 / big
    return _Moments(
        sqr=(big * stats.norm_sqr - small * stats.local_norm_sqr) / span,
        trace=(stats.local_norm_sqr - stats.norm_sqr) / inverse,
        sqr_variance=(big**2 * of_big + small**2 * of_small - 2 * big * small * of_both) / span**2,
        trace_variance=(of_big + of_small - 2 * of_both) / inverse**2,
        covariance=((big + small) * of_both - big * of_big - small * of_small) / (span * inverse),
    )


def _combine_moments(moments: Sequence[_Moments], shares: Sequence[float]) -> _Moments:
    def sum_weighted(name: str, *, power: int) -> float:
        return float(
            sum(
                share**power * getattr(probe_moments, name)
                for share, probe_moments in zip(shares, moments, strict=True)
            )
        )

    return _Moments(
        sqr=sum_weighted("sqr", power=1),
        trace=sum_weighted("trace", power=1),
        sqr_variance=sum_weighted("sqr_variance", power=2),
        trace_variance=sum_weighted("trace_variance", power=2),
        covariance=sum_weighted("covariance", power=2),
    )


def _estimate_relative_scatter(moments: Sequence[_Moments], shares: Sequence[float], total: _Moments) -> float:
    """Return the relative standard error of the ratio from the differences between probes.

    0 with one probe or if |G|^2 is not positive.
    """
    if len(moments) < 2 or total.sqr <= 0:
        return 0.0
    scale = total.trace / total.sqr
    residuals = [
        share * (probe_moments.trace - scale * probe_moments.sqr)
        for share, probe_moments in zip(shares, moments, strict=True)
    ]
    return math.sqrt(len(residuals) / (len(residuals) - 1) * sum(value**2 for value in residuals)) / total.trace


def _compute_noise_from_moments(total: _Moments, *, scatter: float, probes: int) -> Noise:
    """Return trace / sqr with its interval, which has no upper end if |G|^2 is not significantly above 0."""
    sure = math.sqrt(max(0.0, total.sqr_variance))
    if total.sqr <= Z90 * sure:
        least = total.trace / (max(total.sqr, 0.0) + Z90 * sure) if sure else math.inf
        return Noise(scale=total.trace / total.sqr if total.sqr > 0 else least, low=least, high=math.inf, error=None, probes=probes)  # fmt: skip
    scale = total.trace / total.sqr
    within = math.sqrt(
        max(
            0.0,
            total.trace_variance / total.trace**2
            + total.sqr_variance / total.sqr**2
            - 2 * total.covariance / (total.trace * total.sqr),
        )
    )
    relative = max(within, scatter)
    interval_ratio = math.exp(Z90 * relative)
    return Noise(
        scale=scale, low=scale / interval_ratio, high=scale * interval_ratio, error=scale * relative, probes=probes
    )


def compute_equivalent_constant_noise(
    noise: float, *, reference: float, epochs: float, growth: float = NOISE_GROWTH_EXPONENT, measured_at: float = 1.0
) -> float:
    """Return the constant noise scale, in samples, that has the same effect as the growing one over a whole training.

    Args:
        reference: batch that `epochs` refers to.
        epochs: length of the training; below 1 the noise has not grown.
        growth: exponent of the epochs.
        measured_at: epochs done at the measurement; up to 1 counts as the start of training.
    """
    return (reference + noise) * math.pow(max(1.0, epochs / max(1.0, measured_at)), growth) - reference


def compute_steps_ratio(batch: Number, *, reference: float, noise: float) -> Number:
    """Return the steps that a batch needs for the same progress, as a multiple of those of the reference batch."""
    return (1 + noise / batch) / (1 + noise / reference) if math.isfinite(noise) else reference / batch


def compute_equivalent_epochs(epochs: float, batch: Number, *, reference: float, noise: float) -> Number:
    """Return the epochs at `batch` (a number or array) with the same progress as `epochs` at the reference batch."""
    return epochs * compute_steps_ratio(batch, reference=reference, noise=noise) * batch / reference


def add_same_progress(rows: Candidates, *, epochs: int, reference: int, noise: Noise) -> Candidates:
    """Add epochs, time and cost for the same progress as `epochs` at the reference batch to the table of candidates.

    If the batch grows (`train.ramp`), each stage makes the progress of its batch in its share of the epochs.

    The range extends from an infinite noise scale, at which all samples contribute equally, to the lowest noise with
    the slowest growth. All of the time is scaled with the epochs, including start-up.
    """
    extend = functools.partial(
        compute_equivalent_constant_noise, reference=reference, epochs=epochs, measured_at=noise.epoch
    )
    count, epochs_at_infinite_noise, epochs_at_lowest_noise = (
        _count_epochs_over_stages(
            rows, functools.partial(compute_equivalent_epochs, epochs, reference=reference, noise=value)
        )
        for value in (extend(noise.scale), math.inf, extend(noise.low, growth=MIN_NOISE_GROWTH))
    )
    fewest = np.minimum(epochs_at_infinite_noise, epochs_at_lowest_noise)
    most = np.maximum(epochs_at_infinite_noise, epochs_at_lowest_noise)
    hours = rows["hours"]
    low, high = (np.where(np.isnan(end), hours, end) for end in (rows["hours_low"], rows["hours_high"]))
    columns = {
        "epochs": count,
        "epochs_low": fewest,
        "epochs_high": most,
        "epochs_alike": epochs_at_infinite_noise,
        "epochs_lossy": epochs_at_lowest_noise,
        "hours": hours * count / epochs,
        "hours_low": low * fewest / epochs,
        "hours_high": high * most / epochs,
        "cost": rows["cost"] * count / epochs,
    }
    return rows.with_columns({f"same_progress_{name}": column for name, column in columns.items()})


def _count_epochs_over_stages(rows: Candidates, epochs_at: Callable[[Number], Number]) -> Number:
    """Return the epochs that configurations need, shape (n,).

    `epochs_at` gives the epochs at a constant batch; all stages are stretched equally.
    """
    epochs_needed = epochs_at(rows["batch"]) + np.zeros(len(rows))
    if rows.stages is NO_STAGES:
        return epochs_needed
    batch, share = (column[rows["stages"], :-1] for column in (rows.stages.batch, rows.stages.share))
    progress = 1 / epochs_at(np.where(batch > 0, batch, rows["batch"][:, None]))  # per epoch
    return 1 / (1 / epochs_needed + (share * (progress - 1 / epochs_needed[:, None])).sum(axis=1))


def describe_noise(noise: Noise, *, reference: int, epochs: int) -> str:
    """Describe the measured noise scale and the assumptions about it in a sentence or two."""
    is_bounded = math.isfinite(noise.high)
    scale = noise.scale if is_bounded else noise.low
    mean = compute_equivalent_constant_noise(scale, reference=reference, epochs=epochs, measured_at=noise.epoch)
    value = f"{noise.scale:.3g} samples" if is_bounded else f"at least {noise.low:.3g} samples"
    bounds = f"{noise.low:.3g} to {noise.high:.3g}, " if is_bounded else ""
    at = f"after {noise.epoch:g} of {epochs} epochs" if noise.epoch else "at the start of training"
    source = "a training" if noise.epoch else format_count(noise.probes, "probe")
    return (
        f"gradient noise scale {value} {at} ({bounds}{source}), {format_number(mean)} on average over the training if the scale"
        f" grows with epochs^{NOISE_GROWTH_EXPONENT:g}; the epochs for the same progress as {epochs} at batch {reference} are predicted for plain SGD"
        " with a scaled learning rate, and are an assumption for other methods"
    )
