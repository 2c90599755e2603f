"""What this machine has of memory, its own and shared; a container's limits in files of the test."""

import os
from pathlib import Path

import pytest

from tula_cli.host.capacity import machine_memory, shared_memory


@pytest.mark.parametrize(("text", "share"), [("4096\n", None), ("max\n", 1), (None, 1), ("twice", 1)])
def test_a_control_group_bounds_the_machine(tmp_path: Path, text: str | None, share: int | None) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if text is not None:
        (tmp_path / "memory.max").write_text(str(2 * total) if text == "twice" else text)
    assert machine_memory(tmp_path / "memory.max") == (4096 if share is None else total)


def test_shared_memory_is_what_is_free_of_its_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs_result((4096, 4096, 100, 90, 80, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: found)
    assert shared_memory(tmp_path) == 80 * 4096


def test_where_there_is_no_shared_memory_nothing_is_known(tmp_path: Path) -> None:
    assert shared_memory(tmp_path / "shm") is None
