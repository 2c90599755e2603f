"""The code files that a script can load. Other files of its folder do not identify its code, so their edits change nothing."""

import sys
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tula_cli.run.imports import list_imported_files, read_python_file
from tula_cli.run.python_file import split_words
from tula_cli.run.secrets import CODE_SUFFIXES
from tula_cli.spec.scripts.placeholders import SCRIPT_SUFFIXES

_LOADED_BY_LIBRARIES = {*sys.stdlib_module_names, "hubconf", "sitecustomize", "usercustomize"}
"""Modules that python and libraries import by themselves if a file has such a name."""


def select_loadable_files(
    files: Collection[Path], starts: Iterable[Path], text: str, base: Path, roots: Sequence[Path]
) -> set[Path]:
    """Return the files without the Python and shell scripts that the start files cannot load.

    A script is loadable if an import statement leads to it, or if its name is a word of a loadable file, of the settings
    or of the command. If a loadable file computes the names of the files that it loads, or cannot be parsed, all scripts are.

    Args:
        files: code and settings.
        starts: files that the command runs or names.
        text: the command.
        base: only files under it are the user's own.
        roots: folders that python imports from.
    """
    scripts = {file for file in files if file.suffix in SCRIPT_SUFFIXES}
    settings = [file for file in files if file.suffix not in CODE_SUFFIXES]
    words = _LOADED_BY_LIBRARIES.union(
        *map(split_words, [text, *(file.read_text(errors="replace") for file in settings)])
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
