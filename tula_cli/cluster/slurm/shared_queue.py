"""One answer of squeue for all commands of a user that wait: it is asked once a minute, however many they are."""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tula_cli.cluster.slurm.command import COMMAND_TIMEOUT
from tula_cli.errors import TulaError
from tula_cli.run.files import write_atomic

MAX_AGE = 60.0
"""Seconds for which an answer stands."""
_MAX_BYTES = 2**24  # bytes of a kept answer
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")


@dataclass(frozen=True)
class StoredAnswer:
    """What squeue said of all jobs of a user, or why it said nothing, and when it was asked (Unix time)."""

    asked_at: float
    text: str
    complaint: str


def shared_answer(ask: Callable[[], StoredAnswer], environ: Mapping[str, str] = os.environ) -> StoredAnswer:
    """Return an answer of the last minute; where none is kept `ask` gives one, once for all who want it now.

    Where nothing can be kept, each asks for itself.
    """
    path = _answer_path(environ)
    with contextlib.ExitStack() as stack:
        lock, deadline = _open_lock(path.with_suffix(".lock")), time.monotonic() + COMMAND_TIMEOUT
        if lock is not None:
            stack.callback(os.close, lock)
        while (answer := _read_fresh(path)) is None and not _acquire_lock(lock) and time.monotonic() < deadline:
            time.sleep(0.1)  # another one is asking; one that was stopped (Ctrl-Z) meanwhile is not waited for
        answer = answer or _read_fresh(path)  # it may have been told in between
        if answer is None:
            answer = ask()
            with contextlib.suppress(TulaError):
                write_atomic(path, json.dumps(asdict(answer)))
        return answer


def _answer_path(environ: Mapping[str, str]) -> Path:
    """Return the file of this user and cluster."""
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/nonexistent")) / ".cache"
    return Path(home) / "tula" / f"squeue-{_cluster_key(environ)}.json"


def _cluster_key(environ: Mapping[str, str]) -> str:
    """Return what tells clusters apart that share a home: SLURM's settings, the machine where they cannot be read."""
    for path in (environ.get("SLURM_CONF"), *_CONFIGURATIONS):
        with contextlib.suppress(OSError):
            if path:
                return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def _read_fresh(path: Path) -> StoredAnswer | None:
    """Return the answer that is kept, if it is of the last minute, and this user's own."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                return None
            stored = StoredAnswer(**json.loads(file.read(_MAX_BYTES)))
        fresh = 0 <= time.time() - stored.asked_at < MAX_AGE and isinstance(stored.text + stored.complaint, str)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return stored if fresh else None


def _open_lock(path: Path) -> int | None:
    """Return a file that one command locks while it asks; None where there can be none, and all may ask."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _acquire_lock(lock: int | None) -> bool:
    """Return whether this command is the one that may ask."""
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # files cannot be locked here
        pass
    return True
