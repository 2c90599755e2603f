"""Watches the steps of a training: their duration on every rank, and changes of its level.

The ranks compare their samples when they communicate anyway, about once a second: nothing waits for the device between
two samples. The exposed synchronisation is measured in the first steps of each sample only, because its hooks cost
time.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tula_cli.models.time.changes import Level, LevelDetector, StepSample
from tula_cli.models.time.noise import compute_trimmed_mean
from tula_cli.run.records.results import StepParts
from tula_cli.worker.device import Clock, Mark
from tula_cli.worker.train.loop import Step, Trainer

# --- Implicit synchronisations


@dataclass
class SynchronisationTimer:
    """Times the exposed synchronisation of backward passes: last local gradient to the end of the reduction.

    A hook on each parameter fires when its local gradient is complete, before DDP reduces it; the last one to fire
    marks the end of the local work. Used on separate steps, because the hooks cost time.
    """

    clock: Clock
    model: nn.Module
    last: Mark | None = None
    exposed: list[tuple[Mark, Mark]] = field(default_factory=list)

    def __enter__(self) -> "SynchronisationTimer":
        self._handles = [
            p.register_hook(self._record_ready_gradient) for p in self.model.parameters() if p.requires_grad
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record_ready_gradient(self, _: torch.Tensor) -> None:
        self.last = self.clock.mark()

    def record_reduction(self) -> None:
        """Record the end of the reduction, to be called when backward has returned.

        On the CPU the reduction is then over; on a GPU the stream waits for it.
        """
        assert self.last is not None
        self.exposed.append((self.last, self.clock.mark()))

    def measure_seconds(self) -> list[float]:
        """Return the exposed synchronisation of each backward pass in seconds; waits for the device."""
        return [self.clock.measure_seconds(start, end) for start, end in self.exposed]

    def compute_median(self) -> float:
        """Return the median exposed synchronisation in seconds."""
        return statistics.median(self.measure_seconds())


# --- Samples of steps

SAMPLED_STEPS = 3
"""Steps at the start of each sample in which the synchronisation is timed."""


class StepWatch:
    """Follows the steps of one training on this rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.levels = LevelDetector()
        self.steps: list[Step] = []  # steps since the last sample
        self.newest: StepParts | None = None
        self._start_sampling()

    @property
    def can_time_communication(self) -> bool:
        """Whether computation and synchronisation can be timed separately: with DDP, and uncompiled (hooks
        recompile)."""
        return self.trainer.parallel.separates_communication and not self.trainer.spec.train.compile

    def _start_sampling(self) -> None:
        trainer = self.trainer
        self.steps, self.began = [], (trainer.position.samples, trainer.epoch, time.time())
        self.timer = SynchronisationTimer(trainer.clock, trainer.parallel)
        self.watching = self.can_time_communication and trainer.ranks.world > 1 and not trainer.is_local_sgd
        if self.watching:
            self.timer.__enter__()
            trainer.on_backward = self.timer.record_reduction

    def _stop_sampling(self) -> None:
        if self.watching:
            self.watching = False
            self.timer.__exit__()
            self.trainer.on_backward = None

    def restart(self) -> None:
        """Discard the steps so far, because the coming steps have another batch and therefore another duration."""
        self._stop_sampling()
        self.levels, self.newest = LevelDetector(), None
        self._start_sampling()

    def record_step(self, step: Step) -> None:
        """Record the step that has just been made."""
        self.steps.append(step)
        if len(self.steps) == SAMPLED_STEPS:
            self._stop_sampling()

    def detect_level_change(self) -> Level | None:
        """Judge the steps since the last sample; return a change of level, on rank 0 alone.

        Every rank must call this, after the same step.
        """
        self._stop_sampling()
        steps, timer, (passed, epoch, at) = self.steps, self.timer, self.began
        local = self.trainer.is_local_sgd  # local steps are compared separately from synchronous ones
        step_parts = None if local else self._find_slowest_parts(steps, timer)
        self._start_sampling()
        if step_parts is None or not self.trainer.ranks.is_first:
            return None
        self.newest = step_parts
        return self.levels.add_sample(StepSample(passed, epoch, at, step_parts))

    def _find_slowest_parts(self, steps: Sequence[Step], timer: SynchronisationTimer) -> StepParts | None:
        """Return the times of a step on the slowest rank; None if every step in the sample included a refresh."""
        plain = [step for step in steps if not step.refreshed]
        if not plain:
            return None
        seconds = self.trainer.clock.measure_seconds
        step_time = compute_trimmed_mean([seconds(step.start, step.end) for step in plain])
        data = compute_trimmed_mean([seconds(step.start, step.loaded) for step in plain])
        if not self.can_time_communication:
            (data,) = self.trainer.ranks.compute_elementwise_max([data])
            return StepParts(step=step_time, data=data, compute=None, sync=None)
        if self.trainer.ranks.world == 1:
            return StepParts(step=step_time, data=data, compute=step_time - data, sync=0.0)
        pairs = list(zip(steps, timer.measure_seconds(), strict=False))
        plain_pairs = [pair for pair in pairs if not pair[0].refreshed] or pairs
        sync = statistics.median(exposed for _, exposed in plain_pairs)
        compute = statistics.median(seconds(step.loaded, step.end) - exposed for step, exposed in plain_pairs)
        data, compute, least = self.trainer.ranks.compute_elementwise_max([data, compute, -sync])
        return StepParts(step=step_time, data=data, compute=compute, sync=-least)
