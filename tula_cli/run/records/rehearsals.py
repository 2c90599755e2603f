"""What was found of how a script of the user's own resumes."""

from typing import Literal

from tula_cli.run.records.base import OutcomeClass, Record, RecordedText
from tula_cli.spec.scripts.own_script import Length

Phase = Literal["begin", "same", "half"]
"""A start from nothing, which is killed after its first checkpoint; on from there at its batch; and at half of it."""
Verdict = Literal["same", "epoch", "any", "none"]
"""With which batch a script may go on: as `script.resume.batch`; none: with no batch, its checkpoint is of no use to it."""


class RehearsalStart(Record):
    """One start of a rehearsal, before it begins."""

    phase: Phase
    batch: int  # global
    length: Length  # that the command line is given, in place of the job's
    out: str  # the script's own folder
    checkpoint: str = ""  # that it goes on from
    seconds: float  # that it may take


class Schedule(Record):
    """The torch scheduler of the script's optimizer, as one start has shown it."""

    name: str
    at: int  # its steps, at the first step of the start, or the first after its checkpoint
    per_step: bool  # it steps with each optimizer step, not each epoch
    moves: bool | None  # whether it will change the learning rate; None if that is not known


class Rehearsed(Record):
    """One start of a rehearsal, as it was seen. Samples are those of all ranks."""

    phase: Phase
    batch: int
    length: Length
    whole: int | None  # samples of that length; None where nobody knows the size of an epoch
    ended: Literal[
        "killed", "ended", "failed", "cut"
    ]  # killed as planned, by itself, by an error, by the time or by us
    seconds: float
    steps: int = 0
    samples: int = 0
    first_lr: float | None = None  # of the first step; None where the optimizer tells none
    rates: tuple[tuple[int, float], ...] = ()  # samples since the start, and the learning rate there
    schedule: Schedule | None = None  # None without a scheduler of torch
    outcome: OutcomeClass | None = None  # of what failed
    error: str = ""  # class of the exception
    why: RecordedText = ""  # its line
    # of a beginning, once there was a checkpoint
    saved_steps: int | None = None
    saved_samples: int | None = None
    next_lr: float | None = None  # of the step after it
    lr_step: float = 0.0  # by how much that differs from the one before
    dataset_size: int | None = None


class Rehearsal(Record):
    """What a rehearsal has found so far; `verdict` None once it is over: it could not be found out, and `told` says why."""

    task: str
    key: str  # rehearsal_signature
    began_at: float
    starts: tuple[Rehearsed, ...] = ()
    over_at: float | None = None
    verdict: Verdict | None = None
    told: tuple[str, ...] = ()  # sentences: what was found, and what was not reached
    faults: tuple[str, ...] = ()  # those of them that tell of what is wrong
