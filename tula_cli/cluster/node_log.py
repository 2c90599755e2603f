"""The log of a node: one file per attempt, however many supervisors start ranks on the node.

If a supervisor is alone on its node, its ranks write into the file directly. If there are several, each supervisor
reads the output of its ranks from a pipe and appends it line by line, so that lines do not mix. Lines of all
supervisors but the node's first begin with the rank, like torch's messages. Such a supervisor also keeps the last
output of its ranks, from which their exit reason is found.
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
"""Maximum pieces queued while a file system hangs; further output is dropped, so that ranks never block."""
_MARK_TIMEOUT = 2.0  # seconds
_PAUSE = 0.02
_MARK = re.compile(rb"\0tula ([0-9]+)\0$")
"""A mark that a supervisor writes into its pipe: once it is read, all earlier output has been read."""
MAX_LOG = 128 * 2**20
"""Maximum bytes of a log; the middle of a longer log is dropped."""
_DROPPED_LINE = b"tula: %d bytes of this log were dropped here: it had grown beyond %d MiB\n"
_DROPPED = re.compile(rb"^tula: ([0-9]+) bytes of this log were dropped here: .*\n", re.MULTILINE)
_LINE_END = re.compile(rb"\r\n|\n|\r")
"""Line ends, with the carriage return of progress bars, to which the next rank's line would else be appended."""


def get_log_path(run: RunDir, allocation: Allocation, task_id: str, attempt: int) -> Path:
    """Return the log of a supervisor's ranks: that of the node, named after its first supervisor, or a separate one."""
    first_supervisor = allocation.index - (allocation.local_index if _shares_log(allocation) else 0)
    return run.log_path(task_id, attempt, first_supervisor).resolve()


def _shares_log(allocation: Allocation) -> bool:
    """Return whether supervisors of a node share a log: if there are several, with consecutive indices."""
    first_supervisor = allocation.index - allocation.local_index
    near = allocation.neighbours
    return not allocation.is_alone_on_node and near == tuple(range(first_supervisor, first_supervisor + len(near)))


def read_log_end(log: Path) -> str:
    """Return the end of a log; empty if there is no log."""
    return read_end(log, TAIL)


def cap_log(log: Path, *, most: int = MAX_LOG, keep: Sequence[str] = ()) -> None:
    """Drop the middle of a log that is too large, so that endless output does not fill the disk.

    Ranks open the log in append mode and can write while it is cut. A line in its place reports how much was dropped.

    Args:
        log: the file, which may not exist.
        most: maximum size in bytes; about an eighth of it is kept from the start and a quarter from the end of the log.
        keep: patterns of lines to keep from the middle too; the newest of them, up to a quarter of `most`.
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
    """Yield the lines between two offsets of a file that match any of the patterns."""
    compiled, incomplete = [re.compile(pattern, re.MULTILINE) for pattern in patterns], b""
    for at in range(begin, end, _BLOCK):
        *lines, incomplete = (incomplete + os.pread(file.fileno(), min(_BLOCK, end - at), at)).splitlines(keepends=True)
        lines += [incomplete] if at + _BLOCK >= end else []
        yield from (
            line for line in lines if any(expression.search(line.decode(errors="replace")) for expression in compiled)
        )


@dataclass
class RankOutput:
    """The output of the ranks of one supervisor, over all attempts.

    One thread reads and never waits for a file, another one writes: the last output is known even if a disk hangs.

    Args:
        shared: whether other supervisors of the node write into the same log.
        rank: rank to put in front of each line (the first of this supervisor); None for lines without a rank.
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
        """Return the rank output of the supervisor of an allocation."""
        shared = _shares_log(allocation)
        return cls(shared, allocation.index if shared and allocation.local_index else None)

    @contextlib.contextmanager
    def write_into(self, run: RunDir, log: Path) -> Iterator[IO[bytes]]:
        """Open a log for ranks; yields the file or pipe to use as their standard output.

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
        """Return the end of the output of this supervisor's ranks in the last attempt."""
        return bytes(self._words).decode(errors="replace") if self.shared else read_log_end(log)

    def close(self) -> None:
        """Close the pipe; nothing more is written."""
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None

    def _open_pipe(self) -> IO[bytes]:
        """Return the pipe, one for all attempts, because the fork server of the ranks writes into it as well."""
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
        """Read the output of the ranks until all writers have closed the pipe."""
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
        """Record that a mark was read; return the log for the lines after it."""
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
        """Queue text to be written to a log; empty text closes the log."""
        if log is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((log, text))

    def _write_log(self) -> None:
        """Append queued text to the log, each piece by one write."""
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
    """Return the complete lines and the incomplete rest; a rest that is too long is returned as a line."""
    *lines, incomplete = _LINE_END.split(text)
    if text.endswith(b"\r"):  # half of an end, perhaps
        incomplete = lines.pop() + b"\r"
    return ([*lines, incomplete], b"") if len(incomplete) > _CHUNK else (lines, incomplete)
