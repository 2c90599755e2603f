"""Changes of step times: between two probes, within a training, and compared with the prediction."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tula_cli.diagnostics import Diagnostic
from tula_cli.models import messages
from tula_cli.models.cost import compute_cost
from tula_cli.models.time.noise import (
    SETTLING_SAMPLES,
    Floats,
    compute_known_median,
    compute_standard_error,
    compute_trimmed_mean,
)
from tula_cli.run.records.recommendations import Prediction, StageSteps
from tula_cli.run.records.results import StepChange, StepPart, StepParts
from tula_cli.run.records.scripts import Heartbeat
from tula_cli.run.records.tasks import TrainTask
from tula_cli.words import format_duration, format_local_time, format_number

# --- Change points

MIN_LEVEL_VALUES = 10
"""Minimum values for which a new level has to last, and that have to be known of the previous level."""
MAX_VALUES = 8 * MIN_LEVEL_VALUES
"""Upper limit of the values for which a new level has to last after repeated changes."""
HISTORY_LENGTH_RATIO = 8
"""Length of the remembered series, as a multiple of the values for which a level has to last."""
MANN_WHITNEY_THRESHOLD = 5.0
"""Threshold of the largest standardised Mann-Whitney statistic."""
MIN_LEVEL_RATIO = 1.1
"""Ratio of two levels below which a change is too small to report."""


class ChangePointTest:
    """Detects a change of level in a series, value by value.

    Every split of the remembered values is judged by the Mann-Whitney statistic (1947), and the largest one counts, as
    in the change-point model of Hawkins and Deng (2010). It is based on ranks: its error rate on independent values
    does not depend on their distribution, and a spike counts as one value, however high. Correlated neighbours, as
    under a lingering load, count less. A change is reported if the medians on both sides differ by `MIN_LEVEL_RATIO`.
    The series then starts with the new level, and the next change has to last twice as long, up to `MAX_VALUES`, so
    that a load that comes and goes is not reported endlessly.
    """

    def __init__(self) -> None:
        self.least = MIN_LEVEL_VALUES
        self.values: deque[float] = deque(maxlen=HISTORY_LENGTH_RATIO * MAX_VALUES)

    def add_value(self, value: float) -> tuple[int, int] | None:
        """Add the next value; return the numbers of values at the new and the old level, or None without a change.

        Args:
            value: positive, as times are.
        """
        self.values.append(value)
        values = np.asarray(self.values)[-HISTORY_LENGTH_RATIO * self.least :]
        if len(values) < 2 * MIN_LEVEL_VALUES:
            return None
        scores = compute_split_statistics(values)
        judged = np.abs(scores[MIN_LEVEL_VALUES - 1 : len(values) - MIN_LEVEL_VALUES])
        split = int(np.argmax(judged)) + MIN_LEVEL_VALUES
        if len(values) - split < self.least:
            return None
        certainty = abs(scores[split - 1]) / math.sqrt(_compute_variance_inflation(values, split))
        median_before, after = np.median(values[:split]), np.median(values[split:])
        if certainty < MANN_WHITNEY_THRESHOLD or abs(math.log(after / median_before)) < math.log(MIN_LEVEL_RATIO):
            return None
        self.least = min(MAX_VALUES, 2 * self.least)
        self.values = deque(values[split:], maxlen=HISTORY_LENGTH_RATIO * MAX_VALUES)
        return len(values) - split, split


def compute_split_statistics(values: Floats) -> Floats:
    """Return the standardised Mann-Whitney statistic of each split; positive if the later values are larger.

    Args:
        values: shape (n,).

    Returns:
        Shape (n - 1,): of the split after the first value, the first two and so on.
    """
    count = len(values)
    ranks = _rank_values(values)
    # Pairs within one side cancel out, so that only pairs across the split contribute to the sum of signs.
    between = -np.cumsum(2 * ranks - count - 1)[:-1]
    sizes = np.arange(1, count)
    return between / np.sqrt(sizes * (count - sizes) * (count + 1) / 3)


def _compute_variance_inflation(values: Floats, split: int) -> float:
    """Return the factor by which the variance of a level's mean rank exceeds that of independent values.

    Computed from the autocorrelation of successive ranks within the two levels, as for an autoregressive series: if
    neighbours are correlated, fewer values count.
    """
    ranks = _rank_values(values)
    ranks[:split] -= ranks[:split].mean()
    ranks[split:] -= ranks[split:].mean()
    variance = float(np.square(ranks).mean())
    autocorrelation = float((ranks[1:] * ranks[:-1]).mean()) / variance if variance else 0.0
    autocorrelation = min(0.95, max(0.0, autocorrelation))
    return (1 + autocorrelation) / (1 - autocorrelation)


def _rank_values(values: Floats) -> Floats:
    """Return the rank of each value, from 1; equal values share their mean rank."""
    ordered = np.sort(values)
    ranks: Floats = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1) / 2
    return ranks


# --- Levels


@dataclass(frozen=True)
class StepSample:
    """The duration of some steps, and the position and time at which the first of them started."""

    samples: int
    epoch: float | None  # None if the samples per epoch are unknown
    at: float  # Unix time
    parts: StepParts


@dataclass(frozen=True)
class Level:
    """A change of level: the samples before it, and those since."""

    before: Sequence[StepSample]
    after: Sequence[StepSample]


class LevelDetector:
    """Detects changes of level in the step samples of one start of a training."""

    def __init__(self) -> None:
        self.test = ChangePointTest()
        # samples in the window of the test
        self.samples: deque[StepSample] = deque(maxlen=HISTORY_LENGTH_RATIO * MAX_VALUES)
        self.unsettled = SETTLING_SAMPLES

    def add_sample(self, sample: StepSample) -> Level | None:
        """Add a sample; return a change of level if it reveals one."""
        if self.unsettled:
            self.unsettled -= 1
            return None
        self.samples.append(sample)
        change = self.test.add_value(sample.parts.step)
        if change is None:
            return None
        new, old = change
        samples = list(self.samples)
        self.samples = deque(samples[-new:], maxlen=self.samples.maxlen)
        return Level(before=samples[-new - old : -new], after=samples[-new:])


# --- Two probes

MIN_STANDARD_ERRORS_APART = 3.0
"""Standard errors of the difference: 0.3 % of pairs of equal probes differ by more by chance, if errors are normal."""
MIN_DIFFERENCE = 0.03
"""Share of the step time by which two identical jobs on one machine differ without any recorded cause."""
NOISE_TEST = (
    f"within noise: a difference of at most {100 * MIN_DIFFERENCE:g} % or {MIN_STANDARD_ERRORS_APART:g} standard errors"
)


@dataclass(frozen=True)
class StepRatio:
    """The step time of one probe over that of another."""

    before: float  # seconds, the mean without the fastest and slowest tenth of the steps
    after: float
    error: float  # standard error of ln(ratio); inf if either probe has fewer than five steps

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the difference is larger than the noise of the steps explains."""
        log_difference = abs(math.log(self.ratio))
        return log_difference > MIN_STANDARD_ERRORS_APART * self.error and log_difference > math.log1p(MIN_DIFFERENCE)


def compare_step_times(times_before: Sequence[float], after: Sequence[float]) -> StepRatio:
    """Compare the step times of two probes, in seconds."""
    middles = compute_trimmed_mean(times_before), compute_trimmed_mean(after)
    errors = compute_standard_error(times_before) / middles[0], compute_standard_error(after) / middles[1]
    return StepRatio(*middles, error=math.hypot(*errors))


# --- Drift

MAX_WARNINGS = 3
"""Maximum warnings per attempt that the step time has left the predicted interval, or is back in it."""


class StepTimeDrift:
    """Compares the step time of each epoch with the predicted interval.

    The state changes only when two successive epochs agree: a step time near an end of the interval crosses it by
    chance.

    Args:
        prediction: of the training, or of a stage of it; None if there was none.
    """

    def __init__(self, prediction: Prediction | StageSteps | None) -> None:
        self.prediction = prediction
        self._settled: bool | None = None  # whether the last two equal epochs were within the interval; None before
        self._latest: bool | None = None  # whether the latest epoch was within the interval
        self._warnings = 0

    def is_within_prediction(self, step_time: float | None) -> bool | None:
        """Return whether a step time (seconds) is within the 90 % interval; None if either is unknown."""
        prediction = self.prediction
        if prediction is None or step_time is None or prediction.step_low is None or prediction.step_high is None:
            return None
        return prediction.step_low <= step_time <= prediction.step_high

    def check_epoch(self, step_time: float | None, *, epoch: int) -> Diagnostic | None:
        """Return a warning if the step time has been out of the predicted interval for two epochs, or back in it; else None.

        Args:
            step_time: seconds; None if too few steps were timed.
        """
        is_within, was_within = self.is_within_prediction(step_time), self._latest
        self._latest = is_within
        if is_within is None or is_within is not was_within or is_within is self._settled:
            return None
        is_silent = (is_within and self._settled is None) or self._warnings == MAX_WARNINGS
        self._settled = is_within
        if is_silent or step_time is None or self.prediction is None:
            return None
        self._warnings += 1
        predicted = 1000 * self.prediction.step_time
        if is_within:
            return messages.step_time_as_predicted(epoch=epoch, step_ms=1000 * step_time, predicted_ms=predicted)
        low, high = (1000 * (bound or 0.0) for bound in (self.prediction.step_low, self.prediction.step_high))
        return messages.step_time_not_as_predicted(
            epoch=epoch, step_ms=1000 * step_time, predicted_ms=predicted, low_ms=low, high_ms=high
        )


# --- The step time of a script


class ScriptLevelDetector:
    """Detects changes of level in the step times of one start of a script."""

    def __init__(self) -> None:
        self.levels = LevelDetector()
        self._before: tuple[Heartbeat, int, float | None] | None = None  # previous heartbeat with its samples and epoch

    def detect_level_change(
        self, heartbeat: Heartbeat, gaps: Iterable[Mapping[str, Any]], *, samples: int, epoch: float | None
    ) -> Level | None:
        """Judge the steps since the previous call; return a change of level if they reveal one.

        Args:
            gaps: rows of steps that included an evaluation, a save or a new epoch; they are left out.
            samples: of the whole training at that step.
            epoch: of the training at that step; None if unknown.
        """
        previous, self._before = self._before, (heartbeat, samples, epoch)
        if previous is None:
            return None
        previous_beat = previous[0]
        extra_seconds = {
            row["step"]: row["seconds"] for row in gaps if previous_beat.step < row["step"] <= heartbeat.step
        }
        steps = heartbeat.step - previous_beat.step - len(extra_seconds)
        seconds = heartbeat.stepped_at - previous_beat.stepped_at - sum(extra_seconds.values())
        if steps < 1 or seconds <= 0:
            if heartbeat.step == previous_beat.step:
                self._before = previous  # no step was done: keep the start of the interval
            return None
        step_parts = StepParts(step=seconds / steps, data=None, compute=None, sync=None)
        return self.levels.add_sample(StepSample(previous[1], previous[2], previous_beat.stepped_at, step_parts))


# --- Changes in a training

MIN_CAUSE_SHARE = 0.3
"""Share of a step-time change from which on a part is named as a cause."""

_PART_FIELDS: dict[StepPart, str] = {"compute": "compute", "network": "sync", "input": "data"}
_SLOWER_CAUSES: dict[StepPart, str] = {"compute": "the nodes compute more slowly", "network": "the network is slower", "input": "data loading is slower"}  # fmt: skip
_FASTER_CAUSES: dict[StepPart, str] = {"compute": "the nodes compute faster", "network": "the network is faster", "input": "data loading is faster"}  # fmt: skip


def compute_median_step_parts(samples: Sequence[StepParts]) -> StepParts:
    """Return the median of each part over samples, of which there must be at least one."""
    return StepParts(
        step=statistics.median(sample.step for sample in samples),
        data=compute_known_median(sample.data for sample in samples),
        compute=compute_known_median(sample.compute for sample in samples),
        sync=compute_known_median(sample.sync for sample in samples),
    )


def make_step_change(level: Level, task: TrainTask, seconds_left: Callable[[float], float | None]) -> StepChange:
    """Return the record of a step-time change: its parts before and after, remaining time and extra cost.

    Args:
        seconds_left: returns the remaining time at a step time; None if the length of the training is unknown.
    """
    first_after, pricing, prediction = level.after[0], task.spec.pricing, task.prediction
    parts_before, after = (
        compute_median_step_parts([sample.parts for sample in samples]) for samples in (level.before, level.after)
    )
    remaining, at_first = seconds_left(after.step), seconds_left(parts_before.step)
    return StepChange(
        samples=first_after.samples,
        epoch=first_after.epoch,
        began_at=first_after.at,
        parts=find_changed_parts(parts_before, after),
        before=parts_before,
        after=after,
        seconds_left=remaining,
        seconds_left_before=at_first,
        cost_more=compute_cost(
            pricing,
            hours=0.0 if remaining is None or at_first is None else (remaining - at_first) / 3600,
            nodes=task.nodes,
            gpus_per_node=task.spec.cluster.gpus_per_node,
            reserved=(prediction and prediction.peak_memory) or 0,
            market=prediction.market if prediction else "on_demand",
        ),
        currency=pricing.currency,
    )


def find_changed_parts(parts_before: StepParts, after: StepParts) -> tuple[StepPart, ...]:
    """Return the parts that account for at least `MIN_CAUSE_SHARE` of a step-time change, largest first."""
    difference = after.step - parts_before.step
    shares: dict[StepPart, float] = {}
    for part, name in _PART_FIELDS.items():
        old, new = getattr(parts_before, name), getattr(after, name)
        if old is not None and new is not None and difference:
            shares[part] = (new - old) / difference
    return tuple(sorted((part for part in shares if shares[part] >= MIN_CAUSE_SHARE), key=lambda part: -shares[part]))


def describe_step_change(change: StepChange) -> str:
    """Describe a change in one line."""
    parts_before, after = change.before, change.after
    slower = after.step > parts_before.step
    since = format_local_time(change.began_at, "%H:%M:%S")
    causes = _SLOWER_CAUSES if slower else _FASTER_CAUSES
    named = {"compute": "computing", "sync": "synchronisation", "data": "waiting for data"}
    sentences = [
        f"{text} {format_number(1000 * new)} ({format_number(1000 * old)})"
        for name, text in named.items()
        if (old := getattr(parts_before, name)) is not None and (new := getattr(after, name)) is not None
    ]
    unknown = (
        "the affected part is unknown for a script"
        if parts_before.data is None
        else "no single part of the step explains the change"
    )
    why = ", ".join(causes[part] for part in change.parts) or unknown
    comparison = "more" if change.cost_more > 0 else "less"
    price = f", {format_number(abs(change.cost_more))} {change.currency} {comparison}" if change.cost_more else ""
    end = f"{format_duration(change.seconds_left)} remaining instead of {format_duration(change.seconds_left_before)}{price}"
    ends = [", ".join(sentences)] * bool(sentences) + [end] * (change.seconds_left is not None)
    position = f"{since}, {change.samples} samples"
    return (
        f"since {position if change.epoch is None else f'epoch {change.epoch:.2f} ({position})'} a step takes"
        f" {format_number(1000 * after.step)} ms instead of {format_number(1000 * parts_before.step)} ms"
        f" ({100 * (after.step / parts_before.step - 1):+.0f} %): {'; '.join([why, *ends])}"
    )
