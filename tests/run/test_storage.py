"""Full disks and file systems that do not answer: what is said of them, and what is kept back for that."""

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tula_cli.errors import CannotWrite, DiskFull, StorageFailed
from tula_cli.host.failure_texts import classify_failure
from tula_cli.run import disk_space, files, shortages
from tula_cli.run.records.failures import Shortage

FULL_DISK = """
import json, os, sys
from pathlib import Path
from tula_cli.errors import DiskFull
from tula_cli.run.files import write_file_atomically
from tula_cli.run import disk_space, shortages

run = Path(sys.argv[1])
told = {"empty": disk_space.find_full_disk_errno(run)}
shortages.create_reserve_file(run)
try:
    write_file_atomically(run / "large", bytes(2**20))
except DiskFull as error:
    found = shortages.get_shortage(error)
    told |= {"words": found.description, "missing": found.missing, "total": found.total}
(run / "ballast").open("wb")
with open(run / "ballast", "ab", buffering=0) as ballast:
    try:
        while True:
            ballast.write(bytes(4096))
    except OSError:
        pass
told["full"] = disk_space.find_full_disk_errno(run)
try:
    write_file_atomically(run / "ending.json", b"x" * 5000)
    told["before"] = True
except DiskFull:
    told["before"] = False
shortages.release_reserve(run)
write_file_atomically(run / "ending.json", b"x" * 5000)
told["after"] = (run / "ending.json").stat().st_size
print(json.dumps(told))
"""


def test_a_file_system_that_is_really_full_is_reported_and_has_room_for_an_ending(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    mounted = f'mount -t tmpfs -o size=256k none "{tmp_path}" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", FULL_DISK]
    ended = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert (data["empty"], data["full"]) == (0, errno.ENOSPC)
    assert data["total"] == 2**18 and data["missing"] == 2**20 - (2**18 - shortages.RESERVE_BYTES)
    free = f"0.234 MiB of 0.250 MiB are free on the disk of {tmp_path}"
    assert data["words"] == f"{free}, 1.00 MiB are needed, so 0.766 MiB are missing"
    assert (data["before"], data["after"]) == (False, 5000)


@pytest.mark.parametrize(
    ("code", "kind", "outcome"),
    [
        (errno.ENOSPC, DiskFull, "disk"),
        (errno.EDQUOT, DiskFull, "disk"),
        (errno.EIO, StorageFailed, "storage"),
        (errno.ETIMEDOUT, StorageFailed, "storage"),
        (errno.ESTALE, StorageFailed, "storage"),
        (errno.EREMOTEIO, StorageFailed, "storage"),
    ],
)
def test_what_the_file_system_says_has_its_class(code: int, kind: type, outcome: str, tmp_path: Path) -> None:
    text = OSError(code, os.strerror(code), str(tmp_path / "a.json"))
    error = files.make_write_error(tmp_path / "a.json", text)
    assert type(error) is kind and os.strerror(code) in error.message and error.hint
    assert classify_failure(f"Traceback (most recent call last):\nOSError: {text}\n") == outcome
    assert (
        classify_failure(f"Traceback (most recent call last):\ntula_cli.errors.{kind.__name__}: {error}\n") == outcome
    )


@pytest.mark.parametrize(
    ("path", "hint"), [("tula-runs/a/lock", "another folder with --run-dir"), ("x.html", "another folder")]
)
def test_a_read_only_file_system_is_named_and_another_folder_proposed(path: str, hint: str) -> None:
    error = files.make_write_error(Path(path), OSError(errno.EROFS, os.strerror(errno.EROFS)))
    assert error.message == f"cannot write {path}: Read-only file system" and error.hint == f"choose {hint}"


def test_a_folder_that_is_not_ones_own_is_neither(tmp_path: Path) -> None:
    error = files.make_write_error(tmp_path / "a.json", OSError(errno.EACCES, os.strerror(errno.EACCES)))
    assert type(error) is CannotWrite and "another folder" in error.hint


def test_torchs_own_error_about_writing_is_a_full_disk() -> None:
    words = (
        "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 320 vs 214",
        "RuntimeError: [enforce fail at inline_container.cc:820] . PytorchStreamWriter failed writing file data/3",
    )
    assert {classify_failure(line, exit_code=1) for line in words} == {"disk"}


def test_a_socket_that_times_out_is_no_file_system() -> None:
    assert classify_failure("TimeoutError: [Errno 110] Connection timed out", exit_code=1) != "storage"


def test_a_quota_is_found_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def used_up(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    assert disk_space.find_full_disk_errno(tmp_path, 2**16) == 0
    monkeypatch.setattr(os, "posix_fallocate", used_up)  # the kernel's answer, which no mount here gives
    assert disk_space.find_full_disk_errno(tmp_path, 2**16) == errno.EDQUOT and not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert disk_space.find_full_disk_errno(tmp_path, 2**62) == errno.ENOSPC


def test_what_a_process_said_tells_the_folder() -> None:
    message = "OSError: [Errno 28] No space left on device: '/dev/shm/x/model.pt'"
    assert shortages.parse_shortage(message, ()).folder == "/dev/shm/x"
    quota = shortages.parse_shortage("OSError: [Errno 122] Disk quota exceeded", [Path("/dev/shm")])
    assert quota.quota and quota.description == "the disk quota for /dev/shm is used up"


def test_of_two_folders_on_one_disk_the_first_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other programs write between the two measurements."""
    free = itertools.count(2**30, -4096)
    monkeypatch.setattr(shortages, "count_free_bytes", lambda _: next(free))
    folders = [tmp_path / "run", tmp_path / "job"]
    for folder in folders:
        folder.mkdir()
    assert shortages.parse_shortage("OSError: [Errno 28] No space left on device", folders).folder == str(folders[0])


def test_a_file_system_without_files_left_is_reported_so() -> None:
    shortage = Shortage(folder="/scratch", free=2**30, total=2**40, files_free=0)
    assert "no more files" in shortage.description


@pytest.mark.parametrize(("files", "available", "free"), [(100, 7, 7), (100, 0, 0), (0, 0, None)])
def test_files_are_counted_where_the_file_system_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, available: int, free: int | None
) -> None:
    statistics = SimpleNamespace(f_files=files, f_favail=available, f_bavail=3, f_blocks=8, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda _: statistics)
    shortage = shortages.measure_shortage(tmp_path)
    assert (shortage.free, shortage.total, shortage.files_free, shortage.quota) == (1536, 4096, free, False)


def test_there_is_room_again(tmp_path: Path) -> None:
    before = Shortage(folder=str(tmp_path / "gone"), free=0, total=2**20, needed=2**12)
    assert shortages.find_remaining_shortage(before) is None
    still = shortages.find_remaining_shortage(before.model_copy(update={"needed": 2**61}))
    assert still is not None and still.missing
