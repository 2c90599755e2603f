"""One job of a user has this machine at a time, and no other user can keep it from that."""

import os
from pathlib import Path

import pytest

from tula_cli.host import machine_lock


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_who_has_the_machine_is_told() -> None:
    assert machine_lock.holder() == "" and not machine_lock.path().exists()
    first, second = machine_lock.opened(), machine_lock.opened()
    assert first is not None and second is not None
    assert machine_lock.locked(first, "train-a of /runs/one")
    assert not machine_lock.locked(second, "train-b of /runs/two")
    assert machine_lock.holder() == f"train-a of /runs/one, process {os.getpid()}"
    os.close(first)
    assert machine_lock.holder() == "", "a note of one that has ended tells nothing"
    assert machine_lock.locked(second, "x")
    assert machine_lock.holder() == f"x, process {os.getpid()}"
    os.close(second)


@pytest.mark.parametrize("kind", ["of another user", "a link", "a folder", "a pipe"])
def test_what_another_user_has_put_there_is_not_waited_for(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = machine_lock.path()
    if kind == "of another user":
        place.touch()
        monkeypatch.setattr(machine_lock, "path", lambda: place)
        monkeypatch.setattr(machine_lock.os, "getuid", lambda: os.geteuid() + 1)
    elif kind == "a link":
        place.symlink_to(folder / "precious")
    elif kind == "a folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    assert machine_lock.opened() is None and machine_lock.holder() == ""
    assert not (folder / "precious").exists()
