"""When a supervisor looks at the run directory, which is on a file system that all nodes and all users share.

One supervisor of a node asks by one stat whether anything is new, and tells the others of its node. All of them read
files only where something is: after news, and a few times more, for a file may show up later than the news of it.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli.cluster.allocation import POLL, Allocation
from tula_cli.cluster.watching.node_socket import NEWS, NOTHING, NodeBroadcaster, NodeSubscriber, socket_address
from tula_cli.run.notices import news

MAX_STATS_PER_SECOND = 40
"""Of all nodes of a job."""
MAX_PACE = 1.75
"""Seconds between two stats of a node, at most: with the ranks' grace, peers of a dead rank end within 7 s."""
READ_WITHOUT_NEWS = (2.0, 120.0)
"""Seconds a node between two looks without news, and at most: for what was written by a hand that told nobody."""
READS_AFTER_NEWS = (2.0, 8.0, 32.0)
"""Seconds after news at which to look again: other machines' files may show up late on NFS."""
MAX_SILENCE = 6.0
"""Seconds without a word after which a supervisor looks by itself: the one that looks for the node hangs, or is gone."""
STAT_WITHOUT_PEER = (2.0, 10.0)
"""Bounds of the seconds between two stats of such a supervisor; between them all of a job come to 50 stats a second."""


@dataclass
class ChangeWatcher:
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
    _teller: NodeBroadcaster | None = None
    _listener: NodeSubscriber | None = None

    def __post_init__(self) -> None:
        allocation = self.allocation
        if allocation.is_alone_on_node:
            return
        name = socket_address(allocation.id, allocation.node, str(self.run.resolve()))
        if allocation.local_index:
            self._listener = NodeSubscriber(name)
        else:
            self._teller = NodeBroadcaster(name)

    def force_check(self) -> None:
        """Look the next time whatever there is: something else is looked for than before."""
        self._again = True

    def is_due(self) -> bool:
        """Return whether to look: something is new since the last time, or may be."""
        now = time.monotonic()
        if self._has_peer_news(now) or self._has_stat_news(now) or self._again:
            self._again = False
            return True
        return False

    def pause(self, seconds: float = POLL) -> None:
        """Wait a moment, or until the scheduler ends the job."""
        deadline = time.monotonic() + seconds
        while not self.allocation.termination.received and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL, remaining))

    def close(self) -> None:
        """Tell and hear nothing more."""
        if self._teller is not None:
            self._teller.close()
        if self._listener is not None:
            self._listener.close()

    def _has_peer_news(self, now: float) -> bool:
        """Return whether the supervisor that looks for this node has told of news."""
        heard = self._listener.receive() if self._listener is not None else b""
        if heard:
            self._heard_at = now
        return NEWS in heard

    def _has_stat_news(self, now: float) -> bool:
        """Return whether a stat has told of news, or it is time to look without; False where another one looks."""
        if now < self._next or now - self._heard_at < MAX_SILENCE:
            return False
        self._next = now + self._stat_interval
        previous, self._state = self._state, news.news_state(self.run)
        new = self._state != previous
        if new:
            self._echoes = [now + later for later in READS_AFTER_NEWS]
        elif self._echoes and now >= self._echoes[0]:
            self._echoes.pop(0)
            new = True
        if self._teller is not None:
            self._teller.broadcast(NEWS if new else NOTHING)
        if not (new or now >= self._untold or self._state is None):
            return False
        self._untold = now + min(READ_WITHOUT_NEWS[1], READ_WITHOUT_NEWS[0] * (self.allocation.nodes or 1))
        return True

    @property
    def _stat_interval(self) -> float:
        """Seconds between two stats."""
        if self._listener is not None:
            return min(STAT_WITHOUT_PEER[1], max(STAT_WITHOUT_PEER[0], self.allocation.count / 50))
        return min(MAX_PACE, max(POLL, (self.allocation.nodes or 1) / MAX_STATS_PER_SECOND))
