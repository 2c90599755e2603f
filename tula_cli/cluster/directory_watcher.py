"""Polling of the run directory by a supervisor, and notification of the other supervisors of its node."""

import contextlib
import hashlib
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from tula_cli.cluster.allocation import POLL, Allocation
from tula_cli.run import file_changes

# --- News for the other supervisors of the node
#
# Such a socket is no file, is gone with the process, and is seen on its own machine alone. Each look is told, by a byte;
# who hears nothing, because there is no such socket here or nobody behind it, looks by itself.

NOTHING, NEWS = b".", b"!"
_MAX_PEERS = 256  # supervisors of a node that may wait to be heard


def make_socket_address(*parts: str) -> bytes:
    """Return the address of the socket for a job and a run; the leading NUL byte makes it abstract (not a file)."""
    digest = hashlib.sha256("\n".join((str(os.getuid()), *parts)).encode()).hexdigest()
    return f"\0tula-{digest[:32]}".encode()


def _is_same_user(peer: socket.socket) -> bool:
    """Return whether the peer process belongs to this user: any user of the machine may bind the address."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


@dataclass
class NodeBroadcaster:
    """The end of the supervisor that polls the run directory for its node."""

    address: bytes
    _server: socket.socket | None = None
    _peers: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(self.address)
            server.listen(_MAX_PEERS)
            server.setblocking(False)
            self._server = server
        except OSError:  # no such sockets here, or somebody has the name: the others look by themselves
            server.close()

    def broadcast(self, message: bytes) -> None:
        """Send NEWS or NOTHING to the other supervisors; newly connected ones are sent NEWS, so that they poll."""
        for peer in list(self._peers):
            self._send(peer, message)
        while self._server is not None:
            try:
                peer, _ = self._server.accept()
            except OSError:  # nobody is waiting
                return
            peer.setblocking(False)
            self._peers.append(peer)
            self._send(peer, NEWS)

    def _send(self, peer: socket.socket, message: bytes) -> None:
        try:
            if not _is_same_user(peer):
                raise PermissionError
            peer.send(message)
        except BlockingIOError:  # it has not listened for hours, and will hear of the earlier ones
            return
        except OSError:
            self._peers.remove(peer)
            peer.close()

    def close(self) -> None:
        """Close all connections; the other supervisors then poll by themselves."""
        for end in (*self._peers, *filter(None, [self._server])):
            end.close()
        self._peers, self._server = [], None


@dataclass
class NodeSubscriber:
    """The end of a supervisor that receives news."""

    address: bytes
    _socket: socket.socket | None = None

    def receive(self) -> bytes:
        """Return the bytes received since the last call, without waiting; empty if there are none."""
        heard = b""
        with contextlib.suppress(BlockingIOError):
            try:
                if self._socket is None:
                    self._connect()
                while self._socket is not None and (data := self._socket.recv(4096)):
                    heard += data
                self.close()  # the other end is gone
            except BlockingIOError:
                raise
            except OSError:
                self.close()
        return heard

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.connect(self.address)
        if not _is_same_user(self._socket):
            raise PermissionError

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None


# --- Polling of the run directory
#
# One supervisor of a node asks by one stat whether anything is new, and tells the others of its node. All of them read
# files only where something is: after news, and a few times more, for a file may show up later than the news of it.

MAX_STATS_PER_SECOND = 40
"""Maximum rate of stats, of all nodes of a job together."""
MAX_PACE = 1.75
"""Maximum seconds between two stats of a node: with PEER_GRACE, peers of a dead rank exit within 7 s."""
READ_WITHOUT_NEWS = (2.0, 120.0)
"""Seconds per node between two reads without news, and their maximum: for files written without a notification."""
READS_AFTER_NEWS = (2.0, 8.0, 32.0)
"""Seconds after news at which to read again: files of other machines may become visible late on NFS."""
MAX_SILENCE = 6.0
"""Seconds without a message after which a supervisor polls by itself, as the polling one hangs or has exited."""
STAT_WITHOUT_PEER = (2.0, 10.0)
"""Bounds of the interval (s) of such a supervisor; in between, all supervisors of a job make 50 stats per second."""


@dataclass
class ChangeWatcher:
    """Decides when a supervisor reads the run directory.

    Args:
        run: the run directory.
        allocation: allocation of the supervisor.
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
        name = make_socket_address(allocation.id, allocation.node, str(self.run.resolve()))
        if allocation.local_index:
            self._listener = NodeSubscriber(name)
        else:
            self._teller = NodeBroadcaster(name)

    def force_check(self) -> None:
        """Make the next `is_due` return True, for a caller that now waits for something else."""
        self._again = True

    def is_due(self) -> bool:
        """Return whether to read the run directory: something has changed since the last time, or may have."""
        now = time.monotonic()
        if self._has_peer_news(now) or self._has_stat_news(now) or self._again:
            self._again = False
            return True
        return False

    def pause(self, seconds: float = POLL) -> None:
        """Wait for `seconds`, or until the scheduler asks the job to exit."""
        deadline = time.monotonic() + seconds
        while not self.allocation.termination.received and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL, remaining))

    def close(self) -> None:
        """Close the connections to the other supervisors of the node."""
        if self._teller is not None:
            self._teller.close()
        if self._listener is not None:
            self._listener.close()

    def _has_peer_news(self, now: float) -> bool:
        """Return whether the supervisor that polls for this node has sent news."""
        heard = self._listener.receive() if self._listener is not None else b""
        if heard:
            self._heard_at = now
        return NEWS in heard

    def _has_stat_news(self, now: float) -> bool:
        """Return whether a stat shows a change, or a read without news is due; False while another supervisor polls."""
        if now < self._next or now - self._heard_at < MAX_SILENCE:
            return False
        self._next = now + self._stat_interval
        previous, self._state = self._state, file_changes.read_news_state(self.run)
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
        """Seconds between two stats of the run directory by this supervisor."""
        if self._listener is not None:
            return min(STAT_WITHOUT_PEER[1], max(STAT_WITHOUT_PEER[0], self.allocation.count / 50))
        return min(MAX_PACE, max(POLL, (self.allocation.nodes or 1) / MAX_STATS_PER_SECOND))
