"""Special files (a device without end, a pipe) are neither read nor waited for."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tula_cli.cluster.scripts.checkpoints import is_complete_checkpoint
from tula_cli.cluster.slurm.sbatch import _read_lines_of_file
from tula_cli.errors import TulaError
from tula_cli.run import files
from tula_cli.run.imports import compute_file_digest
from tula_cli.spec import yaml_text
from tula_cli.spec.scripts.launchers import KnownFacts, _find_local_rank_flag, _read_accelerate_config

# what a path leads to
KINDS: dict[str, Callable[[Path], object]] = {
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/urandom": lambda path: path.symlink_to("/dev/urandom"),
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "a folder": lambda path: path.mkdir(),
    "a link to a folder": lambda path: path.symlink_to(path.parent),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
_KNOWN = KnownFacts(Path("/"))
# what reads a file, and what it answers of one that is none: False, or an error
READERS: dict[str, Callable[[Path], object]] = {
    "record": files.read_content,
    "lines": lambda path: list(files.read_json_lines(path)),
    "end of a log": lambda path: files.read_last_bytes(path, 100),
    "checkpoint of a script": lambda path: is_complete_checkpoint(path) and path.is_file(),
    "job or batch script": lambda path: yaml_text.read_text_file(path) == "",
    "accelerate's configuration": lambda path: _read_accelerate_config(str(path), _KNOWN) == {},
    "setup": lambda path: _read_lines_of_file("", str(path), setting="cluster.setup", workdir=path.parent) == [],
    "script of a launcher": lambda path: _find_local_rank_flag(path) == "",
    "first weights": lambda path: path.is_dir() or compute_file_digest(str(path)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_no_regular_file_is_not_read(
    make: Callable[[Path], object], read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(yaml_text, "_PIPE_TIMEOUT", 0.1)
    path = tmp_path / "file.pt"
    make(path)
    try:
        assert read(path) in (False, True) and (path.is_dir() or read(path) is False)
    except (TulaError, OSError) as error:
        assert path.name in str(error) or isinstance(error, IsADirectoryError)


@pytest.mark.parametrize(
    ("name", "content", "complete"),
    [
        ("model.pt", b"", False),
        ("state.json", b"", False),
        ("state.json", b"\0\0\0\0", True),
        ("state.json", b"{}", True),
        ("model.pt", b"\0\0\0\0", False),
        ("model.pt", b"\x80\x02older", True),
        ("model.pt", b"PK\x03\x04, and the rest was never written", False),
        ("model.safetensors", b"PK\x03\x04, no archive", True),
    ],
)
def test_a_checkpoint_is_complete_if_each_of_its_files_is(
    name: str, content: bytes, complete: bool, tmp_path: Path
) -> None:
    (tmp_path / "whole.txt").write_text("x")
    (tmp_path / name).write_bytes(content)
    assert is_complete_checkpoint(tmp_path) is complete


def test_a_pipe_into_which_nobody_writes_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "_PIPE_TIMEOUT", 0.1)
    os.mkfifo(tmp_path / "job.yaml")
    with pytest.raises(TulaError, match="received nothing"):
        yaml_text.read_yaml(tmp_path / "job.yaml")


def test_holes_of_a_sparse_file_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"kind": "a"}\n')
        file.seek(20 * 2**30)
        file.write(b'\n{"kind": "b"}\n')
    assert [row["kind"] for row in files.read_json_lines(path)] == ["a", "b"]


def test_a_file_is_read_up_to_the_size_that_it_has() -> None:
    assert files.read_content(Path("/proc/self/status")) == b"", "the kernel's files say 0, whatever comes of them"
