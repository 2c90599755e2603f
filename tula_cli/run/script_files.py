"""The files of a user's script: those that a snapshot copies, and those that identify the code.

For a script in a git repository, the whole repository is copied, wherever tula was called: all tracked files, and
untracked text files that git does not ignore. For another script, the code and settings under its folder are copied, and
the files imported from the folder where tula was called.
"""

import importlib.util
import os
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tula_cli.diagnostics import Diagnostic
from tula_cli.run import code_selection, messages
from tula_cli.run.code_selection import Selection
from tula_cli.run.disk_space import measure_file_size
from tula_cli.run.imports import (
    follow_imports,
    is_foreign_folder,
    list_import_roots,
    list_imported_files,
    read_python_file,
)
from tula_cli.run.python_file import split_words
from tula_cli.run.script_command import Program, find_program, is_started_unchanged, list_module_names, split_command
from tula_cli.run.secrets import CODE_SUFFIXES, is_key_file
from tula_cli.spec.scripts.placeholders import SCRIPT_SUFFIXES, SHELL_SUFFIXES
from tula_cli.spec.scripts.script import Script

SETTINGS_SUFFIXES = {".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf", ".gin", ".json"}
SUFFIXES_WITHOUT_GIT = {*SCRIPT_SUFFIXES, ".yaml", ".yml", ".json", ".toml", ".cfg"}
OUTPUT_FOLDERS = {
    "checkpoints",
    "lightning_logs",
    "logs",
    "mlruns",
    "multirun",
    "output",
    "outputs",
    "runs",
    "tb_logs",
    "wandb",
}
"""Folders that scripts write to: untracked files in them are never code."""
MAX_FILES_WALKED = 20_000
"""Maximum files and folders to examine if git does not list them."""


def select_script_files(script: Script, workdir: Path, *, path: Sequence[str] | None = None) -> Selection:
    """Return the files for a snapshot of a script's code; empty if the command runs no file of the user's own.

    The digest covers settings and the code that the script can load. It does not cover data, keys, job files of tula, and
    JSON files that git does not track and the command does not name, because most of those are written by the script itself.

    Args:
        workdir: where the command runs.
        path: module search path in addition to `workdir`; sys.path by default.

    Raises:
        SpecError: there is no file of the command's name, or it cannot be read.
    """
    workdir, path = workdir.resolve(), sys.path[1:] if path is None else path
    words = split_command(script.command)
    program = find_program(words, workdir, path=path) if script.code == "snapshot" else None
    if program is None:
        return Selection(workdir, (), (), (), (), exact=True)
    base, listed, beyond = _list_files(program, workdir, path)
    user_files = _select_user_files(program, base, listed)
    keys = [file for file in user_files if is_key_file(file) and file != program.file]
    copied, left_out = _select_bounded_files(
        program, base, {file: listed[file] for file in user_files if file not in keys}
    )
    named, start = _resolve_paths_in_words(words, workdir), program.file.relative_to(base).as_posix()
    modules = {
        file for file in copied if file == program.file or _belongs_to_code(file, tracked=listed[file], named=named)
    }
    if is_started_unchanged(program, words, workdir):
        in_named_folders = [file for file in modules if not named.isdisjoint(file.parents)]
        text = " ".join(
            [
                script.command,
                script.resume.args if script.resume else "",
                script.probe_args,
                *map(_read_settings, named - set(copied)),
            ]
        )
        starts = [program.file, *(modules & named), *in_named_folders]
        modules = _select_loadable_files(modules, starts, text, base, _list_roots_below(program, workdir, path, base))
    return Selection(
        base,
        _list_source_roots(program, workdir, path, base, copied),
        tuple(sorted(modules)),
        tuple(sorted({*copied} - modules)),
        (*left_out, *beyond),
        keys=tuple(keys),
        start=start,
        program="" if program.module else start,
        exact=True,
    )


def list_script_warnings(script: Script, workdir: Path) -> tuple[Diagnostic, ...]:
    """Return warnings if the code that runs may differ, in part or completely, from the submitted code."""
    if script.code == "none":
        return (messages.code_not_copied(),)
    words = split_command(script.command)
    program = find_program(words, workdir)
    if program is None:
        return () if list_module_names(words) else (messages.command_names_no_file(),)
    if program.file.suffix in SHELL_SUFFIXES:
        return (messages.only_shell_script_copied(name=program.file.name, folder=str(workdir)),)
    return ()


def _list_files(program: Program, workdir: Path, path: Sequence[str]) -> tuple[Path, dict[Path, bool], list[Path]]:
    """Return the folder that a snapshot mirrors, its files (whether git tracks each), and folders not searched."""
    left_out: list[Path] = []
    repository = code_selection.list_tracked_files(program.file.parent)
    if repository is not None and program.file in repository[1] and program.root.is_relative_to(repository[0]):
        base, listed = repository
    else:
        base = workdir if program.file.is_relative_to(workdir) else program.root
        files, left_out = _walk_folder(program.root)
        listed = dict.fromkeys(files, False)
    imported = follow_imports([program.file], base, _list_roots_below(program, workdir, path, base))
    return base, {**dict.fromkeys(imported, False), **listed}, left_out


def _list_roots_below(program: Program, workdir: Path, path: Sequence[str], base: Path) -> list[Path]:
    return [program.root, *(root for root in list_import_roots(workdir, path) if root.is_relative_to(base))]


def _walk_folder(start: Path) -> tuple[list[Path], list[Path]]:
    """Return the code and settings files under a folder, by suffix, and the folders that were too large to search."""
    files: list[Path] = []
    left_out: list[Path] = []
    waiting, examined = deque([start]), 0
    while waiting and examined < MAX_FILES_WALKED:
        folder = waiting.popleft()
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError:
            continue
        examined += len(entries)
        below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        inside = [Path(entry.path) for entry in entries if Path(entry.name).suffix in SUFFIXES_WITHOUT_GIT]
        if len(entries) <= code_selection.MAX_ENTRIES or folder == start:
            waiting.extend(folder for folder in below if not is_foreign_folder(folder))
            files += inside
        elif any(file.suffix in CODE_SUFFIXES for file in inside):
            left_out.append(folder)
    return files, [*left_out, *waiting]


def _select_user_files(program: Program, base: Path, listed: Iterable[Path]) -> list[Path]:
    """Return the existing files that are neither hidden nor in installed packages or run folders."""
    is_foreign = cache(is_foreign_folder)
    return [
        file
        for file in listed
        if file == program.file
        or (
            file.is_file()
            and not file.name.startswith(".")
            and not any(map(is_foreign, _list_folders_between(file, base, program)))
        )
    ]


def _list_folders_between(file: Path, base: Path, program: Program) -> Iterator[Path]:
    """Yield the folders from a file up to `base`, except those that also contain the command's file."""
    return (folder for folder in file.parents if folder.is_relative_to(base) and folder not in program.file.parents)


def _select_bounded_files(program: Program, base: Path, listed: Mapping[Path, bool]) -> tuple[list[Path], list[Path]]:
    """Return the files to copy and those beyond the limits; files nearest to the command's file come first."""
    copied, left_out, total = [program.file], [], measure_file_size(program.file)
    for file in sorted(
        listed.keys() - {program.file}, key=lambda file: (_compute_folder_distance(program.file, file), file)
    ):
        if not listed[file] and (
            OUTPUT_FOLDERS & {folder.name for folder in _list_folders_between(file, base, program)}
            or not _is_text_file(file)
        ):
            continue
        size = measure_file_size(file)
        fits_limits = size <= code_selection.MAX_FILE_BYTES and total + size <= code_selection.MAX_TOTAL_BYTES
        if fits_limits and len(copied) < code_selection.MAX_FILE_COUNT and os.access(file, os.R_OK):
            copied.append(file)
            total += size
        else:
            left_out.append(file)
    return copied, left_out


def _compute_folder_distance(path: Path, other: Path) -> int:
    common = os.path.commonpath([path.parent, other.parent])
    return len(path.parts) + len(other.parts) - 2 * len(Path(common).parts)


def _is_text_file(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return b"\0" not in opened.read(8192)
    except OSError:
        return False


def _belongs_to_code(file: Path, *, tracked: bool, named: set[Path]) -> bool:
    if file.suffix in CODE_SUFFIXES:
        return True
    if file.suffix not in SETTINGS_SUFFIXES or _is_job_file(file):
        return False
    return tracked or file.suffix != ".json" or file in named


def _resolve_paths_in_words(words: Iterable[str], workdir: Path) -> set[Path]:
    return {Path(os.path.realpath(workdir / text)) for word in words for text in (word, word.partition("=")[2]) if text}


def _read_settings(file: Path) -> str:
    """Return the text of a file with settings; empty if it is another file, or cannot be read."""
    try:
        is_small = file.suffix in SETTINGS_SUFFIXES and file.stat().st_size <= code_selection.MAX_FILE_BYTES
        return file.read_text(errors="replace") if is_small else ""
    except OSError:
        return ""


def _is_job_file(file: Path) -> bool:
    """Return whether a file is a job.yaml with a script; its relevant settings are already part of the signatures."""
    if file.suffix not in (".yaml", ".yml"):
        return False
    text = file.read_text(errors="replace")
    return bool(re.search(r"^script:", text, re.MULTILINE)) and bool(re.search(r"\bcommand:", text))


def _list_source_roots(
    program: Program, workdir: Path, path: Sequence[str], base: Path, copied: Sequence[Path]
) -> tuple[Path, ...]:
    """Return the folders of the copied files that python imports from in the job, the command's own first.

    `workdir` is not included if only tula searches it and the command does not, because it might hide installed packages.
    """
    given = {(workdir / entry).resolve() for entry in path}
    given_roots = [root for root in list_import_roots(workdir, path) if root != workdir or root in given]
    first = [] if program.file.suffix in SHELL_SUFFIXES else [program.root]
    roots = dict.fromkeys([*first, *given_roots, *_list_editable_installs(copied)])
    return tuple(
        root for root in roots if root.is_relative_to(base) and any(file.is_relative_to(root) for file in copied)
    )


def _list_editable_installs(copied: Iterable[Path]) -> Iterator[Path]:
    """Yield the parent folders of packages that this python imports in place (`pip install --editable`)."""
    folders = {file.parent for file in copied if file.name == "__init__.py"}
    for package in sorted(folder for folder in folders if folder.parent not in folders):
        try:
            spec = importlib.util.find_spec(package.name)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin and Path(spec.origin).resolve().parent == package:
            yield package.parent


# --- Files that identify the code
#
# Scripts of the folder that the training cannot load do not identify its code, so their edits change nothing.

_LOADED_BY_LIBRARIES = {*sys.stdlib_module_names, "hubconf", "sitecustomize", "usercustomize"}
"""Modules that python and libraries import by themselves if a file has such a name."""


def _select_loadable_files(
    files: Collection[Path], starts: Iterable[Path], text: str, base: Path, roots: Sequence[Path]
) -> set[Path]:
    """Return the files without the Python and shell scripts that the start files cannot load.

    A script is loadable if an import statement leads to it, or if its name is a word of a loadable file, of a file of
    another kind (settings, Cython) or of the command. If a loadable file computes the names of the files that it loads, or
    cannot be parsed, all scripts are.

    Args:
        files: code and settings.
        starts: files that the command runs or names.
        text: the command, and settings that it names elsewhere.
        base: only files under it are the user's own.
        roots: folders that python imports from.
    """
    scripts = {file for file in files if file.suffix in SCRIPT_SUFFIXES}
    other_files = [file for file in files if file.suffix not in SCRIPT_SUFFIXES]
    words = _LOADED_BY_LIBRARIES.union(
        *map(split_words, [text, *(file.read_text(errors="replace") for file in other_files)])
    )
    loadable: set[Path] = set()
    waiting = deque(file for file in starts if file.suffix in SCRIPT_SUFFIXES)
    while waiting:
        file = waiting.popleft()
        if file not in loadable:
            loadable.add(file)
            python_file = read_python_file(file)
            if file.suffix in SCRIPT_SUFFIXES and (python_file is None or python_file.loads_computed_names):
                return {*files}
            words |= python_file.words if python_file is not None else set()
            waiting.extend(list_imported_files(file, base, roots))
            waiting.extend(scripts.intersection(folder / "__init__.py" for folder in file.parents))
        if not waiting:
            waiting.extend(script for script in scripts - loadable if words.issuperset(_list_words_of_name(script)))
    return {*files} - (scripts - loadable)


def _list_words_of_name(script: Path) -> list[str]:
    """Return the words by which a script can be loaded: the name of its module, or the name of a shell script's file."""
    if script.suffix != ".py":
        return split_words(script.name)
    return split_words(script.parent.name if script.stem in ("__init__", "__main__") else script.stem)
