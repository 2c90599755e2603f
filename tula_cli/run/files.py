"""Reading and writing the files of a run, on NFS and Lustre too, where other nodes change them.

Writes replace a file as a whole, so that readers never see a partial one; a marker announces changes to readers.
"""

import contextlib
import ctypes
import errno
import fnmatch
import json
import math
import os
import re
import shlex
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, TypeVar, cast

from tula_cli.errors import BadMeasurements, CannotWrite, DiskFull, RunGone, StorageFailed, TulaError, UnreadableFile
from tula_cli.run.disk_space import FULL_DISK_ERRNOS, IO_ERRNOS, describe_free_space
from tula_cli.run.owner import ACCESS_ERRNOS, make_ownership_error
from tula_cli.version import __version__

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter
    from pydantic_core import ErrorDetails
T = TypeVar("T")
_MAX_BYTES = 2**28
"""Maximum bytes of a file that is read as a whole."""
MAX_LINE_BYTES = 2**24
"""Maximum bytes of a line that is read as a whole: longer ones are not records."""
STORAGE_FAILURE_HINT = (
    "the file system failed or did not answer: run the same command again later. If it fails again, ask the administrators"
    " (or renew your Kerberos ticket). All saved files are kept"
)


class _PinnedRun:
    """The run directory that this process works for and its inode at that time; `path` is None if there is none.

    It is kept open, because some file systems (FUSE, for example sshfs) assign another inode to a folder once they have
    forgotten it.
    """

    path: Path | None = None
    inode = 0
    folder: int | None = None


def pin_run(run: Path) -> None:
    """Pin the run directory: once it is moved or removed, none of its folders is created again.

    Nobody would look for files there.

    Raises:
        RunGone: the run directory does not exist.
    """
    try:
        folder = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RunGone(run) from None
    if _PinnedRun.folder is not None:
        os.close(_PinnedRun.folder)
    _PinnedRun.path, _PinnedRun.inode, _PinnedRun.folder = run.absolute(), os.fstat(folder).st_ino, folder


def is_pinned_run_gone(run: Path) -> bool:
    """Return whether a pinned run is no longer at its path; another folder may have taken its place."""
    try:
        return run.absolute() == _PinnedRun.path and run.stat().st_ino != _PinnedRun.inode
    except (FileNotFoundError, NotADirectoryError):
        return True


def make_folder(folder: Path, *, mode: int = 0o700) -> None:
    """Create a folder and its missing parents; `mode` gives their permissions, subject to the umask.

    Raises:
        RunGone: the folder is in a pinned run that no longer exists.
        OSError: it cannot be created.
    """
    pinned_path = _PinnedRun.path
    if pinned_path is not None and folder.absolute().is_relative_to(pinned_path) and is_pinned_run_gone(pinned_path):
        raise RunGone(pinned_path)
    try:
        folder.mkdir(mode=mode, exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent, mode=mode)  # mkdir(parents=True) would create parents with other permissions
        folder.mkdir(mode=mode, exist_ok=True)


MODE_FOR_ALL = 0o666
"""Permissions, subject to the umask, of a file written to a path chosen by the user; all other files are private to the
user."""


def write_file_atomically(path: Path, data: bytes | str | Callable[[BinaryIO], None], *, mode: int = 0o600) -> None:
    """Replace the file at `path` as a whole.

    Args:
        data: the content, or a function that writes it (and may raise OSError).
        mode: permissions, subject to the umask.

    Raises:
        RunGone: the file is in a pinned run that no longer exists.
        DiskFull, StorageFailed: there is no space, or the file system does not answer or is read-only; the old file is
            unchanged.
        NotYours: it is in another user's run.
        CannotWrite: the folder cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        if mode == MODE_FOR_ALL and path.exists() and not (path.is_file() or path.is_dir()):
            raise CannotWrite(
                f"cannot write {path}: this path is a device or a pipe, which tula does not replace by a file",
                "name a file",
            )
        make_folder(path.parent, mode=0o777 if mode == MODE_FOR_ALL else 0o700)
        with _create_file(draft, mode) as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise make_write_error(path, error, needed=None if callable(content) else len(content)) from error


def _create_file(draft: Path, mode: int) -> BinaryIO:
    """Create a new file exclusively; an existing file or link of that name is removed first."""

    def open_new_file(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        return open(draft, "xb", opener=open_new_file)
    except FileExistsError:
        draft.unlink()
        return open(draft, "xb", opener=open_new_file)


def make_write_error(
    path: Path, error: OSError, *, needed: int | None = None, action: Literal["write", "remove"] = "write"
) -> TulaError:
    """Return the error to show for a failed write or removal; `needed` is the size of the content if known."""
    message = f"cannot {action} {path}: {error.strerror}"
    if error.errno in FULL_DISK_ERRNOS:
        free, quota = describe_free_space(path.parent), error.errno == errno.EDQUOT
        return DiskFull(
            f"{message}{f' ({free})' if free and not quota else ''}",
            "free some space and run the same command again; all saved files are kept",
            folder=str(path.parent),
            quota=quota,
            needed=needed,
        )
    if error.errno in IO_ERRNOS:
        return StorageFailed(message, choose_storage_hint(path, error))
    not_yours_error = make_ownership_error(path, change=True) if error.errno in ACCESS_ERRNOS else None
    return not_yours_error or CannotWrite(message, _make_other_folder_hint(path))


def choose_storage_hint(path: Path, error: OSError) -> str:
    """Return the hint for a file whose file system refused an operation with one of `IO_ERRNOS`."""
    return _make_other_folder_hint(path) if error.errno == errno.EROFS else STORAGE_FAILURE_HINT


def _make_other_folder_hint(path: Path) -> str:
    is_in_run = any((folder / "spec.yaml").exists() for folder in path.parents) or "tula-runs" in path.parts
    return "choose another folder with [[--run-dir]]" if is_in_run else "choose another folder"


def read_content(path: Path) -> bytes:
    """Return the content of a file; retry once if NFS replaced it during the read (ESTALE).

    Raises:
        FileNotFoundError: there is no such file.
        BadMeasurements: it is not a regular file, or is larger than any of a run's records.
        UnreadableFile, NotYours, StorageFailed: it cannot be read.
    """
    for may_retry in (True, False):
        try:
            with open_file(path) as file:
                # Reads exactly the size: a read with an upper limit allocates memory for that limit.
                if (size := os.fstat(file.fileno()).st_size) > _MAX_BYTES:
                    raise make_damaged_error(path, f"it is larger than {_MAX_BYTES >> 20} MiB")
                return file.read(size)
        except FileNotFoundError:
            raise
        except OSError as error:
            if not (may_retry and error.errno == errno.ESTALE):
                raise make_read_error(path, error) from error
    raise AssertionError


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else counts as damaged (a pipe would block, a device may be endless).

    Raises:
        OSError: it cannot be opened.
        BadMeasurements: it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise make_damaged_error(path, "it is not a file")
    return open(descriptor, "rb")


def is_regular_file(path: Path | str) -> bool:
    """Return whether a path leads to a regular file: a pipe would block the reader, and a device may be endless.

    Raises:
        OSError: there is no such file, or it cannot be examined.
    """
    return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116


def read_link_target(link: Path) -> Path:
    """Return the direct target of a link, without following further links; the path itself if it is no link."""
    return link.parent / link.readlink() if link.is_symlink() else link


def read_change_time(path: Path, *, follow_symlinks: bool = True) -> float:
    """Return the time of the last change of a file (Unix time); 0 if it does not exist."""
    try:
        return path.stat(follow_symlinks=follow_symlinks).st_mtime
    except OSError:
        return 0.0


def make_read_error(path: Path, error: OSError) -> TulaError:
    message = f"cannot read {path}: {error.strerror}"
    if error.errno in IO_ERRNOS:
        return StorageFailed(message, STORAGE_FAILURE_HINT)
    if error.errno in ACCESS_ERRNOS:
        not_yours_error = make_ownership_error(path)
        return not_yours_error or UnreadableFile(message, f"make it readable: chmod u+r {shlex.quote(str(path))}")
    if isinstance(error, NotADirectoryError):
        file = next((parent for parent in path.parents if parent.is_file()), path.parent)
        return TulaError(f"{message}: {file} is a file", f"{_make_other_folder_hint(path)}, or move that file away")
    return UnreadableFile(message, _MOVE_ADVICE)


def write_record(path: Path, record: "BaseModel") -> None:
    """Replace the record at `path`.

    Raises:
        TulaError: the disk is full, the folder cannot be written, or a path in the record is not UTF-8; the old record
            is unchanged.
    """
    try:
        text = record.model_dump_json(indent=1)
    except ValueError as error:  # a file name in the record is not valid UTF-8
        hint = "use folders and files whose names are UTF-8; convmv -t utf8 renames them"
        raise CannotWrite(f"{path} cannot be written: a path or text in it is not UTF-8", hint) from error
    write_file_atomically(path, text + "\n")


def read_record(path: Path, kind: "type[T] | TypeAdapter[T]") -> T | None:
    """Return the record at `path`, or None if there is no such file.

    Args:
        kind: its class; an adapter for one of several classes.

    Raises:
        BadMeasurements: it is damaged.
        UnreadableFile: it cannot be read, or contains a value that only another version of tula knows.
        TulaError: the file system does not answer, or the run belongs to another user.
    """
    from pydantic import TypeAdapter, ValidationError  # imported late, because it is slow and needed for records only

    try:
        content = read_content(path)
        record: T = (kind if isinstance(kind, TypeAdapter) else _get_adapter(cast("Any", kind))).validate_json(content)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first_error = error.errors()[0]
        where = ".".join(str(key) for key in first_error["loc"]) or "the top"
        if (value := _find_unknown_value(first_error)) is not None:
            raise UnreadableFile(
                f"{path} contains a value that tula {__version__} does not know: {value[:_MAX_SHOWN]!r} at {where}",
                f"use the version of tula that wrote this file; if no other version did, {_MOVE_ADVICE}",
            ) from None
        raise make_damaged_error(path, f"{first_error['msg']} at {where}") from None
    if _EXCESSIVE_NUMBER_PATTERN.search(content):
        try:
            limit = _MAX_MEASURED if path.parent.name == "results" else math.inf
            json.loads(content, parse_constant=_reject_nan_and_infinity, parse_float=partial(_check_number, limit))
        except ValueError as error:
            raise make_damaged_error(path, str(error)) from None
    return record


_MAX_SHOWN = 60
"""Maximum number of characters of an unknown value in a message."""


def _find_unknown_value(error: "ErrorDetails") -> str | None:
    """Return the value if it is text and its field accepts only other values; another version may know it. Else None."""
    value = error["ctx"]["tag"] if error["type"] == "union_tag_invalid" else error["input"]
    return value if error["type"] in ("literal_error", "union_tag_invalid") and isinstance(value, str) else None


@cache
def _get_adapter(kind: type[T]) -> "TypeAdapter[T]":
    """Return the adapter of a class, which takes a while to make."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


_EXCESSIVE_NUMBER_PATTERN = re.compile(rb"NaN|Infinity|\d[eE]\+?\d{3}")
"""Bytes of a JSON text that may be an excessive number; inside strings they are harmless."""
_MAX_MEASURED = 1e150
"""Maximum of measured numbers: their squares must be finite."""


def _reject_nan_and_infinity(text: str) -> float:
    raise ValueError(f"{text} is not a valid number")


def _check_number(limit: float, text: str) -> float:
    return number if abs(number := float(text)) < limit else _reject_nan_and_infinity(text)


_MOVE_ADVICE = (
    "restore it from a copy of the run. If there is no copy, move it to another folder and run the same command again"
)
_JOB_ADVICE = (
    "restore it from a copy of the run. If there is no copy, cancel its job with the scheduler if the job still runs, then move"
    " the file to another folder"
)
JOB_FILE_ADVICE = "run tula profile with the job file, which writes it again and keeps all measurements"
_ADVICE = {
    "results": "run tula profile, which measures it again",
    "recommendation.json": "run tula recommend, which writes it again",
    "trainings.json": "run tula recommend --trainings N --save, which writes it again",
    "evaluations": "run tula evaluate --fresh, which writes it again",
    "jobs": _JOB_ADVICE,
    "spec.yaml": f"{JOB_FILE_ADVICE}; to change the settings, edit the job file instead of spec.yaml",
    "job_file.json": JOB_FILE_ADVICE,
    "variant.json": JOB_FILE_ADVICE,
}
"""Advice for damaged files, by the name of the file or of its folder. No advice may cost anything that was measured."""


def make_damaged_error(path: Path, why: str) -> BadMeasurements:
    """Return the error for a damaged file; its hint names the command that writes the file again, if there is one."""
    advice = None if path.is_dir() else _ADVICE.get(path.name) or _ADVICE.get(path.parent.name)
    return BadMeasurements(f"{path} is damaged: {why}", advice or _MOVE_ADVICE)


class RecordReader(Protocol):
    """A function that reads records: `read_record`, or one with a cache."""

    def __call__(self, path: Path, kind: "type[T] | TypeAdapter[T]", /) -> T | None: ...


def read_records(
    folder: Path, kind: "type[T] | TypeAdapter[T]", pattern: str = "*.json", *, read: RecordReader = read_record
) -> list[T]:
    """Return the records in a folder's files whose names match a pattern, by file name; raises as `read` does."""
    return [record for path in list_files(folder, pattern) if (record := read(path, kind)) is not None]


def read_text(path: Path) -> str:
    """Return the text of a file without surrounding whitespace; empty if there is no such file.

    Raises:
        BadMeasurements: it is not a regular file.
        TulaError: it cannot be read.
    """
    try:
        return read_content(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def list_files(folder: Path, pattern: str = "*.json") -> list[Path]:
    """Return the files of a folder whose names match, sorted by name, without drafts; empty if there is no such folder.

    Raises:
        TulaError: the folder cannot be read.
    """
    return [folder / name for name in list_names(folder) if fnmatch.fnmatchcase(name, pattern)]


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, without drafts; empty if there is no such folder.

    Raises:
        TulaError: the folder cannot be read.
    """
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise make_read_error(folder, error) from error


def read_json_lines(
    path: Path, *, last_bytes: int | None = None, is_wanted: Callable[[bytes], bool] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file if it exists; an incomplete last line is left out.

    Args:
        last_bytes: read only this many bytes at its end; None for all.
        is_wanted: returns whether a line is to be parsed; None for all.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise make_read_error(path, error) from error
    with file:
        if last_bytes is not None and file.seek(0, os.SEEK_END) > last_bytes:
            file.seek(-last_bytes, os.SEEK_END)
            file.readline()  # skips the partial first line
        else:
            file.seek(0)
        for line in read_lines(file):
            # A lost node may leave a line with unwritten blocks, so lines that are not JSON objects are skipped.
            if line.endswith(b"\n") and (is_wanted is None or is_wanted(line)):
                row = parse_json_object(line)
                if row is not None:
                    yield row


def read_lines(file: BinaryIO, *, longest: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file from its current position, long ones in pieces: a whole file may be a single line.

    Every piece of a line except the last lacks a line end.

    Args:
        longest: maximum bytes of a piece, including its line end.
    """
    while line := file.readline(longest):
        if not line.strip(b"\0"):  # only zero bytes: skip the hole of a sparse file, which may be very large
            try:
                file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
            except OSError:  # no data after the hole
                return
        yield line


def read_lines_reversed(file: BinaryIO, *, end: int, block: int) -> Iterator[bytes]:
    """Yield the lines of a file before `end`, last first.

    A block is read at a time; lines longer than a block are yielded in pieces.
    """
    position, incomplete = end, b""
    while position:
        step = min(position, block)
        position = file.seek(position - step)
        incomplete, *lines = re.findall(rb"[^\n]*\n|[^\n]+", file.read(step) + incomplete)
        yield from reversed(lines)
        if position == 0 or len(incomplete) > block:
            yield incomplete
            incomplete = b""


def read_last_bytes(path: Path, size: int) -> str:
    """Return the last bytes of a file as text; empty if there is no such file.

    Raises:
        OSError: it cannot be read.
        BadMeasurements: it is not a regular file.
    """
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode(errors="replace")
    except FileNotFoundError:
        return ""


def parse_json_object(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object; return None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def append_json_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append an object to a JSON-lines file, creating it if needed; raises as `open_file_to_append` does."""
    with open_file_to_append(path) as file:
        file.write(f"{json.dumps(content)}\n".encode())


def remove_path(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists. Errors inside a folder are ignored.

    Raises:
        OSError: the file or the link cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish_folder(draft: Path, target: Path) -> None:
    """Rename a finished folder to its final name; if that exists, keep it, because folders of equal names are equal.

    Raises:
        OSError: it cannot be renamed.
    """
    if target.is_dir():
        return
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # not published by another process meanwhile
            raise


def open_file_to_append(path: Path) -> BinaryIO:
    """Open a file for appending; its folder is created if needed.

    Raises:
        TulaError: the disk is full, the folder cannot be written, or the file is a link, which would redirect the data.
    """
    try:
        make_folder(path.parent)
        # O_NONBLOCK: opening a pipe without a reader would block.
        file = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(file)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return os.fdopen(file, "ab")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CannotWrite(
                f"cannot append to {path}: it is a link or not a file, so the data would be written elsewhere",
                f"remove it: rm {shlex.quote(str(path))}",
            ) from error
        raise make_write_error(path, error) from error


# --- Reads that bypass caches of the file system
#
# NFS and FUSE cache file attributes and lookups by name, including failed ones, for up to a minute. Linux's statx with
# AT_STATX_FORCE_SYNC makes them query the server; a change found this way also invalidates the cached content of the
# folder. Without this call, or on a file system without a cache, it is an ordinary stat.

MAX_ATTRIBUTE_LAG = 60.0
"""Seconds after which a file written by another machine becomes visible at the latest."""
_AT_FDCWD = -100
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC_STATS = 0x7FF
_STATX_BYTES = 256  # size of struct statx
_INODE_OFFSET, _MODIFIED_OFFSET = 32, 112  # byte offsets of these fields in struct statx
_REFUSED_ERRNOS = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
"""Errors of kernels before 4.11, and of containers that do not allow statx."""


def read_file_identity(path: Path) -> tuple[int, int] | None:
    """Return the inode and modification time (ns) of a file or folder with one call; None if it is not visible."""
    call = _load_statx()
    if call is not None:
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        if call(_AT_FDCWD, os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, buffer) == 0:
            (inode,) = struct.unpack_from("Q", buffer, _INODE_OFFSET)
            seconds, nanoseconds = struct.unpack_from("qI", buffer, _MODIFIED_OFFSET)
            return inode, seconds * 10**9 + nanoseconds
        if ctypes.get_errno() not in _REFUSED_ERRNOS:
            return None
    try:
        plain = path.stat()
    except OSError:
        return None
    return plain.st_ino, plain.st_mtime_ns


def is_listed(path: Path) -> bool:
    """Return whether a folder, which need not exist, contains a name.

    The name itself is not looked up: the file system would cache that it is missing and hide it for a while after it is
    created.

    Raises:
        TulaError: the folder cannot be read, or its file system does not answer.
    """
    read_file_identity(path.parent)
    return path.name in list_names(path.parent)


def wait_until_listed(path: Path, *, timeout: float = MAX_ATTRIBUTE_LAG) -> bool:
    """Wait until the folder of a path that another machine has written lists it; return False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not is_listed(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(0.5, timeout))
    return True


@cache
def _load_statx() -> Callable[..., int] | None:
    """Return the C library's statx, or None if it has none (glibc before 2.28, systems other than Linux)."""
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    return function


# --- Marker of changes

_CHANGE_MARKER_FILE = "news"
_POLLED_FOLDERS = ("orders", "handover", "failures")


def touch_change_marker(run: Path) -> None:
    """Announce a change in a run directory, after it has become readable.

    Takes no space, and errors are ignored: supervisors also poll without it.
    """
    path = run / _CHANGE_MARKER_FILE
    with contextlib.suppress(OSError):
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def write_record_and_announce(run: Path, name: str, record: "BaseModel") -> None:
    """Replace a record at the path `name` in a run directory, and announce the change.

    Raises:
        TulaError: the disk is full or the folder cannot be written; the old record is unchanged.
    """
    write_record(run / name, record)
    touch_change_marker(run)


def read_change_marker(run: Path) -> tuple[int, int] | None:
    """Return a value that changes with each announcement (one stat call); None if there has been none."""
    return read_file_identity(run / _CHANGE_MARKER_FILE)


def create_polled_folders(run: Path, *others: str) -> None:
    """Create the folders that supervisors and ranks poll, and `others`: caches of missing names would hide them later.

    Raises:
        OSError: the run directory cannot be written.
    """
    for name in (*_POLLED_FOLDERS, *others):
        make_folder(run / name)
    touch_change_marker(run)
