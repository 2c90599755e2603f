"""A folder in which small scripts, which tell their steps through tula_hooks, run without waiting for other tests."""

import tempfile
from pathlib import Path

import pytest

from tula_cli.cluster import attempt as cluster_attempt
from tula_cli.cluster.scripts import checkpoints

TEMPLATES = Path(__file__).parents[3] / "templates"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(TEMPLATES))
    monkeypatch.setattr(cluster_attempt, "PEER_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(checkpoints, "UNCHANGED_SECONDS", 0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the machine's lock
    return tmp_path
