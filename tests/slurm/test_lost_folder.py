"""The run directory is away when the next job of a chain starts: SLURM would fail each job of it within a second."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula, slow_training_options
from faults import run_in_mounts
from test_recovery import ONE, attempts, finished, submit

from tula_cli.cluster.supervise import MAX_STARTUP_SECONDS

from conftest import JOB  # isort: skip

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.proof]
Fault = Callable[[SlurmCluster, Path], None]


@pytest.fixture
def on_one_node(
    needs_slurm: None, own_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Tula, SlurmCluster]]:
    with SlurmCluster(1, prefix=f"{own_prefix}l") as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        yield Tula(tmp_path, JOB), cluster


def kill_file_system(cluster: SlurmCluster, runs: Path) -> None:
    """Serve a folder by a FUSE daemon, and kill that: "Transport endpoint is not connected"."""
    run_in_mounts(cluster, f"bindfs '{runs}' '{runs}'; pkill -9 -x bindfs")


def make_read_only(cluster: SlurmCluster, runs: Path) -> None:
    # the mount is busy while the job has a file open for writing
    remount = (
        f"for try in $(seq 200); do mount -o remount,ro,bind '{runs}' 2>/dev/null && exit; sleep .05; done; exit 1"
    )
    run_in_mounts(cluster, f"mount --bind '{runs}' '{runs}'; {remount}")


@pytest.mark.promise(
    "the file system",
    "the file system is unavailable or read-only when the next job of a chain starts",
    "that job waits for the file system, and `tula status` shows the reason. No job of the chain is lost",
)
@pytest.mark.parametrize(
    ("fault", "seconds", "words"),
    [(kill_file_system, 20, "Transport endpoint is not connected"), (make_read_only, 60, "Read-only file system")],
)
def test_no_job_of_a_chain_is_lost_while_the_run_directory_is_away(
    on_one_node: tuple[Tula, SlurmCluster], fault: Fault, seconds: int, words: str
) -> None:
    tula, cluster = on_one_node
    runs = (tula.folder / "tula-runs").resolve()
    submit(tula, *ONE, *slow_training_options(tula, 12))
    tula.wait_until(tula.epochs_done)
    fault(cluster, runs)
    for pid in cluster.processes(cluster.names[0], "submitit"):
        with contextlib.suppress(ProcessLookupError):  # it ends with the first of them
            os.kill(pid, signal.SIGKILL)
    reason = tula.wait_until(lambda: [j["reason"] for j in tula("status")["data"]["jobs"] if "waits" in j["reason"]])
    assert words in reason[0] and cluster.names[0] in reason[0]
    time.sleep(seconds)
    run_in_mounts(cluster, f"umount --lazy '{runs}'")
    tula.wait_until(lambda: finished(tula))
    job = tula.run().find_job(tula.task().job)
    assert job is not None
    assert [attempt.scheduler_id for attempt in attempts(tula)] == list(job.links[:2]), "the second job did the rest"
    log = (tula.run().submitit_dir / f"{job.links[1]}_0_log.err").read_text()
    assert words in log and "the job waited" in log


@pytest.mark.promise(
    "the file system",
    "the run directory fails under a running job (its FUSE daemon dies, or it becomes read-only)",
    "the job ends with the outcome `storage` (exit code 14). The next job waits for the folder and resumes",
)
@pytest.mark.parametrize("fault", [kill_file_system, make_read_only])
def test_a_run_directory_that_fails_under_a_running_job_costs_that_job(
    on_one_node: tuple[Tula, SlurmCluster], fault: Fault
) -> None:
    tula, cluster = on_one_node
    runs = (tula.folder / "tula-runs").resolve()
    submit(tula, *ONE, *slow_training_options(tula, 60))
    tula.wait_until(tula.epochs_done)
    time.sleep(MAX_STARTUP_SECONDS)  # a job that fails at once delays the next one
    fault(cluster, runs)
    tula.wait_until(lambda: [j for j in tula("status")["data"]["jobs"] if "waits" in j["reason"]])
    run_in_mounts(cluster, f"umount --lazy '{runs}'")
    tula.wait_until(lambda: finished(tula))
    job = tula.run().find_job(tula.task().job)
    assert job is not None
    first, second = attempts(tula)
    assert (first.outcome, first.scheduler_id, second.scheduler_id) == ("storage", *job.links[:2]), first.message


READING = """
from pathlib import Path
from emulated import Waiting

class Reading(Waiting):
    def forward(self, inputs):
        Path({file!r}).read_bytes()
        return super().forward(inputs)
"""


@pytest.mark.promise(
    "the file system",
    "the data of a running job is unavailable for longer than the pauses between attempts",
    "the next job of the chain starts 10 minutes later, and resumes",
)
def test_an_outage_under_a_running_job_delays_the_next_one(on_one_node: tuple[Tula, SlurmCluster]) -> None:
    tula, cluster = on_one_node
    data = tula.folder / "data"
    data.mkdir()
    (data / "shard").touch()
    pauses = slow_training_options(tula, 12)
    (tula.folder / "reading.py").write_text(READING.format(file=str(data / "shard")))
    model = "model={name: 'reading:Reading', args: {pause: 0.05}}"
    submit(tula, *ONE, *pauses, "--set", model, "--set", "train.max_attempts=2")
    tula.wait_until(tula.epochs_done)
    kill_file_system(cluster, data)
    job = tula.run().find_job(tula.task().job)
    assert job is not None
    last = tula.wait_until(lambda: len(attempts(tula)) == 3 and (last := attempts(tula)[-1]).outcome and last)
    assert [attempt.outcome for attempt in attempts(tula)] == ["storage"] * 3, "the first one saved something"
    assert f"job {job.links[1]} starts in 10 min at the earliest" in last.message
    answer = tula.wait_until(
        lambda: [j["reason"] for j in tula("status")["data"]["jobs"] if "BeginTime" in j["reason"]]
    )
    assert answer
    shown = cluster.run("login", "squeue", "--noheader", f"--jobs={job.links[1]}", "--format=%S").stdout.strip()
    begins = time.mktime(time.strptime(shown, "%Y-%m-%dT%H:%M:%S"))
    assert 500 < begins - time.time() <= 600
    run_in_mounts(cluster, f"umount --lazy '{data}'")
    cluster.run("login", "scontrol", "update", f"JobId={job.links[1]}", "StartTime=now")  # ten minutes are over
    tula.wait_until(lambda: finished(tula))
    assert [attempt.scheduler_id for attempt in attempts(tula)] == [*[job.links[0]] * 3, job.links[1]]
