"""Losses of trainings by step: healthy ones with jumps of the loss, and diverged ones.

Each curve is a trend times the noise of a batch mean. Most have an event at step 300 of 900: the data get harder, an augmentation
starts, the learning rate restarts, or the training diverges.
"""

import math
import random
from collections.abc import Callable

Curve = list[float]
STEPS = 900
EVENT = 300


def _curve(trend: Callable[[int], float], seed: int, noise: float, steps: int = STEPS) -> Curve:
    draw = random.Random(seed)
    return [max(trend(step) * math.exp(draw.gauss(0, noise)), 1e-4) for step in range(steps)]


def _exponential_decay(step: float, start: float, end: float, tau: float) -> float:
    return end + (start - end) * math.exp(-step / tau)


def jump_and_learn(
    *, start: float, low: float, tau: float, to: float, end: float, after: float, seed: int, noise: float,
    at: int = EVENT, over: int = 1,
) -> Curve:  # fmt: skip
    """Falls from `start` to `low`, rises to `to` within `over` steps, and falls to `end` with a time constant of `after` steps."""

    def trend(step: int) -> float:
        before = _exponential_decay(step, start, low, tau)
        if step < at:
            return before
        if step < at + over:
            last = _exponential_decay(at, start, low, tau)
            return last + (to - last) * (step - at + 1) / over
        return _exponential_decay(step - at - over, to, end, after)

    return _curve(trend, seed, noise)


def restarts(
    *, start: float, low: float, tau: float, rise: float, every: int, after: float, seed: int, noise: float
) -> Curve:
    """The learning rate restarts every `every` steps: the loss rises by `rise` within ten steps and falls again."""

    def trend(step: int) -> float:
        base = _exponential_decay(step, start, low, tau)
        since = step % every
        if step < every:
            return base
        return base + rise * min(since / 10, 1) * math.exp(-max(since - 10, 0) / after)

    return _curve(trend, seed, noise)


def alternating(*, start: float, low: float, high: float, tau: float, period: int, seed: int, noise: float) -> Curve:
    """Two data sets in alternation, one harder than the other."""
    return _curve(
        lambda step: _exponential_decay(step, start, high if step // period % 2 and step > EVENT else low, tau),
        seed,
        noise,
    )


def noisy_labels(*, start: float, low: float, tau: float, share: float, high: float, seed: int, noise: float) -> Curve:
    """Some batches have wrong labels, in bursts."""
    draw = random.Random(seed)
    bad = [draw.random() < share for _ in range(STEPS // 8 + 1)]
    return _curve(
        lambda step: high if step > 150 and bad[step // 8] else _exponential_decay(step, start, low, tau), seed, noise
    )


def spike(*, start: float, low: float, tau: float, to: float, rise: int, back: float, seed: int, noise: float) -> Curve:
    """A spike from which the training recovers."""

    def trend(step: int) -> float:
        base, since = _exponential_decay(step, start, low, tau), step - EVENT
        if since < 0:
            return base
        return base + (to - base) * (since / rise if since < rise else math.exp(-(since - rise) / back))

    return _curve(trend, seed, noise)


HEALTHY: dict[str, Curve] = {
    # harder data from one step on
    "curriculum, +40 %": jump_and_learn(start=2.3, low=0.5, tau=90, to=1.25, end=0.45, after=120, seed=1, noise=0.06),
    "curriculum, +65 %": jump_and_learn(start=2.3, low=0.5, tau=90, to=1.7, end=0.5, after=150, seed=2, noise=0.06),
    "curriculum, +80 %": jump_and_learn(start=2.3, low=0.3, tau=80, to=1.9, end=0.6, after=100, seed=3, noise=0.05),
    "curriculum, slow": jump_and_learn(start=4.6, low=1.2, tau=100, to=3.4, end=1.6, after=300, seed=4, noise=0.04),
    "curriculum, over 20 steps": jump_and_learn(start=2.3, low=0.4, tau=80, to=1.7, end=0.5, after=150, seed=5, noise=0.06, over=20),
    "curriculum, over 60 steps": jump_and_learn(start=2.3, low=0.4, tau=80, to=1.6, end=0.5, after=200, seed=6, noise=0.06, over=60),
    "longer texts": jump_and_learn(start=10.8, low=4.0, tau=80, to=7.8, end=4.0, after=100, seed=7, noise=0.02),
    "larger images": jump_and_learn(start=6.9, low=2.6, tau=120, to=5.2, end=2.5, after=80, seed=8, noise=0.04),
    # an augmentation that makes all batches harder permanently
    "mixup": jump_and_learn(start=2.3, low=0.3, tau=80, to=1.5, end=1.1, after=200, seed=9, noise=0.06),
    "mixup, hard": jump_and_learn(start=2.3, low=0.2, tau=80, to=1.7, end=1.2, after=250, seed=10, noise=0.05),
    "mixup, 100 classes": jump_and_learn(start=4.6, low=0.8, tau=90, to=3.2, end=2.3, after=250, seed=11, noise=0.04),
    "mixup, 1000 classes": jump_and_learn(start=6.9, low=2.0, tau=120, to=4.9, end=3.6, after=300, seed=12, noise=0.03),
    "mixup, hardly learning": jump_and_learn(start=2.3, low=0.3, tau=80, to=1.5, end=1.3, after=400, seed=13, noise=0.05),
    "cutmix": jump_and_learn(start=2.3, low=0.4, tau=80, to=1.65, end=1.2, after=150, seed=14, noise=0.07),
    "label smoothing": jump_and_learn(start=2.3, low=0.1, tau=60, to=1.35, end=1.1, after=200, seed=15, noise=0.03),
    "dropout": jump_and_learn(start=2.3, low=0.3, tau=80, to=1.0, end=0.5, after=150, seed=16, noise=0.06),
    # restarts of the learning rate
    "lr restart": restarts(start=2.3, low=0.3, tau=80, rise=0.7, every=300, after=60, seed=17, noise=0.06),
    "lr restart, large": restarts(start=2.3, low=0.3, tau=80, rise=1.3, every=300, after=60, seed=18, noise=0.06),
    "lr restart, slow": restarts(start=2.3, low=0.3, tau=80, rise=1.2, every=400, after=120, seed=19, noise=0.06),
    "warm restarts": restarts(start=4.6, low=1.0, tau=90, rise=1.6, every=200, after=50, seed=20, noise=0.04),
    "warm restarts, large": restarts(start=4.6, low=1.0, tau=90, rise=2.4, every=250, after=60, seed=21, noise=0.04),
    "warm restarts, often": restarts(start=2.3, low=0.4, tau=60, rise=0.8, every=100, after=25, seed=22, noise=0.06),
    # label noise
    "label noise": noisy_labels(start=2.3, low=0.5, tau=80, share=0.1, high=1.6, seed=23, noise=0.08),
    "label noise, a third": noisy_labels(start=2.3, low=0.5, tau=80, share=0.33, high=1.5, seed=24, noise=0.08),
    "label noise, small batches": noisy_labels(start=2.3, low=0.8, tau=80, share=0.2, high=1.7, seed=25, noise=0.25),
    "small batches": jump_and_learn(start=2.3, low=0.7, tau=80, to=0.8, end=0.6, after=200, seed=26, noise=0.35),
    # a changed reduction of the loss
    "loss x 1.5": jump_and_learn(start=2.3, low=0.9, tau=90, to=1.5, end=0.9, after=200, seed=27, noise=0.05),
    "loss x 2": jump_and_learn(start=2.3, low=0.8, tau=90, to=1.75, end=0.9, after=200, seed=28, noise=0.05),
    "auxiliary loss": jump_and_learn(start=2.3, low=0.4, tau=90, to=1.5, end=0.8, after=90, seed=29, noise=0.05),
    "auxiliary loss, large": jump_and_learn(start=2.3, low=0.4, tau=90, to=2.0, end=0.9, after=90, seed=30, noise=0.05),
    # alternating data, and temporary spikes
    "two data sets": alternating(start=2.3, low=0.4, high=1.5, tau=90, period=30, seed=31, noise=0.05),
    "two data sets, 60 steps each": alternating(start=2.3, low=0.5, high=1.6, tau=90, period=60, seed=32, noise=0.05),
    "spike": spike(start=10.8, low=3.5, tau=90, to=7.6, rise=4, back=12, seed=33, noise=0.02),
    "spike, slow": spike(start=10.8, low=3.5, tau=90, to=7.8, rise=10, back=40, seed=34, noise=0.02),
    "nothing happens": jump_and_learn(start=2.3, low=0.3, tau=120, to=0.45, end=0.3, after=200, seed=35, noise=0.1),
    "regression, harder data": jump_and_learn(start=1.0, low=0.05, tau=70, to=0.65, end=0.06, after=90, seed=36, noise=0.1),
}  # fmt: skip


def make_diverged(
    *, start: float, low: float, tau: float, to: float, over: int, seed: int, noise: float, drift: float = 0.0,
    at: int = EVENT, wave: float = 0.0,
) -> Curve:  # fmt: skip
    """Falls from `start` to `low`, then grows exponentially to `to` within `over` steps and remains there.

    Args:
        drift: relative growth per 100 steps afterwards.
        wave: relative amplitude of an oscillation afterwards, with a period of 12 steps.
    """

    def trend(step: int) -> float:
        base, since = _exponential_decay(step, start, low, tau), step - at
        if since < 0:
            return base
        before = _exponential_decay(at, start, low, tau)
        if since < over:
            return before * math.pow(to / before, (since + 1) / over)
        return float(to * (1 + drift * (since - over) / 100) * (1 + wave * math.sin(since * math.pi / 6)))

    return _curve(trend, seed, noise)


DIVERGED: dict[str, Curve] = {
    "to chance": make_diverged(start=2.3, low=0.4, tau=80, to=2.3, over=15, seed=101, noise=0.02),
    "to chance, in 3 steps": make_diverged(start=2.3, low=0.4, tau=80, to=2.31, over=3, seed=102, noise=0.02),
    "to chance, slowly": make_diverged(start=2.3, low=0.4, tau=80, to=2.3, over=80, seed=103, noise=0.04),
    "to chance, 100 classes": make_diverged(start=4.7, low=1.2, tau=100, to=4.61, over=20, seed=104, noise=0.01),
    "to chance, 1000 classes": make_diverged(start=7.0, low=3.0, tau=120, to=6.91, over=25, seed=105, noise=0.01),
    "above the start": make_diverged(start=2.3, low=0.5, tau=80, to=4.0, over=20, seed=106, noise=0.1),
    "far above": make_diverged(start=2.3, low=0.5, tau=80, to=60.0, over=30, seed=107, noise=0.3),
    "grows on and on": make_diverged(start=2.3, low=0.5, tau=80, to=3.0, over=20, seed=108, noise=0.1, drift=2.0),
    "exponentially": make_diverged(start=2.3, low=0.5, tau=80, to=1e6, over=200, seed=109, noise=0.1),
    "swings": make_diverged(start=2.3, low=0.5, tau=80, to=3.0, over=15, seed=110, noise=0.1, wave=0.3),
    "text, to the words' frequencies": make_diverged(start=10.8, low=3.4, tau=90, to=7.7, over=25, seed=111, noise=0.015),
    "text, to the frequencies, falling": make_diverged(start=10.8, low=3.4, tau=90, to=7.9, over=25, seed=112, noise=0.015, drift=-0.01),
    "dead units": make_diverged(start=2.3, low=0.3, tau=80, to=1.75, over=12, seed=113, noise=0.05),
    "half of the classes": make_diverged(start=4.6, low=0.8, tau=90, to=3.6, over=20, seed=114, noise=0.03),
    "regression": make_diverged(start=1.0, low=0.05, tau=70, to=1.0, over=20, seed=115, noise=0.1),
    "regression, far above": make_diverged(start=1.0, low=0.05, tau=70, to=500.0, over=40, seed=116, noise=0.4),
    "early": make_diverged(start=2.3, low=0.6, tau=40, to=2.3, over=15, seed=117, noise=0.04, at=120),
    "late": make_diverged(start=2.3, low=0.2, tau=120, to=2.3, over=15, seed=118, noise=0.04, at=700),
    "small batches": make_diverged(start=2.3, low=0.7, tau=80, to=2.4, over=20, seed=119, noise=0.2),
}  # fmt: skip
