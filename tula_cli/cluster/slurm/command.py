"""Calls of SLURM's commands, in a cleaned environment, with a timeout, and without raising errors."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tula_cli.host.processes import run_command

_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=")
COMMAND_TIMEOUT = 60.0
"""Timeout in seconds of a command of SLURM; a busy controller may take tens of seconds to answer."""

_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_DROPPED_PREFIXES = ("SLURM_", "SUBMITIT_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SACCTMGR_")
_SET_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)


@dataclass(frozen=True)
class CommandResult:
    """The result of a command; `error_message` is its error message, or empty."""

    end: Literal["done", "failed", "hung", "missing"]
    text: str = ""
    error_message: str = ""

    @property
    def has_succeeded(self) -> bool:
        return self.end == "done"


def call_slurm_command(
    *command: str, timeout: float | None = None, environ: Mapping[str, str] | None = None
) -> CommandResult:
    """Run a command of SLURM, by default in the cleaned environment of this process, and wait for its exit."""
    limit = COMMAND_TIMEOUT if timeout is None else timeout
    try:
        completed = run_command(
            command,
            timeout=limit,
            environ=make_command_environment(os.environ) if environ is None else environ,
            outlives_parent=command[0] in ("sbatch", "scancel", "scontrol"),  # commands that change jobs must complete
        )
    except OSError as error:
        return CommandResult("missing", error_message=f"{command[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return CommandResult("hung", error_message=f"{command[0]} took more than {limit:g} s")
    text, error_message = completed.stdout.strip(), completed.stderr.strip()
    if completed.returncode == 0:
        return CommandResult("done", text, error_message)
    return CommandResult(
        "failed", text, error_message or text or f"{command[0]} ended with exit code {completed.returncode}"
    )


def make_command_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which SLURM's commands are run.

    Variables of an allocation in which tula was started are dropped, as they would bind the new job's ranks to its CPUs
    and GPUs. Variables of users for squeue, sacct and sinfo are dropped, as they hide jobs, change formats and select
    another cluster than the one that sbatch submits to.
    """
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT_VARIABLES or not (name.startswith(_DROPPED_PREFIXES) or (inside and name in _SET_VARIABLES))
    }


def parse_record(line: str) -> dict[str, str]:
    """Return the fields of a one-line record of `scontrol --oneliner`; values may contain spaces and "="."""
    keys = list(_KEY.finditer(line))
    ends = [key.start() for key in keys[1:]] + [len(line)]
    fields: dict[str, str] = {}
    # strict=False: a line without fields ("No reservations in the system") gives an end, but no key.
    for key, end in zip(keys, ends, strict=False):
        fields.setdefault(key[1], line[key.end() : end].strip())  # "CfgTRES=cpu=2,..." has no space before "cpu"
    return fields
