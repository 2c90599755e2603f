"""The steps of a training as an observation for the fit, in addition to those of the probes.

A training shows only its own configurations, but for longer than any probe, on another day and under the load of that
day. Its observation therefore has its own noise: the standard error of its mean over stretches, the difference between
jobs, and the change of its pace during the training.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tula_cli.models import refresh
from tula_cli.models.time.noise import (
    BLOCK_COUNT,
    SETTLING_SAMPLES,
    Z90,
    compute_block_deviation,
    compute_known_median,
    compute_standard_error,
    compute_trimmed_mean,
)
from tula_cli.models.time.step_time import (
    DEFAULT_REPEAT_SD,
    STUDENT_T_95,
    Estimate,
    Observation,
    estimate_measured_step_time,
)
from tula_cli.run.records.recommendations import TrainedSteps
from tula_cli.run.records.tasks import TrainTask

MIN_STEPS = 10
"""Minimum step rows, of about a second each, for a training to count."""
MAX_STRETCHES = 40
"""Maximum stretches into which its steps are divided: means of fewer steps are noisy, and the fit needs no more of
them."""

Row = Mapping[str, Any]
Refused = Callable[[TrainTask, Row | None], str]
"""Returns why the steps of an attempt in an environment (None: unknown) do not count; empty if they do."""


@dataclass(frozen=True)
class TrainedConfiguration:
    """A training at one of its configurations, whether or not its steps are used."""

    signature: str
    nodes: int
    local_batch: int
    until: float  # Unix time of its newest row; 0 without one
    hours: float | None = None  # None if it has not finished, had another length, or changed its configuration


@dataclass(frozen=True)
class TrainingObservations:
    """The observations of a training, and why other steps of it are excluded."""

    steps: tuple[TrainedSteps, ...] = ()
    left_out: tuple[str, ...] = ()
    configurations: tuple[TrainedConfiguration, ...] = ()


@dataclass
class _Start:
    """The rows of one start of the ranks."""

    attempt: int
    environment: Row | None = None
    steps: list[Row] = field(default_factory=list)
    since: float = 0.0  # Unix time of the newest change of the step time; 0 if there is none
    changed: float = 0.0  # natural logarithm of the ratio of that change


@dataclass(frozen=True)
class _TimedSteps:
    """Steps without a refresh, from one row."""

    row: Row
    count: int
    seconds: float


def list_observations_from_training(
    tasks: Sequence[TrainTask], rows: Iterable[Row], refused: Refused
) -> TrainingObservations:
    """Return the step times of a training at each configuration that it ran at.

    Args:
        tasks: of all its attempts.
        rows: of metrics.jsonl.
        refused: returns why the steps of an attempt in an environment do not count.
    """
    task_by_attempt = {task.attempt: task for task in tasks}
    starts: dict[tuple[int, int], list[tuple[TrainTask, _Start]]] = {}
    left_out: list[str] = []
    for start in _split_into_starts(rows):
        task = task_by_attempt.get(start.attempt)
        if task is None or not start.steps:
            continue
        if why := _describe_difference_from_probes(task) or refused(task, start.environment):
            left_out.append(why)
        else:
            starts.setdefault((task.nodes, task.batch), []).append((task, start))
    joined = (_join_starts(starts_here) for starts_here in starts.values())
    return TrainingObservations(tuple(steps for steps in joined if steps is not None), tuple(dict.fromkeys(left_out)))


def convert_to_observation(steps: TrainedSteps) -> Observation:
    return Observation(
        nodes=steps.nodes,
        gpus_per_node=steps.gpus_per_node,
        local_batch=steps.local_batch,
        step_times=steps.step_times,
        compute_time=math.nan if steps.compute is None else steps.compute,
        doubt=steps.noise,
    )


def group_trainings_by_configuration(trained: Iterable[TrainedSteps]) -> dict[tuple[int, int], list[TrainedSteps]]:
    """Return trainings by nodes and local batch, oldest first."""
    groups: dict[tuple[int, int], list[TrainedSteps]] = {}
    for steps in sorted(trained, key=lambda steps: steps.until):
        groups.setdefault((steps.nodes, steps.local_batch), []).append(steps)
    return groups


def convert_to_trained_configuration(steps: TrainedSteps) -> TrainedConfiguration:
    return TrainedConfiguration(steps.signature, steps.nodes, steps.local_batch, steps.until)


def find_newest_trainings(
    trainings: Iterable[TrainedConfiguration],
) -> dict[tuple[int, int], TrainedConfiguration]:
    """Return the newest training by nodes and local batch; one that has the length of the job and is finished, if any."""
    return {
        (training.nodes, training.local_batch): training
        for training in sorted(trainings, key=lambda training: (training.hours is not None, training.until))
    }


def estimate_from_measurements(
    probe: Sequence[float] | None, trained: Sequence[TrainedSteps], repeats: float
) -> Estimate | None:
    """Return the step time of a configuration measured by a probe or by trainings, with its 90 % interval.

    Trainings take precedence over the probe, because they ran longer and are what is predicted. They are weighted by
    their precision. If they or the probe differ from the mean by more than their noise explains, its uncertainty is
    increased accordingly (Birge 1932). A probe alone gives `estimate_measured_step_time`; None without any measurement.

    Args:
        probe: its step times; None if there is none.
        trained: trainings at this configuration.
        repeats: standard deviation of one job from the mean of all jobs, as a share.
    """
    if not trained:
        return None if probe is None else estimate_measured_step_time(probe, repeats)
    between = repeats**2
    estimates = [
        (compute_trimmed_mean(steps.step_times), max(0.0, steps.noise**2 - DEFAULT_REPEAT_SD**2)) for steps in trained
    ]
    if probe is not None and (spread := compute_block_deviation(probe)) is not None:
        seconds = compute_trimmed_mean(probe)
        estimates.append((seconds, (STUDENT_T_95 / Z90 * spread / seconds) ** 2 * (1 + 1 / BLOCK_COUNT)))
    logs = np.log([seconds for seconds, _ in estimates])
    weights = 1 / np.array([variance + between for _, variance in estimates])
    count = len(trained)
    mean = float(np.average(logs[:count], weights=weights[:count]))
    birge = float(weights @ np.square(logs - mean)) / max(1, len(estimates) - 1)
    half = Z90 * math.sqrt(max(1.0, birge) / float(weights[:count].sum()) + between)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _split_into_starts(rows: Iterable[Row]) -> Iterator[_Start]:
    start: _Start | None = None
    for row in rows:
        if row["kind"] == "start":
            if start is not None:
                yield start
            start = _Start(row["attempt"])
        elif start is None:
            continue
        elif row["kind"] == "environment":
            start.environment = row
        elif row["kind"] == "step":
            start.steps.append(row)
        elif row["kind"] == "change":
            step_before, after = row["change"]["before"]["step"], row["change"]["after"]["step"]
            start.since, start.changed = row["change"]["began_at"], abs(math.log(after / step_before))
    if start is not None:
        yield start


def _describe_difference_from_probes(task: TrainTask) -> str:
    """Return why the steps of an attempt are not comparable with a probe's; empty if they are."""
    if task.splits > 1:
        return f"its micro-batches were split into {task.splits}"
    if task.workers != task.spec.train.workers:
        return f"it had {task.workers} loader processes per rank"
    return ""


def _join_starts(starts: Sequence[tuple[TrainTask, _Start]]) -> TrainedSteps | None:
    """Return the combined step times of the starts at one configuration; None if there are too few."""
    task = starts[0][0]
    timed = [step for start_task, start in starts for step in _list_timed_steps(start_task, start)]
    times = _compute_stretch_means(timed)
    if len(timed) < MIN_STEPS or len(times) < BLOCK_COUNT:
        return None
    changed = max(start.changed for _, start in starts)
    # The next training may have the step time before or after a change, so the 90 % interval includes both.
    noise = math.hypot(compute_standard_error(times) / compute_trimmed_mean(times), DEFAULT_REPEAT_SD, changed / Z90)
    names = ("compute", "sync", "data_wait")
    medians = {name: compute_known_median(step.row.get(name) for step in timed) for name in names}
    # as for a probe, compute includes data waits; their maxima may be of different ranks
    if medians["compute"] is not None:
        medians["compute"] = min(compute_trimmed_mean(times), medians["compute"] + (medians["data_wait"] or 0.0))
    return TrainedSteps(
        signature=task.signature,
        nodes=task.nodes,
        gpus_per_node=task.spec.cluster.gpus_per_node,
        batch=task.batch,
        step_time=compute_trimmed_mean(times),
        step_times=times,
        **medians,
        steps=sum(step.count for step in timed),
        changed=changed,
        noise=noise,
        since=timed[0].row["time"],
        until=timed[-1].row["time"],
    )


def _list_timed_steps(task: TrainTask, start: _Start) -> Iterator[_TimedSteps]:
    """Yield the steps of a start since its pace changed, without the first ones, while caches and loaders warm up.

    Older logs do not distinguish refreshes from other steps: of these, steps of a method with separate refreshes are
    left out.
    """
    has_refreshes, previous_step = refresh.has_separate_refreshes(task.spec, task.batch), 0
    # without rows of earlier stages
    rows_of_batch = [row for row in start.steps if row.get("batch", task.batch) == task.batch]
    for number, row in enumerate(rows_of_batch):
        count, previous_step = row.get("count") or max(1, row["step"] - previous_step), row["step"]
        if number < SETTLING_SAMPLES or row["time"] < start.since:
            continue
        if "plain_time" in row:
            if row["plain_time"] is not None:
                yield _TimedSteps(row, count - row["refreshed"], row["plain_time"])
        elif not has_refreshes:
            yield _TimedSteps(row, count, row["step_time"])


def _compute_stretch_means(timed: Sequence[_TimedSteps]) -> tuple[float, ...]:
    """Return the mean step times of successive stretches with about the same number of steps. Seconds."""
    if not timed:
        return ()
    counts = np.array([step.count for step in timed], dtype=float)
    stretch = np.minimum(MAX_STRETCHES - 1, (np.cumsum(counts) - counts) * MAX_STRETCHES // counts.sum()).astype(int)
    total_seconds = np.bincount(stretch, weights=counts * [step.seconds for step in timed])
    steps = np.bincount(stretch, weights=counts)
    return tuple(float(seconds) for seconds in total_seconds[steps > 0] / steps[steps > 0])
