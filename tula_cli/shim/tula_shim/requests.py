"""Requests to save, which the supervisor makes by a file and all ranks see after the same step."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Callable

from .agreement import NoStoreError, agree
from .output import write_json
from .plan import Plan
from .pulse import Pulse

EVERY = 2.0  # seconds between two looks
MOST_STEPS = 1000


class Requests:
    """Looks for save.json every few steps. Which steps, rank 0 decides once: ranks may only look together."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.callback: Callable[[str], object] | None = None
        self.note = ""
        self._every = 0
        self._off = not plan.save

    def look(self, step: int, pulse: Pulse, world: int) -> str:
        """Return "save" or "stop" where that is asked for after this step, else "". The pulse tells how long steps take."""
        if self._off or step < self.plan.warmup or (self._every and step % self._every):
            return ""
        try:
            if not self._every:
                self._every = int(agree("every", lambda: str(_steps_between(pulse.median)), world=world))
                return ""
            return agree(f"asked/{step}", self._asked, world=world)
        except NoStoreError as error:
            self._off = True
            self.note = f"saves cannot be asked for: {error}"
            return ""

    def _asked(self) -> str:
        try:
            asked = json.loads((self.plan.folder / "save.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""  # none, or half of one: the next look sees it whole
        return "stop" if asked.get("then") == "stop" else "save"

    def save(self, step: int, samples: float | None, rank: int) -> bool:
        """Have the loop save; return whether it could."""
        if self.callback is None:
            return False
        self.callback(self.plan.checkpoint)
        self.saved(step, samples, rank, path=self.plan.checkpoint)
        return True

    def saved(self, step: int, samples: float | None, rank: int, *, path: str) -> None:
        """Tell the supervisor that a checkpoint is written."""
        if rank == 0:
            told = {"step": step, "samples": samples, "path": path, "time": time.time()}
            write_json(self.plan.folder / "saved.json", told)
            with contextlib.suppress(FileNotFoundError):
                (self.plan.folder / "save.json").unlink()


def _steps_between(median: float) -> int:
    return max(1, min(MOST_STEPS, round(EVERY / max(median, 1e-6))))
