"""Why ranks and attempts end, what follows, and the sentences that describe both."""

import time
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from tula_cli.run.records.base import OutcomeClass, Record, RecordedText
from tula_cli.spec.sections import Workers
from tula_cli.words import format_bytes, format_count

FaultName = Literal["memory", "link", "gpu_lost", "gpu_busy", "fabric", "driver", "mps", "locked_memory", "no_gpu"]
"""The faults of a node or a device that messages of drivers tell apart."""

NODE_FAILURES: frozenset[OutcomeClass] = frozenset(
    ("device_fault", "device_error", "storage", "supervisor", "hung", "host_limit")
)
"""Kinds of failure that concern the node, so that messages about them name it."""

ALLOCATOR_ADVICE = " If reserved "
"""The start of the advice in each out-of-memory error of torch's allocator, after the facts; of torch 2.0 too."""


class Shortage(Record):
    """The free and total space of a full file system. Bytes."""

    folder: str  # that was written to
    free: int  # to this user
    total: int
    files_free: int | None = None  # None where the file system does not count them
    needed: int | None = None  # of what was to be written; None where that is not known
    quota: bool = False  # the user's quota is used up, of which `free` knows nothing

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
    message: RecordedText = ""  # of the program, the scheduler or the supervisor; its first line says what happened
    rank: int | None = None  # None if no single rank failed
    host: str = ""
    task: str = ""
    attempt: int = 0
    pid: int = 0
    detail: RecordedText = ""  # traceback, or the end of the log; only in the file of the rank
    local_batch: int | None = None
    signal: str = ""  # that killed a process, "SIGSEGV"; empty if none is known
    fault: FaultName | None = None  # of a device_fault, if the driver's message tells it
    shortage: Shortage | None = None  # of a full disk
    permanent: bool = False  # a new start would fail in the same way: settings and script contradict each other
    failed_at: float = Field(default_factory=time.time)  # Unix time

    @property
    def summary(self) -> str:
        """The message; generic for a lost peer, whose cause only another rank knows; the facts of torch's on memory."""
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


# --- What follows


class Fallback(Record):
    """The configuration to train after an out-of-memory error, and what did not fit."""

    rung: int  # of the OOM fallbacks, from 0: the batch that did not fit
    splits: int  # parts that each micro-batch is computed in
    batch: int  # that did not fit, global
    stage: int | None = None  # the batch that was in use, if it was a smaller one (`train.ramp`)
    micro_batch: int | None = None  # samples of the smaller micro-batches; None if the next batch is used
    micro_batches: int = 0  # of them in a step
    normalised: int = 0  # samples that BatchNorm takes its statistics over; 0 without BatchNorm, or if unchanged
    failed_micro_batch: int | None = None  # that is not split further, so that a smaller batch is used
    limit: str = ""  # why micro-batches are not split (further)

    @property
    def statistics(self) -> str:
        """Over how many samples BatchNorm takes its statistics from now on; empty if that has not changed."""
        return f"BatchNorm's statistics over {self.normalised} samples" if self.normalised else ""

    @property
    def description(self) -> str:
        """Description of what did not fit and of the smaller configuration."""
        message = f"out of memory at batch {self.batch}"
        if self.stage is not None:
            message = f"out of memory at batch {self.stage}, in a stage before batch {self.batch}"
        if self.micro_batch is not None:
            statistics = f", with {self.statistics}" if self.normalised else ""
            return f"{message}: micro-batch {self.micro_batch} x {self.micro_batches} now{statistics}"
        if self.failed_micro_batch is not None:
            return f"{message} in micro-batches of {self.failed_micro_batch}, which are not split further: {self.limit}"
        return f"{message}; its micro-batches are not split: {self.limit}" if self.limit else message


class Relaunch(Record):
    """New processes in the same allocation, with the settings that change."""

    kind: Literal["relaunch"] = "relaunch"
    pause: bool = False  # wait first, longer after each repetition
    after_progress: bool = False  # tried once more, because the training had made progress
    nodes: int | None = None  # of the next stage (`train.ramp`)
    nodes_before: int = 0
    stage_batch: int = 0  # of that stage
    fallback: Fallback | None = None
    workers: int | None = None  # data-loader processes per rank
    workers_before: Workers = 0
    max_lr_factor: float | None = None
    skip: int | None = None  # a probe's local batch, which is left out from now on

    @property
    def consequence(self) -> str:
        """Description of what follows, to append to that of the failure; empty if there is nothing to report."""
        return "the training had made progress, so tula starts it again" if self.after_progress else ""

    def describe_cause(self, failure: Failure) -> str:
        """Return why a training is relaunched after a failure."""
        if self.nodes is not None and failure.outcome == "device_oom":
            return f"out of memory on {format_count(self.nodes_before)}, so it continues on {self.nodes}"
        if self.nodes is not None:
            return f"batch {self.stage_batch} has {format_count(self.nodes)}"
        if self.fallback is not None:
            return self.fallback.description
        if self.workers is not None:
            return f"host out of memory with {self.workers_before} loader processes per rank"
        if self.max_lr_factor is not None:
            return f"{failure.summary}; restarted from the previous checkpoint with train.max_lr_factor {self.max_lr_factor:g}"
        if self.after_progress:
            return f"{failure.description}; {self.consequence}"
        return f"{failure.outcome}: {failure.description}"


class Requeue(Record):
    """The task resumes in the next job of the chain."""

    kind: Literal["requeue"] = "requeue"
    first: Literal["", "exclude", "delay", "hold"] = ""  # what is done to the later jobs: without the node, later, held
    after_progress: bool = False  # as in Relaunch
    jobs: tuple[str, ...] = ()  # the later jobs that were delayed or held
    nodes: str = ""  # all excluded nodes
    minutes: int = 0  # of a delay
    complaint: str = ""  # of the scheduler, which refused

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
            return f"{ids} could not be held{refused}" if self.complaint else f"held: {ids}"
        return ""

    def describe_cause(self, failure: Failure) -> str:
        """Return why a training resumes in another job after a failure."""
        if self.first == "hold":
            return f"resumes now that there is free space: {failure.description}"
        named = f"{failure.outcome}: " if self.first == "exclude" else ""
        return "; ".join(filter(None, (f"{named}{failure.description}", self.consequence)))


class Stop(Record):
    """Nothing follows."""

    kind: Literal["stop"] = "stop"
    why: Literal["", "cancelled", "batch_failed", "same_failure", "nothing_saved", "supervisors_failed"] = ""
    seconds: float | None = None  # of the longer of two attempts that failed in the same way
    samples: int | None = None  # after which both failed
    setting: str = ""  # the time limit of jobs
    count: int = 0  # supervisors that failed without a newer checkpoint

    @property
    def consequence(self) -> str:
        """As in `Relaunch`."""
        if self.samples is not None:
            return f"failed twice in the same way after {self.samples} samples from the same checkpoint, so it is not started again"
        if self.seconds is not None:
            return f"failed twice in the same way within {max(1.0, self.seconds):.0f} s of a start, so it is not started again"
        if self.why == "nothing_saved":
            return f"the time limit was reached before anything could be saved: raise {self.setting}"
        if self.why == "supervisors_failed":
            return f"{self.count} supervisors failed without a newer checkpoint"
        return ""


Decision = Annotated[Relaunch | Requeue | Stop, Field(discriminator="kind")]
"""The decision after an attempt."""


class Resize(Record):
    """A job of the training has another number of nodes, because it uses those that the scheduler grants."""

    kind: Literal["resize"] = "resize"
    nodes: int
    nodes_before: int
    granted: int | None  # more than `nodes` if the batch does not divide among all of them; None of another --nodes

    @property
    def description(self) -> str:
        """How many nodes were granted or requested, and how many of them are used."""
        if self.granted is None:
            return (
                f"continues on {format_count(self.nodes)} instead of {self.nodes_before}, because --nodes has changed"
            )
        used = f"; the batch can be divided among {self.nodes} of them" * (self.granted > self.nodes)
        return f"{format_count(self.granted)} granted instead of {self.nodes_before}{used}"


class Recovery(Record):
    """Why a task follows another one: the failure of an attempt, and what was decided."""

    failure: Failure | None = None  # None of another number of nodes
    decision: Relaunch | Requeue | Resize | None = Field(default=None, discriminator="kind")

    @field_validator("decision", mode="before")
    @classmethod
    def _read_move(cls, decision: Any) -> Any:
        """Read a training that an earlier version moved to other nodes as one whose number of nodes changed."""
        if isinstance(decision, dict) and decision.get("kind") == "move":
            return {**decision, "kind": "resize", "granted": None}
        return decision

    @property
    def description(self) -> str:
        """One sentence."""
        if isinstance(self.decision, Resize):
            return self.decision.description
        if self.failure is None or self.decision is None:
            return ""
        return self.decision.describe_cause(self.failure)
