"""`tula check --site`: check the settings that apply to all jobs of a site, and whether the site matches them."""

import json
import math
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tula_cli.assets import SITE_FOLDER, config_files
from tula_cli.cluster.slurm.queue import describe_window
from tula_cli.cluster.slurm.sbatch import make_export_lines, read_setup_lines
from tula_cli.cluster.slurm.site import Partition, SiteFacts, ask_site_facts, describe_partition
from tula_cli.cluster.slurm.site_factors import list_unknown_factors
from tula_cli.errors import JobFailed, SchedulerError, SpecError, TulaError
from tula_cli.host.processes import run_command
from tula_cli.plugins import suggest_nearest
from tula_cli.spec.job import JobSpec
from tula_cli.spec.load import validate
from tula_cli.spec.merge import SITE_FILE, flatten, merge
from tula_cli.spec.old_keys import replace_old_keys
from tula_cli.spec.slurm_options import ROOM, Slurm
from tula_cli.spec.yaml_text import read_yaml
from tula_cli.version import __version__
from tula_cli.words import format_count

# --- A finding


@dataclass(frozen=True)
class SiteFinding:
    """One finding about a site: what was checked, its state, and what to do."""

    verdict: Literal["ok", "warning", "problem"]  # with a problem jobs fail, or are refused
    about: str  # the key, or what it is about
    message: str
    advice: str = ""  # empty where there is nothing to do
    source: Literal["file", "scheduler", "jobs"] = "file"  # what tells it


def make_ok_finding(about: str, message: str, source: Literal["file", "scheduler", "jobs"] = "file") -> SiteFinding:
    return SiteFinding("ok", about, message, source=source)


def make_warning_finding(
    about: str, message: str, advice: str, source: Literal["file", "scheduler", "jobs"] = "file"
) -> SiteFinding:
    return SiteFinding("warning", about, message, advice, source)


def make_problem_finding(
    about: str, message: str, advice: str, source: Literal["file", "scheduler", "jobs"] = "file"
) -> SiteFinding:
    return SiteFinding("problem", about, message, advice, source)


# --- The settings

_ANY_JOB: Mapping[str, Any] = {
    "model": {"name": "small_cnn"},
    "dataset": {"name": "digits"},
    "optimizer": {"lr": 0.1},
    "train": {"epochs": 1000},
}
"""The smallest valid job; a site file is merged into it so that the rules of jobs can be applied."""


@dataclass(frozen=True)
class SiteSettings:
    """Site files merged over each other, as they apply to every job."""

    files: tuple[Path, ...]  # the weaker first
    content: Mapping[str, Any]
    origins: Mapping[str, str]  # key -> the file that sets it

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the files set, in the form `a.b.c`."""
        return tuple(key for key, _ in flatten(dict(self.content)))

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the sections that hold these keys."""
        return tuple(dict.fromkeys(key.rpartition(".")[0] for key in self.keys))

    def origin(self, path: str) -> str:
        """Return the file that sets a key or a part of a section; the file of highest precedence if none does."""
        files = [file for key, file in self.origins.items() if key == path or key.startswith((f"{path}.", f"{path}["))]
        outer = [file for key, file in self.origins.items() if path.startswith((f"{key}.", f"{key}["))]
        return next(iter([*files, *outer]), str(self.files[-1]))


def read_site(file: Path | None, *, environ: Mapping[str, str] = os.environ) -> SiteSettings:
    """Read one site file, or those that apply to jobs on this machine.

    Args:
        file: a file to check by itself, in any folder; None for those of the site and the user.
        environ: environment with the XDG variables.

    Raises:
        SpecError: there is no file, or one cannot be read or is not YAML.
    """
    files = tuple(reversed(config_files(SITE_FILE, environ=environ))) if file is None else (file,)
    if not files:
        raise SpecError(
            f"there is no {SITE_FILE} in {SITE_FOLDER}, or in folder tula/ of $XDG_CONFIG_DIRS or $XDG_CONFIG_HOME"
            " (~/.config)",
            f"give one: tula check --site FILE; examples/slurm_site/{SITE_FILE} is an example",
        )
    content: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for settings_file in files:
        merge(
            content,
            replace_old_keys(read_yaml(settings_file), source=str(settings_file)),
            origins,
            source=str(settings_file),
        )
    return SiteSettings(files, content, origins)


def make_job_of_site(site: SiteSettings) -> JobSpec:
    """Return a minimal job with the settings of the site.

    Raises:
        SpecError: with all problems of the settings at once.
    """
    job: dict[str, Any] = {}
    merge(job, _ANY_JOB, {}, source="")
    cluster, pricing = site.content.get("cluster"), site.content.get("pricing")
    if isinstance(cluster, dict) and cluster.get("slurm") is not None:  # a job for SLURM says so, if the site does not
        job["cluster"] = {"kind": "slurm"}
    if isinstance(pricing, dict):  # the rest of it is the job's
        job["pricing"] = {"price": 1.0}
    merge(job, site.content, {}, source="")
    return validate(job, source=", ".join(map(str, site.files)))


def check_files(site: SiteSettings) -> Iterator[SiteFinding]:
    """Yield findings on whether everyone can read the files, and whether their keys and values are valid in a job."""
    for file in site.files:
        yield from _check_readable(file)
    yield from _check_relative_paths(site)
    if "cluster.slurm" in site.sections and "cluster.kind" not in site.keys:
        yield make_warning_finding(
            "cluster.kind",
            "is not set: cluster.slurm only applies to jobs with kind: slurm",
            "set kind: slurm for all jobs",
        )
    try:
        make_job_of_site(site)
    except SpecError as error:
        several = len(site.files) > 1
        for spec_problem in error.problems:
            where = f", in {site.origin(spec_problem.path)}" if several else ""
            yield make_problem_finding(spec_problem.path, f"{spec_problem.message}{where}", spec_problem.hint)
    else:
        for file in site.files:
            keys_of_file = [key for key, source in site.origins.items() if source == str(file)]
            yield make_ok_finding(
                str(file), f"{format_count(len(keys_of_file), 'setting')}, all of keys that a job has"
            )


def _check_readable(file: Path) -> Iterator[SiteFinding]:
    if file.is_relative_to(Path("~").expanduser()) or not file.is_file():
        return
    if not file.stat().st_mode & stat.S_IROTH:
        yield make_warning_finding(
            str(file), "not everybody may read it, and who may not can load no job", f"chmod a+r {file}"
        )


def _check_relative_paths(site: SiteSettings) -> Iterator[SiteFinding]:
    """Yield findings on paths that refer to different files for each user, or to no file."""
    slurm = site.content.get("cluster") or {}
    slurm = (slurm.get("slurm") if isinstance(slurm, dict) else None) or {}
    for key in ("setup", "wrapper"):
        path = slurm.get(key) if isinstance(slurm, dict) else None
        if not isinstance(path, str):
            continue
        expanded = Path(path).expanduser()
        about = f"cluster.slurm.{key}"
        if not expanded.is_absolute():
            yield make_warning_finding(
                about,
                f"{path!r} is a relative path, so it depends on the folder that each user is in",
                "write an absolute path",
            )
        elif not expanded.is_file():
            yield make_problem_finding(about, f"the file {path} does not exist", "correct the path, or remove it")


# --- What jobs start with

COMMAND_TIMEOUT = 120.0
"""Seconds allowed for the set-up and the start of Python; containers start slowly."""
_HOW_TO_RUN_SETUP = "tula check --site --run-setup runs them here, on this machine"
_NEEDED_PACKAGES = ("pydantic", "yaml", "numpy", "submitit", "torch")
_MIN_PYTHON = (3, 10)
_ENDS_AT_ERRORS = re.compile(r"\s*set\s+(-[a-zA-Z]*e|-o\s+errexit)")
_MARK = "tula-site-check: "
_TRAP = f"trap 'echo \"{_MARK}$? of: $BASH_COMMAND\" >&2' ERR"
_VERSION_PROGRAM = f"""
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
found = {{name: bool(importlib.util.find_spec(name)) for name in {_NEEDED_PACKAGES!r}}}
print("{_MARK}" + json.dumps({{"python": list(sys.version_info[:3]), "path": sys.executable, "found": found,
    "tula": version("tula-cli"), "torch": version("torch")}}))
"""


@dataclass(frozen=True)
class _ShellResult:
    """The result of running shell lines."""

    code: int
    out: str
    err: str

    @property
    def failed(self) -> list[str]:
        """The commands that failed, with their exit codes: `1 of: module load x`."""
        return [line.removeprefix(_MARK) for line in self.err.splitlines() if line.startswith(_MARK)]

    @property
    def last_error_line(self) -> str:
        error_lines = [line for line in self.err.splitlines() if line.strip() and not line.startswith(_MARK)]
        return error_lines[-1].strip() if error_lines else "it printed nothing"


def check_job_start(spec: JobSpec, *, run_setup: bool, workdir: Path) -> Iterator[SiteFinding]:
    """Yield findings on whether jobs can start here; each distinct set-up and Python of the node types is checked once.

    Args:
        spec: any job of the site.
        run_setup: also run the set-up lines; else they are only parsed.
        workdir: base of relative paths.
    """
    checked: set[str] = set()
    for job in spec.by_type().values():
        slurm = job.cluster.slurm or Slurm()
        try:
            lines = read_setup_lines(slurm, workdir)
        except SpecError as error:
            yield make_problem_finding("cluster.slurm.setup", error.message, error.hint, "jobs")
            continue
        key = json.dumps([lines, make_export_lines(slurm), slurm.python])
        if key not in checked:
            checked.add(key)
            yield from _check_setup(slurm, lines, run_setup=run_setup)


def _check_setup(slurm: Slurm, lines: Sequence[str], *, run_setup: bool) -> Iterator[SiteFinding]:
    where = lines[0].removeprefix("# ") if lines else "cluster.slurm.setup"
    if lines:
        read = _run_bash([*lines], only_read=True)
        if read.code:
            yield make_problem_finding(
                where, f"bash cannot read the set-up: {read.last_error_line}", "mend its lines", "jobs"
            )
            return
        if not any(_ENDS_AT_ERRORS.match(line) for line in lines):
            yield make_warning_finding(
                where, "a line of the set-up that fails ends nothing", "begin with set -e", "jobs"
            )
        if not run_setup:
            yield make_warning_finding(
                where, "the set-up lines, and the python that they lead to, were not tried", _HOW_TO_RUN_SETUP, "jobs"
            )
            return
        completed = _run_bash([_TRAP, *lines])
        if completed.code or completed.failed:
            failures = "; ".join(f"exit code {line}" for line in completed.failed) or f"exit code {completed.code}"
            yield make_problem_finding(
                where, f"the set-up fails here: {failures} ({completed.last_error_line})", "mend its lines", "jobs"
            )
            return
        yield make_ok_finding(where, "the set-up lines run here", "jobs")
    yield from _check_python(slurm, lines)


def _check_python(slurm: Slurm, lines: Sequence[str]) -> Iterator[SiteFinding]:
    about, command = "cluster.slurm.python", slurm.python or shlex.quote(sys.executable)
    completed = _run_bash([*lines, *make_export_lines(slurm), f"{command} -c {shlex.quote(_VERSION_PROGRAM)}"])
    answer_line = next((line for line in completed.out.splitlines() if line.startswith(_MARK)), None)
    if answer_line is None:
        yield make_problem_finding(
            about,
            f"{command} does not start here: {completed.last_error_line}",
            "set it to a python that exists on every node, or correct the setup lines",
            "jobs",
        )
        return
    answer: dict[str, Any] = json.loads(answer_line.removeprefix(_MARK))
    version = ".".join(map(str, answer["python"]))
    missing = [name for name, is_installed in answer["found"].items() if not is_installed]
    if tuple(answer["python"][:2]) < _MIN_PYTHON:
        yield make_problem_finding(
            about,
            f"{answer['path']} is Python {version}",
            f"tula needs {_MIN_PYTHON[0]}.{_MIN_PYTHON[1]} or newer",
            "jobs",
        )
    elif missing:
        yield make_problem_finding(
            about,
            f"{answer['path']} (Python {version}) lacks {', '.join(missing)}",
            "pip install 'tula-cli[torch]' there, or name another python",
            "jobs",
        )
    else:
        note = "" if slurm.python else ", the interpreter of this tula"
        yield make_ok_finding(
            about,
            f"{answer['path']}: Python {version}, torch {answer['torch'] or 'of unknown version'}{note}",
            "jobs",
        )
    yield from _check_tula_version(about, answer["tula"])


def _check_tula_version(about: str, version: str) -> Iterator[SiteFinding]:
    """Yield a finding on whether the Python of jobs has the same version of tula.

    Jobs use the version of the submitting user, which is copied into the run, if they can see it.
    """
    if version == __version__:
        yield make_ok_finding(about, f"tula {version} there and here", "jobs")
    elif version:
        yield make_warning_finding(
            about,
            f"tula {version} there, and {__version__} here",
            "install the same one: jobs take that of who submits, unless their python ignores PYTHONPATH",
            "jobs",
        )


def _run_bash(lines: Sequence[str], *, only_read: bool = False) -> _ShellResult:
    """Run lines as a job's script would, or only let bash parse them."""
    command = ["bash", "-n"] if only_read else ["bash"]
    try:
        completed = run_command(command, stdin="\n".join(lines) + "\n", timeout=COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        return _ShellResult(1, "", f"it took more than {COMMAND_TIMEOUT:g} s")
    except OSError as error:
        return _ShellResult(1, "", f"bash: {error.strerror}")
    return _ShellResult(completed.returncode, completed.stdout, completed.stderr)


# --- The scheduler

_NEEDED_COMMANDS = ("sinfo", "squeue", "sbatch")
_WITHOUT = {
    "sacct": "tula works without accounting, but may mistake a scancel for a lost allocation",
    "sacctmgr": "accounts and QOS are not checked",
    "scontrol": "maintenance windows are not seen, and faulty nodes of waiting jobs cannot be excluded",
}
_SECTION = "cluster.slurm"


def check_commands(facts: SiteFacts) -> Iterator[SiteFinding]:
    """Yield findings on which SLURM commands respond."""
    for name, why in facts.silent.items():
        if name in _NEEDED_COMMANDS:
            yield make_problem_finding(
                name, why, "nothing can be submitted or followed without it: is SLURM in PATH here?", "scheduler"
            )
        elif facts.answers:
            yield make_warning_finding(name, why, _WITHOUT.get(name, "tula does without"), "scheduler")
    if facts.answers:
        names = ", ".join(partition.name for partition in facts.partitions)
        yield make_ok_finding(
            "scheduler", f"answers: {format_count(len(facts.partitions), 'partition')}, {names}", "scheduler"
        )


def check_settings(spec: JobSpec, facts: SiteFacts) -> Iterator[SiteFinding]:
    """Yield findings on whether the settings of each node type match the site; a finding of several types only once.

    Args:
        spec: any job of the site.
        facts: answers of the scheduler.
    """
    seen_findings: set[SiteFinding] = set()
    for name, job in spec.by_type().items():
        if job.cluster.kind != "slurm":
            continue
        for finding in _check_node_type(job, facts):
            where = finding if name is None else _name_node_type(finding, name)
            if finding not in seen_findings:
                seen_findings.add(finding)
                yield where


def _name_node_type(finding: SiteFinding, name: str) -> SiteFinding:
    return SiteFinding(finding.verdict, f"{finding.about} ({name})", finding.message, finding.advice, finding.source)


def _check_node_type(spec: JobSpec, facts: SiteFacts) -> Iterator[SiteFinding]:
    slurm = spec.cluster.slurm or Slurm()
    partitions = yield from _check_partitions(slurm, facts)
    for partition in partitions:
        yield from _check_sizes(spec, slurm, partition)
        yield from _check_limits(spec, slurm, partition)
    yield from _check_maintenance(slurm, facts)
    yield from _check_account(slurm, facts)
    yield from _check_qos(slurm, facts)
    yield from _check_constraint(slurm, facts, partitions)
    for unknown in list_unknown_factors(spec.pricing, qos=facts.qos, partitions=facts.all_partitions):
        yield make_warning_finding(unknown.key, unknown.message, unknown.advice, "scheduler")


def _check_partitions(slurm: Slurm, facts: SiteFacts) -> Generator[SiteFinding, None, list[Partition]]:
    """Yield findings on whether the partitions exist and are up; return those that are."""
    about = f"{_SECTION}.partition"
    partitions_by_name = {partition.name: partition for partition in facts.partitions}
    if slurm.partition is None:
        default_partition = next((candidate for candidate in facts.partitions if candidate.default), None)
        if default_partition is None and len(partitions_by_name) > 1:
            yield make_warning_finding(
                about,
                "none is set, and the scheduler has no default",
                f"name one of {', '.join(partitions_by_name)}",
                "scheduler",
            )
        elif default_partition is not None:
            yield make_ok_finding(
                about, f"none is set: the default, {describe_partition(default_partition)}", "scheduler"
            )
        return [default_partition] if default_partition is not None else []
    partitions_found = []
    for name in slurm.partition.split(","):
        if name not in partitions_by_name:
            advice = suggest_nearest(name, partitions_by_name) or f"there are: {', '.join(partitions_by_name)}"
            yield make_problem_finding(about, f"no partition {name!r}", advice, "scheduler")
        elif not partitions_by_name[name].up:
            yield make_problem_finding(
                about, f"partition {name} is not up", "name another, or have it set up", "scheduler"
            )
        else:
            partitions_found.append(partitions_by_name[name])
            yield make_ok_finding(about, describe_partition(partitions_by_name[name]), "scheduler")
    return partitions_found


def _check_sizes(spec: JobSpec, slurm: Slurm, partition: Partition) -> Iterator[SiteFinding]:
    """Yield problems if no kind of node in the partition has the requested resources."""
    kinds, gpus = partition.kinds, spec.cluster.gpus_per_node
    if not kinds:
        yield make_problem_finding(
            f"{_SECTION}.partition",
            f"{partition.name} has no node that can run a job",
            "sinfo --list-reasons tells why",
            "scheduler",
        )
        return
    if spec.cluster.device != "cpu" and slurm.gpus != "none":
        yield from _check_gpus(spec, slurm, partition)
    cpus = max(kind.cpus for kind in kinds)
    if slurm.cpus_per_task and slurm.cpus_per_task * gpus > cpus:
        yield make_problem_finding(
            f"{_SECTION}.cpus_per_task",
            f"{slurm.cpus_per_task} for each of {format_count(gpus, 'rank')} is more than a node of {partition.name} has ({cpus})",
            f"set it to {max(1, cpus // gpus)}",
            "scheduler",
        )
    memory = max(kind.memory for kind in kinds)
    if slurm.memory == "0" and all(kind.limited_memory for kind in kinds):
        yield make_problem_finding(
            f"{_SECTION}.memory",
            f"0 requests all memory of a node, but a job in {partition.name} can have {memory} MB",
            f"set it to {memory}M",
            "scheduler",
        )
    most_nodes = max(spec.search.nodes)
    if "nodes" in spec.search.model_fields_set and most_nodes > partition.usable:
        yield make_problem_finding(
            "search.nodes",
            f"{most_nodes} is more than a job can have in {partition.name} ({partition.usable})",
            "remove it, so that jobs set it, or search fewer",
            "scheduler",
        )


def _check_gpus(spec: JobSpec, slurm: Slurm, partition: Partition) -> Iterator[SiteFinding]:
    kinds, gpus = partition.kinds, spec.cluster.gpus_per_node
    most = max((gpu_kind.count for kind in kinds for gpu_kind in kind.gpus), default=0)
    types = sorted({gpu_kind.type for kind in kinds for gpu_kind in kind.gpus if gpu_kind.type})
    if most == 0:
        yield make_problem_finding(
            "cluster.gpus_per_node",
            f"the nodes of {partition.name} have no GPUs that SLURM knows of",
            f"set {_SECTION}.gpus: none, or cluster.device: cpu",
            "scheduler",
        )
    elif gpus > most:
        yield make_problem_finding(
            "cluster.gpus_per_node",
            f"{gpus} is more than a node of {partition.name} has ({most})",
            f"set it to {most}",
            "scheduler",
        )
    elif gpus < most and slurm.exclusive:
        yield make_warning_finding(
            "cluster.gpus_per_node",
            f"{gpus} of the {most} that a node of {partition.name} has, but whole nodes are charged (exclusive)",
            f"set it to {most}",
            "scheduler",
        )
    if slurm.gpu_type and slurm.gpu_type not in types:
        advice = suggest_nearest(slurm.gpu_type, types) or (
            f"there are: {', '.join(types)}" if types else "remove it: SLURM does not distinguish GPU types here"
        )
        yield make_problem_finding(
            f"{_SECTION}.gpu_type", f"no GPU {slurm.gpu_type!r} in {partition.name}", advice, "scheduler"
        )


def _check_limits(spec: JobSpec, slurm: Slurm, partition: Partition) -> Iterator[SiteFinding]:
    """Yield problems if the partition's time limit is below the requested time of jobs."""
    limit = partition.minutes
    if limit is None:
        return
    if slurm.minutes > limit:
        yield make_problem_finding(
            f"{_SECTION}.minutes",
            f"{slurm.minutes} is more than {partition.name} allows ({limit})",
            f"set it to {limit} or less",
            "scheduler",
        )
    probes = math.ceil(spec.search.max_minutes) + ROOM
    if probes > limit:
        yield make_problem_finding(
            "search.max_minutes",
            f"a measuring job asks for {probes} minutes, and {partition.name} allows {limit}",
            f"set it to {max(1, limit - ROOM)}",
            "scheduler",
        )


def _check_maintenance(slurm: Slurm, facts: SiteFacts) -> Iterator[SiteFinding]:
    """Yield a warning if training jobs would overlap a maintenance window and therefore wait until it is over."""
    now = time.time()
    begin = next((begin for begin, _ in facts.maintenance if begin > now), math.inf)
    remaining = (begin - now) / 60
    if remaining < slurm.minutes:
        yield make_warning_finding(
            f"{_SECTION}.minutes",
            f"a job of {slurm.minutes} minutes would not start before the maintenance: {describe_window(begin, now)}",
            f"set it below {max(1, int(remaining))} to start now" if remaining >= 2 else "jobs wait until it is over",
            "scheduler",
        )


def _check_account(slurm: Slurm, facts: SiteFacts) -> Iterator[SiteFinding]:
    if slurm.account is None or facts.accounts is None:
        return
    about = f"{_SECTION}.account"
    if slurm.account.lower() in (name.lower() for name in facts.accounts):
        yield make_ok_finding(about, f"{slurm.account} exists; all users of this file charge it", "scheduler")
    else:
        advice = (
            suggest_nearest(slurm.account, facts.accounts)
            or "remove it, so that users set it, or set one that sacctmgr lists"
        )
        yield make_problem_finding(about, f"the accounting has no account {slurm.account!r}", advice, "scheduler")


def _check_qos(slurm: Slurm, facts: SiteFacts) -> Iterator[SiteFinding]:
    if slurm.qos is None or facts.qos is None:
        return
    about = f"{_SECTION}.qos"
    for name in slurm.qos.split(","):
        if name not in facts.qos:
            advice = suggest_nearest(name, facts.qos) or f"there are: {', '.join(facts.qos)}"
            yield make_problem_finding(about, f"no QOS {name!r}", advice, "scheduler")
        elif (limit := facts.qos[name]) is not None and slurm.minutes > limit:
            yield make_problem_finding(
                f"{_SECTION}.minutes",
                f"{slurm.minutes} is more than QOS {name} allows ({limit})",
                f"set it to {limit} or less",
                "scheduler",
            )
        else:
            yield make_ok_finding(about, f"{name} is known", "scheduler")


def _check_constraint(slurm: Slurm, facts: SiteFacts, partitions: Sequence[Partition]) -> Iterator[SiteFinding]:
    """Yield features in the constraint that no node of the partitions has; operators between them are not checked."""
    known_features = frozenset[str]().union(
        *(facts.features.get(partition.name, frozenset()) for partition in partitions)
    )
    names = [name for name in re.split(r"[&|\[\](),*\s]+", slurm.constraint or "") if name and not name.isdigit()]
    if unknown := [name for name in names if name not in known_features]:
        advice = suggest_nearest(unknown[0], known_features) or (
            f"there are: {', '.join(sorted(known_features))}" if known_features else "they have no features"
        )
        yield make_problem_finding(
            f"{_SECTION}.constraint", f"no node here has {', '.join(unknown)}", advice, "scheduler"
        )


# --- The check

_ERRORS: Mapping[str, type[TulaError]] = {"file": SpecError, "scheduler": SchedulerError, "jobs": JobFailed}
"""Error classes by the source of the problem; the first of file, scheduler and jobs that has a problem is raised."""


@dataclass(frozen=True)
class SiteCheck:
    """The findings of a site check."""

    files: tuple[Path, ...]
    keys: tuple[str, ...]  # that they set
    findings: tuple[SiteFinding, ...]

    @property
    def problems(self) -> tuple[SiteFinding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "problem")

    def require_sound(self) -> None:
        """Raise an error if jobs with these settings would fail or be refused.

        Raises:
            SpecError: a key or a value is wrong.
            SchedulerError: the files are valid, but the scheduler does not respond or lacks what they request.
            JobFailed: files and scheduler are fine, but the set-up or the Python of jobs fails.
        """
        if not self.problems:
            return
        source = next(source for source in _ERRORS if any(finding.source == source for finding in self.problems))
        names = ", ".join(dict.fromkeys(finding.about for finding in self.problems))
        raise _ERRORS[source](
            f"{', '.join(map(str, self.files))}: {format_count(len(self.problems), 'problem')} ({names})",
            "correct the settings listed above, and check again",
        )


def check_site(
    file: Path | None = None,
    *,
    run_setup: bool = False,
    environ: Mapping[str, str] = os.environ,
    ask: Callable[[], SiteFacts] = ask_site_facts,
) -> SiteCheck:
    """Check the settings of a site; nothing is submitted.

    Args:
        file: a site.yaml in any folder; None for the files that apply to jobs on this machine.
        run_setup: also run the set-up lines of jobs on this machine.
        environ: environment with the XDG variables.
        ask: queries the scheduler.

    Raises:
        SpecError: there is no file, or it cannot be read or is not YAML.
    """
    site = read_site(file, environ=environ)
    return SiteCheck(site.files, site.keys, tuple(_check_site_settings(site, ask, run_setup=run_setup)))


def _check_site_settings(site: SiteSettings, ask: Callable[[], SiteFacts], *, run_setup: bool) -> Iterator[SiteFinding]:
    yield from check_files(site)
    try:
        spec = make_job_of_site(site)
    except SpecError:  # told by what it is above; what it asks for is not known
        return
    if not any(job.cluster.kind == "slurm" for job in spec.by_type().values()):
        return
    facts = ask()
    yield from check_commands(facts)
    if facts.answers:
        yield from check_settings(spec, facts)
    yield from check_job_start(spec, run_setup=run_setup, workdir=Path.cwd())
