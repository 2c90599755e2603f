"""`tula check --on-cluster` and `tula init slurm` on a real cluster: what a user runs first on a new site."""

import subprocess
from pathlib import Path

import pytest
from cluster import SlurmCluster
from driver import Tula

from tula_cli.spec.load import load_spec

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
CHECK = ("check", "job.yaml", "--on-cluster")


def jobs(*states: str) -> list[str]:
    requested = [f"--states={','.join(states)}"] if states else []
    return subprocess.run(
        ["squeue", "--noheader", "--format=%j", *requested], capture_output=True, text=True
    ).stdout.split()


def test_nodes_and_the_network_between_them_are_reported(tula: Tula, on_slurm: SlurmCluster) -> None:
    data = tula(*CHECK)["data"]
    nodes, report = data["report"]["nodes"], data["report"]
    assert data["problems"] == []
    assert [node["host"] for node in nodes] == on_slurm.names[:2]
    assert [(node["interface"], node["address"]) for node in nodes] == [("eth0", "10.77.0.1"), ("eth0", "10.77.0.2")]
    assert [node["ranks"] for node in nodes] == [1, 1]
    assert max(abs(node["clock_offset"]) for node in nodes) < 0.1, "one machine, one clock"
    # A link of 200 Mbit/s. Larger transfers than its burst cannot be faster.
    large = [transfer for transfer in report["transfers"] if transfer["size"] >= 2**20]
    assert max(transfer["speed"] for transfer in large) == pytest.approx(200e6, rel=0.25)
    assert 0 < report["latency"] < 0.1


@pytest.mark.proof
def test_a_folder_that_no_node_sees_is_reported(tula: Tula, on_slurm: SlurmCluster) -> None:
    error = tula_error(tula, *CHECK, "--run-dir", str(on_slurm.local / "runs"), code=6)
    assert str(on_slurm.local / "runs") in error["message"]
    assert f"{', '.join(on_slurm.names[:2])} reported nothing" in error["message"]
    assert "--run-dir" in error["hint"]


@pytest.mark.proof
def test_the_node_that_does_not_see_the_folder_is_named(tula: Tula, on_slurm: SlurmCluster) -> None:
    first, second = on_slurm.names[:2]
    folder = tula.folder / "tula-runs"
    with hidden(on_slurm, second, folder):
        error = tula_error(tula, *CHECK, code=6)
    assert f"{first} wrote files there, {second} did not" in error["message"]
    assert f"cluster.slurm.exclude={second}" in error["hint"]


def test_a_partition_that_is_down_is_reported_and_nothing_stays_in_the_queue(tula: Tula) -> None:
    error = tula_error(tula, *CHECK, "--set", "cluster.slurm.partition=closed", code=5)
    assert "PartitionDown" in error["message"]
    tula.wait_until(lambda: not jobs())


def test_a_refusal_is_in_the_schedulers_own_words(tula: Tula) -> None:
    error = tula_error(tula, *CHECK, "--set", "cluster.slurm.partition=nope", code=5)
    assert "invalid partition specified: nope" in error["message"]


@pytest.mark.proof
def test_a_waiting_check_is_taken_up_again(tula: Tula, on_slurm: SlurmCluster) -> None:
    everything = ("--exclusive", f"--nodes={len(on_slurm.names)}", "--job-name=neighbour", "--wrap=sleep 100")
    subprocess.run(["sbatch", "--output=/dev/null", *everything], check=True, capture_output=True)
    tula.wait_until(lambda: jobs("running"))
    error = tula_error(tula, *CHECK, "--timeout", "3", code=75)
    assert "Resources" in error["message"] or "Priority" in error["message"]
    subprocess.run(["scancel", "--name=neighbour"], check=True)
    assert tula(*CHECK)["data"]["report"]["id"] == "check-n002-1"
    assert [job.submissions for job in tula.run().read_jobs()] == [1]


def test_init_asks_the_scheduler_and_sbatch_takes_what_it_writes(tula: Tula, on_slurm: SlurmCluster) -> None:
    tula("init", "slurm", "-o", "new.yaml")
    spec = load_spec(tula.folder / "new.yaml", environ={}, site_files=())
    assert spec.cluster.slurm is not None
    assert spec.cluster.slurm.partition == "main"
    assert spec.search.nodes == [2, 4]
    error = tula_error(tula, "check", "new.yaml", "--on-cluster", "--set", "cluster.device=cuda", code=6)
    assert "torch sees no GPU" in error["message"]  # the cluster's are stand-ins: the job ran, and told


# --- helpers


def tula_error(tula: Tula, *arguments: str, code: int) -> dict[str, str]:
    error: dict[str, str] = tula(*arguments, code=code)["error"]
    return error


class hidden:
    """A folder that one node sees empty, as where it has mounted another file system."""

    def __init__(self, cluster: SlurmCluster, node: str, folder: Path) -> None:
        daemon = str(cluster.processes(node, "slurmd -N")[0])
        self.enter, self.folder = ["nsenter", "--target", daemon, "--mount"], str(folder)

    def __enter__(self) -> None:
        subprocess.run([*self.enter, "mount", "-t", "tmpfs", "none", self.folder], check=True)

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self.enter, "umount", self.folder], check=True)
