"""The inspection: what building model and dataset tells, asked of a process of its own."""

import json
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tula_cli import words
from tula_cli.cluster.local import environment_with_package
from tula_cli.cluster.scripts.described import describe_script_job
from tula_cli.errors import JobFailed, Problem, SpecError
from tula_cli.host.capacity import machine_memory
from tula_cli.host.processes import run_command
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec

PROGRAM = "tula_cli.worker.measure.inspect"
TORCH_MISSING = "pip install 'tula-cli[torch]', or, on SLURM, set cluster.slurm.python to an interpreter that has torch"
ON_A_NODE = "run tula profile job.yaml: its first job builds them on a node"
_STEP_WORDS = ("srun:", "slurmstepd:")  # what SLURM says beside a program that fails
INSPECTION_TIMEOUT = 600.0  # seconds; a first download of a dataset is part of it


Inspect = Callable[[JobSpec], Inspection]
"""Tells what building model and dataset tells: `inspect`, or one that remembers."""


@dataclass(frozen=True)
class ResourceLimit:
    """A limit of a machine that ends programs, and the signs of it.

    Args:
        name: of the resource.
        signs: what programs print that reach it.
        signals: by which the kernel kills them.
        settings: the shell's names of the limit, and the kernel's.
        remedy: what a user can do here.
    """

    name: str
    signs: str
    signals: tuple[int, ...]
    settings: Mapping[str, int]
    remedy: str


_PREAMBLE = re.compile(r"^.*(cannot build the model and the dataset|before its answer|own code fails): ")
RESOURCE_LIMITS = (
    ResourceLimit(
        "CPU time",
        r"CPU time limit exceeded",
        (signal.SIGXCPU,),
        {"ulimit -t": resource.RLIMIT_CPU},
        "raise the limit of CPU time (ulimit -t)",
    ),
    ResourceLimit(
        "processes and threads",
        r"can't start new thread|pthread_create|Thread creation failed|RLIMIT_NPROC|fork: retry|clone3? failed"
        r"|Resource temporarily unavailable|unable to (create|start) (new )?(native )?thread",
        (),
        {"ulimit -u": resource.RLIMIT_NPROC},
        "raise the limit of processes and threads (ulimit -u), or end other processes of yours",
    ),
    ResourceLimit(
        "memory",
        r"MemoryError|bad_alloc|an(no|')t allocate memory|failed to map segment|[Uu]nable to (allocate|mmap)|ENOMEM"
        r"|oom.?kill|[Nn]ot enough memory|static TLS block|[Oo]ut [Oo]f [Mm]emory: [Kk]illed|cannot map zero-fill"
        r"|[Ff]ailed to allocate memory|[Mm]emory (cgroup|exhausted)|cgroup out.of.memory|CPU out of memory",
        (signal.SIGKILL, signal.SIGBUS),
        {"ulimit -v": resource.RLIMIT_AS},
        "raise the limit of memory (ulimit -v, or that of your session), or use a machine with more",
    ),
)


class NotInspectable(JobFailed):
    """The model and the dataset cannot be built on this machine: what they are is not known yet.

    Args:
        message: why.
        remedy: what would make it possible here.
        elsewhere: what to do instead.
    """

    def __init__(self, message: str, remedy: str = TORCH_MISSING, *, elsewhere: str = "") -> None:
        super().__init__(message, f"{elsewhere}; or {remedy}" if elsewhere else remedy)
        self.remedy = remedy


def inspect(spec: JobSpec, *, timeout: float = INSPECTION_TIMEOUT) -> Inspection:
    """Build the model and the dataset in a process of its own, and tell what was found; of a script, what its spec says.

    Args:
        spec: the job.
        timeout: seconds.

    Raises:
        SpecError: the model, dataset, optimizer ... of the spec cannot be built.
        JobFailed: the user's code failed, or took too long.
        NotInspected: the interpreter that the jobs will use cannot run here, has no torch, or exceeds a limit of this machine.
    """
    if spec.script is not None:
        return describe_script_job(spec, spec.script)
    python = interpreter_command(spec)
    command = ["bash", "-c", f"{python} -m {PROGRAM}"]
    try:
        completed = run_command(
            command, stdin=spec.model_dump_json(), timeout=timeout, environ=environment_with_package(), guarded=True
        )
    except subprocess.TimeoutExpired:
        raise JobFailed(f"building the model and the dataset took more than {timeout:g} s") from None
    elsewhere = ON_A_NODE if spec.cluster.kind == "slurm" else ""
    try:
        if not completed.stdout.strip():
            raise interpreter_failed(python, completed.stderr, elsewhere=elsewhere)
        return parse_inspection(completed.stdout, completed.stderr)
    except JobFailed as error:
        exceeded = limit_exceeded(error, "" if completed.returncode == 0 else completed.stderr, completed.returncode)
        if exceeded is None:
            raise
        limit, sign = exceeded
        why = f"{python} cannot build the model and the dataset here: the limit of {limit.name} was exceeded"
        raise NotInspectable(
            f"{why}: {sign}{_describe_limits(limit)}", f"here, {limit.remedy}", elsewhere=elsewhere
        ) from error


def limit_exceeded(error: JobFailed, stderr: str, code: int = 0) -> tuple[ResourceLimit, str] | None:
    """Return the limit of a machine that a program has exceeded and the sign of it; None if there is no sign of any.

    Args:
        error: how the program failed.
        stderr: what it printed.
        code: its exit code; 128 + N if signal N killed it.
    """
    for limit in RESOURCE_LIMITS:
        for line in (*error.message.splitlines(), *stderr.splitlines()):
            if re.search(limit.signs, line):
                return limit, _PREAMBLE.sub("", line.strip())[-300:]
        if code - 128 in limit.signals:
            return limit, f"it was killed by {signal.Signals(code - 128).name}"
    return None


def _describe_limits(limit: ResourceLimit) -> str:
    """Say which limits of a resource hold in this process, if any is known."""
    soft = {option: resource.getrlimit(kind)[0] for option, kind in limit.settings.items()}
    limits = [f"{option}: {value}" for option, value in soft.items() if value != resource.RLIM_INFINITY]
    if limit.name == "memory":
        limits = [f"ulimit -v: {words.amount(soft['ulimit -v'])}"] if limits else []
        limits.append(f"memory of this session or machine: {words.amount(machine_memory())}")
    return f" ({', '.join(limits)})" if limits else ""


def interpreter_command(spec: JobSpec) -> str:
    """Return the shell's words that start the python of the jobs."""
    return other_interpreter(spec) or shlex.quote(sys.executable)


def other_interpreter(spec: JobSpec) -> str | None:
    """Return the shell's words that start the python of the jobs, where it is not the one that runs this."""
    return spec.cluster.python


def interpreter_failed(python: str, stderr: str, *, elsewhere: str = "") -> NotInspectable:
    """Return the error of an interpreter that ended before it began: it is not there, or lacks something.

    Args:
        python: the shell's words that start it.
        stderr: what was said.
        elsewhere: where it may be otherwise than here.
    """
    messages = [line for line in stderr.splitlines() if line.strip() and not line.startswith(_STEP_WORDS)]
    last_message = messages[-1].strip() if messages else "it said nothing"
    return NotInspectable(f"{python} cannot build the model and the dataset: {last_message}", elsewhere=elsewhere)


def parse_inspection(stdout: str, stderr: str) -> Inspection:
    """Return what the inspection answered in its last line, after the one that says that it has begun.

    Raises:
        SpecError, JobFailed: as `inspect`.
    """
    try:
        answer: Mapping[str, Any] = json.loads(stdout.strip().splitlines()[1:][-1])
    except (ValueError, IndexError):
        last_line = stderr.strip().splitlines()[-1:] or ["no output"]
        raise JobFailed(f"building the model and the dataset ended before its answer: {last_line[0]}") from None
    error = answer.get("error")
    if error is None:
        return Inspection.model_validate(answer)
    if error["class"] == "SpecError":
        problems = tuple(Problem(**problem) for problem in error["problems"])
        raise SpecError(error["message"], error["hint"], problems=problems)
    raise JobFailed(error["message"], error["hint"])
