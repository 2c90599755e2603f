"""What SLURM says of its jobs: a hint, never the truth about results. It forgets, lags, and may not answer at all."""

import subprocess
from dataclasses import dataclass
from typing import Literal

from tula_cli.errors import SchedulerError


@dataclass(frozen=True)
class SchedulerState:
    """What the scheduler says of a job; a hint, never the truth about results."""

    state: Literal["pending", "running", "ended", "unknown"]
    reason: str = ""


PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
HOPELESS = {
    "PartitionConfig": "the partition does not allow so many nodes or so much of them",
    "PartitionNodeLimit": "the partition does not allow so many nodes",
    "PartitionTimeLimit": "the partition does not allow so much time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node satisfies the constraints",
    "DependencyNeverSatisfied": "it waits for a job that failed",
    "AccountNotAllowed": "the account may not use the partition",
    "QOSNotAllowed": "the QOS may not be used here",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such QOS",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "you hold it: scontrol release",
}
"""squeue's reasons that waiting does not cure."""


def _slurm_state(state: str, reason: str) -> SchedulerState:
    """Return what a state of SLURM means; an unknown one is not over."""
    name = state.split()[0].rstrip("+")  # sacct writes "CANCELLED by 1000"
    if name in PENDING:
        words = HOPELESS.get(reason)
        return SchedulerState("pending", f"{reason}: will not start, {words}" if words else reason)
    if name in RUNNING:
        return SchedulerState("running")
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")
    if name in (*ended, "DEADLINE", "REVOKED"):
        return SchedulerState("ended", "" if name == "COMPLETED" else state)
    return SchedulerState("unknown", state)


def ask(job_id: str) -> SchedulerState:
    """Ask squeue, which forgets a job some time after its end; then sacct, which lags, or is not there at all."""
    queue = _told("squeue", "--noheader", f"--jobs={job_id}", "--format=%T|%r")
    if queue:
        state, _, reason = queue.splitlines()[0].partition("|")
        return _slurm_state(state, reason)
    account = _told("sacct", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=JobID,State")
    rows = [line.split("|") for line in account.splitlines()]
    states = [state for name, state in rows if name == job_id]
    if states:
        return _slurm_state(states[-1], "")
    # Neither knows it: over, and forgotten. The grace period for results covers a job too young to be known.
    return SchedulerState("ended")


def _told(*command: str) -> str:
    """Return what a command printed; nothing where it failed or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def refused(words: str) -> SchedulerError:
    """Return sbatch's refusal in its own words, and what to do about it."""
    told = [line.strip().removeprefix("sbatch: error: ") for line in words.splitlines() if "sbatch:" in line]
    text = "; ".join(told) or words.strip().splitlines()[-1]
    hints = {
        "partition": "set cluster.slurm.partition; sinfo lists them",
        "account": "set cluster.slurm.account; sacctmgr show user $USER withassoc lists yours",
        "qos": "set cluster.slurm.qos; sacctmgr show qos lists them",
        "feature": "set cluster.slurm.constraint; sinfo -o '%f' lists the features",
        "node count": "search fewer nodes, or another partition",
        "time limit": "lower search.max_minutes or cluster.slurm.minutes",
        "memory": "lower cluster.slurm.memory",
        "gres": "check cluster.gpus_per_node against sinfo -o '%G'",
    }
    hint = next((hint for word, hint in hints.items() if word in text.lower()), "check the cluster section of the job")
    return SchedulerError(f"sbatch refused the job: {text}", hint)
