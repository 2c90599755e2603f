"""The copy of this package that the jobs of a run use."""

import functools
import hashlib
import os
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tula_cli.entry_points import make_metadata_files
from tula_cli.run.files import write_file_atomically
from tula_cli.version import __version__

_PACKAGE = Path(__file__).parents[1]
_ARCHIVE_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of all archive members, so that the same code produces the same archive."""


@functools.cache
def _read_package_code() -> Mapping[str, bytes]:
    """Return the sources of this package, and the metadata by which it finds its optional packages, by archive name.

    Empty if it was imported from an archive.
    """
    code = {
        f"{_PACKAGE.name}/{path.relative_to(_PACKAGE)}": path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))
    }
    return {**code, **make_metadata_files()} if code else {}


@functools.cache
def _make_archive_name() -> str:
    digest = hashlib.sha256()
    for name, content in _read_package_code().items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"tula-{__version__}-{digest.hexdigest()[:8]}.zip"


def find_package_archive(run: Path) -> Path | None:
    """Return the absolute path of this package's archive in a run; None if imported from an archive itself."""
    return run.absolute() / "code" / _make_archive_name() if _read_package_code() else None


def write_package_archive(run: Path) -> Path | None:
    """Write the archive if it does not exist; return its path as `find_package_archive` does.

    Raises:
        TulaError: it cannot be written.
    """

    def write_archive(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in _read_package_code().items():
                archive.writestr(zipfile.ZipInfo(name, _ARCHIVE_DATE), content, zipfile.ZIP_DEFLATED)

    archive = find_package_archive(run)
    if archive is not None and not archive.exists():
        write_file_atomically(archive, write_archive)
    return archive


def prepend_archive_to_path(archive: Path | None, path: str) -> str:
    """Return PYTHONPATH with an archive first; if the archive is gone, jobs import the installed package."""
    entries = [*([str(archive)] if archive is not None else []), *filter(None, path.split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(entries))


def make_package_path_lines(run: Path) -> list[str]:
    """Return shell lines by which a job imports the version that submitted it, whatever its set-up put in the path."""
    archive = find_package_archive(run.resolve())
    if archive is None:
        return []
    return [f'export PYTHONPATH={shlex.quote(str(archive))}"${{PYTHONPATH:+:$PYTHONPATH}}"']
