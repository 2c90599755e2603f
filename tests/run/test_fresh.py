"""Requests to the file system itself; tests/slurm/test_cached_attributes.py makes them on one that caches."""

import ctypes
import errno
import threading
from pathlib import Path

import pytest

from tula_cli.run import files
from tula_cli.run.files import is_listed, read_file_identity, wait_until_listed


def refused(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


@pytest.mark.parametrize("call", ["as here", "none", "refused"])
def test_the_answer_is_that_of_a_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    if call != "as here":
        monkeypatch.setattr(files, "_load_statx", lambda: refused if call == "refused" else None)
    file = tmp_path / "a file"
    assert read_file_identity(file) is None
    file.write_text("")
    result = file.stat()
    assert read_file_identity(file) == (result.st_ino, result.st_mtime_ns)
    assert read_file_identity(file / "in a file") is None


def test_a_name_is_looked_for_in_its_folder(tmp_path: Path) -> None:
    assert not is_listed(tmp_path / "none" / "file")
    (tmp_path / "file").write_text("")
    assert is_listed(tmp_path / "file") and not is_listed(tmp_path / "other")


def test_what_appears_late_is_waited_for(tmp_path: Path) -> None:
    assert not wait_until_listed(tmp_path / "file", timeout=0.0)
    late = threading.Timer(0.3, (tmp_path / "file").touch)
    late.start()
    assert wait_until_listed(tmp_path / "file", timeout=20.0)
    late.join()
