"""Optional packages, which the rest of tula reaches only through the entry points of group `tula.extras`.

The entry point names the object with which the core uses a package; its interface is a protocol in the core:
`ReportPackage`, `TrackersPackage` or `SiteBilling`. (The package `figures` is used by `report`, which has the protocol.) Looking up an entry
point reads the metadata of all installed packages, which takes some milliseconds, so only commands that need an optional
package do it.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_cli.errors import SpecError
from tula_cli.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "tula.extras"
PROJECT_FILE = Path(__file__).parents[1] / "pyproject.toml"
"""The project file of a source tree; it does not exist beside an installed package."""


def load_extra(name: str) -> Any:
    """Return the object that the entry point of an optional package names.

    Args:
        name: name of the package, and of the pip extra that installs it.

    Raises:
        SpecError: the package is not installed, or a library that it needs.
    """
    hint = make_install_hint(name)
    entry = _find_entry_points().get(name)
    if entry is not None:
        try:
            return entry.load()
        except ModuleNotFoundError as error:
            if not entry.module.startswith(str(error.name)):
                raise SpecError(f"tula's optional package {name} needs {error.name}, which is missing", hint) from error
        except AttributeError as error:
            raise SpecError(f"tula's optional package {name} does not match this tula: {error}", hint) from error
    raise SpecError(f"tula's optional package {name} is not installed", hint)


def make_install_hint(name: str) -> str:
    return f"pip install 'tula-cli[{name}]' (from a clone: pip install '.[{name}]')"


def load_extra_if_installed(name: str) -> Any:
    """Return the object that the entry point of an optional package names, or None if the package cannot be used."""
    try:
        return load_extra(name)
    except SpecError:
        return None


def make_metadata_files() -> dict[str, bytes]:
    """Return the files, by path, that make this process's optional packages known where tula is only on the path."""
    folder = f"tula_cli-{__version__}.dist-info"
    entries = sorted(f"{entry.name} = {entry.value}" for entry in _find_entry_points().values())
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: tula-cli\nVersion: {__version__}\n".encode(),
        f"{folder}/entry_points.txt": "\n".join([f"[{GROUP}]", *entries, ""]).encode(),
    }


def _find_entry_points() -> "dict[str, EntryPoint]":
    """Return the entry points by name: those of installed packages, and those of the source tree that code runs from.

    A source tree may be installed with metadata older than its code, or only be on the path.
    """
    from importlib import metadata

    installed = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    declared = {name: metadata.EntryPoint(name, value, GROUP) for name, value in _read_declared_entry_points().items()}
    return installed | declared


def _read_declared_entry_points() -> dict[str, str]:
    """Return the entry points that a source tree declares, module and object by name; empty for an installed package."""
    text = PROJECT_FILE.read_text() if PROJECT_FILE.is_file() else ""
    table = re.search(rf'^\[project\.entry-points\."{GROUP}"\]\n((?:\w+ = ".+"\n)*)', text, re.MULTILINE)
    # Not parsed as TOML, because Python 3.10 has no tomllib.
    return dict(re.findall(r'(\w+) = "(.+)"', table[1])) if table else {}
