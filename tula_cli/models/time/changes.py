"""Changes of step times: between two sets of steps, within a training, and against what was predicted."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tula_cli.models.cost import compute_cost
from tula_cli.models.time.noise import Floats, compute_standard_error, compute_trimmed_mean
from tula_cli.run.records.recommendations import Prediction, StageSteps
from tula_cli.run.records.results import StepChange, StepPart, StepParts
from tula_cli.run.records.scripts import Heartbeat
from tula_cli.run.records.tasks import TrainTask
from tula_cli.words import format_duration, format_number

# --- Change points

MIN_VALUES = 10
"""Values that a new level has to last for, and that have to be known of the level before."""
MAX_VALUES = 8 * MIN_VALUES
"""How long a new level has to last after others that did not."""
WINDOW = 8
"""Values that are remembered, in multiples of what a level has to last for."""
THRESHOLD = 5.0
"""Of the largest standardised Mann-Whitney statistic."""
MIN_RATIO = 1.1
"""Ratio of two levels below which a change makes too little difference to be told."""


class ChangePointTest:
    """Looks for a change of level in a series, value by value.

    Every split of the remembered values is judged by Mann and Whitney's statistic (1947), the largest counts, as in the
    change-point model of Hawkins and Deng (2010). It goes by ranks: how often it errs on independent values does not
    depend on their distribution, and a spike counts as one value, however high. Where neighbours are alike, as of a load
    that lingers, they count less. A change is told where the medians on both sides also differ by NOTABLE. What is
    remembered begins with the new level then, and the next change has to last twice as long, up to MOST: a load that
    comes and goes is not told for ever.
    """

    def __init__(self) -> None:
        self.least = MIN_VALUES
        self.values: deque[float] = deque(maxlen=WINDOW * MAX_VALUES)

    def add(self, value: float) -> tuple[int, int] | None:
        """Take the next value; return how many of the newest are of a new level, and how many before them of the old one.

        None where there is no new level.

        Args:
            value: positive, as times are.
        """
        self.values.append(value)
        values = np.asarray(self.values)[-WINDOW * self.least :]
        if len(values) < 2 * MIN_VALUES:
            return None
        statistics = split_statistics(values)
        split = int(np.argmax(np.abs(statistics[MIN_VALUES - 1 : len(values) - MIN_VALUES]))) + MIN_VALUES
        if len(values) - split < self.least:
            return None
        certainty = abs(statistics[split - 1]) / math.sqrt(_compute_variance_inflation(values, split))
        median_before, after = np.median(values[:split]), np.median(values[split:])
        if certainty < THRESHOLD or abs(math.log(after / median_before)) < math.log(MIN_RATIO):
            return None
        self.least = min(MAX_VALUES, 2 * self.least)
        self.values = deque(values[split:], maxlen=WINDOW * MAX_VALUES)
        return len(values) - split, split


def split_statistics(values: Floats) -> Floats:
    """Return the standardised Mann-Whitney statistic of each split of a series; positive where what follows is larger.

    Args:
        values: shape (n,).

    Returns:
        Shape (n - 1,): of the split after the first value, the first two and so on.
    """
    count = len(values)
    ranks = _rank_values(values)
    # Each pair within a part adds 1 and -1: what is left of the sum of a part's signs is between the parts.
    between = -np.cumsum(2 * ranks - count - 1)[:-1]
    sizes = np.arange(1, count)
    return between / np.sqrt(sizes * (count - sizes) * (count + 1) / 3)


def _compute_variance_inflation(values: Floats, split: int) -> float:
    """Return by how much the variance of a level's mean rank is larger than with independent values.

    By the autocorrelation of successive ranks within the two levels, as of an autoregressive series; where neighbours are
    alike, fewer values count.
    """
    ranks = _rank_values(values)
    ranks[:split] -= ranks[:split].mean()
    ranks[split:] -= ranks[split:].mean()
    variance = float(np.square(ranks).mean())
    alike = float((ranks[1:] * ranks[:-1]).mean()) / variance if variance else 0.0
    alike = min(0.95, max(0.0, alike))
    return (1 + alike) / (1 - alike)


def _rank_values(values: Floats) -> Floats:
    """Return the rank of each value, from 1; the mean one of equal values."""
    ordered = np.sort(values)
    ranks: Floats = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1) / 2
    return ranks


# --- Levels

SETTLING_SAMPLES = 3
"""The first looks are not judged: caches fill, loaders start."""


@dataclass(frozen=True)
class StepSample:
    """The duration of some steps, and the sample at which the first of them started."""

    samples: int
    epoch: float | None  # None where nobody knows how many samples one has
    at: float  # Unix time
    parts: StepParts


@dataclass(frozen=True)
class Level:
    """A change of level: the looks before it, and those since."""

    before: Sequence[StepSample]
    after: Sequence[StepSample]


class LevelDetector:
    """Follows the looks of one start of a training."""

    def __init__(self) -> None:
        self.test = ChangePointTest()
        self.looks: deque[StepSample] = deque(maxlen=WINDOW * MAX_VALUES)  # those that the test remembers
        self.unsettled = SETTLING_SAMPLES

    def add(self, sample: StepSample) -> Level | None:
        """Take a look; return a change of level where it shows one."""
        if self.unsettled:
            self.unsettled -= 1
            return None
        self.looks.append(sample)
        change = self.test.add(sample.parts.step)
        if change is None:
            return None
        new, old = change
        samples = list(self.looks)
        self.looks = deque(samples[-new:], maxlen=self.looks.maxlen)
        return Level(before=samples[-new - old : -new], after=samples[-new:])


# --- Two probes

ERRORS_APART = 3.0
"""Standard errors of the difference: 0.3 % of pairs that are alike are further apart by chance, where errors are normal."""
MIN_DIFFERENCE = 0.03
"""Share of the step time: two jobs of one thing on one machine differ by so much without a cause that anything records."""
TEST = (
    f"beyond noise: further apart than {ERRORS_APART:g} standard errors of the two trimmed means (of single steps, and of five blocks of"
    f" steps), and than {100 * MIN_DIFFERENCE:g} %"
)


@dataclass(frozen=True)
class StepRatio:
    """The step time of one probe over that of another."""

    before: float  # seconds, the mean without the fastest and the slowest tenth
    after: float
    error: float  # standard error of the ratio's logarithm; inf where either has fewer than five steps

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the noise of the steps does not explain the difference."""
        log_difference = abs(math.log(self.ratio))
        return log_difference > ERRORS_APART * self.error and log_difference > math.log1p(MIN_DIFFERENCE)


def compare_step_times(times_before: Sequence[float], after: Sequence[float]) -> StepRatio:
    """Compare the step times of two probes.

    Args:
        before: step times of the one, seconds.
        after: those of the other.
    """
    middles = compute_trimmed_mean(times_before), compute_trimmed_mean(after)
    errors = compute_standard_error(times_before) / middles[0], compute_standard_error(after) / middles[1]
    return StepRatio(*middles, error=math.hypot(*errors))


# --- Drift

MAX_WARNINGS = 3
"""How often an attempt says that its step time left the predicted interval, or is back in it."""


class StepTimeDrift:
    """Holds the step time of each epoch against the predicted interval.

    What is said changes when two epochs in a row agree: a time near an end of the interval goes in and out by chance.

    Args:
        prediction: what the training was chosen by, or a stage of it; None where there was none.
    """

    def __init__(self, prediction: Prediction | StageSteps | None) -> None:
        self.prediction = prediction
        self._settled: bool | None = None  # within the interval, as of two epochs that agree
        self._latest: bool | None = None  # the same of the latest epoch
        self._told = 0

    def is_within(self, step_time: float | None) -> bool | None:
        """Return whether a step time (seconds) is within the 90 % interval; None where either is unknown."""
        prediction = self.prediction
        if prediction is None or step_time is None or prediction.step_low is None or prediction.step_high is None:
            return None
        return prediction.step_low <= step_time <= prediction.step_high

    def warning(self, step_time: float | None, *, epoch: int) -> str:
        """Return what there is to say after an epoch; "" for nothing new.

        Args:
            step_time: seconds; None where too few steps have been timed.
            epoch: which one has ended.
        """
        within, previously_within = self.is_within(step_time), self._latest
        self._latest = within
        if within is None or within is not previously_within or within is self._settled:
            return ""
        untold = (within and self._settled is None) or self._told == MAX_WARNINGS
        self._settled = within
        if untold or step_time is None or self.prediction is None:
            return ""
        self._told += 1
        took = (
            f"epoch {epoch}: a step takes {1000 * step_time:.1f} ms, predicted {1000 * self.prediction.step_time:.1f}"
        )
        if within:
            return f"{took}: within the interval again"
        low, high = (1000 * (bound or 0.0) for bound in (self.prediction.step_low, self.prediction.step_high))
        why = "has the network or the load changed?" if 1000 * step_time > high else "faster than the probes were"
        return f"{took} (90 % between {low:.1f} and {high:.1f}): {why}"


# --- The pace of a script


class ScriptLevelDetector:
    """Follows one start of a script."""

    def __init__(self) -> None:
        self.levels = LevelDetector()
        self._before: tuple[Heartbeat, int, float | None] | None = None  # of the last look: samples, epoch

    def judge_steps(
        self, beat: Heartbeat, gaps: Iterable[Mapping[str, Any]], *, samples: int, epoch: float | None
    ) -> Level | None:
        """Judge the steps since the last look; return a change of level where they show one.

        Args:
            beat: the newest heartbeat.
            gaps: rows of steps that held something else (an evaluation, a save, a new epoch): they are left out.
            samples: of the whole training at that step.
            epoch: of the training there; None where nothing tells it.
        """
        previous, self._before = self._before, (beat, samples, epoch)
        if previous is None:
            return None
        previous_beat = previous[0]
        extra_seconds = {row["step"]: row["seconds"] for row in gaps if previous_beat.step < row["step"] <= beat.step}
        steps = beat.step - previous_beat.step - len(extra_seconds)
        seconds = beat.stepped_at - previous_beat.stepped_at - sum(extra_seconds.values())
        if steps < 1 or seconds <= 0:
            if beat.step == previous_beat.step:
                self._before = previous  # nothing was stepped: the next look begins where this one has
            return None
        step_parts = StepParts(step=seconds / steps, data=None, compute=None, sync=None)
        return self.levels.add(StepSample(previous[1], previous[2], previous_beat.stepped_at, step_parts))


# --- Changes in a training

MIN_SHARE = 0.3
"""Of the change of a step, from which on a part is named."""

_FIELDS: dict[StepPart, str] = {"compute": "compute", "network": "sync", "input": "data"}
_SLOWER: dict[StepPart, str] = {"compute": "the nodes compute more slowly", "network": "the network is slower", "input": "the data come more slowly"}  # fmt: skip
_FASTER: dict[StepPart, str] = {"compute": "the nodes compute faster", "network": "the network is faster", "input": "the data come faster"}  # fmt: skip


def compute_median_parts(samples: Sequence[StepParts]) -> StepParts:
    """Return the median of each part over some looks, of which there is at least one."""

    def of(name: str) -> float | None:
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        return statistics.median(values) if values else None

    step = of("step")
    assert step is not None
    return StepParts(step=step, data=of("data"), compute=of("compute"), sync=of("sync"))


def describe_level_change(level: "Level", task: TrainTask, seconds_left: Callable[[float], float | None]) -> StepChange:
    """Return what has changed in a training, since when, and what comes of it.

    Args:
        level: of the looks at its steps.
        task: what is trained.
        seconds_left: returns what is left of it at a step time; None where nothing tells how long it is.
    """
    first_after, pricing, prediction = level.after[0], task.spec.pricing, task.prediction
    parts_before, after = (
        compute_median_parts([sample.parts for sample in samples]) for samples in (level.before, level.after)
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
    """Return the parts that make a notable share of a change of the step time, the most first."""
    difference = after.step - parts_before.step
    shares: dict[StepPart, float] = {}
    for part, name in _FIELDS.items():
        old, new = getattr(parts_before, name), getattr(after, name)
        if old is not None and new is not None and difference:
            shares[part] = (new - old) / difference
    return tuple(sorted((part for part in shares if shares[part] >= MIN_SHARE), key=lambda part: -shares[part]))


def describe_step_change(change: StepChange) -> str:
    """Return a change in one line."""
    parts_before, after = change.before, change.after
    slower = after.step > parts_before.step
    since = time.strftime("%H:%M:%S", time.localtime(change.began_at))
    causes = _SLOWER if slower else _FASTER
    named = {"compute": "computing", "sync": "synchronisation", "data": "waiting for data"}
    sentences = [
        f"{text} {format_number(1000 * new)} ({format_number(1000 * old)})"
        for name, text in named.items()
        if (old := getattr(parts_before, name)) is not None and (new := getattr(after, name)) is not None
    ]
    unknown = (
        "a script does not tell which part of it" if parts_before.data is None else "no part alone accounts for it"
    )
    why = ", ".join(causes[part] for part in change.parts) or unknown
    extra_cost = change.cost_more
    price = (
        f", {format_number(abs(extra_cost))} {change.currency} {'more' if extra_cost > 0 else 'less'}"
        if extra_cost
        else ""
    )
    end = f"{format_duration(change.seconds_left)} to the end, not {format_duration(change.seconds_left_before)}{price}"
    ends = [", ".join(sentences)] * bool(sentences) + [end] * (change.seconds_left is not None)
    position = f"{since}, {change.samples} samples"
    return (
        f"since {position if change.epoch is None else f'epoch {change.epoch:.2f} ({position})'} a step takes"
        f" {format_number(1000 * after.step)} ms, before {format_number(1000 * parts_before.step)} ms"
        f" ({100 * (after.step / parts_before.step - 1):+.0f} %): {'; '.join([why, *ends])}"
    )
