"""Files of the shim: JSON, replaced whole; a reader sees the old one or the new one."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any], *, durable: bool = True) -> None:
    """Replace `path`; numbers that are not finite become null, which JSON does not have.

    Args:
        path: its folder is made.
        content: what goes into it.
        durable: wait until it is on the disk. A heartbeat need not.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with open(draft, "w", encoding="utf-8", opener=_private) as file:
        file.write(json.dumps(_finite(content), allow_nan=False))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(draft, path)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a JSONL file; a process that is killed meanwhile leaves half of it, which readers leave out."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", opener=_private) as file:
        file.write(json.dumps(_finite(row), allow_nan=False) + "\n")


def _private(path: str, flags: int) -> int:
    """Open a file that is for this user alone where it is made."""
    return os.open(path, flags, 0o600)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
