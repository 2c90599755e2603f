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

from tula_cli.cluster.slurm.sbatch import exports, set_up
from tula_cli.errors import SpecError
from tula_cli.host.processes import run_command
from tula_cli.services.node_check.site_finding import SiteFinding, ok, problem, warning
from tula_cli.spec.job import JobSpec
from tula_cli.spec.slurm_options import Slurm
from tula_cli.version import __version__

PATIENCE = 120.0
"""Seconds that the set-up and the start of python get; a container starts slowly."""
_ON_REQUEST = "tula check --site --run-setup runs them here, on this machine"
_NEEDED = ("pydantic", "yaml", "numpy", "submitit", "torch")
_OLDEST = (3, 10)
_ENDS_AT_ERRORS = re.compile(r"\s*set\s+(-[a-zA-Z]*e|-o\s+errexit)")
_MARK = "tula-site-check: "
_TRAP = f"trap 'echo \"{_MARK}$? of: $BASH_COMMAND\" >&2' ERR"
_ASK = f"""
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
found = {{name: bool(importlib.util.find_spec(name)) for name in {_NEEDED!r}}}
print("{_MARK}" + json.dumps({{"python": list(sys.version_info[:3]), "path": sys.executable, "found": found,
    "tula": version("tula-cli"), "torch": version("torch")}}))
"""


@dataclass(frozen=True)
class _Ended:
    """What became of lines of the shell."""

    code: int
    out: str
    err: str

    @property
    def failed(self) -> list[str]:
        """The commands that failed, with their exit codes: `1 of: module load x`."""
        return [line.removeprefix(_MARK) for line in self.err.splitlines() if line.startswith(_MARK)]

    @property
    def last(self) -> str:
        own = [line for line in self.err.splitlines() if line.strip() and not line.startswith(_MARK)]
        return own[-1].strip() if own else "it said nothing"


def job_findings(spec: JobSpec, *, run_setup: bool, workdir: Path) -> Iterator[SiteFinding]:
    """Yield whether what jobs begin with works here; each set-up and python of the types of node once.

    Args:
        spec: any job of the site.
        run_setup: run the set-up lines too; else they are only read.
        workdir: what paths start from.
    """
    seen: set[str] = set()
    for own in spec.by_type().values():
        slurm = own.cluster.slurm or Slurm()
        try:
            lines = set_up(slurm, workdir)
        except SpecError as error:
            yield problem("cluster.slurm.setup", error.message, error.hint, "jobs")
            continue
        key = json.dumps([lines, exports(slurm), slurm.python])
        if key not in seen:
            seen.add(key)
            yield from _tried(slurm, lines, run_setup=run_setup)


def _tried(slurm: Slurm, lines: Sequence[str], *, run_setup: bool) -> Iterator[SiteFinding]:
    where = lines[0].removeprefix("# ") if lines else "cluster.slurm.setup"
    if lines:
        read = _bash([*lines], only_read=True)
        if read.code:
            yield problem(where, f"bash cannot read the set-up: {read.last}", "mend its lines", "jobs")
            return
        if not any(_ENDS_AT_ERRORS.match(line) for line in lines):
            yield warning(where, "a line of the set-up that fails ends nothing", "begin with set -e", "jobs")
        if not run_setup:
            yield warning(
                where, "the set-up lines, and the python that they lead to, were not tried", _ON_REQUEST, "jobs"
            )
            return
        done = _bash([_TRAP, *lines])
        if done.code or done.failed:
            what = "; ".join(f"exit code {line}" for line in done.failed) or f"exit code {done.code}"
            yield problem(where, f"the set-up fails here: {what} ({done.last})", "mend its lines", "jobs")
            return
        yield ok(where, "the set-up lines run here", "jobs")
    yield from _python(slurm, lines)


def _python(slurm: Slurm, lines: Sequence[str]) -> Iterator[SiteFinding]:
    about, command = "cluster.slurm.python", slurm.python or shlex.quote(sys.executable)
    done = _bash([*lines, *exports(slurm), f"{command} -c {shlex.quote(_ASK)}"])
    told = next((line for line in done.out.splitlines() if line.startswith(_MARK)), None)
    if told is None:
        yield problem(
            about,
            f"{command} does not start here: {done.last}",
            "set it to a python that is on every node, or mend the set-up",
            "jobs",
        )
        return
    found: dict[str, Any] = json.loads(told.removeprefix(_MARK))
    version = ".".join(map(str, found["python"]))
    missing = [name for name, there in found["found"].items() if not there]
    if tuple(found["python"][:2]) < _OLDEST:
        yield problem(
            about, f"{found['path']} is Python {version}", f"tula needs {_OLDEST[0]}.{_OLDEST[1]} or newer", "jobs"
        )
    elif missing:
        yield problem(
            about,
            f"{found['path']} (Python {version}) lacks {', '.join(missing)}",
            "pip install 'tula-cli[torch]' there, or name another python",
            "jobs",
        )
    else:
        own = "" if slurm.python else ", the one that tula itself runs with"
        yield ok(
            about, f"{found['path']}: Python {version}, torch {found['torch'] or 'of an unknown version'}{own}", "jobs"
        )
    yield from _tula(about, found["tula"])


def _tula(about: str, there: str) -> Iterator[SiteFinding]:
    """Yield whether jobs have the same tula: they take that of who submits, which lies in the run, where they see it."""
    if there == __version__:
        yield ok(about, f"tula {there} there and here", "jobs")
    elif there:
        yield warning(
            about,
            f"tula {there} there, and {__version__} here",
            "install the same one: jobs take that of who submits, unless their python ignores PYTHONPATH",
            "jobs",
        )


def _bash(lines: Sequence[str], *, only_read: bool = False) -> _Ended:
    """Run lines as the script of a job would, or only have bash read them."""
    words = ["bash", "-n"] if only_read else ["bash"]
    try:
        done = run_command(words, stdin="\n".join(lines) + "\n", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return _Ended(1, "", f"it took more than {PATIENCE:g} s")
    except OSError as error:
        return _Ended(1, "", f"bash: {error.strerror}")
    return _Ended(done.returncode, done.stdout, done.stderr)
