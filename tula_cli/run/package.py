"""The copy of this package that the jobs of a run use, and the version that submitted them."""

import functools
import hashlib
import os
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tula_cli.run.files import write_atomic
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.snapshot import Snapshot
from tula_cli.version import __version__

_PACKAGE = Path(__file__).parents[1]
_SAME_DATE = (1980, 1, 1, 0, 0, 0)
"""Of all files, so that the same code makes the same archive."""


@functools.cache
def _read_package_code() -> Mapping[str, bytes]:
    """Return the sources of this tula by their names in an archive; none where it was imported from one itself."""
    return {
        f"{_PACKAGE.name}/{path.relative_to(_PACKAGE)}": path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))
    }


@functools.cache
def _make_archive_name() -> str:
    digest = hashlib.sha256()
    for name, content in _read_package_code().items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"tula-{__version__}-{digest.hexdigest()[:8]}.zip"


def find_package_archive(run: Path) -> Path | None:
    """Return the place of this tula's archive in a run, absolute; None where this tula was imported from one itself."""
    return run.absolute() / "code" / _make_archive_name() if _read_package_code() else None


def keep_package(run: Path) -> Path | None:
    """Write the archive, where it is not there yet; return its place as `find_package_archive` does.

    Raises:
        TulaError: it cannot be written.
    """

    def save(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
            for name, content in _read_package_code().items():
                made.writestr(zipfile.ZipInfo(name, _SAME_DATE), content, zipfile.ZIP_DEFLATED)

    place = find_package_archive(run)
    if place is not None and not place.exists():
        write_atomic(place, save)
    return place


def prepend_to_path(place: Path | None, path: str = "") -> str:
    """Return PYTHONPATH with an archive first; where that is gone when a job starts, what is installed by then is imported."""
    entries = [*([str(place)] if place is not None else []), *filter(None, path.split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(entries))


def make_shell_lines(run: Path) -> list[str]:
    """Have a job's shell import the tula that it is submitted with, after whatever its set-up has put into the path."""
    place = find_package_archive(run.resolve())
    if place is None:
        return []
    return [f'export PYTHONPATH={shlex.quote(str(place))}"${{PYTHONPATH:+:$PYTHONPATH}}"']


def describe_upgrade(job: Job | None, ran_with: str) -> str:
    """Say that a job runs with another tula than it was submitted with; empty where it does not, or nobody knows.

    Args:
        job: as it was submitted.
        ran_with: the version that runs it; empty where that was not written down.
    """
    if job is None or not job.tula or not ran_with or job.tula == ran_with:
        return ""
    return f"{job.id} was submitted with tula {job.tula}, and goes on with tula {ran_with}, which reads the same format"


def list_upgrades(look: Snapshot) -> tuple[str, ...]:
    """Return the same of each job of a run, by its newest attempt."""
    newest: dict[str, Attempt] = {job.id: attempts[-1] for job in look.jobs if (attempts := look.attempts_of(job.id))}
    messages = (describe_upgrade(job, newest[job.id].tula) for job in look.jobs if job.id in newest)
    return tuple(filter(None, messages))
