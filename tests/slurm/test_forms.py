"""Options of sbatch and srun on a real cluster: every form of requesting GPUs, and what reaches the tasks."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import SlurmCluster, wait_until

from tula_cli.cluster.slurm.submit import SlurmLauncher
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import CheckTask
from tula_cli.spec.job import JobSpec

pytestmark = pytest.mark.slurm
LOOK = 'echo "$SLURM_LOCALID ${CUDA_VISIBLE_DEVICES-none} $SLURM_CPUS_PER_TASK $NOTE" > "$0.$SLURM_PROCID"\n'
"""Runs in the place of python, in every task."""


def spec(look: Path, **slurm: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"name": "resnet18"},
            "dataset": {"name": "CIFAR10"},
            "optimizer": {"lr": 0.1},
            "train": {"epochs": 1},
            "cluster": {
                "kind": "slurm",
                "gpus_per_node": 2,
                "python": f"sh {look}",
                "slurm": {"memory": "500M", **slurm},
            },
        }
    )


def submit(folder: Path, result: JobSpec) -> None:
    run = RunDir(folder)
    run.submitit_dir.mkdir()
    task = CheckTask(id="check", job="check", spec=result, workdir=str(folder), nodes=2)
    (folder / "job.sh").write_text(SlurmLauncher().render_script(run, task))
    done = subprocess.run(["sbatch", str(folder / "job.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def told(folder: Path, tasks: int) -> list[str]:
    """Return what each task of a job has seen: its place on its node, its GPUs, its CPUs, $NOTE."""
    files = [folder / f"look.{task}" for task in range(tasks)]
    wait_until(
        lambda: all(path.exists() and path.stat().st_size for path in files), f"{tasks} tasks look round", seconds=30
    )
    time.sleep(0.2)
    assert not (folder / f"look.{tasks}").exists()
    return [path.read_text().strip() for path in files]


FORMS = [
    ({"gpus": "gpus_per_node"}, ["0,1", "0,1"]),
    ({"gpus": "gpus_per_node", "gpu_type": "a100"}, ["0,1", "0,1"]),
    ({"gpus": "gres"}, ["0,1", "0,1"]),
    ({"gpus": "gres", "gpu_type": "a100"}, ["0,1", "0,1"]),
    ({"gpus": "gpus_per_task"}, ["0", "1"]),
    ({"gpus": "gpus_per_task", "gpu_type": "a100"}, ["0", "1"]),
    ({"gpus": "none"}, ["none", "none"]),
    ({"gpus": "none", "exclusive": False}, ["none", "none"]),
    ({"gpus": "none", "extra": {"gpus-per-socket": 2, "sockets-per-node": 1}}, ["0,1", "0,1"]),
    ({"launcher": "torchrun", "gpus": "gpus_per_node"}, ["0,1"]),
    ({"launcher": "torchrun", "gpus": "gres", "gpu_type": "a100", "exclusive": False}, ["0,1"]),
]


def test_every_form_gives_the_ranks_the_gpus_of_their_node(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(FORMS))]
    for folder, (slurm, _) in zip(folders, FORMS, strict=True):
        folder.mkdir()
        (folder / "look").write_text(LOOK)
        submit(folder, spec(folder / "look", cpus_per_task=1, **slurm))
    for folder, (slurm, gpus) in zip(folders, FORMS, strict=True):
        cpus = 2 if slurm.get("launcher") == "torchrun" else 1
        expected = [f"{place} {seen} {cpus}" for place, seen in enumerate(gpus)] * 2
        assert told(folder, len(expected)) == expected, slurm


def test_environment_and_wrapper_reach_the_tasks_of_all_nodes(
    on_slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the site, or the job, keeps the environment of the login node from the job."""
    wrapper = '# one\'s "own"\n' + 'exec "$@"\n'
    (tmp_path / "own.sh").write_text(wrapper)
    (tmp_path / "look").write_text(
        '{ printf "%s|%s|" "$NOTE" "$LEAKED"; echo "$TULA_WRAPPER"; } > "$0.$SLURM_PROCID"\n'
    )
    slurm = {
        "gpus": "none", "environment": {"NOTE": "it's $HOME"}, "wrapper": "own.sh",
        "extra": {"export": "NONE"}, "setup": [f"export PATH={os.environ['PATH']} SLURM_CONF={os.environ['SLURM_CONF']}"],
    }  # fmt: skip
    monkeypatch.setenv("LEAKED", "from the login node")
    submit(tmp_path, spec(tmp_path / "look", **slurm))
    assert told(tmp_path, 4) == [f"it's $HOME||# {tmp_path}/own.sh\n{wrapper}".strip()] * 4
