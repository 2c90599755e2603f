"""What is known of a job with a script before anything is measured: what its spec says, and this machine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tula_cli.errors import SpecError
from tula_cli.host import devices
from tula_cli.host.processes import run_command
from tula_cli.host.processor import processor_name
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec
from tula_cli.spec.scripts.own_script import Script

PYTHON = re.compile(r"python(\d(\.\d+)?)?")
IMPORT_SECONDS = 60.0
"""That importing torch may take; after that nothing is said of it."""


def describe_script_job(spec: JobSpec, script: Script) -> Inspection:
    """Return what takes the place of building a model and a dataset: nothing is started.

    Args:
        spec: the job.
        script: its script.

    Raises:
        SpecError: nothing bounds the batches that are to be measured, or the command's program is not on this machine.
    """
    warnings = _warn_missing_program(spec, script) or _warn_missing_torch(spec, script)
    bounds = [bound for bound in (script.known_dataset_size, spec.search.max_batch) if bound is not None]
    if not bounds:
        raise SpecError(
            "nothing tells which batches are too large: script.dataset_size is auto, and the script has not run yet",
            "give script.dataset_size (samples of an epoch) or search.max_batch",
        )
    gpus = 0 if spec.cluster.device == "cpu" else devices.gpu_count()
    return Inspection(
        dataset_size=script.known_dataset_size or bounds[0],
        eval_size=0,
        classes=None,
        sample_shape=(),
        parameters=0,
        footprints=(),
        estimate_error="",
        device="cuda" if gpus or spec.cluster.device == "cuda" else "cpu",
        hardware="" if gpus else processor_name(),
        capacity=spec.cluster.memory_per_gpu,
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpus,
        script=script.command,
        warnings=warnings,
    )


def _warn_missing_program(spec: JobSpec, script: Script) -> tuple[str, ...]:
    """Return what to say of a program that is not here but may be on a node.

    Raises:
        SpecError: it is to run here.
    """
    program = shlex.split(script.command)[0]
    if program.endswith(".py") or "{" in program or shutil.which(program):  # which takes a path from here, too
        return ()
    problem = f"script.command: there is no program {program} on this machine"
    if spec.cluster.kind != "local":
        return (f"{problem}: the nodes need one",)
    raise SpecError(problem, "install it, activate its environment, or write its path")


def _warn_missing_torch(spec: JobSpec, script: Script) -> tuple[str, ...]:
    """Return what to say of a Python, not tula's own, that cannot import torch here but may on a node.

    Raises:
        SpecError: it is to run here.
    """
    program = shlex.split(script.command)[0]
    python = shutil.which(program) if PYTHON.fullmatch(Path(program).name) else None
    is_tulas = python is None or Path(python).parent == Path(sys.executable).parent
    set_up = [options.setup for options in (spec.cluster.slurm, spec.cluster.scheduler) if options is not None]
    if python is None or is_tulas or any(set_up):  # set-up lines may activate another
        return ()
    try:
        tried = run_command([python, "-c", "import torch"], timeout=IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if tried.returncode == 0:
        return ()
    why = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    problem = f"script.command: {python} cannot import torch: {why}"
    if spec.cluster.kind != "local":
        return (f"{problem}; on the nodes it has to",)
    raise SpecError(problem, "activate the environment that has it, or write the path of its python")
