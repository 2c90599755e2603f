"""Settings of tests of the command line: nothing of the person who runs them reaches it, and jobs are polled often."""

import dataclasses
import io
import os
from pathlib import Path

import pytest

from tula_cli.spec.backend import BACKENDS


def poll_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll jobs on this machine often, and count them as lost soon."""
    local = dataclasses.replace(BACKENDS["local"], grace=0.02, poll=(0.01, 0.01))
    monkeypatch.setitem(BACKENDS, "local", local)


def quiet(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in a folder, without a terminal and without the settings of the environment."""
    monkeypatch.chdir(folder)
    for name in list(os.environ):
        if name.startswith("TULA_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("sys.stdin", io.StringIO())
