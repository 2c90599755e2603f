"""Another user's run: told in one sentence by every command, read where it is open, and never written into."""

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import make_runs as make
import pytest
from make_results import Truth, make_probe

from tula_cli.cli import app
from tula_cli.errors import CannotWrite, NotYours, SpecError
from tula_cli.run import owner
from tula_cli.run.directory import RunDir

NOBODY = 65534
COMMANDS = ("status", "logs", "recommend", "train", "cancel", "compare", "profile", "evaluate")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder for runs into which every user may write, and see."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture
def theirs(shared: Path) -> RunDir:
    """A run of another user's with measured probes, which nobody else may look into."""
    run = RunDir.create(shared, make.spec())
    make.add_probes(run, 1, (32, 64))
    for nodes, local in ((1, 32), (1, 64), (2, 32)):
        run.write_result(make_probe(Truth(), nodes, local))
    give(shared)
    return run


def give(place: Path) -> None:
    """Make all there another user's."""
    for path in (place, *place.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


def opened(run: RunDir) -> None:
    """Let everybody read a run."""
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Let root be a user like any other: files of others are closed to it.

    So it can go on importing modules: an interpreter under /root is closed to any other user of this machine.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    before = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; of 32 capabilities each, twice
    assert libc.capget(header, before) == 0
    ordinary = (ctypes.c_uint32 * 6)(*before)
    ordinary[0] &= ~0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
    assert libc.capset(header, ordinary) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def command(*arguments: str, capture: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with without_rights():
        code = app.run(arguments)
    output = capture.readouterr()
    return code, output.out, output.err


def content(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.promise(
    "the run directory",
    "the run belongs to another user and is not readable",
    "every command names the owner and what to do (exit code 15)",
)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_whose_a_closed_run_is(
    name: str, theirs: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, message = command(name, "--run", str(theirs.path), capture=capsys)
    assert code == NotYours.exit_code == 15
    assert f"{theirs.path} belongs to nobody: you may not read it" in message and "ask nobody" in message
    assert "Traceback" not in message


def test_what_lies_in_a_folder_that_may_not_be_searched_is_its_owners(shared: Path, theirs: RunDir) -> None:
    shared.chmod(0o700)
    with without_rights(), pytest.raises(NotYours, match=f"^{shared} belongs to nobody: you may not read it"):
        RunDir.open(theirs.path)


def test_a_list_leaves_it_out_and_says_so_once(
    shared: Path, theirs: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, message = command("list", "--run-dir", str(shared), capture=capsys)
    assert code == 0 and theirs.id not in out
    assert message.count("not shown: a run of nobody, which you may not read") == 1
    code, _, message = command("status", "--run-dir", str(shared), capture=capsys)
    assert code == 2 and "(not shown: a run of nobody, which you may not read)" in message


@pytest.mark.parametrize("arguments", [("status",), ("recommend", "--json"), ("recommend",), ("compare", "--show")])
def test_one_that_is_open_is_read_and_nothing_is_written(
    arguments: tuple[str, ...], theirs: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(theirs)
    before = content(theirs)
    code, _, message = command(*arguments, "--run", str(theirs.path), capture=capsys)
    assert "Traceback" not in message and content(theirs) == before
    assert code == (4 if "--show" in arguments else 0), message  # nothing was compared yet
    if arguments[0] == "recommend":
        assert "could not be stored" in message and "belongs to nobody: you may not change it" in message


@pytest.mark.promise(
    "the run directory",
    "the run belongs to another user and is readable",
    "commands read it, but never write to it, even if its permissions allow it",
)
@pytest.mark.parametrize("name", ["train", "cancel", "profile", "compare", "recommend"])
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_what_would_write_into_it_is_refused_even_where_it_could(
    name: str, mode: int, theirs: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(theirs)
    for folder in (theirs.path, *(path for path in theirs.path.rglob("*") if path.is_dir())):
        folder.chmod(mode)
    before = content(theirs)
    options = {
        "train": ("--nodes", "1", "--batch", "64", "--yes"),
        "recommend": ("--save",),
        "profile": ("--yes", "--set", "search.nodes=[1,2,4]"),
        "compare": ("--yes", "--batch", "64"),
    }.get(name, ())
    code, _, message = command(name, "--run", str(theirs.path), *options, capture=capsys)
    assert code == 15 and f"{theirs.path} belongs to nobody: you may not change it" in message, message
    assert "Traceback" not in message and content(theirs) == before


def test_a_lock_and_a_record_of_another_user(shared: Path) -> None:
    value = RunDir.create(shared, make.spec(name="own"))
    (value.path / "lock").mkdir()
    (value.path / "recommendation.json").write_text("{}")
    (value.path / "recommendation.json").chmod(0o600)
    for name in ("lock", "recommendation.json"):
        give(value.path / name)
    with without_rights(), pytest.raises(NotYours, match=f"{value.path}/lock belongs to nobody"):
        value.lock.acquire()
    with (
        without_rights(),
        pytest.raises(NotYours, match=r"recommendation\.json belongs to nobody: you may not read it"),
    ):
        value.read_recommendation()


def test_clean_names_the_owner_of_folders_in_ones_own_run(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = RunDir.create(shared, make.spec(name="own"))
    training = value.get_training("ab12cd34")
    for samples in (100, 200):
        path = training.get_checkpoint_path(samples)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"weights")
    (training.path / "last").symlink_to(Path("checkpoints") / path.name)
    value.write_train_result(make.train_result("ab12cd34"))
    give(path.parent)
    code, _, message = command("clean", "--run-dir", str(shared), "--yes", capture=capsys)
    assert code == 15 and "cannot delete the files: " in message, message
    assert "100.pt belongs to nobody: you may not change it" in message and len(list(path.parent.iterdir())) == 2


def test_ones_own_run_is_the_newest_and_a_name_in_a_sticky_folder_stays(shared: Path, theirs: RunDir) -> None:
    shared.chmod(0o1777)
    opened(theirs)
    with without_rights():
        assert RunDir.find_newest(shared).id == theirs.id
        value = RunDir.create(shared, make.spec(name="own"))  # `latest` is another's, and cannot be replaced
        assert RunDir.find_newest(shared).id == value.id
    assert (shared / "latest").read_text().strip() == theirs.id


def test_what_is_closed_otherwise_is_no_other_users(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = RunDir.create(shared, make.spec())
    value.path.chmod(0)
    with without_rights(), pytest.raises(SpecError, match=r"no permission to read .*") as error:
        RunDir.open(value.path)
    assert "chmod" in error.value.hint
    closed = shared / "closed"
    closed.mkdir(mode=0o755)
    give(closed)
    with without_rights(), pytest.raises(CannotWrite, match="Permission denied"):
        RunDir.create(closed / "runs", make.spec())
    assert owner.find_other_owner(closed) == "nobody"
    monkeypatch.setattr(owner, "_owns_all_new_files", lambda *_: True)  # a file system that gives all files to one user
    assert not owner.find_other_owner(closed)


def test_it_is_so_of_a_real_process_of_another_user(shared: Path) -> None:
    run = RunDir.create(shared, make.spec())
    code = f"""
import os, sys
import tula_cli.run.directory
from tula_cli.cli import app
app.run(["status", "--run", {str(run.path)!r}])  # so that nothing is left to be imported
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit(app.run(["status", "--run", {str(run.path)!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 15, ended.stderr
    assert "belongs to root: you may not read it" in ended.stderr and "Traceback" not in ended.stderr
