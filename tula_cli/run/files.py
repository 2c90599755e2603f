"""Reading and writing the files of a run: replaced whole, never half of either."""

import contextlib
import errno
import os
import socket
from pathlib import Path

from tula_cli.errors import TulaError


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` whole.

    Raises:
        TulaError: the disk is full or the folder cannot be written; the old file stands as it was.
    """
    content = data.encode() if isinstance(data, str) else data
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> TulaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TulaError(
            f"cannot write {path}: {error.strerror}", "free some space and run the same command again; nothing is lost"
        )
    return TulaError(f"cannot write {path}: {error.strerror}", "choose another folder with --run-dir")


def content(path: Path) -> bytes:
    """Return what a file holds; one that NFS has replaced under the reader (ESTALE) is read once more.

    Raises:
        FileNotFoundError: there is none.
        TulaError: it cannot be read.
    """
    for again in (True, False):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            if not (again and error.errno == errno.ESTALE):
                raise TulaError(f"cannot read {path}: {error.strerror}") from error
    raise AssertionError
