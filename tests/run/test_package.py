"""The tula that a job was submitted with is the one that it imports, whatever is installed by then."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tula_cli.cluster.scripts import methods
from tula_cli.run import package
from tula_cli.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "a run").mkdir()
    result = package.write_package_archive(tmp_path / "a run")
    assert result is not None
    return result


def python(program: str, place: Path | None, folder: Path, *arguments: object) -> str:
    """Return what a program prints that imports tula from an archive, where another tula is installed."""
    (folder / "installed/tula_cli").mkdir(parents=True, exist_ok=True)
    (folder / "installed/tula_cli/__init__.py").write_text("")
    (folder / "installed/tula_cli/version.py").write_text('__version__ = "9.9"\n')
    environ = {**os.environ, "PYTHONPATH": package.prepend_archive_to_path(place, str(folder / "installed"))}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environ, cwd=folder, text=True, capture_output=True, check=True).stdout.strip()


VERSION = "import tula_cli.version as v; print(v.__version__)"


def test_a_job_imports_the_tula_that_it_was_submitted_with(place: Path, tmp_path: Path) -> None:
    assert python(VERSION, place, tmp_path) == __version__
    place.unlink()  # a run that was moved, or a node that does not see it
    assert python(VERSION, place, tmp_path) == "9.9"
    place.write_bytes(b"PK\x03\x04 half of one")
    assert python(VERSION, place, tmp_path) == "9.9"


def test_the_archive_is_written_once_and_holds_all_of_tula(place: Path) -> None:
    assert place == package.find_package_archive(place.parents[1])
    before = place.stat()
    package.write_package_archive(place.parents[1])
    assert place.stat().st_mtime_ns == before.st_mtime_ns
    assert list(place.parent.iterdir()) == [place]
    names = {str(path.relative_to(ROOT)) for path in (ROOT / "tula_cli").rglob("*.py")}
    metadata = {f"tula_cli-{__version__}.dist-info/{name}" for name in ("METADATA", "entry_points.txt")}
    assert set(zipfile.ZipFile(place).namelist()) == names | metadata
    assert before.st_size < 2**21


def test_what_goes_with_scripts_is_copied_out_of_an_archive_too(place: Path, tmp_path: Path) -> None:
    methods.copy_shim(tmp_path / "folder")
    methods.copy_optim(tmp_path / "folder")
    program = (
        "import sys; from pathlib import Path; from tula_cli.cluster.scripts import methods;"
        "from tula_cli.run import package; run = Path(sys.argv[1]);"
        "methods.copy_shim(run); methods.copy_optim(run); print(package.find_package_archive(run))"
    )
    assert python(program, place, tmp_path, tmp_path / "archive") == "None"
    remaining, right = (
        {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in (tmp_path / name).rglob("*.py")}
        for name in ("folder", "archive")
    )
    assert remaining == right and len(remaining) > 20
