"""What of tula goes into a run, for a script in whose Python tula need not be: the shim, and the optimizers."""

import hashlib
import os
import shutil
import socket
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from tula_cli.run.files import publish

LIBRARY = "tula_ags"
"""The name of the optimizers' copy: an installed tula is another package, of another version perhaps."""


def copy_shim(run: Path) -> Path:
    """Copy the shim into a run, where it is not there yet; return its folder. Containers see the run, not tula.

    Raises:
        OSError: it cannot be written.
    """
    return _copied(run, "shim", _sources("shim"))


def copy_optim(run: Path) -> Path:
    """Copy the optimizers into a run as a package of a name of its own; return the folder in which it is.

    Raises:
        OSError: it cannot be written.
    """
    presets = {Path("presets.py"): files("tula_cli").joinpath("presets.py").read_bytes()}
    found = _sources("optim") | presets
    return _copied(run, "ags", {LIBRARY / name: _renamed(content) for name, content in found.items()})


def _sources(folder: str) -> dict[Path, bytes]:
    """Return the modules of a folder of tula's by their paths in it, also where tula is imported from an archive."""
    found, ahead = {}, [(Path(), files("tula_cli").joinpath(folder))]
    for path, place in ahead:
        for inner in place.iterdir():
            if inner.is_dir():
                ahead.append((path / inner.name, inner))
            elif inner.name.endswith(".py"):
                found[path / inner.name] = inner.read_bytes()
    return dict(sorted(found.items()))


def _renamed(code: bytes) -> bytes:
    """Return the code with the one module of tula that it imports in the copy instead."""
    return code.replace(b"from tula_cli.presets import", f"from {LIBRARY}.presets import".encode())


def _copied(run: Path, name: str, contents: Mapping[Path, bytes]) -> Path:
    found = hashlib.sha256()
    for path, content in contents.items():
        found.update(f"{path}\0".encode() + content)
    place = (run / "script" / f"{name}-{found.hexdigest()[:8]}").absolute()
    if place.is_dir():
        return place
    draft = place.with_name(f".{place.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    for path, content in contents.items():
        copy = draft / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    try:
        publish(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place
