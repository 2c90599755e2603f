"""That this process steps, for the supervisor; and in a training the rows of what it has done."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import deque
from typing import Any, Callable

from .output import append_row, write_json
from .plan import Plan

REMEMBERED = 100  # steps, for the median
REMEMBERED_SAMPLES = 20  # steps: a batch that changes is to be seen soon


class Pulse:
    """Writes heartbeat-<rank>.json and steps-<rank>.jsonl at most as often as the plan says. Times of the host."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank = 0
        self.step = 0
        self.samples: float | None = None
        self.before: float | None = 0.0  # samples before the last step
        self.lost: str | None = None
        self._began: float | None = None  # perf_counter at the last step
        self._beaten = self._row_at = float("-inf")
        self._stepped_at = 0.0
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._recent_samples: deque[float] = deque(maxlen=REMEMBERED_SAMPLES)
        self._newest: dict[str, Any] = {}
        self.more: Callable[[], dict[str, Any]] = dict
        """What else a row tells."""

    @property
    def median(self) -> float:
        """Return the median of the last steps in seconds; 0.0 before the second."""
        return statistics.median(self._recent) if self._recent else 0.0

    def beat(self, step: int, samples: float | None) -> None:
        """Take note of a step; `samples` are those of all steps."""
        now = time.perf_counter()
        if self._began is not None:
            self._recent.append(now - self._began)
            self.before = self.samples
            if samples is not None and self.before is not None:
                self._recent_samples.append(samples - self.before)
        self._began, self.step, self.samples = now, step, samples
        self._stepped_at = time.time()
        self._write_if_due(now)

    def alive(self) -> None:
        """Take note that something goes on between two steps: a batch came, an evaluation began."""
        self._write_if_due(time.perf_counter())

    def _write_if_due(self, now: float) -> None:
        if now - self._beaten >= self.plan.heartbeat:
            self._beaten = now
            self.write()

    def write(self) -> None:
        """Write the heartbeat as it stands."""
        content = {
            "step": self.step,
            "samples": self.samples,
            "stepped_at": self._stepped_at,
            "seconds": self.median,
            "step_samples": statistics.median(self._recent_samples) if self._recent_samples else None,
            "alive_at": time.time(),
            "lost": self.lost,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        write_json(self.plan.folder / f"heartbeat-{self.rank}.json", content, durable=False)

    def row(self, causes: list[str], *, lr: Any, loss: Any) -> None:
        """Write a row of a training when one is due, and one of each step that held something else. After `beat`."""
        self._newest = {"lr": lr, "loss": loss}
        if causes and self._recent:
            where = {"step": self.step, "samples": self.samples, "time": time.time()}
            self._append(kind="gap", **where, before=self.before, seconds=self._recent[-1], causes=causes)
        if self._began is not None and self._began - self._row_at >= self.plan.row:
            self._row_at = self._began
            self.close()

    def close(self) -> None:
        """Write a row of where the training stands. A tensor on a GPU is waited for, here alone."""
        newest = {name: None if value is None else float(value) for name, value in self._newest.items()}
        self._append(kind="row", step=self.step, samples=self.samples, time=time.time(), **newest, **self.more())

    def note(self, step: int, text: str) -> None:
        """Write what is to be known of the training."""
        self._append(kind="note", step=step, samples=self.samples, time=time.time(), text=text)

    def load(self, path: str, written: float) -> None:
        """Write that a file was loaded before the first step."""
        self._append(kind="load", step=0, samples=0.0, time=time.time(), path=path, written=written)

    def _append(self, **row: Any) -> None:
        append_row(self.plan.folder / f"steps-{self.rank}.jsonl", row)
