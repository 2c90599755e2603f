"""`tula observe`: watches a training that runs anyway, and reports what else to request."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.cluster.scripts.methods import read_module_sources
from tula_cli.errors import BadMeasurements, CommandNotStarted, SpecError
from tula_cli.models.observed import MAX_TIMED_STEPS, WARMUP_STEPS, MeasuredJob, ObservedReport, make_observed_report
from tula_cli.run.files import make_folder, make_write_error, write_file_atomically
from tula_cli.run.observed import ObservedJob, list_observed_jobs

JOB_VARIABLE = "TULA_OBSERVED_JOB"
SHIM_FOLDER = ".shim"
OBSERVATION_PLAN: Mapping[str, Any] = {
    "version": 1,
    "mode": "observe",
    "task": "observe",
    "warmup": WARMUP_STEPS,
    "min_steps": 20,
    "max_steps": MAX_TIMED_STEPS,
    "seconds": 20.0,
    "split_steps": 20,
    "heartbeat": 10.0,
}
"""The plan of the shim (`tula_cli/shim/__init__.py`): what is measured, and for how long."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers and shells send to a job, passed on to the command."""
RESULT_TIMEOUT = 5.0
"""Seconds to wait for the files of ranks on other nodes after the command of this process has ended."""


def install_observer(folder: Path, root: Path | str) -> None:
    """Copy the hooks into a folder; with this folder first in PYTHONPATH, every training with torch is observed.

    Args:
        folder: of the hooks; existing files are replaced.
        root: folder of the observations; may start with ~, the home of the user who trains.

    Raises:
        TulaError: the folder cannot be written.
    """
    contents = dict(read_module_sources("shim"))
    contents.pop(Path("__init__.py"), None)  # only launchers need it
    contents[Path("observe.json")] = json.dumps({**OBSERVATION_PLAN, "folder": str(root)}).encode()
    for name, content in contents.items():
        path = folder / name
        if path.exists() and path.read_bytes() == content:
            continue
        try:
            make_folder(path.parent, mode=0o755)
            write_file_atomically(path, content, mode=0o644)
        except OSError as error:
            raise make_write_error(path, error) from error


def run_observed_command(command: Sequence[str], root: Path, *, quiet_stdout: bool = False) -> tuple[int, str]:
    """Run a command with the hooks of torch installed; return its exit code and the name of the observed job.

    Signals are passed on. Exit codes of signals are those of a shell, 128 + number.

    Args:
        quiet_stdout: send the standard output of the command to standard error.

    Raises:
        CommandNotStarted: the command cannot be started.
        TulaError: the folder cannot be written.
    """
    root = root.absolute()
    install_observer(root / SHIM_FOLDER, root)
    job = choose_job_name()
    path = os.pathsep.join(filter(None, [str(root / SHIM_FOLDER), os.environ.get("PYTHONPATH", "")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        JOB_VARIABLE: job,
        "TULA_PLAN": str(root / SHIM_FOLDER / "observe.json"),
    }
    with _ForwardedSignals() as signals:
        try:
            process = subprocess.Popen(command, env=environment, stdout=2 if quiet_stdout else None)
        except OSError as error:
            raise CommandNotStarted(
                f"cannot start {command[0]}: {error.strerror}", "give the command as you type it in the shell"
            ) from None
        signals.forward_signals(process)
        code = process.wait()
    return (128 - code if code < 0 else code), job


class _ForwardedSignals:
    """Passes the signals of schedulers and shells on to a command; those that come before it starts are kept for it.

    Signals are not passed on to the processes of a SLURM step, and Ctrl-C not to those in the foreground of a terminal:
    these receive them anyway.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_ForwardedSignals":
        for number in FORWARDED_SIGNALS:
            self._previous[number] = signal.signal(number, self._forward_signal)
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def forward_signals(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def _forward_signal(self, number: int, _: object) -> None:
        if "SLURM_STEP_ID" in os.environ or (number == signal.SIGINT and _is_in_foreground()):
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _is_in_foreground() -> bool:
    """Return whether the terminal sends Ctrl-C to this process and to the commands that it starts."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def choose_job_name() -> str:
    """Return the name of the job: equal for all processes of a SLURM step, else that of this process."""
    environ = os.environ
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    if "SLURM_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}-{os.getpid()}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"


def is_reporting_process() -> bool:
    """Return whether this is the process that reports, if srun starts a `tula observe` for each rank."""
    return os.environ.get("SLURM_PROCID", "0") == "0"


def collect_job_reports(root: Path, job: str) -> list[ObservedReport]:
    """Return the reports on a job that has just ended, one for each training in it.

    Waits up to RESULT_TIMEOUT seconds for the files of ranks on other nodes.

    Raises:
        BadMeasurements: nothing was trained, or too little.
    """
    deadline, on_several_nodes = time.monotonic() + RESULT_TIMEOUT, os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    while True:
        everything = list_observed_jobs(root)
        jobs = [observed for observed in everything if observed.id.startswith(f"{job}-")]
        complete = all(
            len(observed_job.ranks) >= observed_job.ranks[0].world for observed_job in jobs if observed_job.ranks
        )
        if (jobs and complete) or time.monotonic() > deadline or not (jobs or on_several_nodes):
            break
        time.sleep(0.2)
    if not jobs:
        raise BadMeasurements(
            "no step of a torch optimizer was observed",
            "observe the command that trains: tula cannot observe a command that clears PYTHONPATH or ends before it trains",
        )
    return [_make_report(observed, everything) for observed in jobs]


def list_observed_reports(root: Path, name: str | None = None) -> list[ObservedReport]:
    """Return the reports on observed jobs, oldest first.

    Args:
        name: SCRIPT, all jobs of a script; or SCRIPT/JOB, JOB or a folder, one job. None for the newest job.

    Raises:
        SpecError: there is no such job.
        BadMeasurements: the job has not been measured; among several, those are left out.
    """
    jobs = _require_jobs(list_observed_jobs(root), root)
    if name is None:
        return [_make_report(max(jobs, key=lambda job: job.observed_at), jobs)]
    path = Path(name).resolve()
    single = [job for job in jobs if name in (job.id, f"{job.script}/{job.id}") or job.path.resolve() == path]
    if single:
        return [_make_report(job, jobs) for job in single]
    script_jobs = list_jobs_of_script(jobs, root, name)
    measured = _measure_jobs(script_jobs) or [measure_observed_job(script_jobs[-1])]  # which raises the reason
    return [make_observed_report(job, [other for other in measured if other is not job]) for job in measured]


def list_jobs_of_script(jobs: Sequence[ObservedJob], root: Path, name: str) -> list[ObservedJob]:
    """Return the jobs of a script, given by its name or path, oldest first.

    Raises:
        SpecError: there is none.
    """
    script_jobs = [job for job in _require_jobs(jobs, root) if Path(name).name in (job.script, f"{job.script}.py")]
    if not script_jobs:
        names = ", ".join(sorted({job.script for job in jobs}))
        raise SpecError(f"no job of script {name} was observed", f"observed scripts: {names}")
    return script_jobs


def _require_jobs(jobs: Sequence[ObservedJob], root: Path) -> Sequence[ObservedJob]:
    if not jobs:
        raise SpecError(f"no job was observed in {root}", "run tula observe -- COMMAND first")
    return jobs


def _make_report(job: ObservedJob, jobs: Sequence[ObservedJob]) -> ObservedReport:
    others = [other for other in jobs if other.script == job.script and other.path != job.path]
    return make_observed_report(measure_observed_job(job), _measure_jobs(others))


def _measure_jobs(jobs: Sequence[ObservedJob]) -> list[MeasuredJob]:
    """Return the measurements of jobs, without those that have too few steps."""
    measured = []
    for job in jobs:
        with contextlib.suppress(BadMeasurements):
            measured.append(measure_observed_job(job))
    return measured


def measure_observed_job(job: ObservedJob) -> MeasuredJob:
    return MeasuredJob.from_records(job.script, job.id, job.ranks, job.heartbeats, job.observed_at)
