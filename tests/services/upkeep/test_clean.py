"""Files of runs that may be deleted, and those that never are."""

import errno
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from isolation import isolate_environment

from tula_cli.cli import app
from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.queue import SQUEUE_UNREACHABLE_MESSAGE
from tula_cli.errors import NotYours, OtherFormat, Pending, SpecError, TulaError
from tula_cli.host import machine_lock
from tula_cli.run import clean as run_holdings
from tula_cli.run import owner
from tula_cli.run.directory import RunDir
from tula_cli.run.records.results import Cell, Comparison
from tula_cli.services import clean as service
from tula_cli.show.screen import Screen

SIGNATURE = "ab12cd34"
DAY = 86400


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    isolate_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return RunDir.create(tmp_path / "tula-runs", make.spec())


def trained(
    run: RunDir, *samples: int, best: int = 0, over: bool = True, sharded: bool = False, signature: str = SIGNATURE
) -> Path:
    """Add a training with checkpoints, of which the newest is the last one; return their folder."""
    files = run.get_training(signature)
    for count in samples:
        path = files.get_checkpoint_path(count, sharded=sharded)
        (path if sharded else path.parent).mkdir(parents=True, exist_ok=True)
        (path / "0.distcp" if sharded else path).write_bytes(os.urandom(8192))
        if sharded:
            (path / "rest.pt").write_bytes(os.urandom(4096))
    for link, count in (("last", max(samples)), ("best", best)):
        if count:
            (files.path / link).symlink_to(Path("checkpoints") / files.get_checkpoint_path(count, sharded=sharded).name)
    if over:
        run.write_train_result(make.train_result(signature))
    return files.path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name.lstrip("0") for path in folder.iterdir())


def found(run: RunDir, **options: Any) -> service.RunDiskUsage:
    options.setdefault("ask", nobody_asks)
    (item,) = service.measure_runs_disk_usage([run], **options)
    return item


def nobody_asks(ids: Iterable[str]) -> dict[str, SchedulerState]:
    raise AssertionError(f"SLURM was asked about {ids}")


def cleaned(run: RunDir, **options: Any) -> service.CleanResult:
    return service.remove_files([found(run, **options)])


# --- what goes


def test_of_a_finished_training_the_best_and_the_last_stay(run: RunDir) -> None:
    folder = trained(run, 100, 200, 300, 400, best=200)
    item = found(run)
    assert (len(item.holdings), item.size, item.kept, item.final) == (2, 16384, "", ())
    assert item.held >= 4 * 8192
    assert names(folder) == ["100.pt", "200.pt", "300.pt", "400.pt"], "nothing is touched before"
    assert cleaned(run) == service.CleanResult(2, 16384, ())
    assert names(folder) == ["200.pt", "400.pt"]
    assert found(run).holdings == ()
    assert (folder.parent / "best").exists() and (folder.parent / "last").exists()
    assert run.get_training(SIGNATURE).read_result() is not None


def test_what_a_training_that_is_not_over_goes_on_from_stays(run: RunDir) -> None:
    folder = trained(run, 100, 200, 300, 400, best=100, over=False)
    assert cleaned(run, keep_best=True).files == 1
    assert names(folder) == ["100.pt", "300.pt", "400.pt"]


def test_a_training_that_tunes_itself_keeps_what_its_arms_go_back_to(run: RunDir) -> None:
    folder = trained(run, 100, 200, 300, 400, over=False)
    run.write_tuning(make.tuning((make.branch("lbt"),)).model_copy(update={"signature": SIGNATURE}))
    assert cleaned(run).files == 0
    assert len(names(folder)) == 4


@pytest.mark.parametrize("sharded", [False, True])
def test_keep_best_leaves_the_best_weights_to_be_evaluated(run: RunDir, sharded: bool) -> None:
    folder = trained(run, 100, 200, 300, best=200, sharded=sharded)
    assert found(run, keep_best=True).final == (SIGNATURE,)
    cleaned(run, keep_best=True)
    assert names(folder) == ["200.dcp" if sharded else "200.pt"]
    weights = run.get_training(SIGNATURE).find_weights()
    assert weights is not None and weights.exists()
    assert not (folder.parent / "last").is_symlink(), "it would lead nowhere"


def test_without_a_best_the_last_stays(run: RunDir) -> None:
    folder = trained(run, 100, 200)
    assert cleaned(run, keep_best=True).files == 1
    assert names(folder) == ["200.pt"]
    (folder.parent / "last").unlink()
    assert found(run, keep_best=True).holdings == ()


def test_damaged_checkpoints_drafts_and_files_of_probes_go(run: RunDir) -> None:
    folder = trained(run, 100)
    for name in ("damaged-000000000050.pt", "damaged-2-000000000050.pt", ".000000000200.pt.node1.example.org.77"):
        (folder / name).write_bytes(b"x" * 5000)
    for name in ("damaged-000000000060.dcp", ".000000000200.dcp.draft", ".000000000100.dcp.old"):
        (folder / name).mkdir()
        (folder / name / "0.distcp").write_bytes(b"x" * 5000)
    (folder.parent / ".last.123").symlink_to("checkpoints/none")
    for name in ("probe-n001.001/out", "rehearse-7.001/out", "rehearse-7/half", "rates-7/start", "rates-7/sqrt-64"):
        (run.path / "script" / name).mkdir(parents=True)
    (run.path / "script/probe-n001.001/plan.json").write_text("{}")
    item = found(run)
    assert sorted(holding.kind for holding in item.holdings) == ["damaged"] * 3 + ["drafts"] * 4 + ["scratch"] * 3
    cleaned(run)
    assert names(folder) == ["100.pt"]
    assert names(run.path / "script") == ["probe-n001.001", "rates-7", "rehearse-7.001"]
    assert names(run.path / "script/rates-7") == ["start"]  # without it the search would train up to it once more
    assert (run.path / "script/probe-n001.001/plan.json").exists()


def test_trainings_of_a_comparison_go_where_that_is_asked_and_they_are_over(run: RunDir) -> None:
    folders = [trained(run, 100, 200, best=100, signature=name, over=name != "c") for name in ("a", "b", "c")]
    cells = tuple(Cell(method="lbt", batch=64, seed=seed, nodes=1, signature=name) for seed, name in enumerate("ac"))
    run.write_comparison(
        Comparison(methods=("lbt",), batches=(64,), seeds=2, nodes=1, controls=False, cells=cells, created_at=0)
    )
    assert found(run).holdings == ()
    assert found(run, compared=True).compared == ("a",)
    cleaned(run, compared=True)
    assert [names(folder) for folder in folders] == [[], ["100.pt", "200.pt"], ["100.pt", "200.pt"]]
    assert not (folders[0].parent / "best").is_symlink()
    assert run.get_training("a").read_result() is not None


def test_a_run_with_node_types_inside_is_left_as_it_is(run: RunDir) -> None:
    (run.path / "types").mkdir()
    folder = trained(run, 100, 200, 300, best=300)
    (space,) = service.measure_runs_disk_usage([run])
    assert space.holdings == () and "makes separate runs" in space.kept
    assert names(folder) == ["100.pt", "200.pt", "300.pt"]


# --- what never goes


def test_names_that_tula_did_not_give_stay(run: RunDir, tmp_path: Path) -> None:
    folder = trained(run, 100, 200, best=200)
    theirs = ("my-backup.pt", "100.pt", "000000000100.pt.bak", "damaged-mine.pt", ".000000000100.pt.swp", "notes.txt")
    for name in theirs:
        (folder / name).write_text("mine")
    cleaned(run, keep_best=True)
    assert set(os.listdir(folder)) == {*theirs, "000000000200.pt"}


def test_no_link_is_followed(run: RunDir, tmp_path: Path) -> None:
    folder = trained(run, 300, best=300)
    away = tmp_path / "away"
    (away / "000000000100.dcp").mkdir(parents=True)
    (away / "000000000100.dcp/0.distcp").write_text("mine")
    (away / "000000000100.pt").write_text("mine")
    before = sorted(away.rglob("*"))
    for name in ("000000000100.dcp", "000000000100.pt"):
        (folder / name).symlink_to(away / name)
    (folder / "damaged-000000000050.dcp").symlink_to(away)
    (folder / "000000000200.dcp").mkdir()
    (folder / "000000000200.dcp/0.distcp").symlink_to(away / "000000000100.pt")
    (run.path / "train/cd34ab12").symlink_to(away)
    (run.path / "train/linked").mkdir()
    (run.path / "train/linked/checkpoints").symlink_to(away)
    assert [holding.path.name for holding in found(run).holdings] == ["000000000200.dcp"]
    cleaned(run)
    assert sorted(away.rglob("*")) == before
    assert (folder / "damaged-000000000050.dcp").is_symlink()


@pytest.mark.promise(
    "the command line",
    "`tula clean` is interrupted or killed",
    "no incomplete checkpoint keeps the name of a complete one. Run the same command again to continue",
)
def test_interrupted_anywhere_it_goes_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(run, 100, 200, 300, best=300, sharded=True)
    drop = run_holdings._remove_folder

    def killed(path: Path) -> None:
        (path / "0.distcp").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_holdings, "_remove_folder", killed)
    with pytest.raises(KeyboardInterrupt):
        cleaned(run)
    monkeypatch.setattr(run_holdings, "_remove_folder", drop)
    assert [path.name for path in run.get_training(SIGNATURE).list_checkpoints()] == [
        "000000000300.dcp",
        "000000000200.dcp",
    ]
    assert not (run.path / "lock").exists()
    assert cleaned(run).files == 2
    assert names(folder) == ["300.dcp"]


def test_a_folder_that_cannot_be_removed_is_reported_and_the_others_go(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run, 100, 200, 300, best=300, sharded=True)
    other = RunDir.create(run.path.parent, make.spec(name="other"))
    trained(other, 100, 200)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(run_holdings, "_remove_folder", refuse)
    done = service.remove_files(service.measure_runs_disk_usage([run, other]))
    assert done.files == 1
    assert len(done.problems) == 1 and "Permission denied" in done.problems[0]


# --- who still works


def slurm_job(run: RunDir, *, at: float = make.START) -> str:
    name = make.add_training(run, signature=SIGNATURE)
    run.write_job(make.scheduler_job(name, scheduler="slurm", at=at).model_copy(update={"links": ("11", "12")}))
    return name


def says(**states: str) -> Callable[[Iterable[str]], dict[str, SchedulerState]]:
    answers = {id_.strip("j"): SchedulerState(state, "why") for id_, state in states.items()}  # type: ignore[arg-type]
    return lambda ids: {id_: answers[id_] for id_ in ids if id_ in answers}


@pytest.mark.promise(
    "the command line",
    "`tula clean` finds a run with a running job, or SLURM does not answer",
    "nothing of that run is deleted",
)
@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (says(j11="ended", j12="pending"), "is pending"),
        (says(j11="running"), "is running"),
        (says(j11="unknown", j12="unknown"), "may be running: SLURM does not answer"),
        (says(j11="ended", j12="ended"), ""),
        (says(), ""),
    ],
)
def test_a_run_with_a_job_that_may_live_is_left_as_it_is(run: RunDir, ask: service.StateQuery, why: str) -> None:
    folder = trained(run, 100, 200, 300, best=100)
    name = slurm_job(run)
    item = found(run, ask=ask)
    assert (bool(item.kept), bool(item.holdings)) == (bool(why), not why)
    assert item.kept.startswith(f"{name} {why}" if why else "")
    service.remove_files([item])
    assert len(names(folder)) == (3 if why else 2)


def test_where_squeue_cannot_be_asked_jobs_count_as_live(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run, 100, 200, 300)
    slurm_job(run)
    monkeypatch.setenv("PATH", str(run.path))
    item = found(run, ask=scheduler.query_states)
    assert item.holdings == () and SQUEUE_UNREACHABLE_MESSAGE in item.kept


def test_a_job_that_was_just_submitted_counts_as_live(run: RunDir) -> None:
    trained(run, 100, 200, 300)
    slurm_job(run, at=time.time() - 60)
    assert "just submitted" in found(run, ask=says()).kept


def test_slurm_is_asked_once_for_all_runs_and_only_where_something_may_go(run: RunDir) -> None:
    other = RunDir.create(run.path.parent, make.spec(name="other"))
    nothing = RunDir.create(run.path.parent, make.spec(name="nothing"))
    requested: list[list[str]] = []
    for item in (run, other, nothing):
        trained(item, *((100, 200) if item is not nothing else (100,)))
        slurm_job(item)

    def ask(ids: Iterable[str]) -> dict[str, SchedulerState]:
        requested.append(list(ids))
        return {}

    service.measure_runs_disk_usage([run, other, nothing], ask=ask)
    assert requested == [["11", "12", "11", "12"]]


def test_a_job_on_this_machine_and_the_lock_of_the_machine_hold_a_run(run: RunDir) -> None:
    from tula_cli.host.processes import read_start_time

    trained(run, 100, 200, 300)
    name = make.add_training(run, signature=SIGNATURE)
    pid = os.getpid()
    alive = {"scheduler_id": str(pid), "process_started": read_start_time(pid)}
    run.write_job(make.scheduler_job(name).model_copy(update=alive))
    assert "is pending" in found(run).kept
    run.write_job(make.scheduler_job(name))
    assert found(run).kept == ""
    ticket = machine_lock.TicketHolder(f"{name} of {run.path.resolve()}", ["core 0"], measures=False)
    assert found(run).kept == f"job {name} is running or waiting on this machine"
    ticket.close()
    assert found(run).kept == ""


def test_a_job_whose_record_is_damaged_holds_a_run(run: RunDir) -> None:
    trained(run, 100, 200, 300)
    (run.path / "jobs").mkdir()
    (run.path / "jobs/x.json").write_text("{")
    assert "unknown whether the job of that file is running" in found(run).kept


def list_also_a_removed_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the listing of a folder contain a draft that is renamed before its status is read."""
    draft = folder / ".a.json.draft"
    draft.touch()
    entries, scandir = list(os.scandir(folder)), os.scandir
    draft.unlink()

    class Listing(list[os.DirEntry[str]]):
        def __enter__(self) -> list[os.DirEntry[str]]:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", lambda path: Listing(entries) if path == folder else scandir(path))


def test_a_draft_that_is_renamed_while_its_folder_is_listed_hides_no_other_entry(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(run, 100, 200, 300, 400, best=200)
    list_also_a_removed_draft(folder, monkeypatch)
    item = found(run)
    assert len(item.holdings) == 2
    slurm_job(run)
    list_also_a_removed_draft(run.path / "jobs", monkeypatch)
    with pytest.raises(TulaError, match="was submitted for this run in the meantime"):
        service.remove_files([item])


def test_what_was_submitted_since_the_look_is_left(run: RunDir) -> None:
    folder = trained(run, 100, 200, 300)
    item = found(run)
    slurm_job(run)
    with pytest.raises(TulaError, match="was submitted for this run in the meantime"):
        service.remove_files([item])
    assert len(names(folder)) == 3 and not (run.path / "lock").exists()
    item = found(run, ask=says())
    assert run.lock.acquire() == ""
    with pytest.raises(TulaError, match="another tula command"):
        service.remove_files([item])
    (run.path / "lock/owner").write_text("a-machine:1\n")
    os.utime(run.path / "lock", (0, 0))
    assert service.remove_files([item]).files == 2, "of a command that was killed an hour ago"


# --- the command


def tula(*words: str) -> tuple[int, str, str]:
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    code = app.run(["clean", *words], screen=screen)
    return code, screen.out.getvalue(), screen.err.getvalue()  # type: ignore[attr-defined]


def test_a_dry_run_shows_the_sizes_by_run_and_kind_and_touches_nothing(run: RunDir) -> None:
    folder = trained(run, 100, 200, 300, best=200)
    (folder / "damaged-000000000050.pt").write_bytes(b"x" * 4000)
    code, out, _ = tula("--dry-run", "--keep", "best")
    assert code == 0
    (first,) = (line for line in out.splitlines() if line.startswith(f"{run.id} "))
    assert first.split()[-5:] == ["older", "checkpoints", "2", "0.0156", "MiB"]
    assert "damaged checkpoints" in out
    assert f"training {SIGNATURE} cannot be resumed afterwards; the best weights are kept" in out
    assert len(names(folder)) == 4


def test_it_asks_on_a_terminal_and_is_refused_without_one(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(run, 100, 200, 300, best=200)
    code, _, err = tula()
    assert (code, len(names(folder))) == (SpecError.exit_code, 3)
    assert "nothing was deleted" in err and "--yes" in err

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert tula()[:2] == (0, "nothing was deleted\n")
    assert len(names(folder)) == 3
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    code, out, err = tula()
    assert "delete these files? [y/N]" in err and out.startswith("freed 0.00781 MiB in 1 file or folder")
    assert names(folder) == ["200.pt", "300.pt"]


def test_files_that_cannot_be_deleted_are_an_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run, 100, 200, 300, best=200)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(run_holdings, "remove_entry", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    code, out, err = tula("--yes")
    assert (code, out) == (14, "") and f"cannot delete the files: {run.id}: cannot write" in err


def test_files_that_could_not_all_be_deleted_are_named_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run, 100, 200, 300, best=200)
    result = service.CleanResult(1, 4096, (f"{run.id}: cannot write",))
    monkeypatch.setattr(service, "remove_files", lambda _: result)
    code, out, err = tula("--yes")
    assert code == 0 and out == "freed 0.00391 MiB in 1 file or folder\n"
    assert err.count(f"cannot delete all files of {run.id}: cannot write") == 1


def test_json_tells_what_was_freed(run: RunDir) -> None:
    trained(run, 100, 200, 300, best=200)
    code, out, _ = tula("--yes", "--json")
    data = json.loads(out)["data"]
    assert (code, data["size"], data["freed"]["size"], data["freed"]["files"]) == (0, 8192, 8192, 1)
    assert data["runs"][0]["holdings"][0]["kind"] == "checkpoints"
    assert json.loads(tula("--json")[1])["data"]["freed"] is None, "nothing is left, so nobody is asked"


def test_older_runs_alone(run: RunDir) -> None:
    trained(run, 100, 200, 300)
    assert "all runs have changed since then" in tula("--older", "30d", "--dry-run")[1]
    for path in (run.path, *run.path.rglob("*")):
        os.utime(path, (time.time() - 31 * DAY,) * 2, follow_symlinks=False)
    assert "older checkpoints" in tula("--older", "30d", "--dry-run")[1]
    assert tula("--older", "old")[0] == SpecError.exit_code


def test_a_run_that_is_named_and_must_stay_is_an_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run, 100, 200, 300)
    slurm_job(run)
    monkeypatch.setenv("PATH", str(run.path))  # without squeue
    code, _, err = tula(run.id, "--yes")
    assert code == Pending.exit_code and "SLURM does not answer" in err and "nothing was deleted" in err
    assert tula("--yes")[0] == 0, "of all runs it is left out"
    assert tula("nowhere")[0] == SpecError.exit_code
    (run.path / "format").write_text("9 tula 9.0\n")
    assert tula(run.id, "--yes")[0] == OtherFormat.exit_code
    assert f"{run.id} is skipped: the run" in tula("--dry-run")[1]


def test_another_users_run_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(run, 100, 200, 300)
    monkeypatch.setattr(owner, "find_other_owner", lambda path: "ada")
    code, _, err = tula(run.id, "--yes")
    assert code == NotYours.exit_code == 15 and "belongs to ada: you may not change it" in err
    code, out, err = tula("--yes")
    assert (code, out) == (0, "there are no runs in tula-runs\n") and "1 of 1 runs belong to other users" in err
    assert len(names(folder)) == 3
