"""Settings of tests of the command line: nothing of the person who runs them reaches it, and jobs are polled often."""

import io
import os
from pathlib import Path

import pytest

from tula_cli.services import status
from tula_cli.services import status as services_status


def poll_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll jobs on this machine often, and count them as lost soon."""
    monkeypatch.setitem(status.GRACE, "local", 0.02)
    monkeypatch.setitem(services_status.POLL, "local", (0.01, 0.01))


def quiet(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in a folder, without a terminal and without the settings of the environment."""
    monkeypatch.chdir(folder)
    for name in list(os.environ):
        if name.startswith("TULA_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("sys.stdin", io.StringIO())
