"""Which files may hold secrets, by their names: they are neither copied nor shown in a diff; and which settings may."""

import fnmatch
import re
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


_SECRET_NAME = r"TOKEN(?!I)|SECRET|PASSW|API[_-]?KEY|ACCESS[_-]?KEY|CREDENTIAL|JWT"
_NAMED = re.compile(_SECRET_NAME, re.IGNORECASE)
_IN_URL = re.compile(r"(://[^/@\s:]*:)[^/\s]*@")  # a URL with a password
_IN_WORDS = re.compile(rf"([^\s=]*(?:{_SECRET_NAME})[^\s=:]*(?:\s*[=:]\s*|\s+))([^\s,;]+)", re.IGNORECASE)


def may_be_secret(name: str, value: str) -> bool:
    """Return whether a variable or setting may be a password or a token, by its name, or for a URL that holds one."""
    return bool(_NAMED.search(name) or _IN_URL.search(value))


def without_secrets(text: str) -> str:
    """Return words, as of a command, with *** for what may be a password or a token among them."""

    def hidden(found: re.Match[str]) -> str:
        return found[0] if found[2].replace(".", "", 1).isdigit() else f"{found[1]}***"

    return _IN_WORDS.sub(hidden, _IN_URL.sub(r"\1***@", text))
