"""Files outside of its folder that a probe changes are restored, however it writes them; those that it only reads stay."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tula_cli
from tula_cli.cluster.scripts.watch import move_probe_files
from tula_cli.run.script_attempt import ScriptAttempt

SHIM = Path(tula_cli.__file__).parent / "shim"
SCRIPT = """
import contextlib, mmap, os, shutil, sqlite3, sys, tempfile, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tula_shim import file_changes
if len(sys.argv) > 4:
    file_changes.MAX_COPIED_BYTES = int(sys.argv[4])
recorder = file_changes.FileChangeRecorder(Path(sys.argv[2]), [])
recorder.record_writes()
os.chdir(sys.argv[3])
def step():
    time.sleep(0.02)
    recorder.mark_first_step()
    time.sleep(0.02)
"""
RUN = "step(); "

CHANGES: dict[str, tuple[dict[str, str], str]] = {
    "a file is mapped and changed": (
        {"a": "1" * 9},
        "f = open('a', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'2'; m.close()",
    ),
    "a file is shortened by its descriptor": ({"a": "1" * 9}, "f = open('a', 'r+b'); os.ftruncate(f.fileno(), 3)"),
    "an old checkpoint's folder is removed": (
        {"1/a": "1", "2/a": "2"},
        "shutil.rmtree('1'); os.makedirs('3'); Path('3/a').write_text('3')",
    ),
    "the only folder is removed and made anew": (
        {"1/a": "1"},
        "shutil.rmtree('1'); os.makedirs('1'); Path('1/a').write_text('2')",
    ),
    "a folder is removed by pathlib": ({"1/a": "1"}, "Path('1/a').unlink(); Path('1').rmdir()"),
    "a new folder takes the name of an old one": (
        {"c/a": "1", "c/b/a": "1"},
        "os.makedirs('t'); Path('t/a').write_text('2'); os.rename('c', 'c.old'); os.rename('t', 'c')",
    ),
    "a new folder is renamed": ({}, "os.makedirs('t/u'); Path('t/u/a').write_text('2'); os.replace('t', 'final')"),
    "a link to a folder is renamed": ({"c/a": "1", "last": "->c"}, "os.rename('last', 'before')"),
    "a link is replaced": ({"a": "1", "last": "->a"}, "os.symlink('b', 'l'); os.replace('l', 'last')"),
    "a file is written through a link": ({"a": "1", "last": "->a"}, "Path('last').write_text('2')"),
    "a temporary file is renamed": (
        {"a": "1"},
        "t = tempfile.NamedTemporaryFile(dir='.', delete=False); t.write(b'2'); t.close(); os.replace(t.name, 'a')",
    ),
    "an older file is copied over one": ({"a": "1", "b": "2"}, "shutil.copy2('b', 'a')"),
    "a database is named by a URI": (
        {},
        "c = sqlite3.connect('file:a%20b.db?mode=rwc', uri=True); c.execute('create table t (x)'); c.commit()",
    ),
    "a file that was opened before the first step": ({"a": "1"}, "f.write('2'); f.close()"),
    "a file has the time of an older file": ({"a": "1"}, "shutil.copy2('a', 'b'); open('b', 'a').write('2')"),
    "a database is left with a write-ahead log": (
        {},
        "c = sqlite3.connect('a'); c.execute('pragma journal_mode=wal'); c.execute('create table t (x)'); c.commit(); os._exit(0)",
    ),
}

READS: dict[str, tuple[dict[str, str], str]] = {
    "a file is opened for reading and writing": ({"a": "1"}, "open('a', 'r+b').read()"),
    "a log is opened to be continued": ({"a": "1"}, "open('a', 'a').close()"),
    "a lock file is opened": ({"a": ""}, "os.close(os.open('a', os.O_RDWR | os.O_CREAT))"),
    "the same content is written": ({"a": "1"}, "Path('a').write_text('1')"),
    "a temporary file without a name": ({}, "tempfile.TemporaryFile(dir='.').write(b'2')"),
    "a temporary file with a name": ({}, "tempfile.NamedTemporaryFile(dir='.').write(b'2')"),
    "a temporary folder": ({}, "d = tempfile.mkdtemp(dir='.'); shutil.rmtree(d)"),
    "another job writes into a folder of a new folder": (
        {},
        "os.makedirs('d'); os.system('mkdir d/e; echo 2 > d/e/a')",
    ),
    "another job creates a file that could not be opened": (
        {},
        "\nwith contextlib.suppress(OSError): open('a', 'r+')\nos.system('echo 2 > a'); open('a', 'r+')",
    ),
    "another job creates a file that could not be renamed": (
        {},
        "\nwith contextlib.suppress(OSError): os.rename('b', 'a')\nos.system('echo 2 > a'); open('a', 'r+')",
    ),
}


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"->{path.readlink()}"
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else path.read_bytes().hex()
        for path in folder.rglob("*")
    }


def probe(
    folder: Path, files: dict[str, str], code: str, *limits: int, processes: int = 1, age: float = 60.0
) -> tuple[ScriptAttempt, Path]:
    """Run a script in a folder with these files, of an age in seconds; "->a" is a link."""
    attempt, work = ScriptAttempt(folder / "run", "probe", 1), folder / "work"
    attempt.path.mkdir(parents=True)
    work.mkdir()
    for name, content in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("->"):
            (work / name).symlink_to(content[2:])
        else:
            (work / name).write_text(content)
            os.utime(work / name, (time.time() - age, time.time() - age - len(name)))
    time.sleep(0.02)
    (attempt.path / "plan.json").write_text("{}")
    for _ in range(processes):
        run_process(attempt, work, code, *limits)
    return attempt, work


def run_process(attempt: ScriptAttempt, work: Path, code: str, *limits: int) -> None:
    command = [sys.executable, "-c", SCRIPT + code, str(SHIM), str(attempt.path), str(work), *map(str, limits)]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("age", [60.0, -600.0], ids=["older", "newer"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_undone(tmp_path: Path, name: str, age: float) -> None:
    """A file server's clock, or another job's change, may make existing files newer than the probe."""
    files, code = CHANGES[name]
    opened = "f = open('a', 'a'); " * ("before the first step" in name)
    _, expected = probe(tmp_path / "untouched", files, "")
    attempt, work = probe(tmp_path / "probe", files, opened + RUN + code, age=age)
    assert tree(work) != tree(expected), "the script has written"
    words = move_probe_files(attempt)
    assert tree(work) == tree(expected)
    assert "could not restore" not in words


@pytest.mark.parametrize("name", READS)
def test_what_is_only_opened_is_left_alone_without_a_word(tmp_path: Path, name: str) -> None:
    files, code = READS[name]
    attempt, work = probe(tmp_path, files, RUN + code)
    before = tree(work)
    assert move_probe_files(attempt) == "" and tree(work) == before and not attempt.moved_files_folder.exists()


def test_processes_of_a_node_share_the_copies(tmp_path: Path) -> None:
    attempt, work = probe(
        tmp_path, {"a": "1", "b": "1"}, RUN + "open('a', 'a').write('2'); open('b', 'r+')", processes=3
    )
    assert sorted(path.read_text() for path in (attempt.path / "before").iterdir()) == ["1", "1"]
    move_probe_files(attempt)
    assert tree(work) == {"a": b"1".hex(), "b": b"1".hex()}


def test_a_file_that_another_job_has_open_is_restored_in_place(tmp_path: Path) -> None:
    attempt, work = probe(tmp_path, {"a": "1"}, "")
    with (work / "a").open("a") as of_another_job:
        run_process(attempt, work, RUN + "open('a', 'a').write('2')")
        move_probe_files(attempt)
        of_another_job.write("3")
    assert (work / "a").read_text() == "13"


def test_a_file_that_became_a_link_to_another_leaves_that_one_as_it_is(tmp_path: Path) -> None:
    attempt, work = probe(tmp_path, {"best": "1", "old": "2"}, RUN + "os.link('old', 't'); os.replace('t', 'best')")
    move_probe_files(attempt)
    assert (work / "best").read_text() == "1" and (work / "old").read_text() == "2"


def test_beyond_the_limit_only_what_has_changed_is_reported(tmp_path: Path) -> None:
    files = {"a": "1" * 60, "b": "1" * 60, "c": "1" * 60}
    attempt, work = probe(
        tmp_path, files, RUN + "open('a', 'a').write('2'); open('b', 'r+'); open('c', 'a').write('2')", 100
    )
    words = move_probe_files(attempt)
    assert f"the script changed {work / 'c'}, and tula could not restore" in words and str(work / "b") not in words
    assert (work / "a").read_text() == "1" * 60


def test_what_another_process_of_the_probe_has_created_did_not_exist_before(tmp_path: Path) -> None:
    """On a second node, the journals of the first are not read."""
    attempt, work = probe(tmp_path, {}, RUN + "Path('a').write_text('1'); os.mkdir('d'); Path('d/a').write_text('1')")
    for host in ("", "import socket; socket.gethostname = lambda: 'node2'; "):
        run_process(
            attempt, work, host + RUN + "open('a', 'a').write('2'); os.makedirs('d', exist_ok=True); open('d/a', 'r+')"
        )
    rows = attempt.read_changed_files("node2")
    assert [row["existed"] for row in rows if "path" in row] == [False] * 3
    move_probe_files(attempt)
    assert tree(work) == {}


def test_an_existing_folder_is_not_one_that_the_probe_has_created(tmp_path: Path) -> None:
    opened = "os.makedirs('d', exist_ok=True); "
    attempt, work = probe(tmp_path, {"d/a": "1"}, opened + RUN + opened + "os.system('echo 2 > d/b')")
    assert move_probe_files(attempt) == "" and (work / "d/b").exists(), "another job may have written it"


def test_what_another_process_has_removed_did_exist_before(tmp_path: Path) -> None:
    attempt, work = probe(tmp_path, {"a": "1"}, RUN + "os.remove('a')")
    run_process(
        attempt, work, "import socket; socket.gethostname = lambda: 'node2'; " + RUN + "open('a', 'w').write('2')"
    )
    assert [row["existed"] for row in attempt.read_changed_files("node2") if "path" in row] == [True]
    move_probe_files(attempt)
    assert tree(work) == {"a": b"1".hex()}


def test_a_file_that_was_not_copied_stays_under_its_new_name(tmp_path: Path) -> None:
    attempt, work = probe(
        tmp_path, {"a": "1" * 60}, RUN + "os.replace('a', 'b'); os.replace('b', 'c'); Path('a').write_text('2')", 10
    )
    words = move_probe_files(attempt)
    assert (work / "c").read_text() == "1" * 60 and str(work / "c") in words


WAL = "c = sqlite3.connect('a'); c.execute('pragma journal_mode=wal'); "


@pytest.mark.parametrize("copied", [True, False])
def test_the_log_of_a_database_is_restored_with_it_or_not_at_all(tmp_path: Path, copied: bool) -> None:
    """Rows 1 and 2 are of another job: 1 in the database, 2 in its write-ahead log. Row 3 is the probe's."""
    work = tmp_path / "work"
    setup = f"import sqlite3, os; os.chdir({str(work)!r}); {WAL} c.execute('create table t (x)'); c.execute('insert into t values (1)'); c.commit(); c.execute('pragma wal_checkpoint(truncate)'); c.execute('insert into t values (2)'); c.commit(); os._exit(0)"
    attempt, _ = probe(tmp_path, {}, "")
    subprocess.run([sys.executable, "-c", setup], check=True, timeout=60)
    code = f"{WAL} c.execute('insert into t values (3)'); c.commit(); c.execute('pragma wal_checkpoint(truncate)'); c.execute('insert into t values (4)'); c.commit(); os._exit(0)"
    run_process(attempt, work, RUN + code, *([] if copied else [1]))
    words = move_probe_files(attempt)
    with contextlib.closing(sqlite3.connect(work / "a")) as database:
        rows = [row for (row,) in database.execute("select x from t order by x")]
    assert rows == ([1, 2] if copied else [1, 2, 3, 4])
    assert ("could not restore" in words) is not copied


def test_the_log_of_an_unchanged_database_stays(tmp_path: Path) -> None:
    """It may hold the rows of another job."""
    work = tmp_path / "work"
    attempt, _ = probe(tmp_path, {}, "")
    setup = f"import sqlite3, os; os.chdir({str(work)!r}); {WAL} c.execute('create table t (x)'); c.commit(); c.close()"
    subprocess.run([sys.executable, "-c", setup], check=True, timeout=60)
    run_process(
        attempt, work, RUN + "c = sqlite3.connect('a'); c.execute('insert into t values (2)'); c.commit(); os._exit(0)"
    )
    words = move_probe_files(attempt)
    assert str(work / "a-wal") in words and "could not restore" in words
    with contextlib.closing(sqlite3.connect(work / "a")) as database:
        assert database.execute("select x from t").fetchall() == [(2,)]
