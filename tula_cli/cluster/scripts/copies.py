"""What of tula goes into a run, for a script in whose Python tula need not be: the shim, and the optimizers."""

import hashlib
import os
import shutil
import socket
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from tula_cli.run.files import publish_folder

LIBRARY = "tula_ags"
"""The name of the optimizers' copy: an installed tula is another package, of another version perhaps."""


def copy_shim(run: Path) -> Path:
    """Copy the shim into a run, where it is not there yet; return its folder. Containers see the run, not tula.

    Raises:
        OSError: it cannot be written.
    """
    return _copy(run, "shim", _module_sources("shim"))


def copy_optim(run: Path) -> Path:
    """Copy the optimizers into a run as a package of a name of its own; return the folder in which it is.

    Raises:
        OSError: it cannot be written.
    """
    presets = {Path("presets.py"): files("tula_cli").joinpath("presets.py").read_bytes()}
    sources = _module_sources("optim") | presets
    return _copy(run, "ags", {LIBRARY / name: _rename_import(content) for name, content in sources.items()})


def _module_sources(folder: str) -> dict[Path, bytes]:
    """Return the modules of a folder of tula's by their paths in it, also where tula is imported from an archive."""
    sources, pending = {}, [(Path(), files("tula_cli").joinpath(folder))]
    for path, resource in pending:
        for inner in resource.iterdir():
            if inner.is_dir():
                pending.append((path / inner.name, inner))
            elif inner.name.endswith(".py"):
                sources[path / inner.name] = inner.read_bytes()
    return dict(sorted(sources.items()))


def _rename_import(code: bytes) -> bytes:
    """Return the code with the one module of tula that it imports in the copy instead."""
    return code.replace(b"from tula_cli.presets import", f"from {LIBRARY}.presets import".encode())


def _copy(run: Path, name: str, contents: Mapping[Path, bytes]) -> Path:
    digest = hashlib.sha256()
    for path, content in contents.items():
        digest.update(f"{path}\0".encode() + content)
    folder = (run / "script" / f"{name}-{digest.hexdigest()[:8]}").absolute()
    if folder.is_dir():
        return folder
    draft = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    for path, content in contents.items():
        copy = draft / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    try:
        publish_folder(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
