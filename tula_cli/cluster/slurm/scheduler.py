"""SLURM as an implementation of the scheduler protocol, by its commands and the environment variables of its jobs."""

import contextlib
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tula_cli.cluster.scheduler import JobRequest, PartitionLimits, ProcessPosition, QueuedJob, SchedulerState
from tula_cli.cluster.slurm import command, queue, site
from tula_cli.cluster.slurm.command import call_slurm_command
from tula_cli.errors import SchedulerError, SpecError
from tula_cli.run.records.base import OutcomeClass

# --- Patterns in the paths of a job's files

_FILENAME_PATTERN_CHARACTERS = re.compile(r"[%\\]")


def require_plain_path(run: Path) -> None:
    """Check that SLURM would not replace patterns in the path of a run, so that files of its jobs are found there.

    Args:
        run: the run directory. SLURM's patterns depend on its version, and `\\` disables them.

    Raises:
        SpecError: the path contains "%" or a backslash.
    """
    path = str(run.resolve())
    match = _FILENAME_PATTERN_CHARACTERS.search(path)
    if match is None:
        return
    pattern = path[match.start() : match.start() + 2]
    raise SpecError(
        f"the run directory {path} contains {pattern}, which SLURM would replace (for example, %j by"
        " the id of the job)",
        "choose another folder with [[--run-dir]], or rename this folder",
    )


# --- Refusals of sbatch

HINTS = {
    "maxsubmitjob": "wait until some of your jobs have finished, or cancel some; squeue --user $USER lists your jobs",
    "accounting/qos policy": "request fewer nodes or less time, or set another cluster.slurm.account or cluster.slurm.qos; the limits are listed by sacctmgr show assoc and sacctmgr show qos",
    "account": "set cluster.slurm.account; sacctmgr show user $USER withassoc lists your accounts",
    "partition": "set cluster.slurm.partition; sinfo lists the partitions",
    "qos": "set cluster.slurm.qos; sacctmgr show qos lists the QOS",
    "reservation": "set cluster.slurm.extra.reservation; scontrol show reservation lists the reservations",
    "feature": "set cluster.slurm.constraint; sinfo -o '%f' lists the features",
    "node count": "lower the numbers in search.nodes, or set another cluster.slurm.partition",
    "time limit": "lower search.max_minutes or cluster.minutes",
    "memory": "lower cluster.slurm.memory",
    "gres": "compare cluster.gpus_per_node with the GPUs that sinfo -o '%G' lists",
    "contact slurm controller": "the controller is down or unreachable; run the same command again later",
    "timed out": "the controller is busy; run the same command again later",
}
"""Hints about a refusal, by words in its message; the first match is used."""


def make_refusal_error(output: str) -> SchedulerError:
    """Return the error for a refusal of sbatch, with sbatch's message and a hint."""
    messages = [line.strip().removeprefix("sbatch: error: ") for line in output.splitlines() if "sbatch:" in line]
    text = "; ".join(messages) or output.strip().rpartition("\n")[2] or "without a reason"
    hint = next(
        (hint for keyword, hint in HINTS.items() if keyword in text.lower()), "check section cluster of the job file"
    )
    return SchedulerError(f"sbatch refused the job: {text}", hint)


# --- The scheduler

ACCEPTANCE_LAG = 10.0
"""Seconds that a job accepted by a busy controller may take to appear in the queue."""
UNDECIDED_ERRORS = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Zero Bytes were transmitted",
    "Connection timed out",
)
"""Messages of sbatch after it lost the controller: the job may have been accepted nevertheless."""


class SlurmScheduler:
    """The SLURM scheduler; job states come from `queue`, the partitions of the site from `site`."""

    name = "SLURM"
    cancel_command = "scancel"
    release_command = "scontrol release"

    def __init__(self, **options: Any) -> None:
        """Create the scheduler; `options` are further submitit parameters of scripts, e.g. `partition`, `account`."""
        self._options = options

    # --- On the submitting machine

    def describe_why_absent(self) -> str:
        return "" if shutil.which("sbatch") else "sbatch was not found on this machine"

    def render_script(self, job: JobRequest) -> str:
        """Return the script for a command; jobs with a task of tula use `sbatch.make_submitit_parameters` instead."""

        from tula_cli.cluster.slurm.script import ScriptWriter  # imported here: submitit is only needed to submit

        writer = ScriptWriter(job.logs, timeout=job.patience)
        gpus = {"gpus_per_node": job.gpus_per_node} if job.gpus_per_node else {}
        after = {"dependency": f"afterany:{':'.join(job.after)}"} if job.after else {}
        limit = {} if job.minutes is None else {"time": math.ceil(job.minutes)}
        writer.update_parameters(
            job_name=job.name, nodes=job.nodes, ntasks_per_node=job.tasks_per_node, setup=[f"cd {shlex.quote(str(job.folder))}", *job.setup], wckey=None,
            additional_parameters={"no-requeue": True}, **gpus, **after, **limit, **self._options,
        )  # fmt: skip
        return writer.render_text(job.command)

    def submit(self, script: Path, job: JobRequest) -> str:
        """Submit a script by sbatch; if the controller does not answer, wait for the job to appear in the queue.

        submitit's call is not used: it has no timeout, passes on variables of an allocation and prints the answer.
        """
        answer = call_slurm_command("sbatch", str(script), environ=make_sbatch_environment(script))
        if answer.end == "missing":
            raise SchedulerError(f"sbatch cannot be started: {answer.error_message}", "run tula on a login node")
        if answer.end == "hung":
            return _find_accepted_job(script, job.name, f"no answer within {command.COMMAND_TIMEOUT:g} s")
        if match := re.search(r"Submitted batch job (\d+)", answer.text):
            return match[1]
        message = answer.error_message or answer.text
        if not answer.has_succeeded and not any(undecided in message for undecided in UNDECIDED_ERRORS):
            raise make_refusal_error(message)
        return _find_accepted_job(script, job.name, message.rpartition("\n")[2].removeprefix("sbatch: error: "))

    def list_queued_jobs(self, names: Sequence[str]) -> list[QueuedJob]:
        return queue.list_live_jobs(names)

    def query_states(self, ids: Sequence[str]) -> Mapping[str, SchedulerState]:
        return queue.query_states(ids)

    def cancel(self, ids: Sequence[str]) -> str:
        return queue.cancel_jobs(ids)

    def hold(self, ids: Sequence[str]) -> str:
        # `uhold` makes it a hold of the user even if root runs the command; `hold` by root would be of an administrator.
        return queue.change_jobs("uhold", ids)

    def release(self, ids: Sequence[str]) -> str:
        return queue.change_jobs("release", ids)

    def exclude(self, ids: Sequence[str], nodes: str) -> str:
        return queue.change_jobs("update", ids, f"ExcNodeList={nodes}")

    def end_delay(self, id_: str, after: str) -> str:
        return queue.change_jobs("update", [id_], f"Dependency=afterany:{after},singleton")

    def delay(self, id_: str, minutes: int) -> str:
        return queue.change_jobs("update", [id_], f"StartTime=now+{minutes}minutes")

    def list_partitions(self) -> Sequence[PartitionLimits]:
        return [
            PartitionLimits(partition.name, partition.default, partition.usable, partition.minutes)
            for partition in site.list_partitions()
            if partition.up
        ]

    # --- Inside a job

    def find_position(self, environ: Mapping[str, str]) -> ProcessPosition | None:
        """Return the position of a process started by srun in its job; None outside a step of srun."""
        if "SLURM_PROCID" not in environ:
            return None
        cpus = environ.get("SLURM_CPUS_PER_TASK")
        return ProcessPosition(
            job_id=environ["SLURM_JOB_ID"],
            index=int(environ["SLURM_PROCID"]),
            count=int(environ["SLURM_NTASKS"]),
            local_index=int(environ["SLURM_LOCALID"]),
            nodes=int(environ.get("SLURM_JOB_NUM_NODES", "0")),
            hosts=environ.get("SLURM_JOB_NODELIST", ""),
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
            cpus=None if cpus is None else int(cpus),
        )

    def find_end_time(self, job_id: str, environ: Mapping[str, str]) -> float | None:
        return queue.find_end_time(job_id, environ)

    def find_end_reason(self, job_id: str, *, restart: int | None = None) -> OutcomeClass | None:
        return queue.find_job_outcome(job_id, restart=restart)


# --- Submission


_OVERRIDES: Mapping[str, tuple[str, ...]] = {
    # Options that tula's script always sets: nodes, ranks, GPUs, files, and the cluster that is queried later.
    "nodes": (
        "ARRAY_INX", "CLUSTERS", "ERROR", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GRES", "INPUT", "JOB_NAME", "NO_KILL",
        "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "OVERCOMMIT", "REQUEUE", "SIGNAL", "TIMELIMIT", "TRES_PER_TASK", "WAIT",
    ),
    "cpus-per-task": ("CORE_SPEC", "CPUS_PER_GPU", "THREAD_SPEC"),
    "mem": ("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE"),
}  # fmt: skip
"""Input variables of sbatch that override or contradict an option, by option, besides those named like it."""


def make_sbatch_environment(script: Path) -> dict[str, str]:
    """Return sbatch's environment without the variables that would override options of the script."""
    options = set(re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(encoding="utf-8"), re.MULTILINE))
    overrides = {name for option in options for name in (option.upper().replace("-", "_"), *_OVERRIDES.get(option, ()))}
    set_by_script = {f"SBATCH_{name}" for name in overrides}
    return {
        name: value for name, value in command.make_command_environment(os.environ).items() if name not in set_by_script
    }


def list_overriding_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the input variables of sbatch that contradict every job of tula and are not passed on to sbatch."""
    return sorted(environ.keys() & {f"SBATCH_{name}" for name in _OVERRIDES["nodes"]})


def _find_accepted_job(script: Path, name: str, message: str) -> str:
    """Wait for a job that may have been accepted although sbatch failed to appear in the queue; return its id.

    Raises:
        SchedulerError: the job does not appear within ACCEPTANCE_LAG seconds.
    """
    deadline, script_path = time.monotonic() + ACCEPTANCE_LAG, script.resolve()
    names_in_script = re.findall(r"^#SBATCH --job-name=(\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    while True:
        with contextlib.suppress(SchedulerError):  # a controller too busy for sbatch may be too busy for squeue
            job_ids = [
                job.id
                for job in queue.list_live_jobs([name, *names_in_script])
                if Path(job.script).resolve() == script_path
            ]
            if job_ids:
                return job_ids[-1]
        if time.monotonic() >= deadline:
            raise SchedulerError(
                f"sbatch does not answer ({message}), and no job {name} has appeared in the queue",
                "the controller is busy or unreachable; run the same command again later, which never submits a job twice",
            )
        time.sleep(ACCEPTANCE_LAG / 10)
