"""How the supervisor that looks at the run directory tells the others of its node: an abstract Unix socket.

Such a socket is no file, is gone with the process, and is seen on its own machine alone. Each look is told, by a byte;
who hears nothing, because there is no such socket here or nobody behind it, looks by itself.
"""

import contextlib
import hashlib
import os
import socket
import struct
from dataclasses import dataclass, field

NOTHING, NEWS = b".", b"!"
_MAX_PEERS = 256  # supervisors of a node that may wait to be heard


def socket_address(*parts: str) -> bytes:
    """Return the socket's name for a job and a run; the leading zero makes it abstract."""
    digest = hashlib.sha256("\n".join((str(os.getuid()), *parts)).encode()).hexdigest()
    return f"\0tula-{digest[:32]}".encode()


def _is_same_user(peer: socket.socket) -> bool:
    """Return whether the other end is a process of this user: anybody on the machine may use any name."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


@dataclass
class NodeBroadcaster:
    """The end of the supervisor that looks."""

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
        """Tell the others that there is something new, or that there is nothing; who comes anew is told to look."""
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
        """Let the others hear nothing more."""
        for end in (*self._peers, *filter(None, [self._server])):
            end.close()
        self._peers, self._server = [], None


@dataclass
class NodeSubscriber:
    """The end of a supervisor that is told."""

    address: bytes
    _socket: socket.socket | None = None

    def receive(self) -> bytes:
        """Return what was told since the last call, without waiting; empty where nothing was."""
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
        """Listen no longer."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
