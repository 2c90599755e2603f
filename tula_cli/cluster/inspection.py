"""Inspection of a job: properties of its model and dataset, found by building them in a separate process."""

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import resource
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli import words
from tula_cli.cluster import messages
from tula_cli.cluster.local import make_environment_with_package
from tula_cli.diagnostics import Diagnostic
from tula_cli.errors import JobFailed, Problem, SpecError, TulaError
from tula_cli.host import devices
from tula_cli.host.machine import read_machine_memory, read_processor_name
from tula_cli.host.processes import run_command
from tula_cli.plugins import is_import_string
from tula_cli.run.code import compute_code_digest
from tula_cli.run.files import make_folder, read_change_time, read_record, write_record
from tula_cli.run.imports import list_import_strings
from tula_cli.run.records.inspections import Inspection
from tula_cli.spec.job import JobSpec, get_beta2_half_life
from tula_cli.spec.scripts.placeholders import PYTHON_PATTERN
from tula_cli.spec.scripts.script import Script
from tula_cli.spec.signature import compute_measurement_signature

# --- The inspection of a script's job

IMPORT_SECONDS = 60.0
"""Timeout in seconds of the trial import of torch; no warning is given after a timeout."""


def describe_script_job(spec: JobSpec, script: Script) -> Inspection:
    """Return the inspection of a script's job from its spec alone, without starting the script.

    Raises:
        SpecError: nothing limits the batches to measure, or, for a job on this machine, the command's program is
            missing here or its Python cannot import torch.
    """
    missing = _find_missing_program(script) or _find_missing_torch(spec, script)
    if missing is not None and not spec.cluster.backend.has_queue:
        raise missing[1]
    bounds = [bound for bound in (script.known_dataset_size, spec.search.max_batch) if bound is not None]
    if not bounds:
        raise SpecError(
            "the largest batch is unknown: script.dataset_size is auto, and the script has not run yet",
            "set script.dataset_size (samples per epoch) or search.max_batch",
        )
    gpus = 0 if spec.cluster.device == "cpu" else devices.count_gpus()
    return Inspection(
        dataset_size=script.known_dataset_size or bounds[0],
        eval_size=0,
        classes=None,
        sample_shape=(),
        parameters=0,
        footprints=(),
        estimate_error="",
        device="cuda" if gpus or spec.cluster.device == "cuda" else "cpu",
        hardware="" if gpus else read_processor_name(),
        capacity=spec.cluster.memory_per_gpu,
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpus,
        script=script.command,
        warnings=() if missing is None else missing[:1],
    )


def _find_missing_program(script: Script) -> tuple[Diagnostic, SpecError] | None:
    """Return a warning about the nodes, and the error on this machine, if the program of a script is missing here."""
    program = shlex.split(script.command)[0]
    if program.endswith(".py") or "{" in program or shutil.which(program):  # shutil.which also accepts a path
        return None
    return messages.program_not_here(program=program), SpecError(
        f"script.command: the program {program} does not exist on this machine",
        "install the program, activate its environment, or give its path in script.command",
    )


def _find_missing_torch(spec: JobSpec, script: Script) -> tuple[Diagnostic, SpecError] | None:
    """Return a warning and an error as `_find_missing_program` if the Python of a script, unless tula's, lacks torch."""
    program = shlex.split(script.command)[0]
    python = shutil.which(program) if PYTHON_PATTERN.fullmatch(Path(program).name) else None
    is_tulas = python is None or Path(python).parent == Path(sys.executable).parent
    if python is None or is_tulas or spec.cluster.setup:  # set-up lines may activate another Python
        return None
    try:
        import_result = run_command([python, "-c", "import torch"], timeout=IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if import_result.returncode == 0:
        return None
    why = (import_result.stderr.strip().splitlines() or ["no reason given"])[-1]
    return messages.torch_not_here(python=python, reason=why), SpecError(
        f"script.command: {python} cannot import torch: {why}",
        "activate the environment that has torch, or give the path of that environment's Python in script.command",
    )


# --- The inspection

INSPECTION_MODULE = "tula_cli.worker.measure.inspect"
TORCH_MISSING_HINT = "run pip install 'tula-cli[torch]', or, on SLURM, set cluster.python to a Python that has torch"
INSPECT_ON_NODE_HINT = "run tula profile job.yaml, whose first job builds the model and the dataset on a node"
_STEP_WORDS = ("srun:", "slurmstepd:")  # prefixes of SLURM's own messages about a program that fails
INSPECTION_TIMEOUT = 600.0  # seconds, including the download of a dataset


Inspect = Callable[[JobSpec], Inspection]
"""Function that returns the size of a job's dataset and the memory estimate: `inspect`, or a cached version."""


@dataclass(frozen=True)
class ResourceLimit:
    """A resource limit that makes programs fail, and how such failures are recognised.

    Args:
        signs: regular expression of messages that programs print at the limit.
        signals: signals by which the kernel kills such programs.
        settings: names of the limit in the shell, with the kernel's constants.
        remedy: what a user can do on this machine.
    """

    name: str
    signs: str
    signals: tuple[int, ...]
    settings: Mapping[str, int]
    remedy: str


RESOURCE_LIMITS = (
    ResourceLimit(
        "CPU time",
        r"CPU time limit exceeded",
        (signal.SIGXCPU,),
        {"ulimit -t": resource.RLIMIT_CPU},
        "raise the limit of CPU time: ulimit -t unlimited",
    ),
    ResourceLimit(
        "processes and threads",
        r"can't start new thread|pthread_create|Thread creation failed|RLIMIT_NPROC|fork: retry|clone3? failed"
        r"|Resource temporarily unavailable|unable to (create|start) (new )?(native )?thread",
        (),
        {"ulimit -u": resource.RLIMIT_NPROC},
        "raise the limit of processes and threads (ulimit -u), or end some of your processes",
    ),
    ResourceLimit(
        "memory",
        r"MemoryError|bad_alloc|an(no|')t allocate memory|failed to map segment|[Uu]nable to (allocate|mmap)|ENOMEM"
        r"|oom.?kill|[Nn]ot enough memory|static TLS block|[Oo]ut [Oo]f [Mm]emory: [Kk]illed|cannot map zero-fill"
        r"|[Ff]ailed to allocate memory|[Mm]emory (cgroup|exhausted)|cgroup out.of.memory|CPU out of memory",
        (signal.SIGKILL, signal.SIGBUS),
        {"ulimit -v": resource.RLIMIT_AS},
        "raise the memory limit (ulimit -v, or the limit of your session), or use a machine with more memory",
    ),
)


class NotInspectable(JobFailed):
    """The model and the dataset cannot be built on this machine, so their properties are not known yet.

    Args:
        remedy: what would make building possible on this machine.
        on_node_hint: what to do instead.
    """

    def __init__(
        self, message: str, remedy: str = TORCH_MISSING_HINT, *, on_node_hint: str = "", evidence: str = ""
    ) -> None:
        super().__init__(message, f"{on_node_hint}; or {remedy}" if on_node_hint else remedy, evidence=evidence)
        self.remedy = remedy


def inspect(spec: JobSpec) -> Inspection:
    """Build the model and the dataset in a separate process and return their properties; for a script, use its spec.

    Raises:
        SpecError: the model, dataset, optimizer ... of the spec cannot be built.
        JobFailed: the user's code failed, or took too long.
        NotInspectable: the interpreter that the jobs will use cannot run here, has no torch, or exceeds a limit of this
            machine.
    """
    if spec.script is not None:
        return describe_script_job(spec, spec.script)
    python = get_python_command(spec)
    command = ["bash", "-c", f"{python} -m {INSPECTION_MODULE}"]
    try:
        completed = run_command(
            command,
            stdin=spec.model_dump_json(),
            timeout=INSPECTION_TIMEOUT,
            environ=make_environment_with_package(),
            guarded=True,
        )
    except subprocess.TimeoutExpired:
        message = f"building the model and the dataset took more than {INSPECTION_TIMEOUT:g} s"
        raise JobFailed(message, "prepare the data beforehand") from None
    on_node_hint = INSPECT_ON_NODE_HINT if spec.cluster.backend.inspects_on_node else ""
    try:
        if not completed.stdout.strip():
            raise make_interpreter_error(python, completed.stderr, on_node_hint=on_node_hint)
        return parse_inspection(completed.stdout, completed.stderr)
    except JobFailed as error:
        stderr = "" if completed.returncode == 0 else completed.stderr
        exceeded = find_exceeded_limit(error, stderr, completed.returncode)
        if exceeded is None:
            raise
        limit, sign = exceeded
        why = f"{python} cannot build the model and the dataset here: the limit of {limit.name} was exceeded"
        raise NotInspectable(
            f"{why}: {sign}{_describe_limits(limit)}", f"here, {limit.remedy}", on_node_hint=on_node_hint
        ) from error


def find_exceeded_limit(error: JobFailed, stderr: str, code: int = 0) -> tuple[ResourceLimit, str] | None:
    """Return the resource limit that a program exceeded, with the line or signal that shows it; None if nothing shows one.

    Args:
        code: its exit code; 128 + N if signal N killed it.
    """
    for limit in RESOURCE_LIMITS:
        for line in (*error.evidence.splitlines(), *stderr.splitlines()):
            if re.search(limit.signs, line):
                return limit, line.strip()[-300:]
        if code - 128 in limit.signals:
            return limit, f"it was killed by {signal.Signals(code - 128).name}"
    return None


def _describe_limits(limit: ResourceLimit) -> str:
    """Return the known limits of a resource for this process, as text; empty if there are none."""
    soft = {option: resource.getrlimit(kind)[0] for option, kind in limit.settings.items()}
    limits = [f"{option}: {value}" for option, value in soft.items() if value != resource.RLIM_INFINITY]
    if limit.name == "memory":
        limits = [f"ulimit -v: {words.format_bytes(soft['ulimit -v'])}"] if limits else []
        limits.append(f"memory of this session or machine: {words.format_bytes(read_machine_memory())}")
    return f" ({', '.join(limits)})" if limits else ""


def get_python_command(spec: JobSpec) -> str:
    """Return the shell command that starts the Python of the jobs."""
    return spec.cluster.python or shlex.quote(sys.executable)


def make_interpreter_error(python: str, stderr: str, *, on_node_hint: str = "") -> NotInspectable:
    """Return the error for an interpreter that exited before the inspection started: it is missing or lacks a module.

    Args:
        python: the shell command that starts the interpreter.
        on_node_hint: what to do instead, if the interpreter may work on another machine.
    """
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith(_STEP_WORDS)]
    last_message = lines[-1].strip() if lines else "it printed nothing"
    message = f"{python} cannot build the model and the dataset: {last_message}"
    return NotInspectable(message, on_node_hint=on_node_hint, evidence=last_message)


def parse_inspection(stdout: str, stderr: str) -> Inspection:
    """Return the inspection from the last line of its output; the first line only marks its start.

    Raises:
        SpecError, JobFailed: as in `inspect`.
    """
    try:
        answer: Mapping[str, Any] = json.loads(stdout.strip().splitlines()[1:][-1])
    except (ValueError, IndexError):
        last_line = (stderr.strip().splitlines() or ["no output"])[-1]
        message = f"building the model and the dataset ended without a result: {last_line}"
        raise JobFailed(message, evidence=last_line) from None
    error = answer.get("error")
    if error is None:
        return Inspection.model_validate(answer)
    if error["class"] == "SpecError":
        problems = tuple(Problem(**problem) for problem in error["problems"])
        raise SpecError(error["message"], error["hint"], problems=problems)
    raise JobFailed(error["message"], error["hint"], evidence=error["cause"])


# --- Cached inspections
#
# The cache key is computed without imports: in milliseconds, while building the model takes seconds.

BUILDING = "building the model and the dataset"
CACHE_FOLDER = ".inspections"
MAX_ENTRIES_KEPT = 50
MAX_FILES_SEEN = 5_000
"""Maximum files and folders of a dataset whose modification times are read."""

Dependencies = dict[str, Any]


@dataclass
class CachedInspection:
    """Inspects a job, and caches the inspection until something that it depends on changes.

    Args:
        root: folder of the runs, in which the cache is kept.
        fresh: ignore a cached inspection; the new one is cached all the same.
        keep: whether the cache may be written.
        facts: returns what the inspection of a job depends on.
    """

    root: Path
    build: Inspect
    fresh: bool = False
    keep: bool = True
    note: Callable[[str], object] = lambda _: None
    facts: Callable[[JobSpec], Dependencies] = lambda spec: list_inspection_dependencies(spec)

    def __call__(self, spec: JobSpec) -> Inspection:
        """Return the inspection of a job, from the cache if possible.

        Raises:
            SpecError: the model, dataset, optimizer ... of the spec cannot be built.
            JobFailed: the user's code failed, or took too long.
        """
        if spec.script is not None:
            return self.build(spec)  # a script's job is inspected from its spec alone
        facts_before = self.facts(spec)
        path = self._make_path(facts_before)
        cached = None if self.fresh else _read_cache_file(path)
        if cached is not None:
            age = words.format_duration(max(0.0, time.time() - (read_change_time(path) or time.time())))
            self.note(f"using the model and dataset sizes measured {age} ago (--fresh measures them again)")
            return cached
        self.note(BUILDING)
        inspection = self.build(spec)
        if self.keep:
            after = self.facts(spec)  # computed again, as building may have downloaded the dataset
            if {**facts_before, "dataset": None} == {**after, "dataset": None}:
                self._write_cache_file(self._make_path(after), inspection)
        return inspection

    def _make_path(self, facts: Dependencies) -> Path:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        return self.root / CACHE_FOLDER / f"{digest[:16]}.json"

    def _write_cache_file(self, path: Path, inspection: Inspection) -> None:
        # If the folder is not writable, the next command builds again; this command still has its result.
        with contextlib.suppress(TulaError, OSError):
            make_folder(path.parent)
            write_record(path, inspection)
            for old in sorted(path.parent.glob("*.json"), key=read_change_time)[:-MAX_ENTRIES_KEPT]:
                old.unlink(missing_ok=True)  # another command may delete it at the same time


def _read_cache_file(path: Path) -> Inspection | None:
    try:
        return read_record(path, Inspection)
    except TulaError:  # a damaged file is replaced by a new inspection
        return None


# --- The dependencies of an inspection


def list_inspection_dependencies(spec: JobSpec) -> Dependencies:
    """Return everything that an inspection of a job depends on, as JSON.

    Raises:
        SpecError: a file of the user's code cannot be read.
    """
    possible_paths = [value for value in spec.dataset.args.values() if isinstance(value, str) and 0 < len(value) < 4096]
    return {
        "signature": compute_measurement_signature(spec),
        "others": list_unmeasured_settings(spec),
        "code": compute_code_digest(spec, Path.cwd()),
        "machine": [platform.node(), read_machine_memory(), sorted(os.sched_getaffinity(0))],
        "gpus": {name: os.environ.get(name) for name in devices.VISIBILITY_VARIABLES},
        "python": spec.cluster.python,
        "packages": _read_package_states(spec),
        "tula": max(read_change_time(path) for path in Path(__file__).parents[1].rglob("*.py")),
        "dataset": [find_newest_change(Path(path)) for path in (spec.dataset.root, *possible_paths)],
    }


def list_unmeasured_settings(spec: JobSpec) -> Dependencies:
    """Return the settings that an inspection depends on and a measurement does not."""
    search, train, half_life = spec.search, spec.train, get_beta2_half_life(spec)
    ranks = max(search.nodes) * spec.cluster.gpus_per_node
    return {
        "several_ranks": ranks > 1,
        # The ranks share the memory of this machine.
        "share": ranks if spec.cluster.kind == "local" and spec.cluster.memory_per_gpu is None else None,
        "one_sample": search.min_batch // (ranks * train.accumulate) <= 1,
        "lr": spec.optimizer.lr if spec.optimizer.groups else None,  # shown for each parameter group
        "weight_decay": spec.optimizer.weight_decay > 0,  # some optimizers do not accept a weight decay
        "beta2": [half_life, search.min_batch, search.max_batch] if half_life else None,
        "test": spec.dataset.test and spec.dataset.test.model_dump(mode="json"),
        "metrics": train.metrics,
        "schedule": [spec.schedule.kind, train.epochs] if is_import_string(spec.schedule.kind) else None,
        "ags": spec.ags.parameters if train.training_method.uses_section("ags") else None,  # patterns must match
        "arms": spec.auto.model_dump(mode="json") if train.training_method.uses_section("auto") else None,
    }


_PACKAGE_STATES = """
import importlib.util, json, os, sys
specs = [importlib.util.find_spec(name) for name in sys.argv[1:]]
files = [spec.origin for spec in specs if spec and spec.origin and os.path.exists(spec.origin)]
print(json.dumps([sys.version, [[file, os.stat(file).st_mtime_ns] for file in files]]))
"""
"""A program that prints where an interpreter finds packages, and when they were installed; it imports none of them."""


def _read_package_states(spec: JobSpec) -> object:
    """Return the state of Python, torch and the packages that the job names, in the interpreter of the jobs."""
    named_packages = {
        re.split(r"[.:]", name)[0] for name in list_import_strings(spec)
    }  # timm of timm.models:create_model
    program = shlex.join([_PACKAGE_STATES, "torch", "torchvision", *sorted(named_packages)])
    command = f"{get_python_command(spec)} -c {program}"
    try:
        completed = run_command(["bash", "-c", command], timeout=60.0, environ=make_environment_with_package())
        return json.loads(completed.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return secrets.token_hex()  # the interpreter cannot run here: a random key matches no cached inspection


def find_newest_change(root: Path) -> list[float]:
    """Return the newest change in a folder (Unix time) and the number of entries examined; empty if missing.

    A file that is rewritten in place, or is added more than two folders down, is not detected.
    """
    if not read_change_time(root):
        return []
    paths = itertools.islice(itertools.chain([root], root.glob("*"), root.glob("*/*")), MAX_FILES_SEEN)
    changes = [read_change_time(path) for path in paths]
    return [max(changes), len(changes)]
