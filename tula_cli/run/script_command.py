"""The command of a user's script: the program that it runs, in the working directory or in a snapshot of the code."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path, PurePath

from tula_cli.errors import JobFailed, SpecError
from tula_cli.run.directory import RunDir
from tula_cli.run.imports import find_source_file, is_installed_folder, list_import_roots, resolve_module
from tula_cli.run.records.tasks import CodeSnapshot
from tula_cli.spec.scripts.placeholders import (
    LAUNCHER_PACKAGES,
    PYTHON_PATTERN,
    SCRIPT_SUFFIXES,
    fill_text,
    find_placeholders,
    separate_python_options,
)

_LAUNCHERS = LAUNCHER_PACKAGES | {"composer", "env", "nice", "numactl", "srun", "stdbuf", "taskset", "torchrun", "uv"}
"""Programs that run the user's program unchanged."""
_SHELL_PATTERN = re.compile(r"(ba|da|k|z)?sh")
_SHELL_INLINE_PATTERN = re.compile(r"-[a-z]*c[a-z]*")
_SHELL_VALUE_OPTIONS = re.compile(r"[-+][a-zA-Z]*[oO]|--rcfile|--init-file")


class CommandFileMissing(SpecError):
    """The command names a file that does not exist."""


@dataclass(frozen=True)
class Program:
    """The user's program that a command runs. Paths are absolute."""

    file: Path  # with symbolic links resolved, as python does for a script; for a module, as found on the import path
    root: Path  # first entry of python's import path
    module: str = ""  # module name after -m; empty if the command names a file


def split_command(command: str) -> list[str]:
    """Split a command into words before its placeholders are filled; words with placeholders become empty."""
    return ["" if find_placeholders(word) else fill_text(word, {}) for word in shlex.split(command)]


def list_module_names(words: Sequence[str]) -> list[str]:
    """Return the modules that a command runs with -m."""
    return [word for word, role in _classify_words(words) if role is _Role.MODULE]


def find_program(words: Sequence[str], workdir: Path, *, path: Sequence[str] | None = None) -> Program | None:
    """Return the user's program that a command runs; None if it is an installed program, or cannot be determined.

    The program is the first word that names a file ending in .py, .sh or .bash, or the argument that python or a shell
    runs, or the module after -m if it lies under `workdir`. Launchers and their options may precede it.

    Args:
        words: of the command; empty for words not known yet.
        workdir: where the command runs.
        path: module search path in addition to `workdir`; sys.path by default.

    Raises:
        SpecError: there is no file of that name.
    """
    workdir, lenient = workdir.resolve(), False
    for word, role in _classify_words(words):
        if role is _Role.MODULE:
            if program := _find_module(word, workdir, sys.path[1:] if path is None else path):
                return program
            # Files in the options of an installed program need not exist yet.
            lenient = lenient or word.partition(".")[0] not in LAUNCHER_PACKAGES
        elif role is _Role.INLINE or (role is _Role.RUN and _is_unknown(word, workdir)):
            return None
        elif word and (file := _find_file(word, role, workdir)):
            if not _is_installed(file, workdir):
                return Program(file, file.parent)
        elif not lenient and (role is _Role.RUN or word.endswith(SCRIPT_SUFFIXES)):
            raise _make_missing_file_error(f"{word} is not in {workdir}")
    return None


def _make_missing_file_error(what: str) -> CommandFileMissing:
    return CommandFileMissing(
        f"script.command: {what}",
        "run tula in the folder in which the command runs, or correct the name of the file in script.command. If the file exists only on the nodes, set script.code: none",
    )


class _Role(Enum):
    FIRST = auto()
    RUN = auto()  # file that python or a shell runs
    MODULE = auto()  # module name after -m
    INLINE = auto()  # code on the command line, after -c
    OPTION = auto()  # an option, or the value of an option of python or a shell
    WORD = auto()


def _classify_words(words: Sequence[str]) -> Iterator[tuple[str, _Role]]:
    """Yield the words of a command, with Python's options separated, and their roles."""
    python = shell = False  # a python or shell command was found whose file has not followed yet
    expected_role: _Role | None = None
    for word, position, is_python_option in separate_python_options(words):
        role, expected_role = expected_role, None
        if role is None and (is_python_option or word.startswith(("-", "+"))):
            role = _Role.OPTION
            if (python and word == "-c") or (shell and _SHELL_INLINE_PATTERN.fullmatch(word)):
                role = _Role.INLINE
            elif word in ("-m", "--module"):
                expected_role, python = _Role.MODULE, False
            elif shell and _SHELL_VALUE_OPTIONS.fullmatch(word):
                expected_role = _Role.OPTION
        elif role is None and (python or shell):
            role, python, shell = _Role.RUN, False, False
        elif role is None:
            role = _Role.WORD if position else _Role.FIRST
            name = PurePath(word).name
            python, shell = bool(PYTHON_PATTERN.fullmatch(name)), bool(_SHELL_PATTERN.fullmatch(name))
        yield word, role


def _find_file(word: str, role: _Role, workdir: Path) -> Path | None:
    """Return the file that a word names if the command runs it."""
    file = workdir / word
    if role is _Role.OPTION or not os.path.isfile(file):  # noqa: PTH113 - raises no OSError if the word is too long for a file name
        return None
    file = file.resolve()
    is_direct_program = role is _Role.FIRST and "/" in word and file.is_relative_to(workdir)
    return file if word.endswith(SCRIPT_SUFFIXES) or role is _Role.RUN or is_direct_program else None


def _is_unknown(word: str, workdir: Path) -> bool:
    """Return whether the argument that python runs is known only to the job, or is a folder."""
    return not word or os.path.isdir(workdir / word)  # noqa: PTH112 - raises no OSError if the word is too long for a file name


def _is_installed(file: Path, workdir: Path) -> bool:
    """Return whether a file is in an installed folder, other than one that contains the working directory."""
    return any(is_installed_folder(folder) for folder in file.parents if not workdir.is_relative_to(folder))


def _find_module(module: str, workdir: Path, path: Sequence[str]) -> Program | None:
    """Return the user's own module of that name.

    Raises:
        SpecError: its package is the user's own, and has no such module.
    """
    for root in list_import_roots(workdir, path):
        if files := resolve_module(f"{module}.__main__", [root]):
            module_path = root.joinpath(*module.split("."))
            if find_source_file(module_path) is None and not module_path.is_dir():
                raise _make_missing_file_error(f"no module {module} in {root}")
            return Program(files[-1], root, module)
    return None


def is_started_unchanged(program: Program, words: Sequence[str], workdir: Path) -> bool:
    """Return whether a command starts a Python program by itself or by a known launcher, which load no code for it."""
    for word, role in _classify_words(words):
        if program.module == word if role is _Role.MODULE else word and _find_file(word, role, workdir) == program.file:
            return program.file.suffix == ".py"
        is_launcher = PurePath(word).name in _LAUNCHERS or PYTHON_PATTERN.fullmatch(PurePath(word).name)
        if (role is _Role.FIRST and not is_launcher) or (
            role is _Role.MODULE and word.partition(".")[0] not in LAUNCHER_PACKAGES
        ):
            return False
    return False


# --- Paths in a snapshot


def move_command_to_snapshot(words: Sequence[str], workdir: Path, code: Path | None) -> list[str]:
    """Return a command that runs its file from a snapshot; its working directory does not change.

    A module after -m is not changed: `list_snapshot_python_path` makes python find it in the snapshot.

    Args:
        words: of the command, with the values of its placeholders.
        workdir: where the command runs.
        code: the snapshot's folder; None if no code was copied.

    Raises:
        JobFailed: the snapshot is gone, or belongs to another command.
    """
    code_snapshot = None if code is None else _read_snapshot_record(code)
    if code is None or code_snapshot is None or not code_snapshot.program:
        return list(words)
    original = Path(code_snapshot.base) / code_snapshot.program
    for position, word in enumerate(words):
        if word and (workdir / word).resolve() == original:
            return [*words[:position], str(code / code_snapshot.program), *words[position + 1 :]]
    raise JobFailed(
        f"the submitted script {original} is not in the command: {shlex.join(words)}",
        "submit the job again with tula profile or tula train",
    )


def list_snapshot_python_path(code: Path | None) -> list[str]:
    """Return the folders of a snapshot to put first in PYTHONPATH; empty if no code was copied.

    Python puts the working directory before PYTHONPATH for `python -m`, but not for a file: in the former case
    PYTHONSAFEPATH=1 (Python 3.11) or a module finder has to prevent this.

    Args:
        code: the snapshot's folder.

    Raises:
        JobFailed: the snapshot is gone.
    """
    return [] if code is None else [os.path.normpath(code / root) for root in _read_snapshot_record(code).roots]


def _read_snapshot_record(code: Path) -> CodeSnapshot:
    code_snapshot = RunDir(code.parent.parent).read_code(code.name)
    if code_snapshot is None or not code.is_dir():
        raise JobFailed(
            f"the snapshot of the submitted code is missing: {code}",
            "submit the job again with tula profile or tula train",
        )
    return code_snapshot
