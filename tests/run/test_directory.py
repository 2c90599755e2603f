import errno
import json
import os
import re
import socket
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import make_runs as make
import pytest

from tula_cli.errors import CannotWrite, RunGone, SpecError, TulaError
from tula_cli.query import Query
from tula_cli.run import files
from tula_cli.run.directory import RunDir
from tula_cli.run.files import write_file_atomically
from tula_cli.run.records.recommendations import QueryLimits
from tula_cli.run.records.results import ScriptCheckpointSave, ScriptSaves
from tula_cli.run.records.tasks import make_probe_id
from tula_cli.run.snapshot import has_run_moved, is_of_another_run


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "tula-runs", make.spec())


@pytest.fixture
def full_disk():
    """A file system of a few pages."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            pytest.skip("cannot mount a small tmpfs here (not root?); the failing fsync is tested all the same")
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)


# --- writing


def test_replaces_the_file_whole(tmp_path):
    write_file_atomically(tmp_path / "a" / "file", "first, and longer")
    write_file_atomically(tmp_path / "a" / "file", "second")
    assert (tmp_path / "a" / "file").read_text() == "second"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


@pytest.mark.promise("the file system", "the disk is full while a file is replaced", "the old file remains unchanged")
def test_a_full_disk_leaves_the_old_file(full_disk):
    write_file_atomically(full_disk / "file", "old")
    with pytest.raises(TulaError, match="No space left") as caught:
        write_file_atomically(full_disk / "file", b"x" * 100_000)
    assert "free some space" in caught.value.hint
    assert (full_disk / "file").read_text() == "old"
    assert [path.name for path in full_disk.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_fsync_leaves_the_old_file(tmp_path, monkeypatch, number):
    write_file_atomically(tmp_path / "file", "old")

    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TulaError, match=os.strerror(number)) as caught:
        write_file_atomically(tmp_path / "file", "new")
    assert caught.value.exit_code == (14 if number == errno.EIO else 13)
    assert ("free some space" in caught.value.hint) == (number != errno.EIO)
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(TulaError, match="cannot write"):
        RunDir.create(tmp_path / "taken", make.spec())


# --- the lock


def test_only_one_process_submits(run):
    assert run.lock.acquire() == ""
    assert run.lock.acquire() == f"{socket.gethostname()}:{os.getpid()}"
    run.lock.release()
    assert run.lock.acquire() == ""


def test_the_lock_of_a_process_that_has_ended_is_taken_over(run):
    ended = subprocess.Popen(["true"])
    ended.wait()
    (run.path / "lock").mkdir()
    (run.path / "lock/owner").write_text(f"{socket.gethostname()}:{ended.pid}\n")
    assert run.lock.acquire() != "", "the next look takes it"
    assert run.lock.acquire() == ""


def test_a_lock_whose_owner_had_no_time_to_write_its_name_is_respected_until_it_is_old(run):
    (run.path / "lock").mkdir()
    assert [run.lock.acquire(), run.lock.acquire()] == ["another process"] * 2
    os.utime(run.path / "lock", (0, 0))
    run.lock.acquire()
    assert run.lock.acquire() == ""


@pytest.mark.promise(
    "the command line",
    "a command runs on a machine whose clock is minutes ahead while another command submits jobs of the run",
    "it waits for the other command, because tula measures the age of a lock by the clock of the file system",
)
def test_a_lock_is_not_old_because_this_machines_clock_is_ahead(run, monkeypatch):
    real = time.time
    (run.path / "lock").mkdir()
    (run.path / "lock/owner").write_text("elsewhere:1\n")
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    assert [run.lock.acquire(), run.lock.acquire()] == ["elsewhere:1"] * 2
    assert not list(run.path.glob(".clock*"))


def test_an_old_lock_whose_pid_another_process_has_by_now_is_taken_over(run):
    assert run.lock.acquire() == ""
    run.lock.acquire()
    assert run.lock.acquire() != ""
    os.utime(run.path / "lock", (0, 0))
    assert run.lock.acquire() != "", "the next look takes it"
    assert run.lock.acquire() == ""


def test_a_lock_that_was_taken_over_is_not_given_back_by_its_first_owner(run):
    assert run.lock.acquire() == ""
    (run.path / "lock/owner").write_text("elsewhere:1\n")
    run.lock.release()
    assert run.lock.acquire() == "elsewhere:1"


def test_a_lock_in_a_folder_that_is_a_file_is_an_error_of_its_own(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(TulaError, match="cannot write"):
        RunDir(tmp_path / "taken").lock.acquire()


# --- which run


def test_create_is_open_again(tmp_path):
    first = RunDir.create(tmp_path, make.spec())
    make.add_measured(first, 1, 32)
    again = RunDir.create(tmp_path, make.spec(pricing={"price": 9.0}))
    assert again.id == first.id
    assert again.read_spec().pricing.price == 9.0
    assert len(again.read_results()) == 1
    assert RunDir.create(tmp_path, make.spec(model={"name": "resnet34"})).id != first.id


def test_only_the_owner_reads_a_run(run):
    assert run.path.stat().st_mode & 0o077 == 0


def test_newest_is_the_last_one_used(tmp_path):
    first = RunDir.create(tmp_path, make.spec(name="first"))
    RunDir.create(tmp_path, make.spec(name="second"))
    assert RunDir.find_newest(tmp_path).id.startswith("second")
    RunDir.create(tmp_path, make.spec(name="first"))
    assert RunDir.find_newest(tmp_path).id == first.id


@pytest.mark.parametrize("pointer", [None, "", "gone-12345678\n", "\0" * 16])
def test_newest_without_a_pointer_that_points_anywhere(tmp_path, pointer):
    first, second = (RunDir.create(tmp_path, make.spec(name=name)) for name in ("first", "second"))
    os.utime(second.path / "spec.yaml", (1, 1))
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert RunDir.find_newest(tmp_path).id == first.id
    assert [run.id for run in RunDir.list_all(tmp_path)] == [first.id, second.id]


def test_no_run_at_all(tmp_path):
    with pytest.raises(SpecError, match="no run under"):
        RunDir.find_newest(tmp_path / "nothing")
    assert RunDir.list_all(tmp_path / "nothing") == []


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(SpecError, match="is not a run"):
        RunDir.open(tmp_path)
    with pytest.raises(SpecError, match="there is no run"):
        RunDir.open(tmp_path / "nothing")


def test_a_run_named_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(Path("tula-runs"), make.spec())
    make.add_measured(run, 1, 32)
    make.add_probes(run, 1, (32,))
    assert [result.local_batch for result in run.read_results()] == [32]
    assert [job.id for job in RunDir.open(Path("tula-runs") / run.id).read_jobs()] == ["probe-n001"]


# --- reading


def test_what_is_not_there_is_none(run):
    assert run.read_result(make_probe_id(1, 32)) is None
    assert run.read_recommendation() is None
    assert run.get_training("ab12cd34").read_result() is None
    assert (
        run.read_results()
        == run.read_jobs()
        == run.read_tasks()
        == run.read_attempts()
        == run.read_failures("t")
        == run.list_logs()
        == []
    )
    assert (
        run.get_training("ab12cd34").read_metrics()
        == run.get_training("ab12cd34").list_checkpoints()
        == run.list_train_signatures()
        == []
    )


def test_entries_that_are_removed_while_they_are_listed(run, monkeypatch):
    """`tula clean` may remove an entry between its listing and the reading of its time."""

    def exists_until_now(path):
        exists = path.exists()
        if "gone" in path.name:
            path.rename(path.with_name("a"))
        return exists

    for folder in ("train/ab12cd34", "train/gone", "train/ab12cd34/out", "train/ab12cd34/out-gone", "logs"):
        (run.path / folder).mkdir(parents=True)
    for log in ("a.001.log", "gone.001.log"):
        (run.path / "logs" / log).touch()
    monkeypatch.setattr(Path, "is_dir", exists_until_now)
    monkeypatch.setattr(Path, "is_file", exists_until_now)
    assert run.list_train_signatures() == ["ab12cd34", "gone"]
    assert [log.name for log in run.list_logs()] == ["gone.001.log", "a.001.log"]
    assert run.get_training("ab12cd34").find_script_output() == run.path / "train/ab12cd34/out"


def test_reads_what_was_written(run):
    make.add_measured(run, 2, 64)
    make.add_out_of_memory(run, 2, 128)
    make.add_failed(run, 1, 32)
    kinds = [(result.nodes, result.local_batch, result.kind) for result in run.read_results()]
    assert kinds == [(1, 32, "failed"), (2, 64, "measured"), (2, 128, "out_of_memory")]
    run.write_recommendation(make.recommendation())
    assert run.read_recommendation() == make.recommendation()


@pytest.mark.parametrize(
    "content", [b"", b'{"kind": "measured", "id"', b"[]", b'{"kind": "measured"}', b"\xff\xfe", b"null"]
)
def test_a_damaged_file_is_named(run, content):
    make.add_measured(run, 1, 32)
    path = run.path / "results" / f"{make_probe_id(1, 32)}.json"
    path.write_bytes(content)
    (error,) = run.read_snapshot().damaged_results
    assert str(path) in error.message
    assert error.hint == "run tula profile, which measures it again"
    assert run.read_results() == [] and run.read_result(path.stem) is None


def test_a_draft_of_another_writer_is_not_read(run):
    make.add_measured(run, 1, 32)
    (run.path / "results" / f".{make_probe_id(1, 64)}.json.host.12").write_text("{")
    assert len(run.read_results()) == 1


def test_a_recommendation_of_an_older_version_is_read_without_what_was_removed(run):
    """`--what-if`, `--with-run` and `--objective result-time` left fields that are ignored; a choice by result-time counts as by time."""
    written = make.recommendation(objective="time").model_dump(mode="json")
    removed = {"with_runs": ["/runs/a"], "what_if": None, "queue": ["bounds of 90 %"]}
    row = {**written["choice"], "what_if": False, "result_time": {"minutes": 60, "links": 3, "wait": 1.0, "hours": 4.0}}
    older = {**written, **removed, "objective": "result-time", "choice": row}
    (run.path / "recommendation.json").write_text(json.dumps(older))
    assert run.read_recommendation() == make.recommendation(objective="time")


def test_the_limits_of_a_recommendation_that_has_only_options_as_typed_are_read_from_these(run):
    options = ("--max-nodes 4", "--deadline 90m", "--min-efficiency 0.5", "--budget 7.5")
    written = make.recommendation(options=options).model_dump(mode="json")
    del written["limits"]
    (run.path / "recommendation.json").write_text(json.dumps(written))
    expected = QueryLimits(max_nodes=4, deadline_hours=1.5, min_efficiency=0.5, budget=7.5)
    assert run.read_recommendation().limits == expected
    query = Query(max_nodes=4, deadline_hours=1.5, min_efficiency=0.5, budget=7.5)
    assert QueryLimits.from_query(query) == expected


def test_a_newer_record_is_read_by_an_older_tula(run):
    make.add_out_of_memory(run, 1, 32)
    path = run.path / "results" / f"{make_probe_id(1, 32)}.json"
    path.write_text(path.read_text().replace("{", '{"from the future": 1,', 1))
    assert run.read_results()[0].kind == "out_of_memory"


def test_a_row_that_is_still_being_written_is_left_out(run):
    make.add_training(run, rows=make.metrics())
    with open(run.get_training("ab12cd34").metrics_path, "a") as file:
        file.write('{"kind": "step", "ti')
    assert len(run.get_training("ab12cd34").read_metrics()) == len(make.metrics())


def test_newest_checkpoint_first(run):
    for samples in (500, 12_000, 3_000):
        write_file_atomically(run.get_training("ab12cd34").get_checkpoint_path(samples), b"")
    assert [int(path.stem) for path in run.get_training("ab12cd34").list_checkpoints()] == [12_000, 3_000, 500]


@pytest.mark.parametrize(
    "name", ["my-backup.pt", "best-copy.pt", "7.pt", "000000012000-copy.pt", ".000000012000.pt.swp"]
)
def test_a_file_that_tula_did_not_name_is_no_checkpoint(run, name):
    path = run.get_training("ab12cd34").get_checkpoint_path(500)
    for file in (path, path.with_name(name)):
        write_file_atomically(file, b"")
    run.get_training("ab12cd34").drop_drafts()
    assert (
        run.get_training("ab12cd34").list_checkpoints() == [path]
        and run.get_training("ab12cd34").find_newest_checkpoint_samples() == 500
    )
    assert path.with_name(name).exists()


def test_a_draft_that_was_left_behind_is_dropped(run):
    draft = run.get_training("ab12cd34").get_checkpoint_path(500).with_name(".000000000500.pt.node1.example.org.4711")
    write_file_atomically(draft, b"")
    run.get_training("ab12cd34").drop_drafts()
    assert not draft.exists()


def test_a_training_has_diverged_if_its_newest_attempt_did(run):
    for task in ("train-ab12cd34-1", "train-ab12cd35-1"):
        run.write_attempt(make.attempt(task, start=1.0, end=2.0, outcome="diverged"))
    assert run.get_training("ab12cd34").find_diverged_attempt().task == "train-ab12cd34-1"
    run.write_attempt(make.attempt("train-ab12cd34-1", number=2, start=3.0))
    assert (
        run.get_training("ab12cd34").find_diverged_attempt()
        is run.get_training("00000000").find_diverged_attempt()
        is None
    )


def test_a_mark_of_cancelling_comes_and_goes(run):
    assert not run.is_cancelled("probe-n001")
    run.mark_job_cancelled("probe-n001")
    assert run.is_cancelled("probe-n001")
    assert run.read_jobs() == []
    run.remove_cancellation("probe-n001")
    assert not run.is_cancelled("probe-n001")


def test_a_small_file_is_read_with_little_memory(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text("{}")
    tracemalloc.start()
    try:
        assert files.read_content(tmp_path / "small.json") == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "plant", [Path.symlink_to, Path.hardlink_to, lambda link, _: os.mkfifo(link)], ids=["sym", "hard", "pipe"]
)
@pytest.mark.promise(
    "the run directory", "another user creates a symbolic link in the run", "nothing is written through the link"
)
def test_nothing_is_written_through_a_planted_link(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    value = tmp_path / "own.txt"
    value.write_text("the user's\n")
    plant(tmp_path / "metrics.jsonl", value)
    for add in (lambda path: files.append_json_line(path, {}), files.open_file_to_append):
        with pytest.raises(CannotWrite, match=r"cannot append to .*metrics\.jsonl: it is a link"):
            add(tmp_path / "metrics.jsonl")
    draft = tmp_path / f".spec.yaml.{socket.gethostname()}.{os.getpid()}"
    plant(draft, value)
    files.write_file_atomically(tmp_path / "spec.yaml", "name: x\n")
    assert value.read_text() == "the user's\n" and not draft.exists()
    assert not (tmp_path / "spec.yaml").is_symlink() and (tmp_path / "spec.yaml").read_text() == "name: x\n"


@pytest.fixture
def held(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(files._PinnedRun, "path", None)
    monkeypatch.setattr(files._PinnedRun, "inode", 0)
    files.pin_run(run.path)
    return run


@pytest.mark.parametrize("another", [False, True], ids=["nothing is there", "another run is"])
@pytest.mark.parametrize(
    "write",
    [
        lambda path: files.write_file_atomically(path / "a" / "b.json", "{}"),
        lambda path: files.append_json_line(path / "a" / "metrics.jsonl", {}),
        lambda path: files.open_file_to_append(path / "a" / "log"),
    ],
    ids=["whole", "a row", "a log"],
)
@pytest.mark.promise("the run directory", "the run is deleted while a job runs", "the job does not create it again")
def test_nothing_grows_where_a_run_was(held: RunDir, write: Callable[[Path], object], *, another: bool) -> None:
    write(held.path)
    held.path.rename(held.path.with_name("moved"))
    if another:
        held.path.mkdir()
    for place in (held.path, held.path / "types" / "x"):
        with pytest.raises(RunGone, match="moved or removed"):
            write(place)
    assert files.is_pinned_run_gone(held.path) and held.path.exists() == another
    assert not another or not any(held.path.iterdir())
    write(held.path.with_name("elsewhere"))


def test_a_run_that_is_not_there_cannot_be_held(tmp_path: Path) -> None:
    with pytest.raises(RunGone):
        files.pin_run(tmp_path / "x")


@pytest.mark.parametrize("beside", ["tula-runs", "shared/deep/tula-runs"])
def test_folders_that_hold_runs_are_private_where_tula_makes_them(tmp_path, beside):
    before = os.umask(0o022)
    try:
        RunDir.create(tmp_path / beside, make.spec())
    finally:
        os.umask(before)
    outermost = tmp_path / beside.split("/")[0]
    made = [outermost, *(path for path in outermost.rglob("*") if path.parent in (outermost, tmp_path / beside))]
    assert {str(path) for path in made if path.stat().st_mode & 0o077} == set()


def test_a_shared_folder_of_runs_keeps_its_permissions(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    RunDir.create(tmp_path / "shared", make.spec())
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o775


@pytest.mark.parametrize("energy", ["NaN", "-Infinity", "1e999", "1e300"])
def test_a_number_that_no_measurement_has_is_damage(run, energy):
    make.add_measured(run, 1, 32)
    path = run.path / "results" / f"{make_probe_id(1, 32)}.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "energy": 0}).replace('"energy": 0', f'"energy": {energy}'))
    (error,) = run.read_snapshot().damaged_results
    assert re.search(r"is damaged: .* is not a valid number", error.message) and run.read_results() == []
    path.write_text(json.dumps({**content, "extra": ": NaN, 1e999"}))  # a text, and a key of a newer version
    assert len(run.read_results()) == 1


def test_a_job_in_a_folder_that_cannot_be_looked_into_counts_as_moved(run):
    long = "x" * 300
    job = make.scheduler_job(long).model_copy(update={"folder": f"/{long}"})
    assert has_run_moved(job, run.path) and not is_of_another_run(job, run.path)


@pytest.mark.parametrize(
    ("key", "value"), [("step_times", []), ("step_times", [0.1, 0.0]), ("capacity", 0), ("nodes", 0), ("batch", -8)]
)
def test_a_probe_without_steps_nodes_or_memory_is_damaged(run, key, value):
    make.add_measured(run, 1, 32)
    path = run.path / "results" / f"{make_probe_id(1, 32)}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    (error,) = run.read_snapshot().damaged_results
    assert "is damaged" in error.message and run.read_results() == []


def test_checkpoints_of_the_training_that_saved_last_are_the_newest_of_a_batch(run):
    def save(signature, *moments, batch=8):
        saves = [ScriptCheckpointSave(saved_at=at, batch=batch, steps=10, samples=80, seconds=1.0) for at in moments]
        run.get_training(signature).write_script_saves(ScriptSaves(saves=saves))

    assert run.find_newest_script_saves() == ()
    save("first", 1.0, 40.0)
    save("second", 30.0, 31.0, 32.0)
    save("third")
    assert [save.saved_at for save in run.find_newest_script_saves()] == [1.0, 40.0]
    save("fourth", 35.0, batch=16)
    assert [save.saved_at for save in run.find_newest_script_saves()] == [35.0, 1.0, 40.0]
