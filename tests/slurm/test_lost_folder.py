"""The run directory is away when the next job of a chain starts: SLURM would fail each job of it within a second."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula
from faults import in_mounts_of
from test_recovery import ONE, attempts, finished, submit, waiting

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
    in_mounts_of(cluster, f"bindfs '{runs}' '{runs}'; pkill -9 -x bindfs")


def make_read_only(cluster: SlurmCluster, runs: Path) -> None:
    in_mounts_of(cluster, f"mount --bind '{runs}' '{runs}'; mount -o remount,ro,bind '{runs}'")


@pytest.mark.promise(
    "the file system",
    "it is away, dead or read-only when the next job of a chain starts",
    "that job waits for it and `tula status` tells why; no job of the chain is lost",
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
    submit(tula, *ONE, *waiting(tula, 12))
    tula.until(tula.epochs_done)
    fault(cluster, runs)
    for pid in cluster.processes(cluster.names[0], "submitit"):
        os.kill(pid, signal.SIGKILL)
    reason = tula.until(lambda: [j["reason"] for j in tula("status")["data"]["jobs"] if "waits" in j["reason"]])
    assert words in reason[0] and cluster.names[0] in reason[0]
    time.sleep(seconds)
    in_mounts_of(cluster, f"umount --lazy '{runs}'")
    tula.until(lambda: finished(tula))
    job = tula.run().job(tula.task().job)
    assert job is not None
    assert [attempt.job_id for attempt in attempts(tula)] == list(job.links[:2]), "the second job did the rest"
    log = (tula.run().submitit_dir / f"{job.links[1]}_0_log.err").read_text()
    assert words in log and "the job waited" in log
