"""Optional packages, which the rest of tula reaches only through the entry points of group `tula.extras`.

The entry point names the object with which the core uses a package; its interface is a protocol in the core:
`ReportPackage` or `TrackersPackage`. (The package `figures` is used by `report`, which has the protocol.) Looking up an entry
point reads the metadata of all installed packages, which takes some milliseconds, so only commands that need an optional
package do it.
"""

from typing import Any

from tula_cli.errors import SpecError
from tula_cli.version import __version__

GROUP = "tula.extras"


def find_module_of_extra(name: str) -> str | None:
    """Return the dotted name of an optional package, without importing it; None if no installed package provides it."""
    from importlib import metadata

    return next((entry.module for entry in metadata.entry_points(group=GROUP, name=name)), None)


def load_extra(name: str) -> Any:
    """Return the object that the entry point of an optional package names.

    Args:
        name: name of the package, and of the pip extra that installs it.

    Raises:
        SpecError: the package is not installed, or a library that it needs.
    """
    from importlib import metadata

    hint = f"pip install 'tula-cli[{name}]' (from a clone: pip install '.[{name}]')"
    for entry in metadata.entry_points(group=GROUP, name=name):
        try:
            return entry.load()
        except ModuleNotFoundError as error:
            if not entry.module.startswith(str(error.name)):
                raise SpecError(f"tula's optional package {name} needs {error.name}, which is missing", hint) from error
    raise SpecError(f"tula's optional package {name} is not installed", hint)


def find_extra(name: str) -> Any:
    """Return the object that the entry point of an optional package names, or None if the package cannot be used."""
    try:
        return load_extra(name)
    except SpecError:
        return None


def make_metadata_files() -> dict[str, bytes]:
    """Return the files, by path, that make this process's optional packages known where tula is only on the path."""
    from importlib import metadata

    folder = f"tula_cli-{__version__}.dist-info"
    entries = sorted(f"{entry.name} = {entry.value}" for entry in metadata.entry_points(group=GROUP))
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: tula-cli\nVersion: {__version__}\n".encode(),
        f"{folder}/entry_points.txt": "\n".join([f"[{GROUP}]", *entries, ""]).encode(),
    }
