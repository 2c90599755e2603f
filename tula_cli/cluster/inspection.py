"""The inspection: what building model and dataset tells, asked of a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tula_cli.cluster.local import with_package
from tula_cli.errors import JobFailed, Problem, SpecError
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec

INSPECTION_TIMEOUT = 600.0  # seconds; a first download of a dataset is part of it


Inspect = Callable[[JobSpec], Inspection]
"""Tells what building model and dataset tells: `inspect`, or one that remembers."""


def inspect(spec: JobSpec, *, timeout: float = INSPECTION_TIMEOUT) -> Inspection:
    """Build the model and the dataset in a process of its own, and tell what was found.

    Args:
        spec: the job.
        timeout: seconds.

    Raises:
        SpecError: the model, dataset, optimizer ... of the spec cannot be built.
        JobFailed: the user's code failed, or took too long.
    """
    command = [sys.executable, "-m", "tula_cli.worker.measure.inspect"]
    try:
        done = subprocess.run(
            command, input=spec.model_dump_json(), capture_output=True, text=True, timeout=timeout, env=with_package()
        )
    except subprocess.TimeoutExpired:
        raise JobFailed(f"building the model and the dataset took more than {timeout:g} s") from None
    return _inspection(done.stdout, done.stderr, exit_code=done.returncode)


def _inspection(stdout: str, stderr: str, *, exit_code: int) -> Inspection:
    try:
        answer: Mapping[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = stderr.strip().splitlines()[-1:] or ["no output"]
        raise JobFailed(f"building the model and the dataset ended with exit code {exit_code}: {last[0]}") from None
    error = answer.get("error")
    if error is None:
        return Inspection.model_validate(answer)
    if error["class"] == "SpecError":
        problems = tuple(Problem(**problem) for problem in error["problems"])
        raise SpecError(error["message"], error["hint"], problems=problems)
    raise JobFailed(error["message"], error["hint"])
