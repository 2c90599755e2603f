"""Memory of this machine, its own and shared; the limits of a container, in files of the test."""

import os
from pathlib import Path

import pytest

from tula_cli.host.machine import read_machine_memory, read_shared_memory

TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SLURM_STEP = "0::/system.slice/slurmstepd.scope/job_7/step_0\n"


@pytest.mark.parametrize(
    ("member", "limits", "expected"),
    [
        ("", {"memory.max": "4096\n"}, 4096),
        ("0::/\n", {"memory.max": "max\n"}, TOTAL),
        ("0::/\n", {"memory.max": str(2 * TOTAL)}, TOTAL),
        ("0::/\n", {}, TOTAL),
        (SLURM_STEP, {"system.slice/slurmstepd.scope/job_7/memory.max": "8192"}, 8192),
        (SLURM_STEP, {"system.slice/slurmstepd.scope/job_8/memory.max": "8192"}, TOTAL),
        ("9:cpu,cpuacct:/a\n4:memory:/slurm/uid_0\n", {"memory/slurm/memory.limit_in_bytes": "4096"}, 4096),
        ("no colon\n4:memory:/a:b\n", {"memory/a:b/memory.limit_in_bytes": "4096"}, 4096),
        ("9:cpu,cpuacct:/a\n", {"memory/a/memory.limit_in_bytes": "4096"}, TOTAL),
    ],
)
def test_control_groups_bound_the_machine(tmp_path: Path, member: str, limits: dict[str, str], expected: int) -> None:
    (tmp_path / "self").write_text(member)
    for name, text in limits.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert read_machine_memory(tmp_path / "groups", tmp_path / "self") == expected


def test_without_control_groups_the_machine_is_what_it_is(tmp_path: Path) -> None:
    assert read_machine_memory(tmp_path, tmp_path / "none") == TOTAL


def test_shared_memory_is_what_is_free_of_its_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = os.statvfs_result((4096, 4096, 100, 90, 80, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: result)
    assert read_shared_memory(tmp_path) == 80 * 4096


def test_where_there_is_no_shared_memory_nothing_is_known(tmp_path: Path) -> None:
    assert read_shared_memory(tmp_path / "shm") is None
