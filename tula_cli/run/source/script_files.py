"""The files of a script of the user's own: those of its repository, or those under its folder.

A script that lies in a git repository comes with all of it, wherever it was called from: with what git tracks, and with
text files that it has not been told to ignore. Another comes with the code and the settings under its own folder, and with
what its import statements lead to under the folder where tula was called.
"""

import importlib.util
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tula_cli.run.imports import follow_imports, import_roots, is_foreign
from tula_cli.run.source import git, selection
from tula_cli.run.source.command_file import SCRIPTS, SHELL, Program, modules_of, program, words_of
from tula_cli.run.source.keys import CODE, is_key
from tula_cli.run.source.selection import Selection
from tula_cli.spec.scripts.own_script import Script

SETTINGS = {".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf", ".gin", ".json"}
WITHOUT_GIT = {*SCRIPTS, ".yaml", ".yml", ".json", ".toml", ".cfg"}
OUTPUT = {
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
"""Folders into which scripts write: of what git does not track in them, nothing is code."""
MAX_LOOKED = 20_000
"""Files and folders that are looked at where git does not tell which there are."""


def of_script(script: Script, workdir: Path, *, path: Sequence[str] | None = None) -> Selection:
    """Return what a snapshot of a script's code holds; nothing where the command runs no file of the user's own.

    Its digest is over the code and the settings: not over data, keys, job files of tula, and JSON files that git does not
    track and the command does not name, which most scripts write themselves.

    Args:
        script: the section of the spec.
        workdir: where the command runs.
        path: where python looks for modules besides `workdir`; sys.path by default.

    Raises:
        SpecError: there is no file of the command's name, or it cannot be read.
    """
    home, path = workdir.resolve(), sys.path[1:] if path is None else path
    words = words_of(script.command)
    found = program(words, home, path=path) if script.code == "snapshot" else None
    if found is None:
        return Selection(home, (), (), (), (), exact=True)
    base, listed, beyond = _listed(found, home, path)
    own = _own(found, base, listed)
    keys = [file for file in own if is_key(file) and file != found.file]
    copied, left_out = _bounded(found, base, {file: listed[file] for file in own if file not in keys})
    named, start = _named(words, home), found.file.relative_to(base).as_posix()
    modules = [file for file in copied if file == found.file or _counts(file, tracked=listed[file], named=named)]
    return Selection(
        base,
        _roots(found, home, path, base, copied),
        tuple(sorted(modules)),
        tuple(sorted({*copied} - {*modules})),
        (*left_out, *beyond),
        keys=tuple(keys),
        start=start,
        program="" if found.module else start,
        exact=True,
    )


def remarks(script: Script, workdir: Path) -> tuple[str, ...]:
    """Say where the code that runs is not, or not all of it, what was submitted."""
    by_then = "what runs is what the files are by then"
    if script.code == "none":
        return (f"script.code is none: no code is copied, and {by_then}",)
    words = words_of(script.command)
    found = program(words, workdir)
    if found is None:
        return (
            ()
            if modules_of(words)
            else (f"script.command names no file of your own: no code is copied, and {by_then}",)
        )
    if found.file.suffix in SHELL:
        return (
            f"{found.file.name} itself is copied, but files that it names are looked for in {workdir}: a change to them reaches"
            " jobs submitted before",
        )
    return ()


# --- which files there are


def _listed(found: Program, home: Path, path: Sequence[str]) -> tuple[Path, dict[Path, bool], list[Path]]:
    """Return the folder that a snapshot mirrors, the files under it, whether git tracks each, and folders not looked into."""
    left_out: list[Path] = []
    known = git.files(found.file.parent)
    if known is not None and found.file in known[1] and found.root.is_relative_to(known[0]):
        base, listed = known
    else:
        base = home if found.file.is_relative_to(home) else found.root
        files, left_out = _walk(found.root)
        listed = dict.fromkeys(files, False)
    roots = [found.root, *(root for root in import_roots(home, path) if root.is_relative_to(base))]
    return base, {**dict.fromkeys(follow_imports([found.file], base, roots), False), **listed}, left_out


def _walk(start: Path) -> tuple[list[Path], list[Path]]:
    """Return the files under a folder that are code or settings by their names, and the folders with more than it looks at."""
    files: list[Path] = []
    left_out: list[Path] = []
    waiting, looked = deque([start]), 0
    while waiting and looked < MAX_LOOKED:
        folder = waiting.popleft()
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError:
            continue
        looked += len(entries)
        below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        inside = [Path(entry.path) for entry in entries if Path(entry.name).suffix in WITHOUT_GIT]
        if len(entries) <= selection.MAX_ENTRIES or folder == start:
            waiting.extend(folder for folder in below if not is_foreign(folder))
            files += inside
        elif any(file.suffix in CODE for file in inside):
            left_out.append(folder)
    return files, [*left_out, *waiting]


# --- which of them are copied


def _own(found: Program, base: Path, listed: Iterable[Path]) -> list[Path]:
    """Return those files that are there, and neither hidden nor installed nor of a run."""
    foreign = cache(is_foreign)
    return [
        file
        for file in listed
        if file == found.file
        or (file.is_file() and not file.name.startswith(".") and not any(map(foreign, _between(file, base, found))))
    ]


def _between(file: Path, base: Path, found: Program) -> Iterator[Path]:
    """Yield the folders from a file up to `base`, without those that hold the command's file too."""
    return (folder for folder in file.parents if folder.is_relative_to(base) and folder not in found.file.parents)


def _bounded(found: Program, base: Path, listed: Mapping[Path, bool]) -> tuple[list[Path], list[Path]]:
    """Return what is copied and what is beyond the bounds; what is nearest to the command's file comes first."""
    copied, left_out, total = [found.file], [], found.file.stat().st_size
    for file in sorted(listed.keys() - {found.file}, key=lambda file: (_distance(found.file, file), file)):
        if not listed[file] and (
            OUTPUT & {folder.name for folder in _between(file, base, found)} or not _is_text(file)
        ):
            continue
        size = file.stat().st_size
        within = size <= selection.MAX_FILE and total + size <= selection.MAX_FILES
        if within and len(copied) < selection.MAX_COUNT and os.access(file, os.R_OK):
            copied.append(file)
            total += size
        else:
            left_out.append(file)
    return copied, left_out


def _distance(one: Path, other: Path) -> int:
    """Return the steps from one file's folder to the other's, through the tree."""
    common = os.path.commonpath([one.parent, other.parent])
    return len(one.parts) + len(other.parts) - 2 * len(Path(common).parts)


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return b"\0" not in opened.read(8192)
    except OSError:
        return False


# --- which of those are in the digest


def _counts(file: Path, *, tracked: bool, named: set[Path]) -> bool:
    if file.suffix in CODE:
        return True
    if file.suffix not in SETTINGS or _is_job(file):
        return False
    return tracked or file.suffix != ".json" or file in named


def _named(words: Iterable[str], home: Path) -> set[Path]:
    """Return the paths that the words of a command may name."""
    return {Path(os.path.realpath(home / text)) for word in words for text in (word, word.partition("=")[2]) if text}


def _is_job(file: Path) -> bool:
    """Return whether a file is a job.yaml with a script, whose settings are in the signatures as far as they count."""
    if file.suffix not in (".yaml", ".yml"):
        return False
    text = file.read_text(errors="replace")
    return bool(re.search(r"^script:", text, re.MULTILINE)) and bool(re.search(r"\bcommand:", text))


# --- from where python imports them


def _roots(found: Program, home: Path, path: Sequence[str], base: Path, copied: Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders of the copied files that python imports from in the job, the command's own first.

    `home` is none of them where only tula looks there, and not the command: it might hide what is installed.
    """
    given = {(home / entry).resolve() for entry in path}
    asked = [root for root in import_roots(home, path) if root != home or root in given]
    first = [] if found.file.suffix in SHELL else [found.root]
    roots = dict.fromkeys([*first, *asked, *_installed_in_place(copied)])
    return tuple(
        root for root in roots if root.is_relative_to(base) and any(file.is_relative_to(root) for file in copied)
    )


def _installed_in_place(copied: Iterable[Path]) -> Iterator[Path]:
    """Yield the folders of packages that this python imports from where they are: `pip install --editable`."""
    folders = {file.parent for file in copied if file.name == "__init__.py"}
    for package in sorted(folder for folder in folders if folder.parent not in folders):
        try:
            spec = importlib.util.find_spec(package.name)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin and Path(spec.origin).resolve().parent == package:
            yield package.parent
