"""Nothing of the person who runs the tests reaches the command line."""

import io
import os
from pathlib import Path

import pytest


def quiet(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in a folder, without a terminal and without the settings of the environment."""
    monkeypatch.chdir(folder)
    for name in list(os.environ):
        if name.startswith("TULA_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("sys.stdin", io.StringIO())
