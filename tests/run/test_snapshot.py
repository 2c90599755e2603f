import shutil
from pathlib import Path

import make_runs as make
import pytest
import status as benchmark

from tula_cli.cluster.scheduler import SchedulerState
from tula_cli.cluster.slurm import queue, submit
from tula_cli.run import files
from tula_cli.run.directory import RunDir
from tula_cli.services import run_list
from tula_cli.services import status as services_status


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "tula-runs", make.spec())


def test_one_look_at_many_ended_slurm_jobs_reads_each_file_at_most_once(tmp_path, monkeypatch):
    run = benchmark.make_run(tmp_path, 66)
    monkeypatch.setattr(queue, "query_states", lambda ids: {id_: SchedulerState("ended") for id_ in ids})
    with benchmark.count_reads() as reads:
        status = services_status.read_run_status(run, submit.SlurmLauncher(), now=benchmark.START + 999)
    assert [job.state for job in status.jobs] == ["done"] * 66
    assert len(reads) == len(set(reads))
    missing = {path for path in reads if not path.exists()}
    assert len(missing) < 66 + 9  # a file a job, and some of the run


def test_a_list_of_runs_reads_each_file_at_most_once(run):
    make.add_training(run, rows=make.metrics())
    run.write_train_result(make.train_result())
    make.add_measured(run, 1, 32)
    with benchmark.count_reads() as reads:
        (line,) = run_list.list_runs(run.path.parent)
    assert (line.measured, line.trained) == (1, 1)
    assert len(reads) == len(set(reads))


def test_what_was_read_does_not_change_within_a_look(run):
    job = make.add_training(run, rows=make.metrics())
    look = run.read_snapshot()
    assert [task.job for task in look.tasks] == [job] and look.get_training("ab12cd34").read_result() is None
    run.write_train_result(make.train_result())
    assert look.get_training("ab12cd34").read_result() is None
    assert run.read_snapshot().get_training("ab12cd34").read_result() == make.train_result()


def test_attempts_are_found_by_their_job_over_all_its_tasks(run):
    name = make.add_training(run)
    task = run.read_task(f"{name}-1")
    run.write_task(task.model_copy(update={"id": f"{name}-2", "attempt": 2}))
    run.write_attempt(make.attempt(f"{name}-2", start=make.START + 20))
    run.write_attempt(make.attempt(f"{name}-1", start=make.START + 10))
    look = run.read_snapshot()
    assert [attempt.task for attempt in look.list_attempts_of_job(name)] == [f"{name}-1", f"{name}-2"]
    assert [attempt.task for attempt in look.list_attempts_of_job(name, since=make.START + 15)] == [f"{name}-2"]
    assert look.list_attempts_of_job("another") == []


@pytest.mark.promise("the run directory", "a result is damaged", "its file is named, and the other results are shown")
def test_a_damaged_result_is_reported_beside_the_others(run):
    make.add_measured(run, 1, 32)
    (run.path / "results" / "probe-n001-l000064.json").write_text("{")
    look = run.read_snapshot()
    assert [result.local_batch for result in look.results] == [32]
    assert "is damaged" in look.damaged_results[0].message
    assert run.read_results() == look.results


MOVE = (
    "restore it from a copy of the run. If there is no copy, move it to another folder and run the same command again"
)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("results/probe-n001-l000064.json", "run tula profile, which measures it again"),
        ("recommendation.json", "run tula recommend, which writes it again"),
        ("attempts/train-1.001.json", MOVE),
        ("results/tula-runs/a/tasks/1.json", MOVE),
    ],
)
def test_the_hint_of_a_damaged_file_names_the_command_that_writes_it(name, hint):
    assert files.make_damaged_error(Path("run") / name, "it is not text").hint == hint


@pytest.mark.promise(
    "the run directory", "the metrics of a training are damaged", "the file is named, and the readable part is shown"
)
def test_a_damaged_curve_is_reported_and_one_that_a_kill_has_cut_off_is_not(run):
    make.add_training(run, rows=make.metrics())
    path = run.get_training("ab12cd34").metrics_path
    rows = path.read_bytes()
    for normal in (rows, rows[:-9], rows + b'{"kind": "st\0\0\0\0', rows + b"\0" * 99):
        path.write_bytes(normal)
        assert run.read_snapshot().training_warnings == []
    torn = rows + b'{"kind": "st'
    for bad, count in (
        (b"\x8f\x00\xe1\n" * 3, 3), (rows + b"\x8f\xe1", 1), (torn + b"\0\0\n", 1), (torn + rows, 1), (b"hello\n" + rows, 1),
    ):  # fmt: skip
        path.write_bytes(bad)
        (words,) = run.read_snapshot().training_warnings
        assert (words.values["path"], words.values["count"]) == (str(path), count)
    now = services_status.read_run_status(run, make.FakeLauncher({}), now=make.START)
    assert now.warnings == (words,) and now.training.samples == 1920


def test_scheduler_logs_are_found_by_the_ids_of_their_jobs(run):
    run.submitit_dir.mkdir()
    for name, text in (
        ("12_0_log.err", "srun: error"),
        ("12_0_log.out", ""),
        ("123_0_log.err", "other"),
        ("12.sh", ""),
    ):
        (run.submitit_dir / name).write_text(text)
    look = run.read_snapshot()
    assert [path.name for path in look.list_scheduler_logs(["12"])] == ["12_0_log.err"]
    assert {path.name for path in look.list_started_logs(["12"])} == {"12_0_log.err", "12_0_log.out"}


def test_a_copy_has_no_jobs_until_it_submits_its_own(run, tmp_path):
    job = make.add_training(run, rows=make.metrics())
    run.write_job(run.find_job(job).model_copy(update={"folder": str(run.path)}))
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    linked = RunDir(tmp_path / "linked")
    linked.path.symlink_to(run.path)
    assert [result.id for result in run.read_jobs()] == [outcome.id for outcome in linked.read_jobs()] == [job]
    assert copy.read_jobs() == [] and copy.find_job(job) is None
    (words,) = copy.read_snapshot().job_warnings
    assert words.values["original"] == str(run.path) and not run.read_snapshot().job_warnings
    copy.write_job(run.find_job(job).model_copy(update={"folder": str(copy.path)}))
    assert copy.find_job(job) is not None and not copy.read_snapshot().job_warnings


def test_what_waits_for_a_run_that_was_moved_is_over(run, tmp_path, monkeypatch):
    job = make.add_training(run, rows=make.metrics())
    run.write_job(run.find_job(job).model_copy(update={"folder": str(run.path), "scheduler": "slurm"}))
    monkeypatch.setattr(
        queue, "query_states", lambda ids: {id_: SchedulerState("pending", "Dependency") for id_ in ids}
    )
    moved = RunDir(tmp_path / "moved")

    def state(run):
        return submit.SlurmLauncher().query_states(run.read_snapshot(), run.read_jobs())[job]

    assert state(run).state == "pending"
    was = run.path
    was.rename(moved.path)
    assert state(moved) == SchedulerState("ended", f"the run was moved from {was} after the job was submitted")
