"""Looks at the steps of a training by a script, by what rank 0's shim tells about once a second."""

from collections.abc import Iterable, Mapping
from typing import Any

from tula_cli.models.time.changes.levels import Level, LevelDetector, StepSample
from tula_cli.run.records.results import StepParts
from tula_cli.run.records.shim import Heartbeat


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
