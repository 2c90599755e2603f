"""When a supervisor looks at the run directory, which is on a file system that all nodes and all users share.

One supervisor of a node asks by one stat whether anything is new, and tells the others of its node. All of them read
files only where something is: after news, and a few times more, for a file may show up later than the news of it.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli.cluster.allocation import POLL, Allocation
from tula_cli.cluster.watching.node_socket import NEWS, NOTHING, Listener, Teller, address
from tula_cli.run.notices import news

STATS_A_SECOND = 40
"""Of all nodes of a job."""
PACE_MOST = 1.75
"""Seconds between two stats of a node, at most: with the ranks' grace, peers of a dead rank end within 7 s."""
UNTOLD = (2.0, 120.0)
"""Seconds a node between two looks without news, and at most: for what was written by a hand that told nobody."""
ECHOES = (2.0, 8.0, 32.0)
"""Seconds after news at which to look again: other machines' files may show up late on NFS."""
SILENCE = 6.0
"""Seconds without a word after which a supervisor looks by itself: the one that looks for the node hangs, or is gone."""
ALONE = (2.0, 10.0)
"""Bounds of the seconds between two stats of such a supervisor; between them all of a job come to 50 stats a second."""


@dataclass
class Lookout:
    """Tells a supervisor when to look.

    Args:
        run: the run directory.
        allocation: where the supervisor stands in its job.
    """

    run: Path
    allocation: Allocation
    _again: bool = True
    _state: tuple[int, int] | None = None
    _next: float = 0.0  # stat, by the monotonic clock as all of these
    _untold: float = 0.0
    _echoes: list[float] = field(default_factory=list)
    _heard_at: float = float("-inf")
    _teller: Teller | None = None
    _listener: Listener | None = None

    def __post_init__(self) -> None:
        allocation = self.allocation
        if allocation.alone:
            return
        name = address(allocation.id, allocation.node, str(self.run.resolve()))
        if allocation.local_index:
            self._listener = Listener(name)
        else:
            self._teller = Teller(name)

    def again(self) -> None:
        """Look the next time whatever there is: something else is looked for than before."""
        self._again = True

    def due(self) -> bool:
        """Return whether to look: something is new since the last time, or may be."""
        now = time.monotonic()
        if self._told(now) or self._asked(now) or self._again:
            self._again = False
            return True
        return False

    def pause(self, seconds: float = POLL) -> None:
        """Wait a moment, or until the scheduler ends the job."""
        until = time.monotonic() + seconds
        while not self.allocation.termination.received and (left := until - time.monotonic()) > 0:
            time.sleep(min(POLL, left))

    def close(self) -> None:
        """Tell and hear nothing more."""
        if self._teller is not None:
            self._teller.close()
        if self._listener is not None:
            self._listener.close()

    def _told(self, now: float) -> bool:
        """Return whether the supervisor that looks for this node has told of news."""
        heard = self._listener.hear() if self._listener is not None else b""
        if heard:
            self._heard_at = now
        return NEWS in heard

    def _asked(self, now: float) -> bool:
        """Return whether a stat has told of news, or it is time to look without; False where another one looks."""
        if now < self._next or now - self._heard_at < SILENCE:
            return False
        self._next = now + self._pace
        before, self._state = self._state, news.state(self.run)
        new = self._state != before
        if new:
            self._echoes = [now + later for later in ECHOES]
        elif self._echoes and now >= self._echoes[0]:
            self._echoes.pop(0)
            new = True
        if self._teller is not None:
            self._teller.tell(NEWS if new else NOTHING)
        if not (new or now >= self._untold or self._state is None):
            return False
        self._untold = now + min(UNTOLD[1], UNTOLD[0] * (self.allocation.nodes or 1))
        return True

    @property
    def _pace(self) -> float:
        """Seconds between two stats."""
        if self._listener is not None:
            return min(ALONE[1], max(ALONE[0], self.allocation.count / 50))
        return min(PACE_MOST, max(POLL, (self.allocation.nodes or 1) / STATS_A_SECOND))
