"""The file of `model.weights` as part of what a run, and a training, is named by."""

import functools
import hashlib
from pathlib import Path

from tula_cli.errors import SpecError
from tula_cli.run.files import is_regular
from tula_cli.spec.job import JobSpec

PART = 2**20  # bytes read at a time


def weights_digest(spec: JobSpec) -> str:
    """Return the digest of the file of first weights, which is looked for in the working directory; empty for none.

    Each command reads the file: it names runs, so it has to be known before there is a run directory to remember it in.

    Raises:
        SpecError: the file cannot be read.
    """
    return "" if spec.script is not None or spec.model.weights is None else file_digest(spec.model.weights)


def with_weights(code: str, weights: str) -> str:
    """Return a digest of the user's own code together with that of the first weights; the code's where there are none."""
    return hashlib.sha256(f"{code}\0{weights}".encode()).hexdigest()[:8] if weights else code


def file_digest(name: str) -> str:
    """Return the SHA-256 of a file, or of the check sums of a folder of shares; it is read again where it has changed.

    Raises:
        SpecError: it cannot be read.
    """
    path = Path(name).absolute()
    path = path / "sums.json" if path.is_dir() else path
    try:
        if not is_regular(path):
            raise SpecError(f"model.weights: {name} is no regular file", "name a file, or a folder of shares")
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
