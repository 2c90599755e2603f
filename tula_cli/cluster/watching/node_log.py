"""The log of a node: one file an attempt, however many supervisors start ranks there.

One that is alone on its node lets its ranks write into the file. Where there are several, each reads from a pipe what its
ranks write and adds it line by line, so that lines do not mix, and those of all but the node's first begin with the rank,
as torch marks its own. What its ranks wrote last a supervisor remembers then: an end is told by a rank's own words.
"""

import contextlib
import os
import re
import select
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from tula_cli.cluster.allocation import Allocation
from tula_cli.run.directory import RunDir

TAIL = 20_000  # bytes that tell an end
_CHUNK = 65_536  # bytes: what a pipe holds, and the longest line that is not cut
_PATIENCE = 5.0
"""Seconds for what is in the pipe to reach the file, which may be on a file system that hangs."""
_MARK = b"\0tula\0"
"""What a supervisor writes as the end of a line into its own pipe: all before it has been read."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
"""A progress bar ends its lines by the last: left as it is, the next rank's line would stand behind it."""
_TAG = re.compile(r"\[rank([0-9]+)\]: ?")


def tag(rank: int) -> str:
    """Return what stands before a line of a rank."""
    return f"[rank{rank}]: "


def rank_of(line: str) -> int | None:
    """Return the rank that stands before a line; None where none does."""
    found = _TAG.match(line)
    return int(found[1]) if found else None


def log_of(run: RunDir, allocation: Allocation, task_id: str, attempt: int) -> Path:
    """Return the log of this node, which bears the index of the node's first supervisor."""
    first = allocation.index - (0 if allocation.alone else allocation.local_index)
    return run.log_path(task_id, attempt, first).resolve()


def end_of(log: Path) -> str:
    """Return the end of a log; nothing where there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


@dataclass
class RankOutput:
    """Where the ranks of one supervisor write, attempt after attempt.

    Args:
        shared: whether other supervisors of the node write into the same log.
        rank: the first rank of this supervisor where its lines begin with it; None where they need not.
    """

    shared: bool = False
    rank: int | None = None
    _pipe: IO[bytes] | None = None  # for ranks to write into
    _log: BinaryIO | None = None
    _words: bytearray = field(default_factory=bytearray)
    _read: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, allocation: Allocation) -> "RankOutput":
        """Return that of this supervisor."""
        return cls(not allocation.alone, allocation.index if allocation.local_index else None)

    @contextlib.contextmanager
    def into(self, run: RunDir, log: Path) -> Iterator[IO[bytes]]:
        """Let ranks write into a log; yields what is to be their standard output.

        Raises:
            TulaError: the disk is full, or the folder cannot be written.
        """
        with run.open_log(log) as file:
            if not self.shared:
                yield file
                return
            self._words.clear()
            self._log = file
            try:
                yield self._started()
            finally:
                self.flush()
                self._log = None

    def words(self, log: Path) -> str:
        """Return the end of what this supervisor's ranks have written."""
        if not self.shared:
            return end_of(log)
        self.flush()
        return self._words.decode(errors="replace")

    def flush(self) -> None:
        """Wait until what has been written so far is in the log."""
        if self._pipe is None:
            return
        self._read.clear()
        _, room, _ = select.select([], [self._pipe], [], _PATIENCE)
        if room:
            self._pipe.write(_MARK + b"\n")
            self._read.wait(_PATIENCE)

    def close(self) -> None:
        """Let nothing more be written."""
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None

    def _started(self) -> IO[bytes]:
        """Return the pipe: one for all attempts, for what ranks are forked from writes into it as well."""
        if self._pipe is None:
            far, near = os.pipe()
            self._pipe = os.fdopen(near, "wb", buffering=0)
            threading.Thread(target=self._pass_on, args=(far,), name="log of this node", daemon=True).start()
        return self._pipe

    def _pass_on(self, pipe: int) -> None:
        """Read what ranks write until nobody can write any more."""
        rest = b""
        with open(pipe, "rb", buffering=0) as ranks:
            while chunk := ranks.read(_CHUNK):
                lines, rest = _split(rest + chunk)
                marked = any(line.endswith(_MARK) for line in lines)
                told = [line.removesuffix(_MARK) for line in lines if line != _MARK]
                self._words += b"".join(line + b"\n" for line in told)
                del self._words[:-TAIL]
                self._add(told)
                if marked:
                    self._read.set()

    def _add(self, lines: Sequence[bytes]) -> None:
        """Add lines to the log by one write."""
        before = b"" if self.rank is None else tag(self.rank).encode()
        text = b"".join((b"" if line.startswith(before) else before) + line + b"\n" for line in lines)
        # A rank must not stand still because its words find no room: what it cannot write itself, it tells.
        with contextlib.suppress(OSError, ValueError):
            if text and self._log is not None:
                os.write(self._log.fileno(), text)


def _split(text: bytes) -> tuple[list[bytes], bytes]:
    """Return the lines that have ended, and what has not; what is too long is cut."""
    *lines, rest = _LINE_END.split(text)
    if text.endswith(b"\r"):  # half of an end, perhaps
        rest = lines.pop() + b"\r"
    return ([*lines, rest], b"") if len(rest) > _CHUNK else (lines, rest)
