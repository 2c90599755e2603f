"""The log of a node: one file an attempt, however many supervisors start ranks there.

One that is alone on its node lets its ranks write into the file. Where there are several, each reads from a pipe what its
ranks write and adds it line by line, so that lines do not mix, and those of all but the node's first begin with the rank,
as torch marks its own. What its ranks wrote last a supervisor remembers then: an end is told by a rank's own words.
"""

import contextlib
import itertools
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from tula_cli import words
from tula_cli.cluster.allocation import Allocation
from tula_cli.run.directory import RunDir
from tula_cli.run.files import read_end

TAIL = 20_000  # bytes that tell an end
_CHUNK = 65_536  # bytes: what a pipe holds, and the longest line that is not cut
_BLOCK = 2**22  # bytes of a log that are searched at a time
_MAX_WAITING = 256
"""Pieces that wait for a file system that hangs; what comes then is not written, for a rank must not stand still."""
_MARK_TIMEOUT = 2.0  # seconds
_PAUSE = 0.02
_MARK = re.compile(rb"\0tula ([0-9]+)\0$")
"""A mark that a supervisor writes into its own pipe: when it is read, all before it has been read."""
MAX_LOG = 128 * 2**20
"""Bytes of a log: of what ranks print beyond them the middle is dropped."""
_DROPPED_LINE = b"tula: %d bytes of this log were dropped here: it had grown beyond %d MiB\n"
_DROPPED = re.compile(rb"^tula: ([0-9]+) bytes of this log were dropped here: .*\n", re.MULTILINE)
_LINE_END = re.compile(rb"\r\n|\n|\r")
"""A progress bar ends its lines by the last: left as it is, the next rank's line would stand behind it."""


def get_log_path(run: RunDir, allocation: Allocation, task_id: str, attempt: int) -> Path:
    """Return where the ranks of a supervisor write: their node's log, which bears the index of its first supervisor, or their own."""
    first_supervisor = allocation.index - (allocation.local_index if _shares_log(allocation) else 0)
    return run.log_path(task_id, attempt, first_supervisor).resolve()


def _shares_log(allocation: Allocation) -> bool:
    """Return whether others of its node write into its log: a node's ranks that do not follow each other have a log each."""
    first_supervisor = allocation.index - allocation.local_index
    near = allocation.neighbours
    return not allocation.is_alone_on_node and near == tuple(range(first_supervisor, first_supervisor + len(near)))


def read_log_end(log: Path) -> str:
    """Return the end of a log; nothing where there is none."""
    return read_end(log, TAIL)


def cap_log(log: Path, *, most: int = MAX_LOG, keep: Sequence[str] = ()) -> None:
    """Drop the middle of a log that has grown too large: a script that prints without end must not fill the disk.

    Ranks only ever add to it, so that they write on while the file is cut. What is dropped is said in its place.

    Args:
        log: the file; there need be none.
        most: its bytes at most; an eighth of them is kept of its beginning, a quarter of its end.
        keep: patterns of lines that are kept of the middle too, the newest quarter.
    """
    try:
        if log.stat().st_size <= most:
            return
        with open(
            os.open(log, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "r+b", 0
        ) as file:
            size = os.fstat(file.fileno()).st_size
            beginning = os.pread(file.fileno(), most // 8 + 256, 0)
            earlier = _DROPPED.search(beginning)
            head = earlier.start() if earlier else beginning.rfind(b"\n", 0, most // 8) + 1
            until = max(head, size - most // 4)
            until += os.pread(file.fileno(), _CHUNK, until).find(b"\n") + 1
            retained = b"".join(_find_matching_lines(file, head, until, keep)) if keep else b""
            retained = retained if len(retained) <= most // 4 else retained[retained.find(b"\n", -most // 4) + 1 :]
            file.seek(until)
            end = file.read() or b""
            dropped = until - head - len(retained) + (int(earlier[1]) - len(earlier[0]) if earlier else 0)
            file.truncate(head)
            file.write(_DROPPED_LINE % (dropped, most >> 20) + retained + end)
    except OSError as error:
        sys.stderr.write(f"tula: {log} has grown beyond {most >> 20} MiB and cannot be cut: {error.strerror}\n")


def _find_matching_lines(file: BinaryIO, begin: int, end: int, patterns: Sequence[str]) -> Iterator[bytes]:
    """Yield the lines of a part of a file in which a pattern matches."""
    compiled, incomplete = [re.compile(pattern, re.MULTILINE) for pattern in patterns], b""
    for at in range(begin, end, _BLOCK):
        *lines, incomplete = (incomplete + os.pread(file.fileno(), min(_BLOCK, end - at), at)).splitlines(keepends=True)
        lines += [incomplete] if at + _BLOCK >= end else []
        yield from (
            line for line in lines if any(expression.search(line.decode(errors="replace")) for expression in compiled)
        )


@dataclass
class RankOutput:
    """Where the ranks of one supervisor write, attempt after attempt.

    One thread reads and never waits for a file, another one writes: words that tell an end are there though a disk hangs.

    Args:
        shared: whether other supervisors of the node write into the same log.
        rank: the first rank of this supervisor where its lines begin with it; None where they need not.
    """

    shared: bool = False
    rank: int | None = None
    _pipe: IO[bytes] | None = None  # for ranks to write into
    _numbers: Iterator[int] = field(default_factory=itertools.count)  # of marks
    _begin: dict[int, BinaryIO] = field(default_factory=dict)  # logs of attempts, by the marks that they begin at
    _mark: int = -1  # that was read last
    _words: bytearray = field(default_factory=bytearray)  # of the attempt
    _waiting: "queue.Queue[tuple[BinaryIO, bytes] | threading.Event]" = field(
        default_factory=lambda: queue.Queue(_MAX_WAITING)
    )

    @classmethod
    def of_allocation(cls, allocation: Allocation) -> "RankOutput":
        """Return that of this supervisor."""
        shared = _shares_log(allocation)
        return cls(shared, allocation.index if shared and allocation.local_index else None)

    @contextlib.contextmanager
    def write_into(self, run: RunDir, log: Path) -> Iterator[IO[bytes]]:
        """Let ranks write into a log; yields what is to be their standard output.

        Raises:
            TulaError: the disk is full, or the folder cannot be written.
        """
        file = run.open_log(log)
        if not self.shared:
            with file:
                yield file
            return
        pipe = self._open_pipe()
        self._send_mark(pipe, begins=file)
        try:
            yield pipe
        finally:
            last_mark, deadline = self._send_mark(pipe), time.monotonic() + _MARK_TIMEOUT
            while self._mark < last_mark and time.monotonic() < deadline:
                time.sleep(_PAUSE)
            written = threading.Event()
            with contextlib.suppress(queue.Full):
                self._waiting.put(written, timeout=_MARK_TIMEOUT)
                written.wait(_MARK_TIMEOUT)

    def end_of_output(self, log: Path) -> str:
        """Return the end of what this supervisor's ranks have written in the last attempt."""
        return bytes(self._words).decode(errors="replace") if self.shared else read_log_end(log)

    def close(self) -> None:
        """Let nothing more be written."""
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None

    def _open_pipe(self) -> IO[bytes]:
        """Return the pipe: one for all attempts, for what ranks are forked from writes into it as well."""
        if self._pipe is None:
            far, near = os.pipe()
            self._pipe = os.fdopen(near, "wb", buffering=0)
            for work in (lambda: self._read_pipe(far), self._write_log):
                threading.Thread(target=work, name="log of this node", daemon=True).start()
        return self._pipe

    def _send_mark(self, pipe: IO[bytes], *, begins: BinaryIO | None = None) -> int:
        number, deadline = next(self._numbers), time.monotonic() + _MARK_TIMEOUT
        if begins is not None:
            self._begin[number] = begins
        # None: a rank has made the pipe one that does not wait, and it is full.
        while pipe.write(b"\0tula %d\0\n" % number) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return number

    def _read_pipe(self, pipe: int) -> None:
        """Read what ranks write until nobody can write any more."""
        log: BinaryIO | None = None
        incomplete = b""
        with open(pipe, "rb", buffering=0) as ranks:
            while chunk := ranks.read(_CHUNK):
                lines, incomplete = _split_lines(incomplete + chunk)
                lines_of_log: list[bytes] = []
                for line in lines:
                    mark = _MARK.search(line)
                    if mark is None or mark.start():
                        lines_of_log.append(line[: mark.start()] if mark else line)
                    if mark is not None:
                        self._keep_lines(lines_of_log, log)
                        log, lines_of_log = self._pass_mark(int(mark[1]), log), []
                self._keep_lines(lines_of_log, log)

    def _pass_mark(self, mark: int, log: BinaryIO | None) -> BinaryIO | None:
        """Note that a mark was read; return the log of what follows."""
        begins = self._begin.pop(mark, None)
        if begins is not None:
            self._words.clear()
            self._queue_text(log, b"")
        self._mark = mark
        return begins or log

    def _keep_lines(self, lines: Sequence[bytes], log: BinaryIO | None) -> None:
        if not lines:
            return
        self._words += b"".join(line + b"\n" for line in lines)
        del self._words[:-TAIL]
        prefix = b"" if self.rank is None else words.make_rank_tag(self.rank).encode()
        stripped = prefix.rstrip()  # torch writes its own with and without a space
        text = b"".join((b"" if line.startswith(stripped) else prefix) + line + b"\n" for line in lines)
        self._queue_text(log, text)

    def _queue_text(self, log: BinaryIO | None, text: bytes) -> None:
        """Let text be written; none closes the log."""
        if log is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((log, text))

    def _write_log(self) -> None:
        """Add to the log what was read, each piece by one write."""
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            log, text = item
            # What finds no room is lost: the rank meets the full disk too, and tells it.
            with contextlib.suppress(OSError):
                os.write(log.fileno(), text) if text else log.close()


def _split_lines(text: bytes) -> tuple[list[bytes], bytes]:
    """Return the lines that have ended, and what has not; what is too long is cut."""
    *lines, incomplete = _LINE_END.split(text)
    if text.endswith(b"\r"):  # half of an end, perhaps
        incomplete = lines.pop() + b"\r"
    return ([*lines, incomplete], b"") if len(incomplete) > _CHUNK else (lines, incomplete)
