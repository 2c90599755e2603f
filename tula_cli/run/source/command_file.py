"""The file of the user's own that a script's command runs: found among its words, and put in its place in a snapshot."""

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
from tula_cli.run.imports import import_roots, is_installed_folder, resolve_module, source_file
from tula_cli.run.records.tasks import CodeSnapshot
from tula_cli.spec.scripts.placeholders import fill, names

SHELL = (".sh", ".bash")
SCRIPTS = (".py", *SHELL)
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_SHELL = re.compile(r"(ba|da|k|z)?sh")
_PYTHON_INLINE, _PYTHON_MODULE = re.compile(r"-[bBdEhiIOqsSuvx]*c"), re.compile(r"-[bBdEhiIOqsSuvx]*m")
_SHELL_INLINE = re.compile(r"-[a-z]*c[a-z]*")
_PYTHON_VALUED = re.compile(r"-X|-W|--check-hash-based-pycs")
_SHELL_VALUED = re.compile(r"[-+][a-zA-Z]*[oO]|--rcfile|--init-file")
_LAUNCHERS = {"torch", "accelerate", "deepspeed"}
"""Packages whose modules start another program: `python -m torch.distributed.run train.py`."""


class NoCommandFile(SpecError):
    """The command names a file that is not there."""


@dataclass(frozen=True)
class Program:
    """What a command runs of the user's own. Paths are absolute."""

    file: Path  # without symbolic links, as python sees its own script; that of a module as it is found
    root: Path  # the folder that python puts first among those it imports from
    module: str = ""  # as the command has it after -m; empty where it names the file


# --- which it is


def words_of(command: str) -> list[str]:
    """Return the words of a command before its placeholders have values; empty ones for those that hold any."""
    return ["" if names(word) else fill(word, {}) for word in shlex.split(command)]


def label(command: str) -> str:
    """Return the word of a command by which people know what it runs."""
    words = words_of(command)
    named = [word for word in words if word.endswith(SCRIPTS)]
    return next(iter(named or modules_of(words)[-1:]), words[0]) or command


def modules_of(words: Sequence[str]) -> list[str]:
    """Return what a command runs by -m."""
    return [words[position] for position, role in _roles(words) if role is _Role.MODULE]


def program(words: Sequence[str], workdir: Path, *, path: Sequence[str] | None = None) -> Program | None:
    """Return what a command runs of the user's own; None where that is an installed program, or cannot be told.

    It is the first word that names a file ending in .py, .sh or .bash, or what python or a shell is given to run, or the
    module after -m where that lies under `workdir`. Launchers and their options may stand before it.

    Args:
        words: of the command; empty where they are not known yet.
        workdir: where the command runs.
        path: where python looks for modules besides `workdir`; sys.path by default.

    Raises:
        SpecError: there is no file of that name.
    """
    home, lenient = workdir.resolve(), False
    for position, role in _roles(words):
        word = words[position]
        if role is _Role.MODULE:
            if found := _module(word, home, sys.path[1:] if path is None else path):
                return found
            # What the options of an installed program name need not be there yet.
            lenient = lenient or word.partition(".")[0] not in _LAUNCHERS
        elif role is _Role.INLINE or (role is _Role.RUN and _is_unknown(word, home)):
            return None
        elif word and (file := _file(word, role, home)):
            if not _is_installed(file, home):
                return Program(file, file.parent)
        elif not lenient and (role is _Role.RUN or word.endswith(SCRIPTS)):
            raise _missing(f"{word} is not in {home}")
    return None


def _missing(what: str) -> NoCommandFile:
    return NoCommandFile(
        f"script.command: {what}",
        "call tula where the command runs, or name the file as it is there; with script.code: none it need only be there for"
        " the job",
    )


class _Role(Enum):
    FIRST = auto()
    RUN = auto()  # what python or a shell is given to run
    MODULE = auto()  # after -m
    INLINE = auto()  # what python or a shell is given is no file
    OPTION = auto()  # and the value of one of python's or a shell's
    WORD = auto()


def _roles(words: Sequence[str]) -> Iterator[tuple[int, _Role]]:
    """Yield the position of each word and what it is."""
    python = shell = False  # what it runs is yet to come
    ahead: _Role | None = None
    for position, word in enumerate(words):
        role, ahead = ahead, None
        if role is None and word.startswith(("-", "+")):
            role = _Role.OPTION
            if (python and _PYTHON_INLINE.fullmatch(word)) or (shell and _SHELL_INLINE.fullmatch(word)):
                role = _Role.INLINE
            elif word in ("-m", "--module") or (python and _PYTHON_MODULE.fullmatch(word)):
                ahead, python = _Role.MODULE, False
            elif (python and _PYTHON_VALUED.fullmatch(word)) or (shell and _SHELL_VALUED.fullmatch(word)):
                ahead = _Role.OPTION
        elif role is None and (python or shell):
            role, python, shell = _Role.RUN, False, False
        elif role is None:
            role = _Role.WORD if position else _Role.FIRST
            name = PurePath(word).name
            python, shell = bool(_PYTHON.fullmatch(name)), bool(_SHELL.fullmatch(name))
        yield position, role


def _file(word: str, role: _Role, home: Path) -> Path | None:
    """Return the file that a word names, if that is what the command runs."""
    file = home / word
    if role is _Role.OPTION or not os.path.isfile(file):  # noqa: PTH113 - a word may be too long for a name
        return None
    file = file.resolve()
    own_program = role is _Role.FIRST and "/" in word and file.is_relative_to(home)
    return file if word.endswith(SCRIPTS) or role is _Role.RUN or own_program else None


def _is_unknown(word: str, home: Path) -> bool:
    """Return whether what python is given to run is known to the job alone, or is a folder."""
    return not word or os.path.isdir(home / word)  # noqa: PTH112 - a word may be too long for a name


def _is_installed(file: Path, home: Path) -> bool:
    return any(is_installed_folder(folder) for folder in file.parents if not home.is_relative_to(folder))


def _module(module: str, home: Path, path: Sequence[str]) -> Program | None:
    """Return the user's own module of that name.

    Raises:
        SpecError: its package is the user's own, and has no such module.
    """
    for root in import_roots(home, path):
        if files := resolve_module(f"{module}.__main__", [root]):
            place = root.joinpath(*module.split("."))
            if source_file(place) is None and not place.is_dir():
                raise _missing(f"no module {module} in {root}")
            return Program(files[-1], root, module)
    return None


# --- its place in a snapshot


def in_snapshot(words: Sequence[str], workdir: Path, code: Path | None) -> list[str]:
    """Return a command that runs its file from a snapshot; its working directory stays the user's own.

    A module after -m stays as it is: `snapshot_path` has it found in the snapshot.

    Args:
        words: of the command, with the values of its placeholders.
        workdir: where the command runs.
        code: the snapshot's folder; None where no code was copied.

    Raises:
        JobFailed: the snapshot is gone, or is of another command.
    """
    found = _record(code)
    if code is None or found is None or not found.program:
        return list(words)
    original = Path(found.base) / found.program
    for position, word in enumerate(words):
        if word and (workdir / word).resolve() == original:
            return [*words[:position], str(code / found.program), *words[position + 1 :]]
    raise JobFailed(f"{original}, which was submitted, is not in the command: {shlex.join(words)}", "submit again")


def snapshot_path(code: Path | None) -> list[str]:
    """Return the folders of a snapshot that go first into PYTHONPATH; none where no code was copied.

    Python puts the working directory before PYTHONPATH for `python -m`, not for a file: there PYTHONSAFEPATH=1 (Python
    3.11) or a finder of modules has to see to it.

    Args:
        code: the snapshot's folder.

    Raises:
        JobFailed: the snapshot is gone.
    """
    found = _record(code)
    return [] if code is None or found is None else [os.path.normpath(code / root) for root in found.roots]


def _record(code: Path | None) -> CodeSnapshot | None:
    if code is None:
        return None
    found = RunDir(code.parent.parent).code(code.name)
    if found is None or not code.is_dir():
        raise JobFailed(
            f"the snapshot of the code that was submitted is gone: {code}", "submit again: tula profile or tula train"
        )
    return found
