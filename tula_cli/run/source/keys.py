"""Which files may hold secrets, by their names: they are neither copied nor shown in a diff."""

import fnmatch
from pathlib import Path

from tula_cli.run.source.command_file import SCRIPTS

CODE = {*SCRIPTS, ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp"}
KEYS = ("*.pem", "*.key", "*.p12", "*.pfx", "*.env", "*netrc", "*credentials*")


def is_key(file: Path) -> bool:
    """Return whether a file's name is one that keys have."""
    name = file.name.lower()
    return any(fnmatch.fnmatch(name, pattern) for pattern in KEYS) or (
        name.startswith("id_") and file.suffix not in CODE
    )


def is_private(file: Path) -> bool:
    """Return whether a file, by its path in a project, is never copied: a key, or hidden as .env and .netrc are."""
    return is_key(file) or any(part.startswith(".") for part in file.parts)
