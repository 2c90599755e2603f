"""Recognise files and settings that may hold secrets by their names.

Such files are neither copied nor shown in a diff.
"""

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CODE_SUFFIXES = {".py", ".sh", ".bash", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp"}
KEY_FILE_PATTERNS = (
    "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "*.env", "*netrc", "*credential*", "kaggle.json",
    "token", "token.*", "*_token", "*_token.*", "*.token", "*secret*", "*service?account*", "*serviceaccount*", "htpasswd", "pgpass",
    "*password*", "*apikey*", "*api_key*", "*api-key*", "*[_-]key", "*[_-]key.*", "*accesskey*", "*access_key*", "rootkey.*",
    "auth.json", "oauth*.json", "kubeconfig*", "cookies.*", "*-adminsdk*", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
)  # fmt: skip
_KEY_PATTERNS_AMONG_CODE = ("*.pem", "*.key", "*.p12", "*.pfx", "*.env", "*netrc", "*credentials*")
"""Names of key files that also apply to files with a code suffix."""


def is_key_file(file: Path) -> bool:
    """Return whether a file's name suggests private keys, passwords or tokens.

    Fewer patterns apply to source files, because a token.py is usually code.
    """
    name = file.name.lower()
    patterns = _KEY_PATTERNS_AMONG_CODE if file.suffix in CODE_SUFFIXES else KEY_FILE_PATTERNS
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def is_private_file(file: Path) -> bool:
    """Return whether a file, by its path in a project, must not be copied: a key, or hidden (.env, .netrc)."""
    return is_key_file(file) or any(part.startswith(".") for part in file.parts)


_SECRET_NAME = (
    r"TOKEN(?!I)|SECRET|PASSW|PASSPHRASE|(?:API|ACCESS|ACCOUNT|PRIVATE|AUTH|SIGNING|SHARED)[ _-]?KEY|SHAREDACCESS|CREDENTIAL"
    r"|JWT|COOKIE"
)
_SHORT_NAME = r"(?:[A-Z0-9_.-]{0,99}[_.-])?(?:AUTH|AUTHORIZATION|PWD|PASS|DSN|SAS|SIG)|[A-Z0-9_-]{1,99}[_-]KEY|(?:[A-Z0-9_.-]{0,99}\.)?(?:WANDB|COMET|NEPTUNE|OPENAI|HUB)\.KEY"
_NAMED_SECRET_PATTERN = re.compile(
    rf"{_SECRET_NAME}|(?:^|[_-])(?:AUTH|AUTHORIZATION|PWD|PASS|DSN|SAS|SIG)(?=$|[_-])|[_-]KEY(?=$|[_-])", re.IGNORECASE
)
_URL_SECRET_PATTERN = re.compile(r"(://[^/@\s:]*:)[^/\s]*@|(://)[A-Za-z0-9_-]{16,}@")
"""A URL with a password, or with a token as user name."""
_QUERY_SECRET_PATTERN = re.compile(
    r"([?&;](?:[\w.-]{0,99}(?:sig|signature|token|key|auth|authorization|passwd|password|pwd|pass|secret|credential|sas|cookie|jwt)"
    r"|code)=)[^&\s'\"#;]+",
    re.IGNORECASE,
)
_VALUE = r"""(?!\*\*\*)("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|["'][^"'\n]+|[^\s,;&"']+)"""
_ASSIGNED_SECRET_PATTERN = re.compile(
    rf"""((?<![\w-])(?!PWD=["']?/)(?:{_SHORT_NAME})(?:=|["']:\s*|(?<=[A-Z]):\s*)|--?(?i:{_SHORT_NAME})(?:=|\s+)){_VALUE}"""
    rf"""|((?<![\w-])(?!PWD=["']?/)(?i:{_SHORT_NAME})(?:=|["']:\s*)){_VALUE}"""
)  # after a lower-case name a colon alone does not count ("forward pass: 3 ms"); PWD=/path is the shell's working directory
_BEARER_PATTERN = re.compile(
    r"(\b(?:(?:Proxy-)?Authorization:\s*(?:[A-Za-z]+\s+)?|(?:Bearer|Basic|Set-Cookie:|Cookie:)\s+))(?!(?:Bearer|Basic)\s)[^\s'\",]{6,}",
    re.IGNORECASE,
)
_PRIVATE_KEY_PATTERN = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL)
_LOGIN_TEMPLATE = (
    r"""(\bcurl\b[^\n|;]{{0,999}}?\s(?:-u|--user)[ =]?{quote}[^\s:'"]+:|\bsshpass\s+-p\s*{quote}"""
    r"""|\b(?:mysql|mariadb)[\w-]{{0,20}}\b[^\n|;]{{0,999}}?\s-p{quote}(?=[^\s"'])"""
    r"""|\b(?:redis-cli\b[^\n|;]{{0,999}}?\s-a|(?:mongo\w{{0,20}}|(?:docker|podman|helm registry) login)\b[^\n|;]{{0,999}}?\s-p)[ =]?{quote}"""
    r"""|\bwandb login(?: +--\S+)* +{quote}(?=\w{{20}})|\bwandb\.login\([^)\n]*?key\s*=\s*{quote}"""
    r"""|https://(?:hooks\.slack\.com/services|(?:\w+\.)?discord(?:app)?\.com/api/webhooks)/)(?!\*\*\*){value}"""
)
"""Text before an unnamed secret: a login, or a URL that anyone who knows it may post to. Options are sought in the next
thousand characters, because a search to the end of each line would take minutes in a line with many such words."""
_LOGIN_PATTERNS = tuple(
    re.compile(_LOGIN_TEMPLATE.format(quote=quote, value=value))
    for quote, value in ((r"""["']""", r"""[^"'\n]+"""), ("", r"""[^\s'"]+"""))
)
"""In quotes, where a secret may contain spaces, and without."""
_TOKEN_PATTERN = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abps]-|AKIA|ASIA|AIza|eyJ|npm_|pypi-|dop_v1_|rpa_|SG\.|ya29\.|dckr_pat_"
    r"|r8_|lin_api_|nvapi-|gsk_|tskey-|xapp-|hvs\.|[rs]k_live_|shpat_|AGE-SECRET-KEY-|dapi(?=[0-9a-f]{32}\b))[A-Za-z0-9_.-]{16,}"
)
_SECRET_AFTER_NAME_PATTERN = re.compile(
    rf"""([^\s=]{{0,99}}(?:{_SECRET_NAME})(?:[^\s=:]{{0,99}}\s*(?:=\s*|:\s+)|(?:ORDS?|DS?|S)?["']?\s*:)|--?[^\s=]{{0,99}}(?:{_SECRET_NAME})[^\s=:]{{0,99}}\s+){_VALUE}""",
    re.IGNORECASE,
)
_SECRET_IN_SENTENCE_PATTERN = re.compile(
    rf"((?:{_SECRET_NAME})[^\s=:]{{0,99}}\s+)(?=\S*\d)(?=\S*[A-Za-z])([^\s,;\"']{{8,}})", re.IGNORECASE
)
"""A word after the name of a secret counts as one only if it contains digits and letters: "token ab12cd34", not "tokens
are counted"."""
_HARMLESS_VALUE_PATTERN = re.compile(
    r"""["']?(?:[+-]?[\d.]+(?:[eE][+-]?\d+)?[kKMGTB]?|(?i:true|false|none|null)|</?s>|<[a-z_|]{3,}>|\[(?i:pad|unk|cls|sep|mask|bos|eos)\])["']?"""
)
"""Values that are never secret, whatever their name: numbers, booleans, special tokens of a tokenizer."""


def may_be_secret(name: str, value: str) -> bool:
    """Return whether a variable or setting may be a password or token, by its name or its content."""
    return bool(_NAMED_SECRET_PATTERN.search(name)) or redact_secrets(value) != value


def redact_secrets(text: str) -> str:
    """Return text, for example a command, with possible passwords and tokens replaced by ***."""

    def mask_secret(match: re.Match[str]) -> str:
        name, value = (part for part in match.groups() if part is not None)
        return match[0] if _HARMLESS_VALUE_PATTERN.fullmatch(value) else f"{name}***"

    for pattern in (_PRIVATE_KEY_PATTERN, *_LOGIN_PATTERNS, _BEARER_PATTERN):
        text = pattern.sub(r"\1***", text)
    text = _TOKEN_PATTERN.sub("***", _QUERY_SECRET_PATTERN.sub(r"\1***", _URL_SECRET_PATTERN.sub(r"\1\2***@", text)))
    for pattern in (_ASSIGNED_SECRET_PATTERN, _SECRET_AFTER_NAME_PATTERN, _SECRET_IN_SENTENCE_PATTERN):
        text = pattern.sub(mask_secret, text)
    return text


def remove_secrets(value: Any) -> Any:
    """Return a JSON value with possible secrets in its strings replaced by ***."""
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, Mapping):
        return {key: remove_secrets(part) for key, part in value.items()}
    return [remove_secrets(part) for part in value] if isinstance(value, list | tuple) else value
