"""Which files may hold secrets, by their names: they are neither copied nor shown in a diff; and which settings may."""

import fnmatch
import re
from pathlib import Path

CODE = {".py", ".sh", ".bash", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp"}
KEYS = (
    "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "*.env", "*netrc", "*credential*", "kaggle.json",
    "token", "token.*", "*_token", "*_token.*", "*.token", "*secret*", "*service?account*", "*serviceaccount*", "htpasswd", "pgpass",
    "*passwords*", "*apikey*", "*api_key*", "*api-key*",
)  # fmt: skip
_CODE_KEYS = ("*.pem", "*.key", "*.p12", "*.pfx", "*.env", "*netrc", "*credentials*")
"""The names of keys that code may have too."""


def is_key(file: Path) -> bool:
    """Return whether a file's name is one that keys have."""
    name = file.name.lower()
    patterns = _CODE_KEYS if file.suffix in CODE else KEYS
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns) or (
        name.startswith("id_") and file.suffix not in CODE
    )


def is_private(file: Path) -> bool:
    """Return whether a file, by its path in a project, is never copied: a key, or hidden as .env and .netrc are."""
    return is_key(file) or any(part.startswith(".") for part in file.parts)


_SECRET_NAME = r"TOKEN(?!I)|SECRET|PASSW|PASSPHRASE|(?:API|ACCESS|PRIVATE|AUTH|SIGNING)[_-]?KEY|CREDENTIAL|JWT|COOKIE"
_SHORT_NAME = r"(?:[A-Z0-9_-]*[_-])?(?:AUTH|AUTHORIZATION|PWD|PASS|DSN|SAS|SIG)|[A-Z0-9_-]+[_-]KEY"
_NAMED = re.compile(
    rf"{_SECRET_NAME}|(?:^|[_-])(?:AUTH|AUTHORIZATION|PWD|PASS|DSN|SAS|SIG)(?=$|[_-])|[_-]KEY(?=$|[_-])", re.IGNORECASE
)
_IN_URL = re.compile(
    r"(://[^/@\s:]*:)[^/\s]*@|(://)[A-Za-z0-9_-]{16,}@"
)  # a URL with a password, or a token as its user
_IN_QUERY = re.compile(
    r"([?&;](?:[\w.-]*(?:sig|signature|token|key|auth|authorization|passwd|password|pwd|pass|secret|credential|sas|cookie|jwt)"
    r"|code)=)[^&\s'\"#;]+",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    rf"""((?<![\w-])(?:{_SHORT_NAME})(?:=|["']?:\s*)|--?(?:{_SHORT_NAME})(?:=|\s+))("[^"]*"|'[^']*'|[^\s,;&"']+)""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\b(?:Bearer|Basic|Authorization:|Set-Cookie:|Cookie:)\s+)[^\s'\",]{6,}", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abps]-|AKIA|ASIA|eyJ)[A-Za-z0-9_.-]{16,}"  # of known services
)
_IN_WORDS = re.compile(rf"([^\s=]*(?:{_SECRET_NAME})[^\s=:]*(?:\s*[=:]\s*|\s+))([^\s,;]+)", re.IGNORECASE)


def may_be_secret(name: str, value: str) -> bool:
    """Return whether a variable or setting may be a password or a token, by its name, or for a URL that holds one."""
    return bool(_NAMED.search(name)) or without_secrets(value) != value


def without_secrets(text: str) -> str:
    """Return words, as of a command, with *** for what may be a password or a token among them."""

    def hidden(found: re.Match[str]) -> str:
        return found[0] if found[2].replace(".", "", 1).isdigit() else f"{found[1]}***"

    text = _IN_QUERY.sub(r"\1***", _IN_URL.sub(r"\1\2***@", text))
    text = _TOKEN.sub("***", _BEARER.sub(r"\1***", text))
    return _IN_WORDS.sub(hidden, _ASSIGNED.sub(hidden, text))
