"""Stopping a training early: at a time limit or on a signal, on all ranks after the same step.

A signal handler that saves a checkpoint hangs occasionally (it may interrupt a collective), so it only sets a flag.
Rank 0 also watches the clock. The ranks agree on the flags between two steps, and during an evaluation between two
batches.
"""

import os
import signal
import time
from collections.abc import Mapping
from typing import Literal

from tula_cli.worker.ranks import Ranks

Reason = Literal["time_limit", "signal", "stage_end"]

CHECK_SECONDS = 1.0
"""Approximate interval between two agreements of the ranks; an all-reduce of two numbers at every step would slow small
steps down considerably."""
MAX_STEPS_BETWEEN_CHECKS = 1000  # maximum steps between two agreements of the ranks


class Preempted(Exception):
    """All ranks stop now; raised on all of them at the same step."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


_REASON_BY_LEVEL: dict[int, Reason] = {1: "time_limit", 2: "signal"}


class PreemptionHandler:
    """Receives the signal and watches the time limit; all ranks agree on when to stop.

    Args:
        environ: TULA_LEAVE_AT is the Unix time by which rank 0 must have saved and exited.
    """

    def __init__(self, ranks: Ranks, environ: Mapping[str, str] = os.environ) -> None:
        self.ranks = ranks
        self.leave_at = float(environ.get("TULA_LEAVE_AT", "inf"))
        self._is_announced = False
        self._next, self._counted = 1, 0
        self._agreed_at = time.monotonic()

    def install(self) -> None:
        """Install the handler of SIGTERM, which is sent at preemption, by scancel and by tula cancel."""
        signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, *_: object) -> None:
        self._is_announced = True

    def stop_if_requested(self, *, reserve: float) -> bool:
        """Stop if the ranks agree to; every rank must call this after every step or evaluation batch.

        Args:
            reserve: seconds that saving takes.

        Returns:
            Whether the ranks have communicated in this call.

        Raises:
            Preempted: the ranks stop now.
        """
        self._counted += 1
        if self._counted < self._next:
            return False
        now = time.monotonic()
        pace = (now - self._agreed_at) / self._counted
        wished = (
            min(MAX_STEPS_BETWEEN_CHECKS, max(1, round(CHECK_SECONDS / pace))) if pace > 0 else MAX_STEPS_BETWEEN_CHECKS
        )
        level, steps = self.ranks.compute_elementwise_max(
            [self._compute_stop_level(reserve), float(wished if self.ranks.is_first else 0)]
        )
        self._counted, self._agreed_at, self._next = 0, now, int(steps)
        if reason := _REASON_BY_LEVEL.get(int(level)):
            raise Preempted(reason)
        return True

    def _compute_stop_level(self, reserve: float) -> float:
        if self._is_announced:
            return 2.0
        # The next agreement may be up to one more interval away.
        is_late = self.ranks.is_first and time.time() + reserve + 2 * CHECK_SECONDS > self.leave_at
        return 1.0 if is_late else 0.0
