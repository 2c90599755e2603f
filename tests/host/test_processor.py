import platform
from pathlib import Path

import pytest

from tula_cli.host import machine


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: A CPU @ 2.0: fast\nprocessor\t: 1\nmodel name\t: another\n",
            "A CPU @ 2.0: fast",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", platform.machine()),  # ARM tells no name
        (None, platform.machine()),
    ],
)
def test_the_name_is_the_kernels_or_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, name: str
) -> None:
    monkeypatch.setattr(machine, "CPU_INFO_FILE", tmp_path / "cpuinfo")
    if told is not None:
        machine.CPU_INFO_FILE.write_text(told)
    assert machine.read_processor_name() == name
