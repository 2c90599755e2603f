"""The file of `model.weights` as part of what a run, and a training, is named by."""

import functools
import hashlib
from pathlib import Path

from tula_cli.errors import SpecError
from tula_cli.spec.job import JobSpec

PART = 2**20  # bytes read at a time


def with_weights(code: str, spec: JobSpec) -> str:
    """Return a digest of the user's own code together with that of the first weights; the code's where there are none.

    Args:
        code: digest of the code; empty for none.
        spec: names the file, relative to the working directory.

    Raises:
        SpecError: the file cannot be read.
    """
    if spec.script is not None or spec.model.weights is None:
        return code
    return hashlib.sha256(f"{code}\0{file_digest(spec.model.weights)}".encode()).hexdigest()[:8]


def file_digest(name: str) -> str:
    """Return the SHA-256 of a file; it is read again where it has changed.

    Raises:
        SpecError: it cannot be read.
    """
    path = Path(name).absolute()
    try:
        found = path.stat()
        return _digest(path, (found.st_size, found.st_mtime_ns))
    except OSError as error:
        raise SpecError(
            f"model.weights: cannot read {name}: {error.strerror}", f"it is looked for in {Path.cwd()}"
        ) from error


@functools.lru_cache
def _digest(path: Path, _stamp: tuple[int, int]) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(PART):
            found.update(part)
    return found.hexdigest()
