"""What of tula goes into a run, for a script in whose Python tula need not be: the shim, and the optimizers."""

import hashlib
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from tula_cli.run.files import publish

TULA = Path(__file__).resolve().parents[2]
SHIM, OPTIM, PRESETS = TULA / "shim", TULA / "optim", TULA / "presets.py"
LIBRARY = "tula_ags"
"""The name of the optimizers' copy: an installed tula is another package, of another version perhaps."""


def copy_shim(run: Path) -> Path:
    """Copy the shim into a run, where it is not there yet; return its folder. Containers see the run, not tula.

    Raises:
        OSError: it cannot be written.
    """
    files = {path.relative_to(SHIM): path.read_bytes() for path in sorted(SHIM.rglob("*.py"))}
    return _copied(run, "shim", files)


def copy_optim(run: Path) -> Path:
    """Copy the optimizers into a run as a package of a name of its own; return the folder in which it is.

    Raises:
        OSError: it cannot be written.
    """
    found = {path.relative_to(OPTIM): path for path in sorted(OPTIM.rglob("*.py"))} | {Path(PRESETS.name): PRESETS}
    return _copied(run, "ags", {LIBRARY / name: _renamed(path.read_bytes()) for name, path in found.items()})


def _renamed(code: bytes) -> bytes:
    """Return the code with the one module of tula that it imports in the copy instead."""
    return code.replace(b"from tula_cli.presets import", f"from {LIBRARY}.presets import".encode())


def _copied(run: Path, name: str, files: Mapping[Path, bytes]) -> Path:
    found = hashlib.sha256()
    for path, content in files.items():
        found.update(f"{path}\0".encode() + content)
    place = (run / "script" / f"{name}-{found.hexdigest()[:8]}").absolute()
    if place.is_dir():
        return place
    draft = place.with_name(f".{place.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    for path, content in files.items():
        copy = draft / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    try:
        publish(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place
