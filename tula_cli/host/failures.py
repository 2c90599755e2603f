"""The kinds of failure: meaning, exit code and advice; and which of several ranks' failures is the root."""

from collections.abc import Iterable
from dataclasses import dataclass

from tula_cli.errors import DeviceFault, DiskFull, Diverged, JobFailed, OutOfMemoryAtMinimum, StorageFailed, TulaError
from tula_cli.run.records.base import OutcomeClass
from tula_cli.run.records.failures import Failure, FaultName
from tula_cli.spec.job import JobSpec
from tula_cli.spec.resources import Cluster
from tula_cli.spec.workload import UserScript, Workload

# --- The table of failure kinds
#
# The commands that wait for a job and the table in docs/reference/commands.md use it. What follows a failure is in
# `cluster/decisions.py`, the texts by which it is recognised are in `failure_texts.py`.


@dataclass(frozen=True)
class FailureKind:
    """A class of failure: its meaning, consequences and advice."""

    means: str
    error: type[TulaError]  # with which a command that waits for the job exits if nothing follows
    advice: str  # what the user can do; one line, with {more_memory} for the setting that depends on the scheduler
    for_script: str = ""  # the same for a user's script, whose job has no model, optimizer ...; empty: same as `advice`
    severity: int = 1  # order among failures of several ranks; the one with the lowest value is the root cause

    def format_advice(self, cluster: Cluster, *, script: bool = False) -> str:
        """Return the advice for the user, with the names of the settings of the cluster's scheduler."""
        advice = self.for_script if script and self.for_script else self.advice
        return advice.format(more_memory=cluster.backend.more_memory_advice)


FAILURE_KINDS: dict[OutcomeClass, FailureKind] = {
    "device_oom": FailureKind(
        "a GPU, or a rank on CPUs, ran out of memory",
        OutOfMemoryAtMinimum,
        Workload.less_memory_hint,
        UserScript.less_memory_hint,
        severity=0,
    ),
    "host_oom": FailureKind(
        "a node ran out of memory",
        JobFailed,
        "the node ran out of memory: lower train.workers, or {more_memory}",
        "the node ran out of memory: lower the script's loader workers (train.workers if its command has {{workers}}), or"
        " {more_memory}",
        severity=0,
    ),
    "user": FailureKind(
        "the model, the data, the script or the job file caused an error",
        JobFailed,
        "read the traceback with tula logs, correct the model, the data or the job file, and run the same command again",
        "read the output of the script with tula logs, correct the script or section script, and run the same command again",
    ),
    "diverged": FailureKind(
        "loss or weights were not finite, or the loss of a growing batch rose and stayed high",
        Diverged,
        "the same command would diverge again: set a lower train.max_lr_factor (if the learning rate grows with the batch),"
        " lower optimizer.lr, lengthen schedule.warmup_epochs, set train.max_grad_norm,"
        " or compute with train.precision fp32 or bf16",
        "the same command would diverge again: lower script.reference.lr (or the learning rate in the script, if the command has no {{lr}}),"
        " lengthen the script's warm-up, clip its gradients, or compute in fp32 or bf16",
    ),
    "device_fault": FailureKind(
        "a device or a node was faulty",
        DeviceFault,
        "a node or one of its GPUs is faulty: inform the administrators, and run the same command again to resume from"
        " the newest checkpoint",
        severity=0,
    ),
    "device_error": FailureKind(
        "a kernel failed on a GPU",
        JobFailed,
        "run the same command again; if the kernel also fails on another node, the model or a library has a bug",
        "run the same command again; if the kernel also fails on another node, the script or a library has a bug",
    ),
    "disk": FailureKind(
        "a disk that the job writes to is full (space, quota or number of files)",
        DiskFull,
        "free some space or quota, and run the same command again, which resumes from the newest checkpoint and releases held jobs",
    ),
    "storage": FailureKind(
        "the file system did not answer or lost a file (a timeout, a stale handle, a disk error)",
        StorageFailed,
        "ask the administrators about the file system on that node, and run the same command again to resume from the"
        " newest checkpoint",
    ),
    "supervisor": FailureKind(
        "tula's own supervisor failed",
        TulaError,
        "this is a bug in tula, or the run directory was changed: please report the output of tula logs; run the same command again to resume from the newest checkpoint",
    ),
    "hung": FailureKind(
        "a step of a rank did not finish, although its process was alive",
        JobFailed,
        "the stack of the rank in tula logs shows what the rank waited for (data, a lock, a file system); run the same command again to resume from the newest checkpoint",
    ),
    "host_limit": FailureKind(
        "a limit of the node was reached (open files, processes, threads)",
        JobFailed,
        "raise the limit on the nodes (ulimit -n for open files, ulimit -u for processes), or lower"
        " train.workers; run the same command again to resume from the newest checkpoint",
        "raise the limit on the nodes (ulimit -n for open files, ulimit -u for processes), or lower the script's loader workers"
        " (train.workers if its command has {{workers}}); run the same command again to resume from the newest checkpoint",
    ),
    "port": FailureKind("a port was in use", JobFailed, "a port was in use; run the same command again"),
    "cancelled": FailureKind(
        "the job was cancelled (tula cancel, scancel), or its time limit was reached",
        JobFailed,
        "the job was cancelled; run the same command again to start what is missing",
    ),
    "time_limit": FailureKind(
        "the time limit was reached",
        JobFailed,
        "run the same command again to resume from the newest checkpoint; raise cluster.minutes if a job makes little"
        " progress",
    ),
    "preempted": FailureKind(
        "the scheduler gave the nodes to another job",
        JobFailed,
        "the scheduler gave the nodes to another job; run the same command again to resume from the newest checkpoint",
    ),
    "node_failure": FailureKind(
        "a node was lost",
        JobFailed,
        "a node was lost; run the same command again to resume from the newest checkpoint on other nodes",
    ),
    "stage_end": FailureKind(
        "the next stage of train.ramp has more nodes",
        JobFailed,
        "the next stage of the batch ramp has more nodes; run the same command again to continue on these nodes",
    ),
    "unknown": FailureKind(
        "the cause is unknown",
        JobFailed,
        "read the output of the job with tula logs",
        severity=2,
    ),
    "signal": FailureKind(
        "a process was killed",
        JobFailed,
        "the job was killed by something other than tula; run the same command again to resume the job",
        severity=3,
    ),
    "peer": FailureKind(
        "a rank was lost, and no log shows why",
        JobFailed,
        "a rank was lost, and no log shows why: read the logs of all ranks with tula logs. If they show connection errors, set"
        " cluster.interface to the network between the nodes",
        severity=4,
    ),
}
"""Kinds of failure by class, in the approximate order of the checks: of the user, the machine, the scheduler."""

_FAULT_ADVICE: dict[FaultName, str] = {
    "memory": "the memory of a GPU or of the node has failed: ask the administrators to drain the node",
    "link": "a link between GPUs has failed: ask the administrators to drain the node",
    "gpu_lost": "a GPU is no longer visible: inform the administrators; nvidia-smi -q and dmesg show details",
    "gpu_busy": "another process uses the GPU, or the GPU is in exclusive mode: see nvidia-smi",
    "fabric": "the node's GPUs are not set up: start its fabric manager (nvidia-fabricmanager)",
    "driver": "the GPU driver of the node does not work, or does not match its libraries: ask the administrators to restart or repair the node",
    "mps": "the MPS server of the node does not answer: restart it (nvidia-cuda-mps-control)",
    "locked_memory": (
        "InfiniBand cannot lock enough memory: remove the node's limit (ulimit -l unlimited, memlock; for SLURM"
        " LimitMEMLOCK of slurmd, PropagateResourceLimitsExcept=MEMLOCK)"
    ),
    "no_gpu": "no GPU is visible: check that the job requests GPUs (on SLURM: cluster.slurm.gpus) and that nvidia-smi or rocm-smi lists them",
}
"""Advice about the faults of a node or a device."""


def find_root_failure(failures: Iterable[Failure]) -> Failure | None:
    """Return the root cause among failures, or None if there are none.

    Out-of-memory and device faults come first, peers that report a lost rank last; of equal ones, the earliest is
    chosen. A rank that was terminated (SIGTERM) ranks like one that lost its peer.
    """
    return min(failures, key=lambda failure: (_get_severity(failure), failure.failed_at, failure.rank), default=None)


def has_cause(failures: Iterable[Failure]) -> bool:
    """Return whether any of the failures is a cause, not only the loss of a peer."""
    return any(_get_severity(failure) != FAILURE_KINDS["peer"].severity for failure in failures)


def _get_severity(failure: Failure) -> int:
    is_follow_up = failure.outcome == "signal" and failure.signal == "SIGTERM"
    return FAILURE_KINDS["peer" if is_follow_up else failure.outcome].severity


def describe_advice(failure: Failure | OutcomeClass, spec: JobSpec | None = None) -> str:
    """Return one line of advice about a failure, or about all of a kind.

    Args:
        spec: the failed job; None: a job of tula's training loop on this machine.
    """
    if isinstance(failure, Failure) and failure.fault is not None and failure.outcome == "device_fault":
        return _FAULT_ADVICE[failure.fault]
    cluster, script = (Cluster(), False) if spec is None else (spec.cluster, spec.script is not None)
    outcome = failure.outcome if isinstance(failure, Failure) else failure
    return FAILURE_KINDS[outcome].format_advice(cluster, script=script)
