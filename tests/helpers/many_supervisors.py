"""Supervisors of some nodes of a large job, all on this machine; their ranks only sleep.

Arguments: an empty folder, the number of nodes that run here, the ranks per node, the number of nodes of the job.
"""

import os
import sys
import time
from pathlib import Path

import make_runs

from tula_cli.cluster.supervise import supervise
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import Rung, TrainTask


def main() -> None:
    folder, (here, per_node, nodes) = Path(sys.argv[1]), map(int, sys.argv[2:])
    rank = f'echo $$ > "{folder}/$RANK.draft"; mv "{folder}/$RANK.draft" "{folder}/$RANK.pid"; exec sleep 300'
    slurm = {"wrapper": ["bash", "-c", rank]}
    cluster = {"kind": "slurm", "device": "cpu", "gpus_per_node": per_node, "slurm": slurm}
    run = RunDir.create(
        folder / "runs", make_runs.spec(cluster=cluster, search={"nodes": [nodes], "max_node_hours": 10})
    )
    task = TrainTask(
        id="train-s-1", job="train-s", spec=run.read_spec(), workdir=str(run.path), nodes=nodes, signature="s", attempt=1,
        ladder=(Rung(batch=64 * nodes * per_node),), workers=0,
    )  # fmt: skip
    run.write_task(task)
    allocation = {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": str(nodes * per_node), "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_END_TIME": str(int(time.time()) + 36000),
    }  # fmt: skip
    for index in range(here * per_node):
        if os.fork() == 0:
            node, local = divmod(index, per_node)
            settings = {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
            os.environ.update(allocation | settings)
            supervise(run.path, task.id)
            os._exit(0)
    time.sleep(300)


main()
