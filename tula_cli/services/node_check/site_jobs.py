"""What jobs of a site begin with, tried here: the set-up lines, and the python that they start."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_cli.cluster.slurm.sbatch import export_lines, set_up_lines
from tula_cli.errors import SpecError
from tula_cli.host.processes import run_command
from tula_cli.services.node_check.site_finding import SiteFinding, ok, problem, warning
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import Slurm
from tula_cli.version import __version__

COMMAND_TIMEOUT = 120.0
"""Seconds that the set-up and the start of python get; a container starts slowly."""
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
    """What became of lines of the shell."""

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
        return error_lines[-1].strip() if error_lines else "it said nothing"


def job_findings(spec: JobSpec, *, run_setup: bool, workdir: Path) -> Iterator[SiteFinding]:
    """Yield whether what jobs begin with works here; each set-up and python of the types of node once.

    Args:
        spec: any job of the site.
        run_setup: run the set-up lines too; else they are only read.
        workdir: what paths start from.
    """
    checked: set[str] = set()
    for job in spec.by_type().values():
        slurm = job.cluster.slurm or Slurm()
        try:
            lines = set_up_lines(slurm, workdir)
        except SpecError as error:
            yield problem("cluster.slurm.setup", error.message, error.hint, "jobs")
            continue
        key = json.dumps([lines, export_lines(slurm), slurm.python])
        if key not in checked:
            checked.add(key)
            yield from _setup_findings(slurm, lines, run_setup=run_setup)


def _setup_findings(slurm: Slurm, lines: Sequence[str], *, run_setup: bool) -> Iterator[SiteFinding]:
    where = lines[0].removeprefix("# ") if lines else "cluster.slurm.setup"
    if lines:
        read = _run_bash([*lines], only_read=True)
        if read.code:
            yield problem(where, f"bash cannot read the set-up: {read.last_error_line}", "mend its lines", "jobs")
            return
        if not any(_ENDS_AT_ERRORS.match(line) for line in lines):
            yield warning(where, "a line of the set-up that fails ends nothing", "begin with set -e", "jobs")
        if not run_setup:
            yield warning(
                where, "the set-up lines, and the python that they lead to, were not tried", _HOW_TO_RUN_SETUP, "jobs"
            )
            return
        completed = _run_bash([_TRAP, *lines])
        if completed.code or completed.failed:
            failures = "; ".join(f"exit code {line}" for line in completed.failed) or f"exit code {completed.code}"
            yield problem(
                where, f"the set-up fails here: {failures} ({completed.last_error_line})", "mend its lines", "jobs"
            )
            return
        yield ok(where, "the set-up lines run here", "jobs")
    yield from _python_findings(slurm, lines)


def _python_findings(slurm: Slurm, lines: Sequence[str]) -> Iterator[SiteFinding]:
    about, command = "cluster.slurm.python", slurm.python or shlex.quote(sys.executable)
    completed = _run_bash([*lines, *export_lines(slurm), f"{command} -c {shlex.quote(_VERSION_PROGRAM)}"])
    answer_line = next((line for line in completed.out.splitlines() if line.startswith(_MARK)), None)
    if answer_line is None:
        yield problem(
            about,
            f"{command} does not start here: {completed.last_error_line}",
            "set it to a python that is on every node, or mend the set-up",
            "jobs",
        )
        return
    answer: dict[str, Any] = json.loads(answer_line.removeprefix(_MARK))
    version = ".".join(map(str, answer["python"]))
    missing = [name for name, is_installed in answer["found"].items() if not is_installed]
    if tuple(answer["python"][:2]) < _MIN_PYTHON:
        yield problem(
            about,
            f"{answer['path']} is Python {version}",
            f"tula needs {_MIN_PYTHON[0]}.{_MIN_PYTHON[1]} or newer",
            "jobs",
        )
    elif missing:
        yield problem(
            about,
            f"{answer['path']} (Python {version}) lacks {', '.join(missing)}",
            "pip install 'tula-cli[torch]' there, or name another python",
            "jobs",
        )
    else:
        note = "" if slurm.python else ", the one that tula itself runs with"
        yield ok(
            about,
            f"{answer['path']}: Python {version}, torch {answer['torch'] or 'of an unknown version'}{note}",
            "jobs",
        )
    yield from _tula_findings(about, answer["tula"])


def _tula_findings(about: str, version: str) -> Iterator[SiteFinding]:
    """Yield whether jobs have the same tula: they take that of who submits, which lies in the run, where they see it."""
    if version == __version__:
        yield ok(about, f"tula {version} there and here", "jobs")
    elif version:
        yield warning(
            about,
            f"tula {version} there, and {__version__} here",
            "install the same one: jobs take that of who submits, unless their python ignores PYTHONPATH",
            "jobs",
        )


def _run_bash(lines: Sequence[str], *, only_read: bool = False) -> _ShellResult:
    """Run lines as the script of a job would, or only have bash read them."""
    command = ["bash", "-n"] if only_read else ["bash"]
    try:
        completed = run_command(command, stdin="\n".join(lines) + "\n", timeout=COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        return _ShellResult(1, "", f"it took more than {COMMAND_TIMEOUT:g} s")
    except OSError as error:
        return _ShellResult(1, "", f"bash: {error.strerror}")
    return _ShellResult(completed.returncode, completed.stdout, completed.stderr)
