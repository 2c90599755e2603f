"""Submitting to SLURM and asking what became of it, by calling the fake's commands; tests/slurm has a real one."""

import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import make_runs as make
import pytest
from fake_slurm import VERSIONS, FakeSlurm, format_time
from make_results import make_inspection

from tula_cli.cli import app
from tula_cli.cluster import attempt as cluster_attempt
from tula_cli.cluster import chains, inspection, job_main
from tula_cli.cluster import launcher as cluster_launcher
from tula_cli.cluster import local as cluster_local
from tula_cli.cluster.rank_processes import RankLaunchPlan
from tula_cli.cluster.slurm import command as slurm_command
from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm import scheduler as slurm_scheduler
from tula_cli.cluster.slurm import site
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.cluster.slurm.submit import SlurmLauncher
from tula_cli.cluster.supervise import supervise
from tula_cli.errors import CannotWrite, SchedulerError
from tula_cli.run.directory import RunDir
from tula_cli.run.job_runs import open_run, open_runs_of_job
from tula_cli.run.records.failures import Failure
from tula_cli.run.records.jobs import Attempt, Job
from tula_cli.run.records.recommendations import Stage, StageSteps
from tula_cli.run.records.tasks import ProbeTask, Rung, TrainTask
from tula_cli.services import cancel, logs, train
from tula_cli.services import status as services_status
from tula_cli.show import screen as show_screen
from tula_cli.spec.slurm_options import MAX_CHAINED_JOBS

ROOT = Path(__file__).resolve().parents[2]
SIGNATURE = "ab12cd34"
LIMITS = (
    "refuse:QOSMaxSubmitJobPerUserLimit;Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


INSPECTION = make_inspection()


@pytest.fixture(
    params=[
        pytest.param(version, marks=[] if version in (min(VERSIONS), max(VERSIONS)) else pytest.mark.proof)
        for version in VERSIONS
    ]
)
def versions(request, tmp_path, monkeypatch):
    return installed(tmp_path, monkeypatch, request.param)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return installed(tmp_path, monkeypatch, "22.05")


def installed(tmp_path, monkeypatch, version):
    fake = FakeSlurm(tmp_path / "slurm", version)
    fake.use(monkeypatch)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(scheduler, "_recent_states", {})
    monkeypatch.setattr(slurm_command, "COMMAND_TIMEOUT", 5.0)
    monkeypatch.setattr(slurm_scheduler, "ACCEPTANCE_LAG", 0.5)
    return fake


@pytest.fixture
def run(tmp_path):
    cluster = {"kind": "slurm", "device": "cpu", "minutes": 60, "slurm": {"partition": "main"}}
    return RunDir.create(tmp_path / "tula-runs", make.spec(cluster=cluster, train={"epochs": 4, "max_attempts": 3}))


def probes(run, nodes=2):
    name = f"probe-n{nodes:03d}"
    return ProbeTask(id=name, job=name, spec=run.read_spec(), workdir="/", nodes=nodes, local_batches=(32, 64))


def training(run, *, hours=None):
    """Return a training that is predicted to take some hours, or without a prediction."""
    predicted = None if hours is None else make.prediction(2, 128, hours=hours)
    return TrainTask(
        id=f"train-{SIGNATURE}-1", job=f"train-{SIGNATURE}", spec=run.read_spec(), workdir="/", nodes=2, signature=SIGNATURE,
        attempt=1, ladder=(Rung(batch=128, prediction=predicted), Rung(batch=64)), workers=0,
    )  # fmt: skip


def submitted(run, task, launcher=None):
    """Submit as the services do."""
    run.write_task(task)
    job = (launcher or SlurmLauncher()).submit(run, task)
    run.write_job(job)
    return job


def state(run, job):
    return SlurmLauncher().query_states(run.read_snapshot(), [job])[job.id]


# --- what is submitted


def test_a_probe_job_is_one_job_under_a_name_of_its_own(slurm, run):
    job = submitted(run, probes(run))
    assert [queued["name"] for queued in slurm.jobs()] == [f"tula-{run.id}-probe-n002"]
    assert (job.scheduler, job.scheduler_id, job.links, job.submissions) == ("slurm", "1000", (), 1)
    assert (run.submitit_dir / "1000_submitted.pkl").is_file(), "where submitit looks for it in the job"


def test_the_dry_run_is_what_is_submitted_byte_for_byte(slurm, run):
    for task in (probes(run), training(run, hours=0.1)):
        shown = SlurmLauncher().render_script(run, task)
        assert slurm.script(submitted(run, task).scheduler_id) == shown
    assert "#SBATCH --partition=main" in shown


def test_the_dry_run_touches_nothing(slurm, run):
    before = sorted(run.path.rglob("*"))
    SlurmLauncher().render_script(run, training(run))
    assert sorted(run.path.rglob("*")) == before
    assert not slurm.calls("sbatch")


def test_the_job_calls_the_supervisor_with_its_run_and_task(slurm, run):
    job = submitted(run, training(run, hours=0.1))
    for id_ in job.links:
        call = pickle.loads((run.submitit_dir / f"{id_}_submitted.pkl").read_bytes())
        assert (call.function, call.args) == (
            cluster_local.run_supervisor,
            (str(run.path.resolve()), f"train-{SIGNATURE}-1"),
        )


# --- the chain


def test_a_training_is_a_chain_in_which_each_link_waits_for_the_end_of_the_one_before(versions, run):
    job = submitted(run, training(run, hours=0.1))
    queued = versions.jobs()
    assert job.links == tuple(str(link["id"]) for link in queued)
    assert job.scheduler_id == job.links[0]
    item, two, _ = job.links
    assert [link["dependency"] for link in queued] == [
        "singleton",
        f"afterany:{item},singleton,after:{item}+10",
        f"afterany:{two},singleton,after:{two}+20",
    ]


def test_all_links_have_one_name_which_a_run_of_the_same_job_elsewhere_does_not_have(slurm, run, tmp_path):
    submitted(run, training(run, hours=0.1))
    (name,) = {link["name"] for link in slurm.jobs()}
    elsewhere = RunDir(tmp_path / "elsewhere" / run.path.name)
    shutil.copytree(run.path, elsewhere.path)
    assert submitted(elsewhere, training(elsewhere, hours=0.1)).links[0] == "1003", "not taken for those of the other"
    assert slurm.jobs()[3]["name"] != name


def test_links_differ_in_their_dependency_only(slurm, run):
    first, second, _ = submitted(run, training(run, hours=0.1)).links
    item, two = slurm.script(first).splitlines(), slurm.script(second).splitlines()
    assert [line for line in item if line not in two] == ["#SBATCH --dependency=singleton"]
    assert [line for line in two if line not in item] == [
        f"#SBATCH --dependency=afterany:{first},singleton,after:{first}+10"
    ]


def test_fifty_links_wait_for_one_job_each(slurm, run):
    job = submitted(run, training(run, hours=1000.0))
    named = [set(re.findall(r":(\d+)", link["dependency"])) for link in slurm.jobs()]
    assert len(job.links) == MAX_CHAINED_JOBS and max(map(len, named)) == 1
    assert slurm.jobs()[-1]["dependency"].endswith("+30"), "the delay grows to half an hour"


@pytest.mark.parametrize(
    ("hours", "links"),
    [(None, 3), (0.01, 3), (0.49, 3), (0.5, 3), (1.0, 4), (10.0, 17), (1000.0, MAX_CHAINED_JOBS)],
)
def test_the_chain_is_as_long_as_the_prediction_wants(run, hours, links):
    assert len(chains.list_chain_tasks(training(run, hours=hours))) == links


def growing(run, *, hours, steps):
    """Return a training whose first two stages have so many steps each, on 1 and 2 of its 4 nodes."""
    task = training(run, hours=hours)
    stages = [(0, 32, 1), (96, 64, 2), (200, 128, 4)]
    on_nodes = tuple(Stage(begin=begin, batch=batch, nodes=nodes) for begin, batch, nodes in stages)
    predicted = tuple(
        StageSteps(batch=batch, steps=steps, step_time=2.0, step_low=None, step_high=None, nodes=nodes)
        for _, batch, nodes in stages[:2]
    )
    rung = task.ladder[0]
    rung = rung.model_copy(update={"prediction": rung.prediction.model_copy(update={"stages": predicted})})
    return task.model_copy(update={"nodes": 1, "stages": on_nodes, "ladder": (rung, *task.ladder[1:])})


def test_stages_that_want_many_links_leave_some_to_those_of_all_nodes(run):
    nodes = chains.list_nodes_of_chain_jobs(growing(run, hours=500.0, steps=180_000))  # a hundred hours each
    assert len(nodes) == MAX_CHAINED_JOBS and nodes[-2:] == (4, 4) and nodes[0] == 1


def test_links_of_stages_ask_for_their_nodes_and_come_first(slurm, run):
    task = growing(run, hours=2.0, steps=900)  # half an hour each
    run.write_task(task)
    job = submitted(run, task)
    # an hour's limit: half an hour is one link and one to spare, what is left two and two
    assert job.link_nodes == (1, 1, 2, 2, 4, 4, 4, 4) == chains.list_nodes_of_chain_jobs(task)
    messages = [next(line for line in slurm.script(link).splitlines() if "--nodes" in line) for link in job.links]
    assert messages == [f"#SBATCH --nodes={nodes}" for nodes in job.link_nodes]
    assert [job.get_nodes(link) for link in job.links] == list(job.link_nodes)
    later = task.model_copy(update={"nodes": 4})
    assert chains.list_nodes_of_chain_jobs(later) == (4,) * 5, "what is over has no links"


def test_only_a_training_on_slurm_is_a_chain(run):
    task = training(run)
    here = task.model_copy(update={"spec": make.spec()})
    assert (len(chains.list_chain_tasks(here)), len(chains.list_chain_tasks(probes(run)))) == (1, 1)


def test_a_chain_has_two_links_at_least(run):
    task = training(run)
    settings = task.spec.train.model_copy(update={"max_attempts": 1})
    assert (
        len(chains.list_chain_tasks(task.model_copy(update={"spec": task.spec.model_copy(update={"train": settings})})))
        == 2
    )


def test_links_that_the_queue_has_no_room_for_are_left_out(slurm, run):
    slurm.fault(sbatch=["accept", "accept", LIMITS])
    assert submitted(run, training(run)).links == ("1000", "1001")
    assert len(slurm.calls("sbatch")) == 3, "no link behind one that is missing"


def test_a_refusal_of_the_first_link_is_reported_in_the_schedulers_words(slurm, run):
    slurm.fault(sbatch=[LIMITS])
    with pytest.raises(SchedulerError, match="QOSMaxSubmitJobPerUserLimit") as caught:
        submitted(run, training(run))
    assert "some of your jobs" in caught.value.hint
    assert not slurm.jobs()


# --- never twice


@pytest.mark.parametrize("fault", ["accept, timeout", "accept, no id"])
@pytest.mark.parametrize("lag", [0, 0.3])
@pytest.mark.promise(
    "the scheduler",
    "sbatch loses the connection to the controller after it has accepted the job",
    "the job is identified by its name; nothing is submitted twice",
)
def test_a_job_accepted_although_sbatch_failed_is_taken_as_submitted(slurm, run, fault, lag):
    slurm.fault(sbatch=[fault, fault], lag=lag)
    job = submitted(run, training(run, hours=0.1))
    assert job.links == ("1000", "1001", "1002")
    assert len(slurm.jobs()) == 3
    assert (run.submitit_dir / "1000_submitted.pkl").is_file()
    assert slurm.jobs()[1]["dependency"] == "afterany:1000,singleton,after:1000+10"


def test_an_sbatch_that_hangs_is_given_up_and_its_job_found(slurm, run, monkeypatch):
    monkeypatch.setattr(slurm_command, "COMMAND_TIMEOUT", 1.0)
    slurm.fault(sbatch=["accept, hang"])
    assert submitted(run, probes(run)).scheduler_id == "1000"
    slurm.fault(sbatch=["accept, hang", "hang"])
    with pytest.raises(SchedulerError, match=r"does not answer \(no answer within 1 s\)"):
        submitted(run, probes(run, nodes=1))
    assert len(slurm.jobs()) == 1


@pytest.mark.parametrize("fault", ["timeout", "unreachable"])
def test_a_job_that_was_not_accepted_is_an_error_with_sbatchs_words(slurm, run, fault):
    slurm.fault(sbatch=[fault])
    with pytest.raises(SchedulerError, match=r"Batch job submission failed: (Socket|Unable)") as caught:
        submitted(run, probes(run))
    assert "never submits a job twice" in caught.value.hint
    assert submitted(run, probes(run)).scheduler_id == "1000", "the next call submits it"


def test_a_job_that_appears_too_late_is_found_by_the_next_call(slurm, run):
    slurm.fault(sbatch=["accept, timeout"], lag=3600)
    with pytest.raises(SchedulerError, match="no job tula-"):
        submitted(run, probes(run))
    slurm.set("1000", "PENDING", visible_at=0)
    assert submitted(run, probes(run)).scheduler_id == "1000"
    assert len(slurm.jobs()) == 1


def test_a_chain_whose_submission_was_cut_off_is_taken_up_and_completed(slurm, run):
    slurm.fault(sbatch=["accept", "accept", LIMITS])
    cut = SlurmLauncher().submit(run, training(run))  # and the command line is killed before it writes the job
    (run.submitit_dir / "1001_submitted.pkl").unlink()
    slurm.fault(sbatch=[])
    job = submitted(run, training(run))
    assert job.links[:2] == cut.links
    assert len(job.links) == len(slurm.jobs()) == 3
    assert slurm.jobs()[2]["dependency"] == "afterany:1001,singleton,after:1001+20"
    assert (run.submitit_dir / "1001_submitted.pkl").is_file()
    assert job.submissions == 1


def test_a_job_that_has_ended_is_submitted_again_and_its_submissions_are_counted(slurm, run):
    job = submitted(run, probes(run))
    slurm.set(job.scheduler_id, "FAILED")
    again = submitted(run, probes(run))
    assert again.scheduler_id != job.scheduler_id
    assert (job.submissions, again.submissions, len(slurm.jobs())) == (1, 2, 2)


def test_no_link_is_submitted_beside_a_later_one_that_runs(slurm, run):
    cut = SlurmLauncher().submit(run, training(run, hours=0.1))
    slurm.set(cut.links[0], "TIMEOUT")
    slurm.set(cut.links[1], "RUNNING")
    assert submitted(run, training(run, hours=0.1)).links == cut.links[1:]


def test_a_chain_that_runs_is_left_as_it_is(slurm, run):
    job = submitted(run, training(run, hours=0.1))
    slurm.set(job.links[0], "TIMEOUT")
    assert submitted(run, training(run, hours=0.1)) == job
    assert len(slurm.jobs()) == 3


def test_the_same_run_in_another_folder_is_another_run(slurm, run, tmp_path):
    submitted(run, probes(run))
    other = RunDir.create(tmp_path / "elsewhere", run.read_spec())
    assert other.id == run.id
    assert submitted(other, probes(other)).scheduler_id == "1001"


def test_a_job_that_is_being_ended_is_not_taken_for_a_new_one(slurm, run):
    first = submitted(run, probes(run))
    slurm.set(first.scheduler_id, "COMPLETING")
    assert submitted(run, probes(run)).scheduler_id == "1001"
    assert run.find_job("probe-n002").submissions == 2


@pytest.mark.promise(
    "the scheduler", "the controller is down", "nothing is submitted (exit code 5); running jobs continue"
)
def test_nothing_is_submitted_where_squeue_does_not_answer(slurm, run):
    slurm.fault(squeue="unreachable")
    with pytest.raises(SchedulerError, match="squeue does not answer"):
        submitted(run, probes(run))
    assert not slurm.calls("sbatch")


@pytest.mark.parametrize("sacct", ["", "knows nothing"])
def test_two_command_lines_at_once_submit_once(slurm, run, sacct):
    slurm.fault(lag=60, sacct=sacct)  # so that the queue cannot help: the second has to wait for what the first writes
    plan = training_plan(run)
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(train.submit_training, RunDir(run.path), plan, SlurmLauncher()) for _ in range(3)]
    assert {future.result() for future in started} == {plan.task.job}
    assert len(slurm.jobs()) == len(run.find_job(plan.task.job).links)
    assert not (run.path / "lock").exists()


def test_a_lock_left_behind_by_a_dead_command_line_is_taken_over(slurm, run):
    dead = subprocess.run([sys.executable, "-c", f"from tula_cli.run.directory import RunDir; from pathlib import Path; RunDir(Path({str(run.path)!r})).lock.acquire()"], env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert dead.returncode == 0
    assert (run.path / "lock").is_dir()
    pauses = []
    with cluster_launcher.lock_submission(run, sleep=pauses.append):
        assert len(pauses) == 1
    assert not (run.path / "lock").exists()


def test_a_lock_of_another_host_is_respected_until_it_is_old(run):
    (run.path / "lock").mkdir()
    (run.path / "lock/owner").write_text("elsewhere:1\n")
    with (
        pytest.raises(SchedulerError, match="elsewhere:1"),
        cluster_launcher.lock_submission(run, sleep=lambda _: None),
    ):
        pass
    long_ago = time.time() - 400
    os.utime(run.path / "lock", (long_ago, long_ago))
    with cluster_launcher.lock_submission(run, sleep=lambda _: None):
        assert run.lock.acquire() != ""


# --- from inside a job


def test_nothing_of_an_outer_job_reaches_sbatch(slurm, run, monkeypatch):
    outer = {
        "SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_NTASKS": "1", "SUBMITIT_EXECUTOR": "slurm",
        "CUDA_VISIBLE_DEVICES": "0", "SLURM_CONF": "/etc/slurm/slurm.conf",
    }  # fmt: skip
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    submitted(run, probes(run))
    assert [call.environ for call in slurm.calls("sbatch")] == [{"SLURM_CONF": "/etc/slurm/slurm.conf"}]
    assert {name: os.environ[name] for name in outer} == outer
    monkeypatch.delenv("SLURM_JOB_ID")
    submitted(run, probes(run, nodes=1))
    assert slurm.calls("sbatch")[1].environ["CUDA_VISIBLE_DEVICES"] == "0", "the user's own"


def test_nothing_of_an_outer_job_reaches_a_local_job(tmp_path, monkeypatch):
    outer = {"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "slurm", "TULA_WRAPPER": "numactl"}
    for name, value in {**outer, "MINE": "1"}.items():
        monkeypatch.setenv(name, value)
    environments = []
    monkeypatch.setattr(job_main, "supervise", lambda *_, environ, **__: environments.append(environ))
    job_main.main("local", str(tmp_path), "t-1")
    assert environments[0]["MINE"] == "1" and not environments[0].keys() & outer.keys()


def test_every_command_of_slurm_is_called_with_the_same_environment(slurm, run, monkeypatch):
    for name in ("SLURM_CLUSTERS", "SQUEUE_STATES", "SINFO_PARTITION", "SACCT_FORMAT"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    job = submitted(run, probes(run))
    site.query_site()
    site.list_allocated_hosts(job.scheduler_id)
    scheduler.query_states([job.scheduler_id, "4711"])
    scheduler.find_job_outcome(job.scheduler_id)
    scheduler.cancel_jobs([job.scheduler_id])
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo"):
        environs = [call.environ for call in slurm.calls(name)]
        assert environs, name
        assert all(environ == {"SLURM_CONF": "/etc/slurm/slurm.conf"} for environ in environs), name


# --- what became of it


def test_all_jobs_of_a_run_are_asked_for_at_once(slurm, run):
    jobs = [submitted(run, probes(run, nodes=1)), submitted(run, training(run, hours=0.1))]
    before = len(slurm.calls("squeue"))
    slurm.set(jobs[0].scheduler_id, "RUNNING")
    states = SlurmLauncher().query_states(run.read_snapshot(), jobs)
    assert [states[job.id].state for job in jobs] == ["running", "pending"]
    assert len(slurm.calls("squeue")) == before + 1


def test_a_chain_waits_as_its_first_link_does(slurm, run):
    job = submitted(run, training(run, hours=0.1))
    slurm.set(job.links[0], "PENDING", "Resources", starts=format_time(2e9))
    assert state(run, job) == scheduler.SchedulerState("pending", "Resources", 2e9)


def test_a_chain_runs_if_one_link_does(slurm, run):
    job = submitted(run, training(run, hours=0.1))
    slurm.set(job.links[0], "TIMEOUT", "TimeLimit")
    slurm.set(job.links[1], "RUNNING")
    assert state(run, job).state == "running"


def test_between_two_links_a_chain_tells_how_the_last_one_ended(slurm, run):
    job = submitted(run, training(run, hours=0.1))
    slurm.set(job.links[0], "TIMEOUT", "TimeLimit")
    answer = state(run, job)
    assert answer.state == "pending"
    assert answer.reason == "continues after job 1000 (TIMEOUT: the time limit of the job was reached)"


def test_a_chain_is_over_when_its_last_link_is(slurm, run):
    job = submitted(run, training(run, hours=0.1))
    slurm.set(job.links[0], "TIMEOUT")
    slurm.set(job.links[1], "NODE_FAIL")
    slurm.set(job.links[2], "COMPLETED")
    (run.submitit_dir / f"{job.links[0]}_0_log.err").touch()
    assert state(run, job) == scheduler.SchedulerState("ended")


def test_a_young_job_that_nobody_knows_yet_is_pending_and_an_old_one_is_over(slurm, run):
    job = submitted(run, probes(run))
    slurm.set(job.scheduler_id, "PENDING", forgotten=True)
    slurm.fault(sacct="knows nothing")
    assert state(run, job) == scheduler.SchedulerState("pending", "just submitted", young=True)
    old = job.model_copy(update={"submitted_at": time.time() - chains.YOUNG_SECONDS - 1})
    assert state(run, old).state == "ended"
    assert "SLURM no longer knows it" in state(run, old).reason


@pytest.mark.parametrize(("words", "reason"), [("FAILED", "JobLaunchFailure"), ("COMPLETED", "None")])
def test_a_job_that_left_nothing_behind_probably_did_not_see_the_folder(slurm, run, words, reason):
    job = submitted(run, probes(run))
    slurm.set(job.scheduler_id, words, reason)
    assert str(run.path) in state(run, job).reason
    assert "--run-dir" in state(run, job).reason
    log = run.submitit_dir / f"{job.scheduler_id}_0_log.err"
    log.touch()
    assert "--run-dir" not in state(run, job).reason
    log.unlink()
    run.write_attempt(make.attempt("probe-n002", start=time.time()))
    assert "--run-dir" not in state(run, job).reason


@pytest.mark.parametrize("words", ["CANCELLED", "NODE_FAIL", "PREEMPTED"])
def test_a_job_that_was_ended_from_outside_says_nothing_of_folders(slurm, run, words):
    job = submitted(run, probes(run))
    slurm.set(job.scheduler_id, words)
    assert "--run-dir" not in state(run, job).reason


def test_cancel_marks_the_run_and_ends_all_links_the_last_first(slurm, run):
    foreign = slurm.add(f"tula-{run.id}-train-{SIGNATURE}", "RUNNING")
    job = submitted(run, training(run, hours=0.1))
    SlurmLauncher().cancel(run, job)
    assert run.is_cancelled(job.id)
    assert slurm.calls("scancel")[0].arguments == list(job.links[::-1])
    assert [queued["state"] for queued in slurm.jobs()] == ["RUNNING", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert foreign not in job.links


def test_a_training_starts_after_its_rehearsal_has_ended(slurm, run):
    run.write_job(Job(id="rehearse-k-1", scheduler="slurm", scheduler_id="77", nodes=1, submitted_at=0.0))
    job = submitted(run, training(run, hours=0.1).model_copy(update={"after": "rehearse-k-1"}))
    waits = [queued["dependency"] for queued in slurm.jobs()]
    assert waits[:2] == ["afterany:77,singleton", f"afterany:77:{job.links[0]},singleton,after:{job.links[0]}+10"]


# --- through the services


def training_plan(run):
    return train.plan_training(open_run(run), nodes=2, batch=128, inspect=lambda _: INSPECTION)


def test_from_submission_to_the_next_link_and_the_end(versions, run):
    plan, launcher = training_plan(run), SlurmLauncher()
    for _ in range(2):
        assert train.submit_training(run, plan, launcher) == plan.task.job
    assert len(versions.jobs()) == run.read_spec().train.max_attempts
    versions.set("1000", "PENDING", "Priority", starts=format_time(2e9))
    job = services_status.read_run_status(run, launcher, now=time.time()).jobs[0]
    assert (job.state, job.reason, job.starts_at) == ("queued", "Priority", 2e9)
    versions.set("1000", "NODE_FAIL", "NodeDown")
    job = services_status.read_run_status(run, launcher, now=time.time()).jobs[0]
    assert (job.state, job.reason) == (
        "queued",
        "continues after job 1000 (NODE_FAIL: a node of the job failed)",
    )
    assert cancel.cancel_jobs(open_runs_of_job(run), lambda _: launcher) == [plan.task.job]
    assert services_status.read_run_status(run, launcher, now=time.time()).jobs[0].state == "cancelled"
    assert cancel.cancel_jobs(open_runs_of_job(run), lambda _: launcher) == []


# --- through the command line

JOB = """
name: toy
model: {name: resnet18}
dataset: {name: digits}
optimizer: {lr: 0.1}
train: {epochs: 4, max_attempts: 3}
search: {nodes: [1, 2], max_node_hours: 10}
cluster: {kind: slurm, device: cpu, minutes: 60}
"""


@pytest.fixture
def tula(tmp_path, monkeypatch):
    """The command line in a folder with a job.yaml; it answers its exit code and the JSON envelope."""
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspection, "inspect", lambda spec: INSPECTION)

    def call(*arguments):
        screen = show_screen.Screen(out=io.StringIO(), err=io.StringIO())
        code = app.run([*arguments, "--json"], screen=screen)
        return code, json.loads(screen.out.getvalue())

    return call


TRAIN = ("train", "job.yaml", "--nodes", "2", "--batch", "128")


def test_a_training_from_the_dry_run_to_its_end(versions, tula):
    scripts = tula(*TRAIN, "--dry-run")[1]["data"]["scripts"]
    assert not versions.calls("sbatch")
    for _ in range(2):
        code, submitted = tula(*TRAIN)
        assert (code, submitted["status"]) == (0, "pending")
    assert len(versions.jobs()) == 3
    assert scripts == [versions.script("1000")]
    versions.set("1000", "PENDING", "Resources", starts=format_time(2e9))
    job = tula("status")[1]["data"]["jobs"][0]
    assert (job["state"], job["reason"], job["starts_at"], job["scheduler_id"]) == ("queued", "Resources", 2e9, "1000")
    versions.fault(squeue="unreachable", sacct="disabled")
    code, message = tula("status")
    assert (code, message["data"]["jobs"][0]["state"]) == (0, "queued")
    versions.fault(squeue="")
    assert tula("cancel")[1]["data"]["cancelled"] == [job["id"]]
    assert {queued["state"] for queued in versions.jobs()} == {"CANCELLED"}
    assert tula("status")[1]["status"] == "done"


def test_a_refusal_is_exit_code_5_and_leaves_nothing_in_the_queue(slurm, tula):
    slurm.fault(
        sbatch=["refuse:invalid partition specified: x;Batch job submission failed: Invalid partition name specified"]
    )
    code, message = tula(*TRAIN)
    assert (code, message["error"]["code"]) == (5, "scheduler")
    assert "invalid partition specified: x" in message["error"]["message"]
    assert tula("status")[1]["data"]["jobs"] == []
    assert Path("tula-runs").is_dir()
    assert not list(Path("tula-runs").glob("*/lock"))


def test_a_scheduler_that_answers_garbage_is_no_defect(slurm, tula):
    assert tula(*TRAIN)[0] == 0
    slurm.fault(squeue="garbage", sacct="disabled")
    code, message = tula("status")
    assert (code, message["data"]["jobs"][0]["reason"]) == (0, "just submitted")


# --- what a job of which little is known says


def test_a_job_whose_script_failed_is_reported_in_its_own_words(slurm, run):
    job = submitted(run, probes(run))
    slurm.set(job.scheduler_id, "FAILED")
    log = run.submitit_dir / f"{job.scheduler_id}_0_log.err"
    log.write_text(
        "slurmstepd: error: execve(): /nosuch/python: No such file or directory\nsrun: error: Exited with exit code 2\n"
    )
    reason = state(run, job).reason
    assert "execve(): /nosuch/python: No such file or directory" in reason
    assert str(log) in reason
    assert next(line.file for line in logs.read_logs(run, logs.LogQuery(job=job.id))) == log


def test_a_job_that_works_is_running_although_the_queue_does_not_show_it_yet(slurm, run):
    task = probes(run)
    job = submitted(run, task)
    slurm.without("squeue")
    assert state(run, job).state == "pending"
    run.write_attempt(make.attempt(task.id, start=time.time()))
    assert state(run, job).state == "running"


def test_what_became_of_a_run_can_be_asked_where_there_is_no_sbatch(slurm, run):
    job = submitted(run, probes(run))
    for command in ("sbatch", "squeue", "sacct", "scontrol", "scancel"):
        slurm.without(command)
    with pytest.raises(SchedulerError, match="sbatch was not found"):
        cluster_launcher.make_launcher(run.read_spec())
    assert cluster_launcher.make_launcher(run.read_spec(), submits=False).query_states(run.read_snapshot(), [job])


CONTRADICTING = ["ARRAY_INX", "CLUSTERS", "CORE_SPEC", "CPUS_PER_GPU", "ERROR", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GRES", "INPUT", "JOB_NAME", "MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE", "NO_KILL", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "OVERCOMMIT", "PARTITION", "REQUEUE", "SIGNAL", "THREAD_SPEC", "TIMELIMIT", "TRES_PER_TASK", "WAIT"]  # fmt: skip
OF_THE_SITE = ["ACCOUNT", "ACCTG_FREQ", "CONSTRAINT", "DELAY_BOOT", "EXPORT", "GPU_FREQ", "GRES_FLAGS", "HINT", "NETWORK", "QOS", "RESERVATION", "WAIT4SWITCH", "WAIT_ALL_NODES", "WCKEY"]  # fmt: skip


def test_variables_do_not_override_or_contradict_what_the_script_says(slurm, run, monkeypatch):
    for name in (*CONTRADICTING, *OF_THE_SITE):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    changed = make.spec(cluster={"kind": "slurm", "slurm": {"partition": "gpu", "memory": "4G", "cpus_per_task": 2}})
    script = run.write_script("x", SlurmLauncher().render_script(run, probes(run).model_copy(update={"spec": changed})))
    kept = {name for name in slurm_scheduler.make_sbatch_environment(script) if name.startswith("SBATCH_")}
    assert kept == {f"SBATCH_{name}" for name in OF_THE_SITE}


def test_what_a_job_says_nothing_of_stays_with_the_variables_of_the_site(slurm, run, monkeypatch):
    for name in ("PARTITION", "MEM_PER_CPU", "CPUS_PER_GPU", "GPUS"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    script = run.write_script("x", SlurmLauncher().render_script(run, probes(run)))
    kept = {name for name in slurm_scheduler.make_sbatch_environment(script) if name.startswith("SBATCH_")}
    assert "SBATCH_GPUS" not in kept and "SBATCH_MEM_PER_CPU" in kept


def test_a_scancel_that_fails_is_reported_and_the_mark_stays(slurm, run):
    job = submitted(run, probes(run))
    slurm.without("scancel")
    with pytest.raises(SchedulerError, match="scancel"):
        SlurmLauncher().cancel(run, job)
    assert run.is_cancelled(job.id)


def test_a_silent_queue_is_no_reason_to_start_anew(slurm, run):
    task = probes(run)
    job = submitted(run, task).model_copy(update={"submitted_at": 1.0})
    run.write_job(job)
    slurm.without("squeue")
    with pytest.raises(SchedulerError, match="squeue does not answer"):
        cluster_launcher.list_unfinished_jobs(run, SlurmLauncher(), [job.id])


def test_a_local_job_of_another_machine_is_not_started_again_here(run):
    job = make.scheduler_job("train-x").model_copy(update={"host": "elsewhere"})
    assert cluster_local.LocalLauncher().query_states(run.read_snapshot(), [job])[job.id].state == "running"


def test_a_local_job_that_cannot_be_started_says_why_in_a_line(run):
    run.submitit_dir.parent.mkdir(parents=True, exist_ok=True)
    run.submitit_dir.write_text("a file where its folder belongs")
    with pytest.raises(CannotWrite, match=r"^cannot write .*submitit/probe-n002.sh: "):
        cluster_local.LocalLauncher().submit(run, probes(run))


# --- faulty nodes


def test_the_next_jobs_of_a_chain_leave_out_a_faulty_node(versions, run, monkeypatch):
    slurm = run.read_spec().cluster.slurm.model_copy(update={"exclude": "old[1-2]"})
    cluster = run.read_spec().cluster.model_copy(update={"slurm": slurm})
    task = training(run).model_copy(update={"spec": run.read_spec().model_copy(update={"cluster": cluster})})
    job = submitted(run, task)
    versions.set(job.links[0], "RUNNING")
    environ = {
        "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": job.links[0], "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")
    monkeypatch.setattr(cluster_attempt, "PEER_GRACE_SECONDS", 0.0)
    dying = [sys.executable, "-c", "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"]
    monkeypatch.setattr(RankLaunchPlan, "make_command_line", lambda _: dying)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)}  # fmt: skip
    supervise(run.path, task.id, environ=environ)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert [queued.get("exclude") for queued in versions.jobs()] == [None, *["old[1-2],gpu7"] * (len(job.links) - 1)]
    versions.set(job.links[0], "COMPLETED")
    shown = services_status.read_run_status(run, SlurmLauncher(), now=time.time())
    assert shown.jobs[0].state == "queued"
    attempt = shown.attempts[-1].attempt
    assert (attempt.outcome, attempt.host) == ("device_fault", "gpu7")
    for link in job.links[1:]:
        versions.set(link, "CANCELLED")
    again = submitted(run, task)
    assert "#SBATCH --exclude='old[1-2],gpu7'\n" in versions.script(again.scheduler_id)
    shown = services_status.read_run_status(run, SlurmLauncher(), now=time.time()).jobs[0]
    assert shown.state == "queued"


def test_a_job_that_has_started_cannot_be_kept_off_a_node(slurm, run):
    job = submitted(run, training(run))
    slurm.set(job.links[1], "RUNNING")
    assert "no longer pending" in SlurmScheduler().exclude(job.links[1:], "gpu7")
    assert SlurmScheduler().exclude([], "gpu7") == ""


def test_a_chain_that_ended_on_faulty_nodes_says_which(slurm, run):
    job = submitted(run, training(run))
    now = time.time()
    attempt = Attempt(
        task=f"{job.id}-1", number=1, started_at=now, ended_at=now, samples=0, allocation=f"{job.links[0]}.0",
        failure=Failure(
            outcome="device_fault", host="gpu7", rank=3, fault="memory", message="CUDA error: uncorrectable ECC error encountered",
        ),
    )  # fmt: skip
    run.write_attempt(attempt)
    for link in job.links:
        slurm.set(link, "COMPLETED")
    shown = services_status.read_run_status(run, SlurmLauncher(), now=now).jobs[0]
    assert shown.state == "failed"
    assert shown.reason.startswith("CUDA error: uncorrectable ECC error encountered on gpu7; the memory of a GPU")


def test_a_job_that_is_still_being_cancelled_is_not_attached_to(tmp_path: Path) -> None:
    run, fake = RunDir.create(tmp_path, make.spec()), make.FakeLauncher(says={"evaluate-1": "running"})
    run.write_job(make.scheduler_job("evaluate-1"))
    assert cluster_launcher.list_jobs_to_wait_for(run, fake, ["evaluate-1"]) == ["evaluate-1"]
    run.mark_job_cancelled("evaluate-1")
    with pytest.raises(SchedulerError, match="evaluate-1 is still being cancelled"):
        cluster_launcher.list_jobs_to_wait_for(run, fake, ["evaluate-1"])
