"""The file of a checkpoint: written tensor by tensor, whole or not at all."""

import errno
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tula_cli.errors import CannotWrite, DiskFull
from tula_cli.run import files
from tula_cli.run.checkpoint_integrity import is_complete_archive
from tula_cli.worker.train import checkpoint


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, path: Path, mode: str, *, after: int = 2**20, opener: Any = None) -> None:
        self.file, self.left = open(path, mode, opener=opener), after  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(data))


def test_nothing_of_it_is_held_in_memory_a_second_time(tmp_path: Path) -> None:
    content = {"model": {"a": torch.arange(2**22), "b": torch.ones(3)}, "epoch": 2}
    tracemalloc.start()
    checkpoint.write_checkpoint(tmp_path / "1.pt", content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23, "of tensors of 32 MiB"
    data = torch.load(tmp_path / "1.pt", weights_only=True)
    assert torch.equal(data["model"]["a"], content["model"]["a"]) and data["epoch"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["1.pt"]


def test_a_full_disk_is_reported_and_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "1.pt"
    checkpoint.write_checkpoint(path, {"model": torch.zeros(3)})
    before = path.read_bytes()
    monkeypatch.setattr(files, "open", Full, raising=False)
    content = {"model": {"a": torch.zeros(2**20)}, "optimizer": [torch.zeros(8), (torch.zeros(8), 3)], "epoch": 2}
    with pytest.raises(CannotWrite, match="No space left on device") as error:
        checkpoint.write_checkpoint(path, content)
    assert isinstance(error.value, DiskFull) and error.value.needed == 4 * (2**20 + 16)
    assert path.read_bytes() == before and [item.name for item in tmp_path.iterdir()] == ["1.pt"]


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "more than its size"])
def test_a_checkpoint_that_is_no_file_is_not_whole(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "000000000064.pt"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data", b"\0" * 2**24)
    assert not is_complete_archive(path)
