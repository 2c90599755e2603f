"""The entry points of this tree, also where it was installed before pyproject.toml named them (`make install` renews that)."""

import functools
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
GROUP = "tula.extras"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@functools.cache
def _write_metadata() -> "tempfile.TemporaryDirectory[str] | None":
    """Write the entry points into a folder of this process; return None where the installed ones are up to date."""
    named = PROJECT["entry-points"][GROUP]
    if {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)} == named:
        return None
    place = tempfile.TemporaryDirectory(prefix="tula-metadata-")
    folder = Path(place.name) / "tula_cli-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tula-cli\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *(f"{k} = {v}" for k, v in named.items()), ""]))
    return place


def make_python_path() -> str:
    """Return a PYTHONPATH with this tree, and its entry points where the installed ones are older."""
    place = _write_metadata()
    return os.pathsep.join([str(ROOT), *([] if place is None else [place.name])])


def provide_entry_points() -> None:
    """Let this process and those that it starts find the optional packages that pyproject.toml names."""
    place = _write_metadata()
    if place is not None:
        sys.path.insert(0, place.name)
        os.environ["PYTHONPATH"] = os.pathsep.join([place.name, *filter(None, [os.environ.get("PYTHONPATH")])])
