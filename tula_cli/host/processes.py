"""Starting and observing processes of this machine."""

import contextlib
import ctypes
import io
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

from tula_cli import words

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PROC_FOLDER = Path("/proc")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
MAX_OUTPUT_BYTES = 2**26
"""Maximum bytes of a command's output that are kept."""
_GUARD_TIMEOUT, _PIPE_TIMEOUT = 15.0, 1.0
"""Timeouts in seconds: for a guard to kill its descendants, and for reading a pipe after a command has exited."""


def set_parent_death_signal(parent: int | None = None, *, by: int = signal.SIGKILL) -> None:
    """Make the kernel kill this process when its parent exits.

    A worker that outlives its supervisor would be a second writer of the run.

    Args:
        parent: process id of the parent, if known, because it may have exited before this call.
        by: the signal to send.
    """
    if platform.system() != "Linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # the parent exited before the call above
        os._exit(1)


def prepare_supervised_child() -> None:
    """Prepare a child of a supervisor before exec: it dies with its parent and ignores time-limit warnings."""
    set_parent_death_signal()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def run_command(
    command: Sequence[str],
    *,
    timeout: float,
    stdin: str = "",
    environ: Mapping[str, str] | None = None,
    guarded: bool = False,
    outlives_parent: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a short-lived command until it exits, and leave none of its processes behind.

    The wait ends when the command exits, even if processes that it started still hold its output open. The command is
    killed at its timeout, on an error or Ctrl-C, and when this process is killed.

    Args:
        command: the program and its arguments.
        timeout: seconds.
        stdin: text for its standard input.
        environ: environment of the command; None: that of this process.
        guarded: whether the command runs a user's code, which may start processes in separate sessions; a guard kills
            them.
        outlives_parent: whether the command changes external state, and must complete if this process is killed.

    Raises:
        subprocess.TimeoutExpired: the command took longer than `timeout`.
        OSError: the command cannot be started.
    """
    if guarded:
        command = [sys.executable, "-m", "tula_cli.host.guard", *command]
    parent, by = os.getpid(), signal.SIGTERM if guarded else signal.SIGKILL
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ,
        start_new_session=True,  # Ctrl-C reaches only tula, which then kills the whole group
        preexec_fn=None if outlives_parent else lambda: set_parent_death_signal(parent, by=by),
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    output, errors = bytearray(), bytearray()
    pipes = [
        _run_in_background(_feed_pipe, process.stdin, stdin.encode()),
        _run_in_background(_read_last_output, process.stdout, output),
        _run_in_background(_read_last_output, process.stderr, errors),
    ]
    try:
        code = process.wait(timeout)
    finally:
        if process.poll() is None and guarded:
            process.terminate()  # the guard then kills processes that have left the group
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GUARD_TIMEOUT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in pipes:
        pipe.join(_PIPE_TIMEOUT)
    return subprocess.CompletedProcess(
        command, code, bytes(output).decode(errors="replace"), bytes(errors).decode(errors="replace")
    )


def _run_in_background(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _feed_pipe(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError), pipe:  # the process may exit without reading its input
        pipe.write(data)


def _read_last_output(pipe: IO[bytes], into: bytearray) -> None:
    """Read a pipe to its end, and keep only the last MAX_OUTPUT_BYTES, because the output may be endless."""
    with pipe:
        while data := os.read(pipe.fileno(), 2**16):
            into += data
            if len(into) > 2 * MAX_OUTPUT_BYTES:
                del into[:-MAX_OUTPUT_BYTES]


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """Adopt descendants that lose their parent in the block (child subreaper).

    Raises:
        OSError: the system does not support this.
    """
    _set_child_subreaper(True)
    try:
        yield
    finally:
        _set_child_subreaper(False)


def _set_child_subreaper(enabled: bool) -> None:
    if platform.system() != "Linux" or ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0):
        raise OSError("this system cannot assign orphaned processes to another parent")


class _TaggedStream(io.RawIOBase):
    """A binary file in which each line begins with a tag."""

    def __init__(self, stream: TextIO, tag: bytes) -> None:
        self.stream = stream  # keep a reference: the stream closes its file when it is collected
        self.file, self.tag, self.is_inside_line = stream.buffer, tag, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, data: "ReadableBuffer", /) -> int:
        tagged = b""
        for line in io.BytesIO(data):  # not splitlines(), which also splits at the "\r" of progress bars
            tagged += line if self.is_inside_line else self.tag + line
            self.is_inside_line = not line.endswith(b"\n")
        self.file.write(tagged)
        self.file.flush()
        return memoryview(data).nbytes


def tag_lines(rank: int) -> None:
    """Prefix lines that Python prints in this process with its rank, as torch does, in shared logs; not for rank 0.

    Output that libraries write without Python is not tagged.
    """
    if rank:
        tag = words.make_rank_tag(rank).encode()
        sys.stdout, sys.stderr = _tag_stream(sys.stdout, tag), _tag_stream(sys.stderr, tag)


def _tag_stream(stream: TextIO, tag: bytes) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(_TaggedStream(stream, tag), encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[type-var]


def read_start_time(pid: int) -> float | None:
    """Return when a process started, in clock ticks since boot; None if it has exited (including zombies)."""
    try:
        fields = (PROC_FOLDER / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else float(fields[19])


def is_process_running(pid: int, started: float | None) -> bool:
    """Return whether the process that `read_start_time` reported to have started then still runs; ids are reused."""
    return started is not None and read_start_time(pid) == started


def find_innermost_pid(pid: int) -> int | None:
    """Return the id of a process in its innermost PID namespace, which differs in containers; None if it has exited."""
    try:
        lines = (PROC_FOLDER / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), pid)
