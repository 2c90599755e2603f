"""This machine as a scheduler: processes of their own sessions, which nothing queues, limits or takes away."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tula_cli.cluster.scheduling.protocol import JobRequest, Limits, Place, Queued, SchedulerState
from tula_cli.errors import SchedulerError
from tula_cli.host.processes import start_time
from tula_cli.run.records.base import OutcomeClass

_children: "list[subprocess.Popen[bytes]]" = []
"""Of this process: each is asked now and then, so that none stays as a zombie."""


class LocalScheduler:
    """Jobs on this machine. An id is the process and when it started, "4711-123456", against reused numbers."""

    name = "this machine"
    cancel_command = "kill"
    release_command = ""

    # --- where jobs are submitted

    def absent(self) -> str:
        return ""

    def script(self, job: JobRequest) -> str:
        """Return a script that becomes the command, so that the process is the job; it has one task, which starts the others."""
        return "\n".join(("#!/bin/sh", *job.lines("$$"), f"exec {job.command}", ""))

    def submit(self, script: Path, job: JobRequest) -> str:
        """Start a process that outlives this one, its terminal and Ctrl-C."""
        if job.after:
            raise SchedulerError("jobs on this machine wait for no others", "start each when those before it are over")
        _reap()
        try:
            child = subprocess.Popen(
                ["/bin/sh", str(script)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SchedulerError(f"the job could not be started: {error.strerror}") from error
        _children.append(child)
        return f"{child.pid}-{start_time(child.pid) or 0:.0f}"

    def queued(self, names: Sequence[str]) -> list[Queued]:
        """Return nothing: a process has no name here, and its id is known as soon as there is one."""
        return []

    def ask(self, ids: Sequence[str]) -> Mapping[str, SchedulerState]:
        _reap()
        return {id_: SchedulerState("running" if _lives(id_) else "ended") for id_ in ids}

    def cancel(self, ids: Sequence[str]) -> str:
        for id_ in ids:
            if _lives(id_):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(_pid(id_), signal.SIGKILL)
        return ""

    def hold(self, ids: Sequence[str]) -> str:
        return "no job waits on this machine" if ids else ""

    def release(self, ids: Sequence[str]) -> str:
        return "no job waits on this machine" if ids else ""

    def partitions(self) -> Sequence[Limits]:
        return []

    # --- inside a job

    def place(self, environ: Mapping[str, str]) -> Place | None:
        """Return nothing: every process may be one of this machine's, and knows all that there is to know."""
        return None

    def ends_at(self, job_id: str, environ: Mapping[str, str]) -> float | None:
        return None

    def ended_how(self, job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
        return None


def _pid(id_: str) -> int:
    return int(id_.partition("-")[0])


def _lives(id_: str) -> bool:
    pid, _, ticks = id_.partition("-")
    since = start_time(int(pid)) if pid.isdigit() else None
    return since is not None and f"{since:.0f}" == ticks


def _reap() -> None:
    _children[:] = [child for child in _children if child.poll() is None]
