"""The inspection: what building model and dataset tells, asked of a process of its own."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tula_cli.cluster.local import with_package
from tula_cli.cluster.scripts.described import described
from tula_cli.errors import JobFailed, Problem, SpecError
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec

PROGRAM = "tula_cli.worker.measure.inspect"
TORCH_MISSING = "pip install 'tula-cli[torch]', or, on SLURM, set cluster.slurm.python to an interpreter that has torch"
ON_A_NODE = "run tula profile job.yaml: its first job builds them on a node"
_STEP_WORDS = ("srun:", "slurmstepd:")  # what SLURM says beside a program that fails
INSPECTION_TIMEOUT = 600.0  # seconds; a first download of a dataset is part of it


Inspect = Callable[[JobSpec], Inspection]
"""Tells what building model and dataset tells: `inspect`, or one that remembers."""


class NotInspected(JobFailed):
    """The jobs' interpreter cannot run on this machine: what the model and the dataset are is not known yet."""


def inspect(spec: JobSpec, *, timeout: float = INSPECTION_TIMEOUT) -> Inspection:
    """Build the model and the dataset in a process of its own, and tell what was found; of a script, what its spec says.

    Args:
        spec: the job.
        timeout: seconds.

    Raises:
        SpecError: the model, dataset, optimizer ... of the spec cannot be built.
        JobFailed: the user's code failed, or took too long.
        NotInspected: the interpreter that the jobs will use cannot run here, or has no torch.
    """
    if spec.script is not None:
        return described(spec, spec.script)
    python = interpreter(spec)
    command = ["bash", "-c", f"{python} -m {PROGRAM}"]
    try:
        done = subprocess.run(
            command, input=spec.model_dump_json(), capture_output=True, text=True, timeout=timeout, env=with_package()
        )
    except subprocess.TimeoutExpired:
        raise JobFailed(f"building the model and the dataset took more than {timeout:g} s") from None
    if not done.stdout.strip():
        raise not_started(python, done.stderr, here=spec.cluster.kind == "slurm")
    return understood(done.stdout, done.stderr)


def interpreter(spec: JobSpec) -> str:
    """Return the shell's words that start the python of the jobs."""
    return own_interpreter(spec) or shlex.quote(sys.executable)


def own_interpreter(spec: JobSpec) -> str | None:
    """Return the shell's words that start the python of the jobs, where it is not the one that runs this."""
    return spec.cluster.python


def not_started(python: str, stderr: str, *, here: bool = False) -> NotInspected:
    """Return the error of an interpreter that ended before it began: it is not there, or lacks something.

    Args:
        python: the shell's words that start it.
        stderr: what was said.
        here: whether it may be otherwise on a node than here.
    """
    own = [line for line in stderr.splitlines() if line.strip() and not line.startswith(_STEP_WORDS)]
    said = own[-1].strip() if own else "it said nothing"
    hint = f"{ON_A_NODE}; or {TORCH_MISSING}" if here else TORCH_MISSING
    return NotInspected(f"{python} cannot build the model and the dataset: {said}", hint)


def understood(stdout: str, stderr: str) -> Inspection:
    """Return what the inspection answered in its last line, after the one that says that it has begun.

    Raises:
        SpecError, JobFailed: as `inspect`.
    """
    try:
        answer: Mapping[str, Any] = json.loads(stdout.strip().splitlines()[1:][-1])
    except (ValueError, IndexError):
        last = stderr.strip().splitlines()[-1:] or ["no output"]
        raise JobFailed(f"building the model and the dataset ended before its answer: {last[0]}") from None
    error = answer.get("error")
    if error is None:
        return Inspection.model_validate(answer)
    if error["class"] == "SpecError":
        problems = tuple(Problem(**problem) for problem in error["problems"])
        raise SpecError(error["message"], error["hint"], problems=problems)
    raise JobFailed(error["message"], error["hint"])
