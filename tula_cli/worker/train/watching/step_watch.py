"""Watches the steps of a training: what they take on every rank, and when that comes to another level.

The ranks look together, where they meet anyway, about once a second: nothing waits for the device between two looks. The
exposed synchronisation is sampled in the first steps after each look, for its hooks cost time.
"""

import statistics
import time
from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from tula_cli.models.time.changes.levels import Level, Levels, Look
from tula_cli.models.time.noise import centre
from tula_cli.run.records.results import StepParts
from tula_cli.worker.train.loop import Step, Trainer
from tula_cli.worker.train.watching.sync_spy import SyncSpy

SAMPLED = 3
"""Steps after each look in which the synchronisation is timed."""


class StepWatch:
    """Follows the steps of one training on this rank.

    Args:
        trainer: whose steps these are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.levels = Levels()
        self.steps: list[Step] = []  # since the last look
        self.newest: StepParts | None = None
        self._begin()

    @property
    def told_apart(self) -> bool:
        """Whether computing and synchronisation can be told apart; compiled steps would be compiled anew for that."""
        return isinstance(self.trainer.parallel, DistributedDataParallel) and not self.trainer.spec.train.compile

    def _begin(self) -> None:
        """Begin a look at the trainer's position."""
        trainer = self.trainer
        self.steps, self.began = [], (trainer.position.samples, trainer.epoch, time.time())
        self.spy = SyncSpy(trainer.clock, trainer.parallel)
        self.watching = self.told_apart and trainer.ranks.world > 1 and not trainer.local_sgd
        if self.watching:
            self.spy.__enter__()
            trainer.on_backward = self.spy.reduced

    def _end(self) -> None:
        """Take the hooks off again."""
        if self.watching:
            self.watching = False
            self.spy.__exit__()
            self.trainer.on_backward = None

    def begin_anew(self) -> None:
        """Forget the steps so far: those to come have another batch, and take another time for that."""
        self._end()
        self.levels, self.newest = Levels(), None
        self._begin()

    def follow(self, step: Step) -> None:
        """Take the step that has just been made."""
        self.steps.append(step)
        if len(self.steps) == SAMPLED:
            self._end()

    def look(self) -> Level | None:
        """Judge the steps since the last look; return a change of level, on rank 0 alone.

        Every rank takes part, after the same step.
        """
        self._end()
        steps, spy, (passed, epoch, at) = self.steps, self.spy, self.began
        local = self.trainer.local_sgd  # each rank's own steps: of another kind than those before
        parts = None if local else self._parts(steps, spy)
        self._begin()
        if parts is None or not self.trainer.ranks.first:
            return None
        self.newest = parts
        return self.levels.add(Look(passed, epoch, at, parts))

    def _parts(self, steps: Sequence[Step], spy: SyncSpy) -> StepParts | None:
        """Return what a step takes on the slowest rank; None where all of them did more than steps do."""
        plain = [step for step in steps if not step.refreshed]
        if not plain:
            return None
        seconds = self.trainer.clock.seconds
        step_time = centre([seconds(step.start, step.end) for step in plain])
        data = centre([seconds(step.start, step.loaded) for step in plain])
        if not self.told_apart:
            (data,) = self.trainer.ranks.maxima([data])
            return StepParts(step=step_time, data=data, compute=None, sync=None)
        if self.trainer.ranks.world == 1:
            return StepParts(step=step_time, data=data, compute=step_time - data, sync=0.0)
        seen = list(zip(steps, spy.seconds(), strict=False))
        known = [pair for pair in seen if not pair[0].refreshed] or seen
        sync = statistics.median(exposed for _, exposed in known)
        compute = statistics.median(seconds(step.loaded, step.end) - exposed for step, exposed in known)
        data, compute, least = self.trainer.ranks.maxima([data, compute, -sync])
        return StepParts(step=step_time, data=data, compute=compute, sync=-least)
