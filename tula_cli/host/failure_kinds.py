"""The table of failure kinds: for each class its meaning, the exit code, what tula does next, and what the user can do.

Relaunches, chains, the commands that wait for a job and the table in docs/commands.md use it. The texts by which a failure is
classified are in `outcome.FAILURE_PATTERNS`: several rows per class, in an order that decides.
"""

from dataclasses import dataclass
from typing import Literal

from tula_cli.errors import DeviceFault, DiskFull, Diverged, JobFailed, OutOfMemoryAtMinimum, StorageFailed, TulaError
from tula_cli.models.out_of_memory import LESS_MEMORY, LESS_MEMORY_FOR_SCRIPT
from tula_cli.run.records.base import OutcomeClass
from tula_cli.spec.resources import Cluster

Next = Literal[
    "processes",
    "paused",
    "outwaited",
    "once more",
    "elsewhere",
    "next job",
    "more nodes",
    "less memory",
    "fewer loaders",
    "held",
    "lower rate",
    "user",
    "nothing",
]
"""The next step after a failure of a training."""

NEXT_WORDS: dict[Next, str] = {
    "processes": "new processes, at most `train.max_attempts` times without a newer checkpoint",
    "paused": "new processes after a pause, at most `train.max_attempts` times without a newer checkpoint",
    "outwaited": "new processes after a pause; after `train.max_attempts` of them in one job without a newer checkpoint the next job of the chain,"
    " 10 to 30 minutes later; it ends where there is none",
    "once more": "new processes; the same without a newer checkpoint is then the user's code's",
    "elsewhere": "the next job of the chain, on other nodes, or new processes on one machine; at most `train.max_attempts` times"
    " without a newer checkpoint",
    "next job": "the next job of the chain, from the newest checkpoint",
    "more nodes": "the same job where it has the nodes, else the first job of the chain that has",
    "less memory": "new processes with smaller micro-batches, or a smaller batch; ends where nothing takes less",
    "fewer loaders": "new processes with fewer loader processes; ends where there are none to spare",
    "held": "it ends, and the other jobs of the chain are held until `tula train` finds room",
    "lower rate": "a batch that grows (`train.ramp`) restarts once, from the checkpoint before, with half the factor of its learning rate;"
    " otherwise it ends, and the other jobs of the chain are taken out of the queue",
    "user": "after its first step the next job of the chain, or new processes, once; the same without a newer checkpoint, or an end"
    " before the first step, ends it, and the other jobs of the chain are taken out of the queue",
    "nothing": "it ends, and the other jobs of the chain are taken out of the queue",
}
"""The same as docs/commands.md tells it."""


@dataclass(frozen=True)
class FailureKind:
    """A class of failure.

    Args:
        means: in words.
        error: what the command that waits for the job exits with, once nothing follows: its exit code and `error.code`.
        follows: what tula does next.
        advice: what the user can do; one line, with {minutes} and {more_memory} for what the scheduler's jobs can be asked for.
        for_script: the same for a script of the user's own, which has no model, optimizer ... in its job; empty: the same words.
        severity: of several ranks' failures that with the lowest is the root of the others.
        names_host: whether the failure is about the node, so that messages about it name the node.
        final_if_again: whether the same at once again, without progress, ends a training: a third start would come to it too.
    """

    means: str
    error: type[TulaError]
    follows: Next
    advice: str
    for_script: str = ""
    severity: int = 1
    names_host: bool = False
    final_if_again: bool = False

    def advice_for(self, cluster: Cluster, *, script: bool = False) -> str:
        """Return what the user can do, by the settings that the jobs' scheduler has."""
        advice = self.for_script if script and self.for_script else self.advice
        return advice.format(minutes=cluster.minutes_setting, more_memory=cluster.more_memory)


FAILURE_KINDS: dict[OutcomeClass, FailureKind] = {
    "device_oom": FailureKind(
        "a GPU, or a rank on CPUs, was out of memory",
        OutOfMemoryAtMinimum,
        "less memory",
        LESS_MEMORY,
        LESS_MEMORY_FOR_SCRIPT,
        severity=0,
    ),
    "host_oom": FailureKind(
        "a node's own memory was used up",
        JobFailed,
        "fewer loaders",
        "the node's own memory ran out: lower train.workers, or {more_memory}",
        "the node's own memory ran out: lower the script's loader workers (train.workers where its command has {{workers}}), or"
        " {more_memory}",
        severity=0,
    ),
    "user": FailureKind(
        "the model, the data, the script or the spec failed",
        JobFailed,
        "user",
        "tula logs shows the whole traceback; correct the model, the data or the spec and run the same command again",
        "correct the script or its section and run the same command again; tula logs shows what the script wrote",
    ),
    "diverged": FailureKind(
        "loss or weights were not finite, or the loss of a batch that grows rose and stayed high",
        Diverged,
        "lower rate",
        "the same command diverges again: set a lower train.max_lr_factor (where the learning rate grows with the batch),"
        " lower optimizer.lr, lengthen schedule.warmup_epochs, set train.max_grad_norm,"
        " or compute with train.precision fp32 or bf16",
        "the same command diverges again: set a lower script.reference.lr, or where the command has no {{lr}} a lower learning"
        " rate in the script; lengthen the script's warm-up, clip its gradients, or compute in fp32 or bf16 there",
    ),
    "device_fault": FailureKind(
        "a device or a node was faulty",
        DeviceFault,
        "elsewhere",
        "a node or one of its GPUs is faulty: tell the administrators; the same command goes on from the newest"
        " checkpoint",
        severity=0,
        names_host=True,
    ),
    "device_error": FailureKind(
        "a GPU refused what a kernel did",
        JobFailed,
        "once more",
        "a GPU refused what a kernel did: if it does so again and on another node, the model or a library is wrong",
        "a GPU refused what a kernel did: if it does so again and on another node, the script or a library is wrong",
        names_host=True,
    ),
    "disk": FailureKind(
        "no space, no quota or no more files where the run lies, or where the job writes",
        DiskFull,
        "held",
        "free some space (or quota) and run the same command again: it goes on from the newest checkpoint, and lets held"
        " jobs go",
    ),
    "storage": FailureKind(
        "the file system did not answer, or lost a file (a time-out, a stale handle, an error of the disk)",
        StorageFailed,
        "outwaited",
        "ask the administrators about the file system on that node; the same command goes on from the newest checkpoint",
        names_host=True,
    ),
    "supervisor": FailureKind(
        "tula's own supervisor failed",
        TulaError,
        "next job",
        "this is a defect of tula, or its run directory was changed: please report it with what tula logs shows; the same"
        " command goes on from the newest checkpoint",
        names_host=True,
        final_if_again=True,
    ),
    "hung": FailureKind(
        "a step of a rank came to no end, though its process lived",
        JobFailed,
        "processes",
        "tula logs shows the stack of the rank that hung: what it waits for there (data, a lock, a file system) is the cause;"
        " the same command goes on from the newest checkpoint",
        names_host=True,
    ),
    "host_limit": FailureKind(
        "a limit of the node was reached (open files, processes, threads)",
        JobFailed,
        "paused",
        "raise the limit on the nodes (ulimit -n for open files, ulimit -u for processes), or lower"
        " train.workers; the same command goes on from the newest checkpoint",
        "raise the limit on the nodes (ulimit -n for open files, ulimit -u for processes), or lower the script's loader workers"
        " (train.workers where its command has {{workers}}); the same command goes on from the newest checkpoint",
        names_host=True,
        final_if_again=True,
    ),
    "port": FailureKind("a port was taken", JobFailed, "processes", "a port was taken; run the same command again"),
    "cancelled": FailureKind(
        "cancelled (tula cancel, scancel), or its time was up",
        JobFailed,
        "nothing",
        "the job was cancelled; the same command starts what is missing",
    ),
    "time_limit": FailureKind(
        "the time limit was reached",
        JobFailed,
        "next job",
        "the same command goes on from the newest checkpoint; raise {minutes} if too little fits in",
    ),
    "preempted": FailureKind(
        "the scheduler gave the nodes to another job",
        JobFailed,
        "next job",
        "the scheduler gave the nodes to another job; the same command goes on from the newest checkpoint",
    ),
    "node_failure": FailureKind(
        "a node was lost",
        JobFailed,
        "next job",
        "a node was lost; the same command goes on from the newest checkpoint, on other nodes",
    ),
    "stage_end": FailureKind(
        "the next stage of train.ramp has more nodes",
        JobFailed,
        "more nodes",
        "the next stage of a batch that grows has more nodes; the same command goes on there",
    ),
    "unknown": FailureKind(
        "nothing tells what it was",
        JobFailed,
        "processes",
        "tula logs shows what the job wrote",
        severity=2,
        final_if_again=True,
    ),
    "signal": FailureKind(
        "a process was killed",
        JobFailed,
        "processes",
        "the job was killed from outside; the same command continues it",
        severity=3,
        final_if_again=True,
    ),
    "peer": FailureKind(
        "a rank was lost, and no log says why",
        JobFailed,
        "processes",
        "a rank was lost and its log does not say why: check the network (cluster.interface) and tula logs",
        severity=4,
    ),
}
"""In the order of what is looked for, roughly: what is the user's, what is the machine's, what is the scheduler's."""
