"""What sbatch and srun are asked for: what the spec asks for, and nothing else."""

import math
from typing import Any

from tula_cli.records import ProbeTask, TrainTask
from tula_cli.rundir import RunDir
from tula_cli.spec import Slurm


def parameters(run: RunDir, task: ProbeTask | TrainTask) -> dict[str, Any]:
    """Return what submitit is given for a job: what the spec asks for, and nothing else."""
    slurm = task.spec.cluster.slurm or Slurm()
    named = slurm.model_dump(include={"partition", "account", "qos", "constraint", "exclude"}, exclude_none=True)
    extra = {key: value for key, value in slurm.extra.items() if value is not False}
    if slurm.reservation:
        extra["reservation"] = slurm.reservation
    if slurm.memory:
        extra["mem"] = slurm.memory
    if task.spec.cluster.device != "cpu":
        named["gpus_per_node"] = task.spec.cluster.gpus_per_node
    if slurm.cpus_per_task:
        named["cpus_per_task"] = slurm.cpus_per_task
    return {
        **named,
        "job_name": f"tula-{run.id}-{task.job}",
        "nodes": task.nodes,
        "ntasks_per_node": task.spec.cluster.gpus_per_node,
        "time": _minutes(task, slurm),
        "exclusive": True,  # neighbours on a node would spoil the times
        "wckey": None,
        "setup": slurm.setup or None,
        # A rank that dies must not leave the others waiting; SLURM's own requeue would start what tula starts itself.
        "srun_args": ["--kill-on-bad-exit=1", *_cpus(slurm)],
        "additional_parameters": {"no-requeue": True, **extra},
    }


def _cpus(slurm: Slurm) -> list[str]:
    """srun of SLURM 22.05 and later does not inherit --cpus-per-task from sbatch."""
    return [f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else []


def _minutes(task: ProbeTask | TrainTask, slurm: Slurm) -> int:
    """Return the time limit; a probe job gets room for the supervisor to end it first and write why."""
    return math.ceil(task.spec.search.max_minutes) + 2 if isinstance(task, ProbeTask) else slurm.minutes
