"""What a snapshot of the user's own code holds, and the bounds of it."""

import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.run.imports import files_of_imports, import_roots, is_foreign, source_file
from tula_cli.run.source.keys import is_key
from tula_cli.spec.job import JobSpec

MAX_FILE = 1_000_000  # bytes of a file of a package that is no module the spec leads to
MAX_FILES = 20_000_000  # bytes of all of them together
MAX_COUNT = 2000
MAX_ENTRIES = 1000
"""A folder that holds more is data: it is not looked through."""


@dataclass(frozen=True)
class Selection:
    """What a snapshot copies. Paths are absolute."""

    base: Path  # the folder that it mirrors: where tula was called, or what a script lies in
    roots: tuple[Path, ...]  # folders that python imports from, those of the files only; the first to look in first
    modules: tuple[Path, ...]  # what the digest is over
    others: tuple[Path, ...]  # further files
    left_out: tuple[Path, ...]  # files and folders beyond the bounds
    keys: tuple[Path, ...] = ()  # code that may hold keys
    start: str = (
        ""  # the file of a script that runs, relative to base: which of them it is depends on where it is called
    )
    program: str = ""  # the same, where the command names it; empty for a module
    exact: bool = False  # git is asked of these files alone: what lies beside them may be secret


def behind_imports(spec: JobSpec, workdir: Path) -> Selection:
    """Return what a snapshot of the spec's code holds: the modules, and of packages their other small files.

    A package's other files are copied because it may read them, or import them in ways that no statement tells.
    """
    modules = files_of_imports(spec, workdir)
    roots = tuple(
        root for root in import_roots(workdir, sys.path) if any(file.is_relative_to(root) for file in modules)
    )
    others: list[Path] = []
    left_out: list[Path] = []
    keys: list[Path] = []
    for package in _packages(modules, workdir):
        _survey(package, set(modules), others, left_out, keys)
    return Selection(workdir, roots, modules, tuple(others), tuple(left_out), keys=tuple(keys))


def _packages(modules: Iterable[Path], workdir: Path) -> list[Path]:
    """Return the outermost folders with an __init__.py among the modules' folders."""
    found: dict[Path, None] = {}
    for module in modules:
        chain = [folder for folder in module.parents if folder != workdir and folder.is_relative_to(workdir)]
        packages = list(itertools.takewhile(lambda folder: source_file(folder / "__init__") is not None, chain))
        if packages:
            found[packages[-1]] = None
    return list(found)


def _survey(package: Path, modules: set[Path], others: list[Path], left_out: list[Path], keys: list[Path]) -> None:
    """Sort a package's other files into those that a snapshot copies, those beyond its bounds, and keys, by folders."""
    total, waiting = sum(file.stat().st_size for file in others), deque([package])
    while waiting:
        folder = waiting.popleft()
        inside = entries(folder)
        if inside is None or len(others) >= MAX_COUNT or total >= MAX_FILES:
            left_out.append(folder)
            continue
        waiting.extend(entry for entry in inside if entry.is_dir() and not entry.is_symlink())
        plain = [entry for entry in inside if entry.is_file() and entry not in modules]
        keys.extend(entry for entry in plain if is_key(entry))
        plain = [entry for entry in plain if not is_key(entry)]
        for entry in sorted(plain, key=lambda entry: entry.suffix != ".py"):
            size = entry.stat().st_size
            beyond = size > MAX_FILE or total + size > MAX_FILES or len(others) >= MAX_COUNT
            if beyond or not os.access(entry, os.R_OK):
                left_out.append(entry)
            else:
                others.append(entry)
                total += size


def entries(folder: Path) -> list[Path] | None:
    """Return what a folder holds that may be the user's, by name; None where that is too much, or not to be read."""
    try:
        with os.scandir(folder) as scan:
            names = [entry.name for entry in itertools.islice(scan, MAX_ENTRIES + 1)]
    except PermissionError:
        return None
    if len(names) > MAX_ENTRIES:
        return None
    paths = (folder / name for name in sorted(names) if not name.startswith(".") and not name.endswith(".pyc"))
    return [path for path in paths if not (path.is_dir() and is_foreign(path))]


def beyond(selection: Selection) -> tuple[str, ...]:
    """Say what the snapshot cannot hold, and what that means."""
    told = []
    if selection.left_out:
        told.append(
            f"{listed(selection.left_out, selection.base)}: too large for the snapshot of the code"
            f" ({MAX_FILE // 10**6} MB a file, {MAX_FILES // 10**6} MB and {MAX_COUNT} files in all), so it is linked, not"
            " copied: a change to it reaches jobs submitted before"
        )
    if selection.keys:
        told.append(
            f"{listed(selection.keys, selection.base)}: may hold keys by the name, so it is linked, not copied: a change to it"
            " reaches jobs submitted before, and makes no other run"
        )
    crowded = [folder for folder in {module.parent for module in selection.modules} if entries(folder) is None]
    if crowded:
        told.append(
            f"{listed(crowded, selection.base)}: more than {MAX_ENTRIES} files beside the code; in a job they are found"
            f" by their path from {selection.base}, not by the code's own __file__"
        )
    return tuple(told)


def listed(paths: Sequence[Path], base: Path) -> str:
    names = [str(path.relative_to(base)) for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
