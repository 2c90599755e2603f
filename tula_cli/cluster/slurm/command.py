"""The one way to call SLURM's commands: in a cleaned environment, with a time limit, and no error that escapes."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tula_cli.host.processes import run_command

PATIENCE = 60.0
"""Seconds that a command of SLURM gets; a busy controller answers after some tens of them."""

_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_DROPPED = ("SLURM_", "SUBMITIT_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SACCTMGR_")
_GIVEN = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)


@dataclass(frozen=True)
class Answer:
    """What became of a call: `complaint` says what went wrong, empty where nothing did."""

    end: Literal["done", "failed", "hung", "missing"]
    text: str = ""
    complaint: str = ""

    @property
    def ok(self) -> bool:
        return self.end == "done"

    @property
    def unknown_job(self) -> bool:
        return "Invalid job id" in self.complaint


def call(*command: str, patience: float | None = None, environ: Mapping[str, str] | None = None) -> Answer:
    """Call one of SLURM's commands and wait for its end.

    Args:
        command: the program and its arguments.
        patience: seconds that it gets; PATIENCE where nothing is said.
        environ: its environment; the cleaned one of this process where nothing is said.
    """
    limit = PATIENCE if patience is None else patience
    try:
        done = run_command(
            command,
            timeout=limit,
            environ=environment(os.environ) if environ is None else environ,
            outlives_parent=command[0] in ("sbatch", "scancel", "scontrol"),  # what it has begun, SLURM completes
        )
    except OSError as error:
        return Answer("missing", complaint=f"{command[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Answer("hung", complaint=f"{command[0]} took more than {limit:g} s")
    text, complaint = done.stdout.strip(), done.stderr.strip()
    if done.returncode == 0:
        return Answer("done", text, complaint)
    return Answer("failed", text, complaint or text or f"{command[0]} ended with exit code {done.returncode}")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which SLURM's commands are called.

    What an allocation sets, where tula is started inside one, would bind the new job's ranks to its processors and GPUs;
    what a user sets for their own squeue, sacct and sinfo hides jobs, changes formats and asks another cluster than the
    one that sbatch submits to.
    """
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (name.startswith(_DROPPED) or (inside and name in _GIVEN))
    }
