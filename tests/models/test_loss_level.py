"""Which finite losses have blown up, and which only spike, rise or wander."""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from loss_curves import DIVERGED, EVENT, HEALTHY

from tula_cli.models.loss_level import LossLevel, compute_max_spike_steps

STEPS = 240
"""Of a curve, a loss a step; a batch that grows has its last two stages from steps 60 and 120."""


def noisy(seed: int, loss: Callable[[int], float], relative: float = 0.1, steps: int = STEPS) -> list[float]:
    chance = random.Random(seed)
    return [loss(step) * math.exp(relative * chance.gauss(0, 1)) for step in range(steps)]


def learning(step: int) -> float:
    return 0.1 + 2.3 * math.exp(-step / 40)


def falling(floor: float, start: float, over: float = 20) -> Callable[[int], float]:
    return lambda step: floor + (start - floor) * math.exp(-step / over)


def spiking(at: int, height: float, over: float) -> Callable[[int], float]:
    return lambda step: learning(step) + (height * math.exp(-(step - at) / over) if step >= at else 0)


def then(at: int, before: Sequence[float], after: Iterable[float]) -> list[float]:
    return [*before[:at], *list(after)[at:]]


QUIET = {
    "a smooth fall": noisy(1, learning, 0.02),
    "noise of 40 %": noisy(2, learning, 0.4),
    "single batches of 20 times the loss": [
        loss * (20 if step % 37 == 5 else 1) for step, loss in enumerate(noisy(3, learning))
    ],
    "one step of 100 times the loss": [
        loss * (100 if step == 130 else 1) for step, loss in enumerate(noisy(4, learning))
    ],
    "a rise at each stage, down again in 10 steps": [
        a + b for a, b in zip(noisy(5, spiking(60, 2, 3)), noisy(6, spiking(120, 3, 3)), strict=True)
    ],
    "a spike that takes 20 steps to recover": noisy(7, spiking(120, 3, 8)),
    "a plateau": noisy(8, lambda step: 2.3, 0.02),
    "a plateau and then a fall": noisy(9, lambda step: 2.3 if step < 100 else falling(0.1, 2.3)(step - 100), 0.05),
    "a first loss of 50 that is gone in 20 steps": noisy(10, falling(0.3, 50, 5)),
    "a rise to 5 times the loss in the first 10 steps": noisy(
        11, lambda step: (2.3 + 1.1 * min(step, 10)) * math.exp(-max(0, step - 10) / 25) + 0.2
    ),
    "a slow rise by 30 %": noisy(12, lambda step: 1 + 0.3 * step / STEPS, 0.05),
    "negative losses": noisy(13, falling(-5, 1, 30), 0.02),
    "losses of 1e-8 with noise of 3e-7": [abs(random.Random(step).gauss(0, 3e-7)) + 1e-8 for step in range(STEPS)],
    "losses that cross zero": [
        3 * math.exp(-step / 40) - 1 + 0.1 * random.Random(step).gauss(0, 1) for step in range(STEPS)
    ],
    "1e-4 that jumps to 1e-2 and falls, of 2 at first": noisy(
        14, lambda step: 1e-4 + 2 * math.exp(-step / 10) + (1e-2 * math.exp((120 - step) / 15) if step > 120 else 0)
    ),
    "a loss of exactly zero": [max(0.0, 1 - step / 100) for step in range(STEPS)],
    "twice the loss of before, of a tenth of the first": then(
        120, noisy(16, falling(0.1, 2)), noisy(17, lambda step: 0.2)
    ),
    "losses that alternate between two kinds of batches": [
        (0.2 if step % 2 else 1.0) * loss for step, loss in enumerate(noisy(18, learning))
    ],
}
BLOWN = {  # and the step at which it begins
    "0.08 that rises to 2 and stays": (then(122, noisy(22, falling(0.08, 1)), noisy(23, lambda step: 2.04)), 122),
    "the same, which comes down to 0.3 over 60 steps": (
        then(122, noisy(24, falling(0.08, 1)), noisy(25, lambda step: 0.3 + 1.8 * math.exp(-(step - 122) / 60))),
        122,
    ),
    "the same, at 1 within 8 steps, at 0.3 after 40 and at 0.11 in the end": (
        then(122, noisy(36, falling(0.09, 1)), noisy(37, lambda step: 0.11 + 1.0 * math.exp(-(step - 122) / 25))),
        122,
    ),
    "the same, with single batches of nearly the loss of before": (
        then(122, noisy(42, falling(0.09, 1)), noisy(43, lambda step: 0.11 + 1.0 * math.exp(-(step - 122) / 18), 0.4)),
        122,
    ),
    "a classifier back at chance": (
        then(125, noisy(26, falling(0.2, 2.2, 15)), noisy(27, lambda step: 2.303, 0.005)),
        125,
    ),
    "a slow learner back at chance": (
        then(150, noisy(38, falling(1.5, 2.303, 60), 0.02), noisy(39, lambda step: 2.303, 0.005)),
        150,
    ),
    "far above the first loss": (then(62, noisy(28, falling(1, 2.3)), noisy(29, lambda step: 50, 0.3)), 62),
    "an exponential rise": (noisy(30, lambda step: learning(min(step, 120)) * math.exp(max(0, step - 120) / 12)), 130),
    "a negative loss that rises to 30": (
        then(122, noisy(31, falling(-5, 1, 30), 0.02), noisy(32, lambda step: 30, 0.2)),
        122,
    ),
    "1e30": (then(121, noisy(33, learning), [1e30] * STEPS), 121),
    "in the second stage": (then(64, noisy(34, falling(1.5, 2.3), 0.05), noisy(35, lambda step: 8, 0.2)), 64),
    "near zero, to 1000 times the loss": (
        then(130, noisy(40, falling(1e-6, 1e-3, 12)), noisy(41, lambda step: 1e-3)),
        130,
    ),
}


def followed(curve: Sequence[float], *, lr_factor: float = 8.0) -> tuple[LossLevel, int | None]:
    """Take a curve; return its level and the step at which it has blown up, or None."""
    level = LossLevel()
    for step, loss in enumerate(curve, 1):
        level.add_loss(loss, samples=step, lr_factor=lr_factor)
        if level.above >= compute_max_spike_steps(len(curve)):
            return level, step
    return level, None


@pytest.mark.parametrize("name", QUIET)
def test_what_recovers_or_only_wanders_has_not_blown_up(name: str) -> None:
    level, at = followed(QUIET[name])
    assert at is None, (level.lowest, level.level)


@pytest.mark.parametrize("name", BLOWN)
def test_a_loss_that_lost_what_was_learned_has_blown_up_and_it_is_known_since_when(name: str) -> None:
    curve, begins = BLOWN[name]
    level, at = followed(curve)
    assert at is not None and at - begins <= 2 * compute_max_spike_steps(STEPS) + 16
    assert begins - 20 <= level.sound <= begins, "a checkpoint from then is from before"
    assert level.lr_factor == 8


@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_that_jumps_and_is_learned_again_has_not_blown_up(name: str) -> None:
    level, at = followed(HEALTHY[name])
    assert at is None, (level.lowest, level.level)


@pytest.mark.parametrize("name", DIVERGED)
def test_a_loss_that_rises_and_stays_has_blown_up(name: str) -> None:
    level, at = followed(DIVERGED[name])
    assert at is not None
    begins = {"early": 120, "late": 700}.get(name, EVENT)
    assert at - begins <= 250 and begins - 40 <= level.sound <= begins + 40


@pytest.mark.parametrize("bad", [1, 10, 70, 130])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_before_a_loss_that_is_no_number_is_before_its_rise(bad: int, value: float) -> None:
    curve = noisy(50, learning)[: bad - 1]
    level, at = followed([*curve[:-2], *(loss * 1e6 for loss in curve[-2:]), value] if bad > 20 else [*curve, value])
    assert at is None and level.lr_factor == 8
    assert level.sound == (bad - 3 if bad > 20 else bad - 1)


def test_at_the_learning_rate_of_the_job_no_loss_is_judged() -> None:
    curve, _ = BLOWN["far above the first loss"]
    assert followed(curve, lr_factor=1.0)[1] is None


def test_a_long_training_waits_longer_for_a_recovery() -> None:
    assert [compute_max_spike_steps(steps) for steps in (50, 240, 368, 3000, 100_000)] == [16, 24, 36, 40, 1000]


def test_a_training_that_was_interrupted_judges_as_one_that_was_not() -> None:
    curve, _ = BLOWN["a classifier back at chance"]
    whole, resumed = LossLevel(), LossLevel()
    for step, loss in enumerate(curve, 1):
        whole.add_loss(loss, samples=step, lr_factor=8)
        resumed.add_loss(loss, samples=step, lr_factor=8)
        resumed = LossLevel(**json.loads(json.dumps(dataclasses.asdict(resumed))))
    assert resumed == whole
