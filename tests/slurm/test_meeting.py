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
from tula_cli.errors import JobFailed
from tula_cli.spec.resources import Cluster
from tula_cli.worker import ranks

for interface in ("ib7", None):
    cluster = Cluster(kind="slurm", device="cpu", interface=interface)
    try:
        with ranks.join_process_group(cluster, rendezvous_file=Path(sys.argv[1])) as me:
            print(*me.sum([me.rank + 1.0]), *me.gather(str(me.rank)), flush=True)
    except JobFailed as error:
        print(error, flush=True)
"""


def meet(cluster: SlurmCluster, folder: Path) -> list[list[str]]:
    """Return what a rank on each of two nodes says, which tries an interface that no node has at first."""
    started = []
    for rank, node in enumerate(cluster.names[:2]):
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        command = ["unshare", "--mount", "sh", "-ec", HOSTS, str(folder / f"hosts{rank}"), sys.executable, "-c", JOIN]
        started.append(
            subprocess.Popen(
                [*cluster.enter(node), *command, str(folder / "handover")],
                env={**os.environ, **world, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        text = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], text
    return [answer.splitlines() for answer, _ in text]


@pytest.mark.proof
def test_nodes_whose_name_stands_for_loopback_meet_and_an_interface_that_no_node_has_is_reported(
    on_slurm: SlurmCluster, tmp_path: Path
) -> None:
    for node, (refusal, hint, met) in zip(on_slurm.names, meet(on_slurm, tmp_path), strict=False):
        assert refusal == f"no network interface 'ib7' on {node}"
        assert "eth0" in hint
        assert met == "3.0 0 1"
    assert (tmp_path / "handover").read_text().startswith(on_slurm.settings.addresses[on_slurm.names[0]])
