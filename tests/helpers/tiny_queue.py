"""A plug-in scheduler for a small batch queue, written from docs/how-to/schedulers.md: `cluster.kind: tiny_queue:TinyQueue`."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.cluster.scheduler import JobRequest, PartitionLimits, ProcessPosition, QueuedJob, SchedulerState
from tula_cli.errors import SchedulerError
from tula_cli.run.records.base import OutcomeClass

COMMANDS = Path(__file__).with_name("tiny_queue_commands.py")
PENDING_REASONS = {"dependency": "Dependency", "nodes": "all nodes are taken", "held": "you hold it"}
END_REASONS: Mapping[str, OutcomeClass] = {
    "cancelled": "cancelled",
    "preempted": "preempted",
    "time limit": "time_limit",
}
REQUESTED_ENDS: Mapping[str, OutcomeClass] = {"cancel": "cancelled", "requeue": "preempted", "time": "time_limit"}


class TinyQueue:
    """The queue with its files in `home`."""

    name = "TinyQueue"
    cancel_command = "tiny cancel"
    release_command = "tiny release"

    def __init__(self, home: str) -> None:
        self.home = home

    # --- on the host that submits jobs

    def describe_why_absent(self) -> str:
        return "" if Path(self.home).parent.is_dir() else f"there is no {self.home}"

    def render_script(self, job: JobRequest) -> str:
        starter = shlex.join([sys.executable, "-I", "-S", str(COMMANDS), self.home, "run"])
        return "\n".join(["#!/bin/sh", *job.make_preamble("$TQ_JOB"), f"exec {starter} {job.command}", ""])

    def submit(self, script: Path, job: JobRequest) -> str:
        after = ",".join(job.after)
        words = (str(script), job.name, str(job.nodes), str(job.tasks_per_node), str(job.minutes or 60), after)
        done = self._call("submit", *words)
        if done.returncode:
            raise SchedulerError(f"{self.name} {done.stderr.strip()}", "request less")
        return done.stdout.strip()

    def list_queued_jobs(self, names: Sequence[str]) -> list[QueuedJob]:
        jobs = self._jobs()
        if jobs is None:
            raise SchedulerError(f"{self.name} does not answer", "run the same command again later")
        wanted = [(id_, job) for id_, job in jobs.items() if job["name"] in names]
        return [QueuedJob(id_, job["name"]) for id_, job in wanted if job["state"] != "over" and not job["wish"]]

    def query_states(self, ids: Sequence[str]) -> Mapping[str, SchedulerState]:
        jobs = self._jobs()
        if jobs is None:
            return {id_: SchedulerState("unknown", f"{self.name} does not answer", silent=True) for id_ in ids}
        return {id_: self._state(jobs[id_]) for id_ in ids if id_ in jobs}

    def cancel(self, ids: Sequence[str]) -> str:
        return self._complaint("cancel", ids)

    def hold(self, ids: Sequence[str]) -> str:
        return self._complaint("hold", ids)

    def release(self, ids: Sequence[str]) -> str:
        return self._complaint("release", ids)

    def list_partitions(self) -> Sequence[PartitionLimits]:
        path = Path(self.home, "settings.json")
        return [
            PartitionLimits("all", default=True, usable=json.loads(path.read_text())["nodes"] if path.exists() else 2)
        ]

    # --- inside a job

    def find_position(self, environ: Mapping[str, str]) -> ProcessPosition | None:
        if "TQ_TASK" not in environ:
            return None
        nodes, tasks = int(environ["TQ_NODES"]), int(environ["TQ_TASKS"])
        return ProcessPosition(
            environ["TQ_JOB"], index=int(environ["TQ_TASK"]), count=nodes * tasks, local_index=int(environ["TQ_LOCAL"]), nodes=nodes,
            restarts=int(environ["TQ_STARTS"]) - 1, hosts=f"{nodes} of this machine",
        )  # fmt: skip

    def find_end_time(self, job_id: str, environ: Mapping[str, str]) -> float | None:
        job = (self._jobs() or {}).get(job_id)
        return None if job is None else job["ends"]

    def find_end_reason(self, job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
        job = (self._jobs() or {}).get(job_id)
        if job is None:
            return None
        runs, number = job["runs"], job["starts"] - 1 if restart is None else restart
        if job["state"] == "runs" and number == len(runs):
            return REQUESTED_ENDS.get(job["wish"])
        return END_REASONS.get(runs[min(number, len(runs) - 1)]) if runs and number >= -1 else None

    # --- the commands of the queue

    def _call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-I", "-S", str(COMMANDS), self.home, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def _jobs(self) -> dict[str, dict[str, Any]] | None:
        done = self._call("list")
        return json.loads(done.stdout) if done.returncode == 0 else None

    def _complaint(self, word: str, ids: Sequence[str]) -> str:
        return self._call(word, *ids).stderr.strip() if ids else ""

    @staticmethod
    def _state(job: Mapping[str, Any]) -> SchedulerState:
        if job["state"] == "waits":
            return SchedulerState(
                "pending", PENDING_REASONS.get(job["why"], ""), on_hold=job["held"], hopeless=job["held"]
            )
        if job["state"] == "runs":
            return SchedulerState("running")
        how = job["runs"][-1] if job["runs"] else ""
        failed = f"FAILED: its script ended with exit code {job['code']}" if job["code"] and not how else ""
        return SchedulerState("ended", how or failed, failed=bool(failed))
