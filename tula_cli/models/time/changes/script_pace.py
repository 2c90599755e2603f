"""Looks at the steps of a training by a script, by what rank 0's shim tells about once a second."""

from collections.abc import Iterable, Mapping
from typing import Any

from tula_cli.models.time.changes.levels import Level, Levels, Look
from tula_cli.run.records.results import StepParts
from tula_cli.run.records.shim import Heartbeat


class ScriptPace:
    """Follows one start of a script."""

    def __init__(self) -> None:
        self.levels = Levels()
        self._before: tuple[Heartbeat, int, float | None] | None = None  # of the last look: samples, epoch

    def look(
        self, beat: Heartbeat, gaps: Iterable[Mapping[str, Any]], *, samples: int, epoch: float | None
    ) -> Level | None:
        """Judge the steps since the last look; return a change of level where they show one.

        Args:
            beat: the newest heartbeat.
            gaps: rows of steps that held something else (an evaluation, a save, a new epoch): they are left out.
            samples: of the whole training at that step.
            epoch: of the training there; None where nothing tells it.
        """
        last, self._before = self._before, (beat, samples, epoch)
        if last is None:
            return None
        begun = last[0]
        held = {row["step"]: row["seconds"] for row in gaps if begun.step < row["step"] <= beat.step}
        steps = beat.step - begun.step - len(held)
        seconds = beat.stepped_at - begun.stepped_at - sum(held.values())
        if steps < 1 or seconds <= 0:
            if beat.step == begun.step:
                self._before = last  # nothing was stepped: the next look begins where this one has
            return None
        parts = StepParts(step=seconds / steps, data=None, compute=None, sync=None)
        return self.levels.add(Look(last[1], last[2], begun.stepped_at, parts))
