"""Polling of the run directory by a supervisor: one stat shows whether anything is new; files are read only then."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli.cluster.allocation import POLL_SECONDS, Allocation
from tula_cli.run import files

MAX_STAT_INTERVAL_SECONDS = 1.5
"""Maximum seconds between two stats: with PEER_GRACE_SECONDS, peers of a dead rank exit within 7 s."""
MAX_STATS_PER_SECOND = 350
"""Maximum rate of stats of all supervisors of a job together; only jobs of more than 525 poll more seldom for it."""
STATS_PER_SECOND = 40
"""Rate of stats of all supervisors of a job together, as far as `MAX_STAT_INTERVAL_SECONDS` permits."""
IDLE_READ_SECONDS = (2.0, 120.0)
"""Seconds per supervisor of the job between two reads without news, and their maximum: for files written without a
notification."""
REREAD_DELAYS_SECONDS = (2.0, 8.0, 32.0)
"""Seconds after news at which to read again: files of other machines may become visible late on NFS."""


@dataclass
class ChangeWatcher:
    """Decides when a supervisor reads the run directory."""

    run: Path
    allocation: Allocation
    _is_forced: bool = True
    _state: tuple[int, int] | None = None
    _next_stat: float = 0.0  # monotonic time, as in the fields below
    _next_read: float = 0.0
    _reads_after_news: list[float] = field(default_factory=list)

    def force_check(self) -> None:
        """Make the next `is_due` return True, for a caller that now waits for something else."""
        self._is_forced = True

    def is_due(self) -> bool:
        """Return whether to read the run directory: something has changed since the last time, or may have."""
        if self._has_news(time.monotonic()) or self._is_forced:
            self._is_forced = False
            return True
        return False

    def pause(self, seconds: float = POLL_SECONDS) -> None:
        """Wait for `seconds`, or until the scheduler asks the job to exit."""
        deadline = time.monotonic() + seconds
        while not self.allocation.termination.is_received and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, remaining))

    def _has_news(self, now: float) -> bool:
        """Return whether a stat shows a change, or a read without news is due."""
        if now < self._next_stat:
            return False
        self._next_stat = now + self._stat_interval
        previous, self._state = self._state, files.read_change_marker(self.run)
        if self._state != previous:
            self._reads_after_news = [now + later for later in REREAD_DELAYS_SECONDS]
        elif self._reads_after_news and now >= self._reads_after_news[0]:
            self._reads_after_news.pop(0)
        elif now < self._next_read and self._state is not None:
            return False
        self._next_read = now + min(IDLE_READ_SECONDS[1], IDLE_READ_SECONDS[0] * self.allocation.count)
        return True

    @property
    def _stat_interval(self) -> float:
        """Seconds between two stats of the run directory by this supervisor."""
        count = self.allocation.count
        return max(POLL_SECONDS, min(MAX_STAT_INTERVAL_SECONDS, count / STATS_PER_SECOND), count / MAX_STATS_PER_SECOND)
