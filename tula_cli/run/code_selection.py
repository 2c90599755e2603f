"""The files of a code snapshot: which files git tracks, and limits on what is copied."""

import itertools
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import TulaError
from tula_cli.run import messages
from tula_cli.run.disk_space import measure_file_size
from tula_cli.run.imports import find_source_file, is_foreign_folder, list_files_of_imports, list_import_roots
from tula_cli.run.secrets import is_key_file, is_private_file
from tula_cli.spec.job import JobSpec
from tula_cli.words import join_first_words

# --- Git

MAX_DIFF_CHARACTERS = 1_000_000  # characters
GIT_TIMEOUT = 10.0  # seconds
LISTING_TIMEOUT = 60.0  # seconds for listing files, whose failure is an error because the code is then unknown


def list_tracked_files(folder: Path) -> tuple[Path, dict[Path, bool]] | None:
    """Return the root of a folder's git repository, and its files with whether git tracks each.

    Ignored files are left out. Nested repositories count as part of it. Listed files need not exist. None if there is no
    repository.

    Args:
        folder: absolute, without symbolic links.

    Raises:
        TulaError: git takes too long.
    """
    top = _run_git(folder, "rev-parse", "--show-toplevel").rstrip("\n")
    return (Path(top), _list_git_files(Path(top))) if top else None


def _list_git_files(top: Path) -> dict[Path, bool]:
    files: dict[Path, bool] = {}
    for options, tracked in ((["--others", "--exclude-standard"], False), (["--cached"], True)):
        for name in filter(None, _run_git_ls_files(top, *options).split("\0")):
            path = top / name
            if (path / ".git").exists():  # a submodule, or another checkout
                files.update(_list_git_files(path))
            else:
                files[path] = tracked
    return files


def _run_git_ls_files(top: Path, *options: str) -> str:
    try:
        return _read_git_output(top, "ls-files", "-z", *options, timeout=LISTING_TIMEOUT)
    except subprocess.TimeoutExpired:
        # Without the list, the same code would get another digest.
        raise TulaError(
            f"git has not listed the files of {top} within {LISTING_TIMEOUT:g} s",
            "run git status to find the reason, or set script.code: none, with which tula does not use git",
        ) from None
    except (OSError, subprocess.SubprocessError):
        return ""


def read_repository_state(base: Path, paths: Iterable[Path]) -> tuple[str, bool, str]:
    """Return (commit, whether the paths may differ from it, their diff without private files); empty without git.

    If git cannot compare the paths with the commit, they may differ, and the diff is a sentence about that.

    Args:
        base: a folder of the repository.
        paths: files and folders, relative to `base`.
    """
    commit = _run_git(base, "rev-parse", "--verify", "HEAD").strip()
    if not commit:
        return "", False, ""
    pathspecs = [f":(literal){path}" for path in _list_paths_in_repository(base, paths)]
    try:
        dirty = bool(_read_git_output(base, "status", "--porcelain", "--", *pathspecs, timeout=GIT_TIMEOUT).strip())
        diff = _read_diff_of_paths(base, pathspecs)
    except (OSError, subprocess.SubprocessError) as error:
        return commit, True, f"git could not compare the files with commit {commit}: {error}\n"
    if len(diff) > MAX_DIFF_CHARACTERS:
        diff = f"{diff[:MAX_DIFF_CHARACTERS]}\n[cut: {len(diff) - MAX_DIFF_CHARACTERS} more characters]\n"
    return commit, dirty, diff


def _read_diff_of_paths(base: Path, paths: Sequence[str]) -> str:
    """Return the diff between paths and the commit, without files that may hold secrets.

    Raises:
        OSError, subprocess.SubprocessError: git fails or takes too long.
    """
    options = ["--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--relative", "HEAD", "--"]
    names = _read_git_output(base, "diff", "--name-only", "-z", *options, *paths, timeout=GIT_TIMEOUT)
    changed = [name for name in names.split("\0") if name]
    private = [f":(exclude,literal){name}" for name in changed if is_private_file(Path(name))]
    if len(changed) == len(private):
        return ""
    return _read_git_output(base, "diff", *options, *paths, *private, timeout=GIT_TIMEOUT)


def _list_paths_in_repository(base: Path, paths: Iterable[Path]) -> Sequence[str]:
    """Return the paths, with files of a nested repository replaced by its folder.

    The outer repository does not know the files of a nested one.
    """
    inside: dict[Path, Path | None] = {Path(): None}

    def find_repository(folder: Path) -> Path | None:
        if folder not in inside:
            above = find_repository(folder.parent)
            inside[folder] = above or (folder if (base / folder / ".git").exists() else None)
        return inside[folder]

    return sorted({str(find_repository(path.parent) or path) for path in paths})


def _run_git(folder: Path, *arguments: str) -> str:
    """Return git's output; empty if it fails."""
    try:
        return _read_git_output(folder, *arguments, timeout=GIT_TIMEOUT)
    except (OSError, subprocess.SubprocessError):
        return ""


def _read_git_output(folder: Path, *arguments: str, timeout: float) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        check=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_LITERAL_PATHSPECS": "0"},
    )
    return done.stdout.decode(errors="replace")


# --- Selection

MAX_FILE_BYTES = 1_000_000  # maximum size of a copied file that is not an imported module
MAX_TOTAL_BYTES = 20_000_000  # maximum total size of these files
MAX_FILE_COUNT = 2000
MAX_ENTRIES = 1000
"""A folder with more entries is treated as data and not searched."""


@dataclass(frozen=True)
class Selection:
    """The files that a snapshot copies. Paths are absolute."""

    base: Path  # folder that the snapshot mirrors: the working directory, or the repository or folder of a script
    roots: tuple[Path, ...]  # import paths that contain the files, in python's order
    modules: tuple[Path, ...]  # files that the digest covers
    others: tuple[Path, ...]  # further copied files
    left_out: tuple[Path, ...]  # files and folders that exceed the limits
    keys: tuple[Path, ...] = ()  # code files that may contain secret keys
    start: str = ""  # file that starts a script, relative to base; part of the digest
    program: str = ""  # `start` if the command names the file; empty for a module
    exact: bool = False  # restrict git's diff to these files, because other files of the folder may contain secrets


def select_imported_files(spec: JobSpec, workdir: Path) -> Selection:
    """Return the files for a snapshot of the spec's code: its modules, and the other small files of their packages.

    A package's other files are copied because the package may read them, or import them in ways that no statement
    shows.
    """
    modules = list_files_of_imports(spec, workdir)
    roots = tuple(
        root for root in list_import_roots(workdir, sys.path) if any(file.is_relative_to(root) for file in modules)
    )
    others: list[Path] = []
    left_out: list[Path] = []
    keys: list[Path] = []
    for package in _find_packages(modules, workdir):
        _classify_package_files(package, set(modules), others, left_out, keys)
    return Selection(workdir, roots, modules, tuple(others), tuple(left_out), keys=tuple(keys))


def _find_packages(modules: Iterable[Path], workdir: Path) -> list[Path]:
    """Return the outermost folders with an __init__.py among the modules' folders."""
    folders: dict[Path, None] = {}
    for module in modules:
        chain = [folder for folder in module.parents if folder != workdir and folder.is_relative_to(workdir)]
        packages = list(itertools.takewhile(lambda folder: find_source_file(folder / "__init__") is not None, chain))
        if packages:
            folders[packages[-1]] = None
    return list(folders)


def _classify_package_files(
    package: Path, modules: set[Path], others: list[Path], left_out: list[Path], keys: list[Path]
) -> None:
    """Sort a package's other files, breadth-first, into those to copy, those beyond the limits, and keys."""
    total, waiting = sum(map(measure_file_size, others)), deque([package])
    while waiting:
        folder = waiting.popleft()
        inside = list_entries(folder)
        if inside is None or len(others) >= MAX_FILE_COUNT or total >= MAX_TOTAL_BYTES:
            left_out.append(folder)
            continue
        waiting.extend(entry for entry in inside if entry.is_dir() and not entry.is_symlink())
        plain = [entry for entry in inside if entry.is_file() and entry not in modules]
        keys.extend(entry for entry in plain if is_key_file(entry))
        plain = [entry for entry in plain if not is_key_file(entry)]
        for entry in sorted(plain, key=lambda entry: entry.suffix != ".py"):
            size = measure_file_size(entry)
            exceeds_limit = size > MAX_FILE_BYTES or total + size > MAX_TOTAL_BYTES or len(others) >= MAX_FILE_COUNT
            if exceeds_limit or not os.access(entry, os.R_OK):
                left_out.append(entry)
            else:
                others.append(entry)
                total += size


def list_entries(folder: Path) -> list[Path] | None:
    """Return the entries of a folder that may be the user's, sorted; None if there are too many or it is unreadable."""
    try:
        with os.scandir(folder) as scan:
            names = [entry.name for entry in itertools.islice(scan, MAX_ENTRIES + 1)]
    except PermissionError:
        return None
    if len(names) > MAX_ENTRIES:
        return None
    paths = (folder / name for name in sorted(names) if not name.startswith(".") and not name.endswith(".pyc"))
    return [path for path in paths if not (path.is_dir() and is_foreign_folder(path))]


def list_selection_warnings(selection: Selection) -> tuple[Diagnostic, ...]:
    """Return warnings about files that the snapshot cannot hold, with the consequences."""
    warnings = []
    folders = {module.parent for module in selection.modules}
    unreadable = [path for path in {*selection.left_out, *folders} if not os.access(path, os.R_OK)]
    if unreadable:
        warnings.append(messages.code_unreadable(paths=_join_paths(sorted(unreadable), selection.base)))
    if too_large := [path for path in selection.left_out if path not in unreadable]:
        warnings.append(
            messages.files_too_large_to_copy(
                paths=_join_paths(too_large, selection.base),
                file_megabytes=MAX_FILE_BYTES // 10**6,
                total_megabytes=MAX_TOTAL_BYTES // 10**6,
                files=MAX_FILE_COUNT,
            )
        )
    if selection.keys:
        warnings.append(messages.secrets_linked(paths=_join_paths(selection.keys, selection.base)))
    large_folders = [folder for folder in folders if folder not in unreadable and list_entries(folder) is None]
    if large_folders:
        warnings.append(
            messages.folder_with_many_files(
                paths=_join_paths(large_folders, selection.base), most=MAX_ENTRIES, folder=str(selection.base)
            )
        )
    return tuple(warnings)


def _join_paths(paths: Sequence[Path], base: Path) -> str:
    return join_first_words([path.relative_to(base) for path in paths], 3)
