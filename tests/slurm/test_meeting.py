"""Ranks on nodes whose name stands for loopback, as Debian writes it into /etc/hosts, meet all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
ROOT = Path(__file__).parents[2]
HOSTS = 'printf "127.0.0.1 localhost\\n127.0.1.1 $(hostname)\\n" > "$0"; mount --bind "$0" /etc/hosts; exec "$@"'
JOIN = """
import sys
from pathlib import Path
from tula_cli.spec.resources import Cluster
from tula_cli.worker import ranks

cluster = Cluster(kind="slurm", device="cpu", interface=sys.argv[2] or None)
with ranks.joined(cluster, handover=Path(sys.argv[1])) as me:
    print(*me.sum([me.rank + 1.0]), *me.gather(str(me.rank)), flush=True)
"""


def meet(cluster: SlurmCluster, folder: Path, interface: str) -> list[str]:
    """Return what a rank on each of two nodes says."""
    started = []
    for rank, node in enumerate(cluster.names[:2]):
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        command = ["unshare", "--mount", "sh", "-ec", HOSTS, str(folder / f"hosts{rank}"), sys.executable, "-c", JOIN]
        started.append(
            subprocess.Popen(
                [*cluster.enter(node), *command, str(folder / "handover"), interface],
                env={**os.environ, **world, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        said = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
    return [answer.strip() or trouble for answer, trouble in said]


def test_nodes_whose_name_stands_for_loopback_meet(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    assert meet(on_slurm, tmp_path, "") == ["3.0 0 1"] * 2
    assert (tmp_path / "handover").read_text().startswith(on_slurm.settings.addresses[on_slurm.names[0]])


def test_an_interface_that_no_node_has_is_told_by_every_rank(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    for node, said in zip(on_slurm.names, meet(on_slurm, tmp_path, "ib7"), strict=False):
        assert f"tula_cli.errors.JobFailed: no network interface 'ib7' on {node}" in said
