"""The tula that jobs are submitted with: one archive in the run, which they import before what is installed by then.

Python imports from a ZIP archive as from a folder; one file costs a shared file system less than four hundred.
"""

import functools
import hashlib
import os
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tula_cli.run.files import write_atomic
from tula_cli.version import __version__

_PACKAGE = Path(__file__).parents[2]
_SAME_DATE = (1980, 1, 1, 0, 0, 0)
"""Of all files, so that the same code makes the same archive."""


@functools.cache
def _code() -> Mapping[str, bytes]:
    """Return the sources of this tula by their names in an archive; none where it was imported from one itself."""
    return {
        f"{_PACKAGE.name}/{path.relative_to(_PACKAGE)}": path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))
    }


@functools.cache
def _name() -> str:
    found = hashlib.sha256()
    for name, content in _code().items():
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"tula-{__version__}-{found.hexdigest()[:8]}.zip"


def archive(run: Path) -> Path | None:
    """Return the place of this tula's archive in a run, absolute; None where this tula was imported from one itself."""
    return run.absolute() / "code" / _name() if _code() else None


def keep(run: Path) -> Path | None:
    """Write the archive, where it is not there yet; return its place as `archive` does.

    Raises:
        TulaError: it cannot be written.
    """

    def save(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
            for name, content in _code().items():
                made.writestr(zipfile.ZipInfo(name, _SAME_DATE), content, zipfile.ZIP_DEFLATED)

    place = archive(run)
    if place is not None and not place.exists():
        write_atomic(place, save)
    return place


def first_in_path(place: Path | None, path: str = "") -> str:
    """Return PYTHONPATH with an archive first; where that is gone when a job starts, what is installed by then is imported."""
    found = [*([str(place)] if place is not None else []), *filter(None, path.split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(found))


def shell_lines(run: Path) -> list[str]:
    """Have a job's shell import the tula that it is submitted with, after whatever its set-up has put into the path."""
    place = archive(run.resolve())
    if place is None:
        return []
    return [f'export PYTHONPATH={shlex.quote(str(place))}"${{PYTHONPATH:+:$PYTHONPATH}}"']
