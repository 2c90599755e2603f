"""Why ranks and attempts end, what follows, and the sentences that describe both."""

import time
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from tula_cli.run.records.base import OutcomeClass, Record, RecordedText
from tula_cli.spec.sections import Workers
from tula_cli.words import format_bytes, format_count

FaultName = Literal["memory", "link", "gpu_lost", "gpu_busy", "fabric", "driver", "mps", "locked_memory", "no_gpu"]
"""The faults of a node or a device that can be distinguished by the messages of drivers."""

NODE_FAILURES: frozenset[OutcomeClass] = frozenset(
    ("device_fault", "device_error", "storage", "supervisor", "hung", "host_limit")
)
"""Kinds of failure that concern the node, so that messages about them name it."""

ALLOCATOR_ADVICE = " If reserved "
"""The start of the advice in each out-of-memory error of torch's allocator, after the facts; of torch 2.0 too."""


class Shortage(Record):
    """The free and total space of a full file system. Bytes."""

    folder: str  # folder in which a file was to be written
    free: int  # free space available to this user
    total: int
    files_free: int | None = None
    """Number of files that can still be created; None if the file system does not count them."""
    needed: int | None = None  # size of the data to write; None if unknown
    quota: bool = False  # the user's quota is used up, which `free` does not include

    @property
    def missing(self) -> int | None:
        """Bytes that have to be freed, or None if unknown."""
        return None if self.needed is None or self.quota else max(0, self.needed - self.free)

    @property
    def description(self) -> str:
        """The folder and the missing space."""
        if self.files_free == 0:
            return f"no more files can be created on the file system of {self.folder}"
        takes = "" if self.needed is None else f", {format_bytes(self.needed)} are needed"
        if self.quota:
            return f"the disk quota for {self.folder} is used up{takes}"
        missing = f", so {format_bytes(self.missing)} are missing" if self.missing else ""
        return f"{format_bytes(self.free)} of {format_bytes(self.total)} are free on the disk of {self.folder}{takes}{missing}"


class Failure(Record):
    """Why a rank, or all ranks of an attempt, ended.

    The failing rank or its supervisor writes it; attempts, results, tasks and summaries contain the one at the root. No
    code reads `message` or `detail`: what they are classified by is in the other fields.
    """

    outcome: OutcomeClass
    message: RecordedText = ""
    """Message of the program, the scheduler or the supervisor; its first line describes the failure."""
    rank: int | None = None  # None if no single rank failed
    host: str = ""
    task: str = ""
    attempt: int = 0
    pid: int = 0
    detail: RecordedText = ""  # traceback, or the end of the log; only in the file of the rank
    local_batch: int | None = None
    signal: str = ""  # signal that killed a process, "SIGSEGV"; empty if none is known
    fault: FaultName | None = None  # fault named by the driver's message, for outcome device_fault; None if unknown
    shortage: Shortage | None = None  # free and missing space, for outcome disk; None if unknown
    permanent: bool = False  # a new start would fail in the same way: settings and script contradict each other
    failed_at: float = Field(default_factory=time.time)  # Unix time

    @property
    def summary(self) -> str:
        """The message of the failure; for outcomes peer and disk a generic one, for device_oom without torch's advice."""
        if self.outcome == "peer" and self.rank is not None:
            return f"rank {self.rank} lost its connection to another rank, which reported no error"
        if self.outcome == "disk" and self.shortage is not None:
            problem = "disk quota exceeded" if self.shortage.quota else "no space left on device"
            return f"{problem}: {self.shortage.description}"
        return self.message.partition(ALLOCATOR_ADVICE)[0] if self.outcome == "device_oom" else self.message

    @property
    def description(self) -> str:
        """The summary, with the node if the failure concerns it."""
        return f"{self.summary} on {self.host}" if self.outcome in NODE_FAILURES and self.host else self.summary


def convert_old_failure(fields: object, *, ended_at: str = "") -> object:
    """Return the fields of a record whose failure an older version stored as single fields, with them as a `Failure`.

    Args:
        fields: fields of the record, as read.
        ended_at: name of the field with the time of the failure; empty if there is none.
    """
    outcome = fields.get("outcome") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or outcome not in get_args(OutcomeClass) or fields.get("failure") is not None:
        return fields
    known = {name: fields[name] for name in ("outcome", "message", "rank", "host", "shortage") if name in fields}
    return {**fields, "failure": {**known, "failed_at": fields.get(ended_at) or 0.0}}


class Fallback(Record):
    """The configuration to train after an out-of-memory error, and what did not fit."""

    rung: int  # index in `TrainTask.ladder` of the batch to use; 0: the batch that did not fit, with more splits
    splits: int  # parts into which each micro-batch is split
    batch: int  # global batch that did not fit
    stage: int | None = None  # batch of the stage that ran out of memory, if smaller than `batch` (`train.ramp`)
    micro_batch: int | None = None  # samples per smaller micro-batch; None if the next smaller batch is used
    micro_batches: int = 0  # smaller micro-batches per step
    normalised: int = 0  # samples over which BatchNorm computes its statistics; 0 without BatchNorm, or if unchanged
    failed_micro_batch: int | None = None  # samples of the micro-batch that did not fit and is not split further
    limit: str = ""  # reason why micro-batches are not split (further)

    @property
    def batch_norm_text(self) -> str:
        """The new number of samples per BatchNorm statistic, as text for messages; empty if it has not changed."""
        return f"BatchNorm's statistics over {self.normalised} samples" if self.normalised else ""

    @property
    def description(self) -> str:
        """Description of what did not fit and of the smaller configuration."""
        message = f"out of memory at batch {self.batch}"
        if self.stage is not None:
            message = f"out of memory at batch {self.stage}, in a stage before batch {self.batch}"
        if self.micro_batch is not None:
            statistics = f", with {self.batch_norm_text}" if self.normalised else ""
            return f"{message}: each rank now computes a step in {self.micro_batches} micro-batches of {self.micro_batch}{statistics}"
        if self.failed_micro_batch is not None:
            return f"{message} in micro-batches of {self.failed_micro_batch}, which are not split further: {self.limit}"
        return f"{message}; its micro-batches are not split: {self.limit}" if self.limit else message


class Relaunch(Record):
    """New processes in the same allocation, with the settings that change."""

    kind: Literal["relaunch"] = "relaunch"
    pause: bool = False  # wait before the start, longer after each repetition
    after_progress: bool = False  # restarted because the training had made progress
    nodes: int | None = None  # new number of nodes for a stage of `train.ramp`; None if unchanged
    nodes_before: int = 0
    stage_batch: int = 0  # global batch of this stage
    fallback: Fallback | None = None  # after an out-of-memory error
    workers: int | None = None  # new number of data-loader processes per rank; None if unchanged
    workers_before: Workers = 0
    max_lr_factor: float | None = None  # new value of train.max_lr_factor; None if unchanged
    skip: int | None = None  # local batch of a probe to leave out from now on; None if all are measured

    @property
    def consequence(self) -> str:
        """Sentence on the consequence, to append to that on the failure; empty if there is nothing to report."""
        return "the training had made progress, so tula starts it again" if self.after_progress else ""

    def describe_cause(self, failure: Failure) -> str:
        """Return why a training is relaunched after a failure."""
        if self.nodes is not None and failure.outcome == "device_oom":
            return f"out of memory on {format_count(self.nodes_before)}, so the training continues on {self.nodes}"
        if self.nodes is not None:
            return f"the stage with batch {self.stage_batch} runs on {format_count(self.nodes)}"
        if self.fallback is not None:
            return self.fallback.description
        if self.workers is not None:
            return f"host out of memory with train.workers: {self.workers_before}; restarted with {self.workers}"
        if self.max_lr_factor is not None:
            return f"{failure.summary}; restarted from the previous checkpoint with train.max_lr_factor: {self.max_lr_factor:g}"
        if self.after_progress:
            return f"{failure.description}; {self.consequence}"
        return f"{failure.outcome}: {failure.description}"


class Requeue(Record):
    """The task resumes in the next job of the chain."""

    kind: Literal["requeue"] = "requeue"
    first: Literal["", "exclude", "delay", "hold"] = ""
    """Action on the later jobs: exclude the node, delay them, hold them."""
    after_progress: bool = False  # as in Relaunch
    jobs: tuple[str, ...] = ()  # the later jobs that were delayed or held
    nodes: str = ""  # all excluded nodes, in the scheduler's notation
    minutes: int = 0  # length of the delay
    complaint: str = ""  # error of the scheduler if it refused the action, else empty

    @property
    def consequence(self) -> str:
        """As in `Relaunch`."""
        refused = f": {self.complaint}"
        if self.after_progress:
            return "the training had made progress, so tula starts it again"
        if self.first == "exclude" and self.nodes:
            return (
                f"{self.nodes} could not be excluded{refused}"
                if self.complaint
                else f"excluded from now on: {self.nodes}"
            )
        if self.first == "delay" and self.jobs:
            result = (
                f"could not be delayed{refused}" if self.complaint else f"starts in {self.minutes} min at the earliest"
            )
            return f"job {self.jobs[0]} {result}"
        if self.first == "hold" and self.jobs:
            ids = self.jobs[0] if len(self.jobs) == 1 else f"{self.jobs[0]} to {self.jobs[-1]}"
            return f"{ids} could not be held{refused}" if self.complaint else f"jobs held: {ids}"
        return ""

    def describe_cause(self, failure: Failure) -> str:
        """Return why a training resumes in another job after a failure."""
        if self.first == "hold":
            return f"{failure.description}; resumed now that there is free space"
        named = f"{failure.outcome}: " if self.first == "exclude" else ""
        return "; ".join(filter(None, (f"{named}{failure.description}", self.consequence)))


class Stop(Record):
    """The task is not started again."""

    kind: Literal["stop"] = "stop"
    why: Literal["", "cancelled", "batch_failed", "same_failure", "nothing_saved", "supervisors_failed"] = ""
    seconds: float | None = None  # duration of the longer of two attempts that failed in the same way
    samples: int | None = None  # samples trained when two attempts failed in the same way
    setting: str = ""  # name of the setting that limits the time of jobs
    count: int = 0  # supervisors that failed without a newer checkpoint

    @property
    def consequence(self) -> str:
        """As in `Relaunch`."""
        if self.samples is not None:
            return f"failed twice in the same way after {self.samples} samples from the same checkpoint, so tula does not start it again"
        if self.seconds is not None:
            return f"failed twice in the same way within {max(1.0, self.seconds):.0f} s of a start, so tula does not start it again"
        if self.why == "nothing_saved":
            return f"the time limit was reached before anything could be saved: raise {self.setting}"
        if self.why == "supervisors_failed":
            return f"tula's supervisor failed {self.count} times without a newer checkpoint"
        return ""


Decision = Annotated[Relaunch | Requeue | Stop, Field(discriminator="kind")]
"""The decision after an attempt."""


class Resize(Record):
    """A job of the training runs on another number of nodes: those that the scheduler granted, or those of a new --nodes."""

    kind: Literal["resize"] = "resize"
    nodes: int
    nodes_before: int
    granted: int | None
    """Nodes of the allocation, more than `nodes` if the batch cannot be divided among all; None if --nodes changed."""

    @property
    def description(self) -> str:
        """The numbers of nodes that were granted or requested, and that are used."""
        if self.granted is None:
            return (
                f"continues on {format_count(self.nodes)} instead of {self.nodes_before}, because --nodes has changed"
            )
        used = f"; the batch can be divided among {self.nodes} of them" * (self.granted > self.nodes)
        return f"{format_count(self.granted)} granted instead of {self.nodes_before}{used}"


class Recovery(Record):
    """Why a task follows another one: the failure of an attempt and the decision after it."""

    failure: Failure | None = None  # None for a `Resize`
    decision: Relaunch | Requeue | Resize | None = Field(default=None, discriminator="kind")

    @field_validator("decision", mode="before")
    @classmethod
    def _convert_old_move(cls, decision: Any) -> Any:
        """Read a training that an earlier version moved to other nodes as one whose number of nodes changed."""
        if isinstance(decision, dict) and decision.get("kind") == "move":
            return {**decision, "kind": "resize", "granted": None}
        return decision

    @property
    def description(self) -> str:
        """The reason in one sentence; empty without a decision."""
        if isinstance(self.decision, Resize):
            return self.decision.description
        if self.failure is None or self.decision is None:
            return ""
        return self.decision.describe_cause(self.failure)
