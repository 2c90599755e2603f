"""Records of a user's script: its resume test, and what its ranks write."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tula_cli.run.records.base import OutcomeClass, Record, RecordedText
from tula_cli.spec.scripts.script import Length

# --- The resume test

Phase = Literal["begin", "same", "more", "half"]
"""A start without a checkpoint, killed after its first checkpoint; a resume at the same batch; one at the same batch on
twice as many nodes; and one at half of the batch."""
Verdict = Literal["same", "epoch", "any", "none"]
"""The batches with which a script can resume, as `script.resume.batch`; none: it cannot use its checkpoint with any
batch."""


class PlannedStart(Record):
    """One start of a resume test, before it runs."""

    phase: Phase
    nodes: int
    batch: int  # global
    length: Length  # that the command line is given, in place of the job's
    out: str  # the script's own folder
    checkpoint: str = ""  # that it goes on from
    seconds: float  # that it may take


class Schedule(Record):
    """The torch scheduler of the script's optimizer, as observed in one start."""

    name: str
    at: int  # its steps, at the first step of the start, or the first after its checkpoint
    per_step: bool  # it steps with each optimizer step, not each epoch
    moves: bool | None  # whether it will change the learning rate; None if that is not known


class ObservedStart(Record):
    """The observations of one start of a resume test. Samples are those of all ranks."""

    phase: Phase
    nodes: int = 1
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
    lr_step: float = 0.0  # change of the learning rate over two steps
    dataset_size: int | None = None


class ResumeTestResult(Record):
    """The state of a resume test.

    If `verdict` is None after its end, no verdict was possible, and `told` gives the reason.
    """

    task: str
    key: str  # resume_test_signature
    began_at: float
    starts: tuple[ObservedStart, ...] = ()
    over_at: float | None = None
    verdict: Verdict | None = None
    other_nodes: bool | None = None  # whether it resumes at the same batch on other nodes; None: not tested
    told: tuple[str, ...] = ()  # sentences: what was found, and what was not reached
    faults: tuple[str, ...] = ()  # those of them that tell of what is wrong


# --- The plan for the ranks, and their results

Positive = Annotated[int, Field(ge=1)]
Cause = Literal["eval", "epoch", "save"]


class ExpectedValues(Record):
    """The values passed to the command and expected of it; None if nothing is expected."""

    world: int | None = None
    batch: int | None = None
    accumulate: int | None = None  # micro-batches an optimizer step
    lr: float | None = None
    dataset: int | None = None  # samples of an epoch


class AgsPlan(Record):
    """The settings of adaptive gradient scaling around a script's optimizer, for the shim."""

    code: str  # the folder in which the library is
    settings: dict[str, Any]  # all of section ags that makes factors and gate, as a preset spells it, and `parameters`
    apply_to: Literal["gradient", "update"] | None  # None: as the script's optimizer needs
    b_large: Positive  # samples of a step, over all ranks
    b_small: Positive
    available: Positive  # samples that a rank computes at a time
    steps_per_epoch: Positive
    seed: int
    resumed: bool  # whether the script goes on from a checkpoint


class OrthoPlan(Record):
    """Settings with which the shim orthogonalises the steps of the script's optimizers."""

    code: str  # the folder in which the library is
    beta2_power: float  # batch / reference batch


class KillPlan(Record):
    """How a start is ended after a checkpoint: the first of a resume test or of a search for a learning rate."""

    checkpoint: str  # its absolute path or pattern
    after: Positive  # steps from it to the end
    ask: str = ""  # how it is asked for: a signal's name, "file:PATH", "hooks"; empty where it is not
    ask_at: Positive = 1  # step
    first: Positive = 1  # step from which on checkpoints count
    settled: float = 2.0  # seconds without a change after which it is taken to be written


class BranchPlan(Record):
    """How a branch of a search for a learning rate is trained, or the training before the branches."""

    steps: Positive | None  # after which it ends; None of the training before the branches, which a KillPlan ends
    factor: float  # of the learning rate at the reference batch, which the command line is given
    norms: int = 0  # first steps whose gradient norms are recorded, with DistributedDataParallel on several ranks


class ShimPlan(Record):
    """plan.json: see the contract in `tula_cli/shim/__init__.py`. Times in seconds."""

    version: Literal[1] = 1
    task: str
    attempt: Positive = 1
    folder: str
    mode: Literal["probe", "train", "observe"] = "probe"
    expected: ExpectedValues = ExpectedValues()
    warmup: Positive = 5
    min_steps: Positive = 15
    max_steps: Positive = 15
    seconds: float = 0.0  # that the timed steps may take between the two
    split_steps: Annotated[int, Field(ge=0)] = 6
    heartbeat: float = 1.0
    row: float = 10.0
    save: bool = False
    checkpoint: str = ""
    ags: AgsPlan | None = None
    ortho: OrthoPlan | None = None
    rehearsal: KillPlan | None = None
    branch: BranchPlan | None = None
    schedule: bool = False  # rows tell where the scheduler stands
    files: tuple[str, ...] | None = None  # folders to write in; what else is changed is written down; None: nothing is


class ScriptStep(Record):
    """One optimizer step of one rank."""

    seconds: float
    wait: float | None  # for the data loader, within seconds; None without one
    samples: float | None  # of this rank; None where nothing counts them
    batches: int | None  # that the data loader gave
    backwards: int
    gap: tuple[Cause, ...]  # what else went on in it


class DdpSplit(Record):
    """Results of the steps after the timed ones, or of the first steps of a branch, under DistributedDataParallel."""

    modules: int
    hook: str  # "default", or the name of the script's own communication hook
    sync: tuple[float, ...]  # a step: exposed synchronisation
    norms: tuple[tuple[float | None, float | None], ...]  # squared, of the rank's own and of the reduced gradient
    local: tuple[ScriptStep, ...]  # without synchronisation


class Peak(Record):
    """Bytes. On the CPU both are the resident memory."""

    allocated: int
    reserved: int


class LearningRates(Record):
    """Learning rates of the first parameter group."""

    base: float | None  # before a scheduler of torch acts on it; None where the script has none
    first: float
    timed: float  # of the first timed step
    last: float


class LoaderProperties(Record):
    """The properties of a data loader."""

    dataset: int | None  # samples
    batches: int | None  # an epoch, on this rank
    batch_size: int | None
    workers: int
    sampler: str
    drop_last: bool
    epoch_samples: int | None = None  # that an epoch delivers on this rank; None if that is not known
    content: str = ""  # digest of the ends of what the dataset holds; empty if there is nothing to compare


class RankResult(Record):
    """result-<rank>.json, and begun-<rank>.json for a training's first steps."""

    version: Literal[1]
    task: str
    attempt: int
    why: Literal["begun", "stopped", "ended", "saved"]
    rank: int
    world: int  # of the process group; 1 without one
    host: str
    pid: int
    expected: ExpectedValues
    python: str
    torch: str
    device: Literal["cpu", "cuda"]
    hardware: str
    backend: str = ""  # of the process group; empty without one
    capacity: int | None = None  # bytes of the GPU; None on the CPU
    startup: float | None  # from the start of the process to its first step
    steps: int
    samples: float | None
    optimizer: str | None
    parameters: int | None  # numbers that the optimizer trains
    bytes: dict[Literal["parameters", "gradients", "optimizer"], int] | None
    peak: dict[Literal["warmup", "timed"], Peak]
    lr: LearningRates | None
    warmup: tuple[float, ...]
    timed: tuple[ScriptStep, ...]
    split: DdpSplit | None
    loader: LoaderProperties | None  # the one that is trained on
    loaders: tuple[LoaderProperties, ...]
    notes: tuple[RecordedText, ...]  # what is absent, and why


class Killed(Record):
    """rehearsal.json: the first checkpoint of a start, and whether it was then killed. Written by rank 0 only."""

    steps: int  # up to the checkpoint
    samples: float | None
    dataset: int | None  # samples that the data loader says it has
    killed: bool


class ScriptFailure(Record):
    """failure-<rank>.json: an uncaught exception."""

    version: Literal[1]
    task: str
    attempt: int
    rank: int | None
    host: str
    pid: int
    where: Literal["script", "shim", "method"]  # method: what tula was to do in the script cannot be done there
    error: str  # full name of the exception's class
    message: RecordedText = ""  # of the exception; empty from an older shim
    text: RecordedText  # traceback
    step: int
    batch_norm: Literal["", "batch", "sync"] | None = None  # that the process held; None where it has not told
    failed_at: float

    @property
    def description(self) -> str:
        """The last line of the traceback; if it is tula that refuses, its message."""
        if self.where == "method" and self.message:
            return self.message
        return (self.text.strip().splitlines() or [self.error])[-1].strip()


class Heartbeat(Record):
    """heartbeat-<rank>.json. Unix times."""

    step: int
    samples: float | None
    stepped_at: float
    seconds: float  # median of the last 100 steps
    step_samples: float | None = None  # median of the last 20 steps, on this rank
    totals: dict[Literal["training", "data", "eval", "epoch", "save"], float] | None = (
        None  # of an observed job: seconds
    )
    alive_at: float
    lost: str | None
    host: str
    pid: int
