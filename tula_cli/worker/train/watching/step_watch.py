"""Watches the steps of a training: what they take on every rank, and when that comes to another level.

The ranks look together, where they meet anyway, about once a second: nothing waits for the device between two looks. The
exposed synchronisation is sampled in the first steps after each look, for its hooks cost time.
"""

import statistics
import time
from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from tula_cli.models.time.changes.levels import Level, LevelDetector, StepSample
from tula_cli.models.time.noise import trimmed_mean
from tula_cli.run.records.results import StepParts
from tula_cli.worker.train.loop import Step, Trainer
from tula_cli.worker.train.watching.sync_spy import SynchronisationTimer

SAMPLED_STEPS = 3
"""Steps after each look in which the synchronisation is timed."""


class StepWatch:
    """Follows the steps of one training on this rank.

    Args:
        trainer: whose steps these are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.levels = LevelDetector()
        self.steps: list[Step] = []  # since the last look
        self.newest: StepParts | None = None
        self._start_sampling()

    @property
    def can_separate_parts(self) -> bool:
        """Whether computing and synchronisation can be told apart; compiled steps would be compiled anew for that."""
        return isinstance(self.trainer.parallel, DistributedDataParallel) and not self.trainer.spec.train.compile

    def _start_sampling(self) -> None:
        """Begin a look at the trainer's position."""
        trainer = self.trainer
        self.steps, self.began = [], (trainer.position.samples, trainer.epoch, time.time())
        self.spy = SynchronisationTimer(trainer.clock, trainer.parallel)
        self.watching = self.can_separate_parts and trainer.ranks.world > 1 and not trainer.local_sgd
        if self.watching:
            self.spy.__enter__()
            trainer.on_backward = self.spy.reduced

    def _stop_sampling(self) -> None:
        """Take the hooks off again."""
        if self.watching:
            self.watching = False
            self.spy.__exit__()
            self.trainer.on_backward = None

    def restart(self) -> None:
        """Forget the steps so far: those to come have another batch, and take another time for that."""
        self._stop_sampling()
        self.levels, self.newest = LevelDetector(), None
        self._start_sampling()

    def record_step(self, step: Step) -> None:
        """Take the step that has just been made."""
        self.steps.append(step)
        if len(self.steps) == SAMPLED_STEPS:
            self._stop_sampling()

    def judge_steps(self) -> Level | None:
        """Judge the steps since the last look; return a change of level, on rank 0 alone.

        Every rank takes part, after the same step.
        """
        self._stop_sampling()
        steps, spy, (passed, epoch, at) = self.steps, self.spy, self.began
        local = self.trainer.local_sgd  # each rank's own steps: of another kind than those before
        step_parts = None if local else self._slowest_parts(steps, spy)
        self._start_sampling()
        if step_parts is None or not self.trainer.ranks.is_first:
            return None
        self.newest = step_parts
        return self.levels.add(StepSample(passed, epoch, at, step_parts))

    def _slowest_parts(self, steps: Sequence[Step], spy: SynchronisationTimer) -> StepParts | None:
        """Return what a step takes on the slowest rank; None where all of them did more than steps do."""
        plain = [step for step in steps if not step.refreshed]
        if not plain:
            return None
        seconds = self.trainer.clock.seconds
        step_time = trimmed_mean([seconds(step.start, step.end) for step in plain])
        data = trimmed_mean([seconds(step.start, step.loaded) for step in plain])
        if not self.can_separate_parts:
            (data,) = self.trainer.ranks.elementwise_max([data])
            return StepParts(step=step_time, data=data, compute=None, sync=None)
        if self.trainer.ranks.world == 1:
            return StepParts(step=step_time, data=data, compute=step_time - data, sync=0.0)
        pairs = list(zip(steps, spy.seconds(), strict=False))
        plain_pairs = [pair for pair in pairs if not pair[0].refreshed] or pairs
        sync = statistics.median(exposed for _, exposed in plain_pairs)
        compute = statistics.median(seconds(step.loaded, step.end) - exposed for step, exposed in plain_pairs)
        data, compute, least = self.trainer.ranks.elementwise_max([data, compute, -sync])
        return StepParts(step=step_time, data=data, compute=compute, sync=-least)
