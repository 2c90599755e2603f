"""Run cases, each in a new folder of the same path, and return their outcomes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent / "helpers")) if path not in sys.path]

import recorded_runs  # noqa: E402
from cases import Case  # noqa: E402
from fake_slurm import FakeSlurm  # noqa: E402
from golden import Normaliser, Outcome  # noqa: E402

ENVIRONMENT = {
    "COLUMNS": "120", "LC_ALL": "C.UTF-8", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TZ": "UTC", "USER": "golden",
    "PYTHONPATH": str(HERE.parents[1]), "PYTHONHASHSEED": "0",
}  # fmt: skip
"""Variables of every case. Of the environment, only OPENBLAS_CORETYPE and ATEN_CPU_CAPABILITY are passed on, to test other CPUs."""
CPU_VARIABLES = ("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "ATEN_CPU_CAPABILITY")


def make_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a case: that of a user without any configuration."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    places = {
        "HOME": home,
        "XDG_CACHE_HOME": home / "cache",
        "XDG_CONFIG_HOME": home / "config",
        "TMPDIR": folder.parent,
    }
    path = f"{Path(sys.executable).parent}:{link_programs(folder.parent.parent)}"
    kept = {name: os.environ[name] for name in CPU_VARIABLES if name in os.environ}
    return ENVIRONMENT | {name: str(place) for name, place in places.items()} | kept | {"PATH": path}


def link_programs(folder: Path) -> Path:
    """Return a folder with the programs of this machine except an installed SLURM."""
    programs = folder / "programs"
    if not programs.exists():
        programs.mkdir(parents=True)
        for path in Path("/usr/bin").iterdir():
            if not re.match(
                r"s(batch|queue|acct|control|cancel|info|run|alloc|share|prio|report|diag|stat)", path.name
            ):
                (programs / path.name).symlink_to(path)
    return programs


class Commands:
    """Runs commands in processes forked from one that has imported their modules.

    All cases have the same path, which is part of the key of a cached inspection if a job names modules of the folder:
    then cases with the same job build the model once.

    Args:
        folder: for the folder of the cases, the inspections, and links to programs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.inspections = self.folder / "inspections"
        self.inspections.mkdir(parents=True)
        self.case_folder = self.folder / "case"
        base = make_environment(self.folder / "first")
        self.server = subprocess.Popen(
            [sys.executable, str(HERE / "command_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=base,
        )
        self.case(Case("recommend-first", "measured", "recommend --json"))

    def close(self) -> None:
        """End the process."""
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()

    def case(self, case: Case, *, again: bool = False) -> Outcome:
        """Run a case and return its outcome; with `again`, in the folder as the previous call left it."""
        folder = self.case_folder / "work"
        if again:
            return self._outcome(case, folder, make_environment(folder))
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        recorded_runs.copy_jobs(folder)
        if case.run:
            recorded_runs.copy_run(case.run, folder)
        runs = folder / "tula-runs"
        runs.mkdir(exist_ok=True)
        (runs / ".inspections").symlink_to(
            self.inspections
        )  # reusing a model that another case has built saves seconds
        variables = make_environment(folder)
        if case.slurm:
            slurm = _make_fake_slurm(folder)
            variables |= {"FAKE_SLURM": str(slurm.folder), "PATH": f"{slurm.folder}/bin:{link_programs(self.folder)}"}
        if case.edit:
            case.edit(folder)
        return self._outcome(case, folder, variables)

    def _outcome(self, case: Case, folder: Path, variables: dict[str, str]) -> Outcome:
        return read_outcome(case, folder, self._run(shlex.split(case.words), case.code, folder, variables))

    def _run(self, words: list[str], code: str, folder: Path, variables: dict[str, str]) -> int:
        assert self.server.stdin is not None and self.server.stdout is not None
        request = {
            "words": words,
            "code": code,
            "folder": str(folder),
            "environment": variables,
            "output": str(folder.parent),
        }
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer: int = json.loads(self.server.stdout.readline())
        return answer


def _make_fake_slurm(folder: Path) -> FakeSlurm:
    """Return a fake SLURM that knows the jobs of a recorded run."""
    recorded = folder / "slurm"
    if recorded.exists():
        recorded.rename(folder / "recorded-slurm")
    slurm = FakeSlurm(recorded)
    if (folder / "recorded-slurm").exists():
        for name in ("jobs", "sbatch.json"):
            if (source := folder / "recorded-slurm" / name).exists():
                if source.is_dir():
                    recorded.joinpath(name).rmdir()
                source.rename(recorded / name)
    for path in (recorded / "jobs").iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"user": os.getuid()}))
    return slurm


def read_outcome(case: Case, folder: Path, code: int) -> Outcome:
    """Return the outcome of a command from its exit code, its output and the files that it wrote."""
    normalise = Normaliser(folder)
    stdout, stderr = ((folder.parent / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    data: dict[str, Any] = {"exit_code": code}
    texts = {}
    if stdout.startswith(("{", "[", '"')):
        data["answer"] = normalise.value(json.loads(stdout))
    else:
        texts["stdout"] = normalise.text(stdout)
    texts["stderr"] = normalise.text(stderr)
    for pattern in case.shows:
        for path in sorted(folder.glob(pattern)):
            name = normalise.text(str(path.relative_to(folder)))
            texts[f"file {name}"] = normalise.text(path.read_text()) if path.suffix != ".pt" else "(a file)"
    return Outcome.of(data, **texts)
