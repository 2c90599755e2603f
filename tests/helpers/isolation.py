"""Settings for tests of the command line: no configuration of the user applies, and jobs are polled often."""

import dataclasses
import io
import os
from pathlib import Path

import pytest

from tula_cli.spec.backend import BACKENDS


def poll_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll local jobs often, and treat them as lost early."""
    local = dataclasses.replace(BACKENDS["local"], grace=0.02, poll=(0.01, 0.01))
    monkeypatch.setitem(BACKENDS, "local", local)


def isolate_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in a folder, without a terminal and without the configuration of the environment."""
    monkeypatch.chdir(folder)
    for name in list(os.environ):
        if name.startswith("TULA_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("sys.stdin", io.StringIO())
