"""Versions of Python and of the packages that an interpreter would import, without importing them.

    python -m tula_cli.host.installed torch mypackage.nets

prints them as JSON for the interpreter that runs it. Only the standard library is needed.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROGRAM = "tula_cli.host.installed"


def read_installed_versions(modules: Iterable[str]) -> dict[str, Any]:
    """Return data that differ between states of an environment.

    Args:
        modules: import names, e.g. "torch" or "mypackage.nets".

    Returns:
        `python`, the version; and for each module the names of its metadata folders, which contain the version, and
        modification time (ns) and size of the files that its import runs first, because packages installed in editable
        mode change without a new version. Both are empty for a missing module.
    """
    metadata_by_project = _list_metadata_folders(sys.path)
    return {
        "python": sys.version,
        **{
            name: [metadata_by_project.get(_normalize_name(name.partition(".")[0]), []), _list_file_states(name)]
            for name in sorted(set(modules))
        },
    }


def _list_metadata_folders(path: Sequence[str]) -> dict[str, list[str]]:
    """Return the `.dist-info` and `.egg-info` entries on the path, by normalised project name."""
    folders_by_project: dict[str, list[str]] = {}
    for folder in dict.fromkeys(path):
        for entry in _read_project_names(folder):
            if entry.endswith((".dist-info", ".egg-info")):
                folders_by_project.setdefault(_normalize_name(entry.partition("-")[0]), []).append(entry)
    return folders_by_project


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _read_project_names(folder: str) -> list[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return sorted(entry.name for entry in entries)
    except OSError:
        return []


def _list_file_states(module: str) -> list[list[int]]:
    return [
        [changed.st_mtime_ns, changed.st_size] for file in _list_module_files(module) if (changed := _read_stat(file))
    ]


def _list_module_files(module: str) -> Iterator[str]:
    """Yield the files of a module's parent packages and of the module itself, outermost first."""
    top, *inner = module.split(".")
    spec, name = _find_spec(top), top
    for part in [*inner, ""]:
        if spec is None:
            return
        if spec.origin is not None:
            yield spec.origin
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) if spec.submodule_search_locations else None


def _find_spec(top: str) -> ModuleSpec | None:
    try:
        return find_spec(top)
    except (ImportError, ValueError):  # one that was imported in a way that left no trace
        return None


def _read_stat(file: str) -> os.stat_result | None:
    try:
        return Path(file).stat()
    except OSError:
        return None


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(read_installed_versions(sys.argv[1:]))}\n")
