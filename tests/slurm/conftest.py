"""A SLURM cluster for the tests that need one, and SLURM's commands on PATH."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cluster import SlurmCluster, describe_why_no_cluster
from driver import Tula

JOB = """
name: slurm
model: {name: small_cnn, args: {in_channels: 1, width: 8}}
dataset: {name: digits}
optimizer: {name: SGD, lr: 0.05, momentum: 0.9, weight_decay: 5e-4}
train: {epochs: 4, reference_batch: 32, workers: 0, method: ags}
search: {nodes: [1, 2], min_batch: 64, max_batch: 128, strategy: full, min_steps: 5, min_seconds: 0, max_seconds: 0.001, max_minutes: 4,
         max_node_hours: 5}
cluster: {kind: slurm, device: cpu, minutes: 10, slurm: {memory: 1500M}}
"""


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    """Skip if no cluster can run; with TULA_REQUIRE_SLURM=1, fail instead."""
    if reason := describe_why_no_cluster():
        (pytest.fail if os.environ.get("TULA_REQUIRE_SLURM") == "1" else pytest.skip)(
            f"no SLURM cluster here: {reason}"
        )


@pytest.fixture(scope="session")
def own_prefix() -> str:
    """A prefix of node names that no cluster of another process has."""
    return f"t{os.getpid()}"


@pytest.fixture(scope="session")
def slurm_cluster(needs_slurm: None, own_prefix: str) -> Iterator[SlurmCluster]:
    """A cluster for the whole session: TULA_SLURM_NODES nodes (default 4) with links of 200 Mbit/s."""
    nodes = int(os.environ.get("TULA_SLURM_NODES", "4"))
    with SlurmCluster(nodes, prefix=f"{own_prefix}n", rate="200mbit") as cluster:
        yield cluster


@pytest.fixture
def on_slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster with its commands on PATH and an empty queue; it is reset after the test."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "SUBMITIT"))]:
        monkeypatch.delenv(name)
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    yield slurm_cluster
    slurm_cluster.reset()


@pytest.fixture
def tula_in_spaces(on_slurm: SlurmCluster, tmp_path: Path) -> Tula:
    """The same in a folder whose name contains characters that are special to a shell."""
    folder = tmp_path / "a user's (2nd) folder; $HOME"
    folder.mkdir()
    return Tula(folder, JOB)


@pytest.fixture
def tula(on_slurm: SlurmCluster, tmp_path: Path) -> Tula:
    """The command line on the login node, in a folder shared by all nodes."""
    return Tula(tmp_path, JOB)
