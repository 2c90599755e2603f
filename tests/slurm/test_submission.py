"""Submitting to a real SLURM and asking it: what the fake of tests/helpers was made after."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_runs as make
import pytest
from cluster import SlurmCluster

from tula_cli.cluster.slurm import queue as scheduler
from tula_cli.cluster.slurm.scheduler import SlurmScheduler
from tula_cli.cluster.slurm.submit import SlurmLauncher, estimate_job_start
from tula_cli.run.directory import Run, RunDir
from tula_cli.run.records.jobs import Job
from tula_cli.run.records.tasks import Rung, TrainTask

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_recent_states", {})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "tula-runs", make.spec(cluster=cluster("closed")))


def cluster(partition: str) -> dict[str, Any]:
    return {"kind": "slurm", "device": "cpu", "minutes": 5, "slurm": {"partition": partition, "memory": "200M"}}


def training(run: RunDir, partition: str = "closed") -> TrainTask:
    spec = make.spec(cluster=cluster(partition))
    ladder = (Rung(batch=64, prediction=make.prediction(2, 64, hours=0.01)),)
    return TrainTask(
        id="train-ab12cd34-1", job="train-ab12cd34", spec=spec, workdir="/", nodes=2, signature="ab12cd34", attempt=1,
        ladder=ladder, workers=0,
    )  # fmt: skip


def submitted(run: RunDir, partition: str = "closed") -> Job:
    job = SlurmLauncher().submit(run, training(run, partition))
    run.write_job(job)
    return job


def sbatch(*options: str) -> str:
    command = ["sbatch", "--parsable", "--time=5", "--output=/dev/null", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def until(true: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := true():
            return result
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def test_the_scheduler_estimates_a_start(run: RunDir, on_slurm: SlurmCluster) -> None:
    """--test-only gives a start, or says why not, and submits nothing."""
    spec = make.spec(cluster=cluster("main"))
    estimate = estimate_job_start(Run(run.path, spec), nodes=2, batch=64, now=time.time())
    assert estimate is not None and estimate.wait is not None and estimate.wait < 60, estimate
    refused = estimate_job_start(Run(run.path, spec), nodes=400, batch=12800, now=time.time())
    assert refused is not None and refused.wait is None and refused.reason
    assert scheduler.list_live_jobs([f"tula-{run.id}-start-estimate"]) == []


def test_a_chain_is_submitted_found_again_and_cancelled(run: RunDir, on_slurm: SlurmCluster) -> None:
    launcher = SlurmLauncher()
    job = submitted(run)
    assert len(job.links) == 3
    assert "PartitionDown: will not start" in until(
        lambda: launcher.query_states(run.read_snapshot(), [job])[job.id].reason
    )
    (run.path / "jobs" / f"{job.id}.json").unlink()  # the command line was killed before it wrote it
    again = submitted(run)
    assert again.links == job.links
    assert abs(again.submitted_at - job.submitted_at) < 5
    bystander = sbatch("--partition=closed", "--wrap=true")
    launcher.cancel(run, job)
    until(lambda: launcher.query_states(run.read_snapshot(), [job])[job.id].state == "ended")
    assert scheduler.query_states([bystander])[bystander].state == "pending"


@pytest.mark.promise(
    "the run directory",
    "the nodes cannot see the run directory",
    "the job waits for it for some minutes, and then fails with an error that names the folder",
)
def test_a_folder_that_the_nodes_do_not_see_is_reported(on_slurm: SlurmCluster) -> None:
    hidden = RunDir.create(on_slurm.local / "tula-runs", make.spec(cluster=cluster("main")))
    launcher, job = SlurmLauncher(), submitted(hidden, "main")
    reason = until(
        lambda: (
            (text := launcher.query_states(hidden.read_snapshot(), [job])[job.id].reason) and "waits" in text and text
        )
    )
    assert "No such file or directory" in reason and str(hidden.path) in reason
    scheduler.cancel_jobs(job.scheduler_ids)


def test_how_allocations_stand_and_end(on_slurm: SlurmCluster) -> None:
    done = sbatch("--wrap=true")
    killed = sbatch("--mem=100M", "--wrap=srun python3 -c 'bytearray(400 << 20)'")
    failed = sbatch("--wrap=exit 3")
    long = sbatch("--nodes=4", "--exclusive", "--job-name=tula-long", "--wrap=srun sleep 60")
    states = until(
        lambda: (result := scheduler.query_states([done, killed, failed, long]))[long].state == "running" and result
    )
    assert {states[done].state, states[killed].state, states[failed].state} == {"ended"}
    waiting = sbatch("--nodes=4", "--exclusive", "--wrap=true")
    expected = until(lambda: scheduler.query_states([waiting])[waiting].starts_at)
    assert expected == scheduler.find_end_time(long, {})
    assert 200 < expected - time.time() < 400
    assert [job.id for job in scheduler.list_live_jobs(["tula-long"])] == [long]
    assert [scheduler.find_job_outcome(id_) for id_ in (done, failed, long, "999999")] == [None] * 4
    if on_slurm.settings.cgroups:
        assert scheduler.find_job_outcome(killed) == "host_oom"
    scheduler.cancel_jobs([waiting, long])
    until(lambda: scheduler.find_job_outcome(long) == "cancelled")
    assert [job.id for job in scheduler.list_live_jobs(["tula-long"])] == []
    until(lambda: scheduler.query_states(["999999", long])[long].reason.startswith("CANCELLED"))


def test_waiting_jobs_are_kept_off_faulty_nodes(on_slurm: SlurmCluster) -> None:
    long = sbatch("--nodes=4", "--exclusive", "--wrap=sleep 60")
    waiting = [sbatch(f"--dependency=afterany:{long}", "--wrap=true") for _ in range(2)]
    completed = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%N"], capture_output=True, text=True, check=True
    )
    first, second = sorted(set(completed.stdout.split()))[:2]
    until(lambda: scheduler.query_states([long])[long].state == "running")
    for nodes in (first, f"{first},{second}"):
        assert SlurmScheduler().exclude(waiting, nodes) == ""
        for job in waiting:
            command = ["scontrol", "--oneliner", "show", "job", job]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            excluded = shown.partition(" ExcNodeList=")[2].split()[0]
            expanded = subprocess.run(
                ["scontrol", "show", "hostnames", excluded], capture_output=True, text=True, check=True
            )
            assert expanded.stdout.split() == nodes.split(",")
    assert SlurmScheduler().exclude(["999999"], first) != ""
    scheduler.cancel_jobs([*waiting, long])


def test_waiting_jobs_are_held_and_released(on_slurm: SlurmCluster) -> None:
    first = sbatch("--nodes=4", "--exclusive", "--wrap=sleep 60")
    second = sbatch(f"--dependency=afterany:{first}", "--wrap=true")
    third = sbatch(f"--dependency=afterany:{first}:{second}", "--wrap=true")
    until(lambda: scheduler.query_states([first])[first].state == "running")
    assert SlurmScheduler().hold([second, third]) == ""
    scheduler.cancel_jobs([first])
    until(lambda: scheduler.find_job_outcome(first) == "cancelled")
    until(lambda: all(state.on_hold for state in scheduler.query_states([second, third]).values()))
    assert SlurmScheduler().release([second, third]) == ""
    until(lambda: scheduler.query_states([third])[third].state == "ended")
    assert SlurmScheduler().hold(["999999"]) != ""


def test_a_requeued_job_lives_and_its_earlier_run_was_taken_away(on_slurm: SlurmCluster) -> None:
    job = sbatch("--requeue", "--wrap=srun sleep 60")
    until(lambda: scheduler.query_states([job])[job].state == "running")
    time.sleep(1)  # accounting does not know the start before
    subprocess.run(["scontrol", "requeue", job], check=True)
    until(lambda: scheduler.query_states([job])[job].state == "pending")
    assert scheduler.find_job_outcome(job) is None
    assert scheduler.find_job_outcome(job, restart=0) == "preempted"


def test_without_accounting_the_controller_has_to_do(needs_slurm: None, own_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with SlurmCluster(1, prefix=f"{own_prefix}q", accounting=False) as bare:
        for name, value in bare.env.items():
            monkeypatch.setenv(name, value)
        done, long = sbatch("--wrap=true"), sbatch("--wrap=sleep 60")
        until(lambda: scheduler.query_states([done, long])[done].state == "ended")
        assert scheduler.find_job_outcome(done) is None
        scheduler.cancel_jobs([long])
        until(lambda: scheduler.find_job_outcome(long) == "cancelled")
        assert scheduler.query_states(["999999"]) == {}
