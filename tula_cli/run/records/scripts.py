"""Records of a user's script: its resume test, and what its ranks write."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tula_cli.run.records.base import OutcomeClass, Positive, Record, RecordedText
from tula_cli.spec.scripts.script import Length

Phase = Literal["begin", "same", "more", "half"]
"""A start without a checkpoint, killed after its first checkpoint; a resume at the same batch; one at the same batch on
twice as many nodes; and one at half of the batch."""
Verdict = Literal["same", "epoch", "any", "none"]
"""The batches with which a script can resume, as in `script.resume.batch`; none: it does not resume at any batch."""


class PlannedStart(Record):
    """One start of a resume test, before it runs."""

    phase: Phase
    nodes: int
    batch: int  # global
    length: Length  # training length on the command line, in place of the job's
    out: str  # output folder of the script
    checkpoint: str = ""  # path of the checkpoint to resume from; empty for a start without one
    seconds: float  # maximum duration


class Schedule(Record):
    """The torch scheduler of the script's optimizer, as observed in one start."""

    name: str  # class name
    at: int  # scheduler steps at the first optimizer step of the start, or at the first one after its checkpoint
    per_step: bool  # whether it steps after each optimizer step; false: after each epoch
    moves: bool | None  # whether it will change the learning rate again; None if unknown


class ObservedStart(Record):
    """The observations of one start of a resume test. Samples are counted over all ranks."""

    phase: Phase
    nodes: int = 1
    batch: int  # global
    length: Length  # training length on its command line
    whole: int | None  # samples of this length; None if the size of an epoch is unknown
    ended: Literal["killed", "ended", "failed", "cut"]
    """Killed as planned; exited by itself; failed with an error; or stopped by tula, for example after its maximum time."""
    seconds: float  # duration
    steps: int = 0  # optimizer steps in this start
    samples: int = 0  # samples trained in this start
    first_lr: float | None = None  # learning rate of the first step; None if the optimizer reports none
    rates: tuple[tuple[int, float], ...] = ()  # (samples trained in this start, learning rate), ascending
    schedule: Schedule | None = None  # None without a scheduler of torch
    outcome: OutcomeClass | None = None  # kind of failure; None if it did not fail
    error: str = ""  # class of the script's exception; empty without one
    why: RecordedText = ""  # error message in one line, or the script's last line if it made no step
    # The next four are set in phase `begin` only, after the first checkpoint.
    saved_steps: int | None = None  # optimizer steps up to the checkpoint
    saved_samples: int | None = None  # samples up to the checkpoint
    next_lr: float | None = None
    """Learning rate of the step after the checkpoint; of the last one before if there is none."""
    lr_step: float = 0.0  # change of the learning rate over the two steps after the checkpoint
    dataset_size: int | None = None  # samples per epoch; None if unknown


class ResumeTestResult(Record):
    """The state of a resume test.

    If `verdict` is None after its end, no verdict was possible, and `told` gives the reason.
    """

    task: str
    key: str  # resume_test_signature
    began_at: float  # Unix time
    starts: tuple[ObservedStart, ...] = ()
    over_at: float | None = None  # Unix time; None until the verdict
    verdict: Verdict | None = None
    other_nodes: bool | None = None  # the script resumes at the same batch on another number of nodes; None: not tested
    told: tuple[str, ...] = ()  # sentences on the result, and on what was not tested
    faults: tuple[str, ...] = ()  # the sentences in `told` that report a fault of the script


Cause = Literal["eval", "epoch", "save"]


class ExpectedValues(Record):
    """The values that the script is expected to use, as passed to its command; None if nothing is expected."""

    world: int | None = None
    batch: int | None = None
    accumulate: int | None = None  # micro-batches per optimizer step
    lr: float | None = None
    dataset: int | None = None  # samples per epoch


class AgsPlan(Record):
    """The settings of adaptive gradient scaling around a script's optimizer, for the shim."""

    code: str  # folder that contains the package tula_ags
    settings: dict[str, Any]  # the keys of section ags that a preset has, and `parameters`
    apply_to: Literal["gradient", "update"] | None  # None: chosen by the type of the script's optimizer
    b_large: Positive  # samples per step over all ranks
    b_small: Positive  # samples of the small batch that large-batch gradients are compared with
    available: Positive  # samples per micro-batch of one rank
    steps_per_epoch: Positive
    seed: int
    resumed: bool  # the script resumes from a checkpoint


class OrthoPlan(Record):
    """Settings with which the shim orthogonalises the steps of the script's optimizers."""

    code: str  # folder that contains the package tula_ags
    beta2_power: float  # batch / reference batch: the exponent applied to Adam's beta2


class KillPlan(Record):
    """When the first start of a resume test or of a learning-rate search is killed: some steps after a checkpoint."""

    checkpoint: str  # absolute path or pattern of the checkpoint
    after: Positive  # steps between the checkpoint and the kill
    ask: str = ""  # how to request a checkpoint: a signal's name, "file:PATH" or "hooks"; empty: no request
    ask_at: Positive = 1  # step after which the checkpoint is requested
    first: Positive = 1  # first step whose checkpoint counts; earlier ones are ignored
    settled: float = 2.0  # seconds without a change after which the checkpoint counts as completely written


class BranchPlan(Record):
    """The plan for a branch of a learning-rate search, or for the training before the branches."""

    steps: Positive | None  # length of the branch; None for the training before the branches, which a KillPlan ends
    factor: float  # learning rate of the branch divided by that at the reference batch
    norms: int = 0
    """Number of first steps whose gradient norms are recorded (with DistributedDataParallel on several ranks)."""


class ShimPlan(Record):
    """plan.json: see the contract in `tula_cli/shim/__init__.py`. Times in seconds."""

    version: Literal[1] = 1
    task: str
    attempt: Positive = 1
    folder: str  # results of this attempt
    mode: Literal["probe", "train", "observe"] = "probe"
    expected: ExpectedValues = ExpectedValues()
    warmup: Positive = 5  # untimed steps
    min_steps: Positive = 15
    max_steps: Positive = 15
    seconds: float = 0.0  # target duration of the timed steps, whose number stays between min_steps and max_steps
    split_steps: Annotated[int, Field(ge=0)] = 6  # steps each for synchronisation, gradient norms and local work
    heartbeat: float = 1.0  # minimum interval between heartbeats
    row: float = 10.0  # minimum interval between rows of a training
    save: bool = False  # poll for requests to save a checkpoint
    checkpoint: str = ""  # path for the callback that saves on request
    ags: AgsPlan | None = None
    ortho: OrthoPlan | None = None
    rehearsal: KillPlan | None = None
    branch: BranchPlan | None = None
    schedule: bool = False  # record the state of torch's learning-rate scheduler in rows
    files: tuple[str, ...] | None = None
    """Folders whose files the script may write; changes of other files are recorded. None: no file is recorded."""


class ScriptStep(Record):
    """One optimizer step of one rank."""

    seconds: float
    wait: float | None  # the part of `seconds` spent waiting for the data loader; None without one
    samples: float | None  # samples of this rank; None if they cannot be counted
    batches: int | None  # batches delivered by the data loader; None without one
    backwards: int  # backward passes
    gap: tuple[Cause, ...]  # other events within the step: an evaluation, a new epoch, a save


class DdpSplit(Record):
    """Results of the steps after the timed ones, or of the first steps of a branch, under DistributedDataParallel."""

    modules: int  # number of DistributedDataParallel modules
    hook: str  # "default", or the name of the script's own communication hook
    sync: tuple[float, ...]  # exposed synchronisation per step, seconds
    norms: tuple[tuple[float | None, float | None], ...]
    """Squared norms per step of this rank's gradient and of the reduced gradient; None if not finite."""
    local: tuple[ScriptStep, ...]  # steps without synchronisation


class PhaseMemory(Record):
    """Peak memory of a phase in bytes; on the CPU both are resident memory."""

    allocated: int
    reserved: int


class LearningRates(Record):
    """Learning rates of the first parameter group."""

    base: float | None  # the optimizer's rate before torch's scheduler changes it; None without a scheduler
    first: float
    timed: float  # at the first timed step
    last: float


class LoaderProperties(Record):
    """The properties of a data loader."""

    dataset: int | None  # samples; None for streams
    batches: int | None  # batches per epoch on this rank; None for streams
    batch_size: int | None  # None if its sampler chooses batches in its own way
    workers: int  # worker processes
    sampler: str  # class name
    drop_last: bool
    epoch_samples: int | None = None  # samples per epoch on this rank; None if unknown
    content: str = ""  # digest of first and last entries of the dataset's contents; empty if it has none to compare


class RankResult(Record):
    """result-<rank>.json, and begun-<rank>.json for a training's first steps."""

    version: Literal[1]
    task: str
    attempt: int
    why: Literal["begun", "stopped", "ended", "saved"]
    rank: int
    world: int  # size of the process group; 1 without one
    host: str
    pid: int
    expected: ExpectedValues
    python: str
    torch: str
    device: Literal["cpu", "cuda"]
    hardware: str
    backend: str = ""  # backend of the process group; empty without one
    capacity: int | None = None  # bytes of the GPU; None on the CPU
    startup: float | None  # seconds from the start of the process to its first step; None before it, or if unknown
    steps: int
    samples: float | None  # samples of this rank; None if they cannot be counted
    optimizer: str | None  # class name; None if the loop reports its steps itself
    parameters: int | None  # number of scalar parameters that the optimizer trains
    bytes: dict[Literal["parameters", "gradients", "optimizer"], int] | None  # None if not measured
    peak: dict[Literal["warmup", "timed"], PhaseMemory]
    lr: LearningRates | None
    warmup: tuple[float, ...]  # seconds per step
    timed: tuple[ScriptStep, ...]
    split: DdpSplit | None
    loader: LoaderProperties | None  # the loader that is used for training
    loaders: tuple[LoaderProperties, ...]
    notes: tuple[RecordedText, ...]  # reasons why measurements are missing


class KillRecord(Record):
    """rehearsal.json: the newest checkpoint of a start, and whether the start was then killed. Written by rank 0 only."""

    steps: int  # optimizer steps up to the checkpoint
    samples: float | None  # samples of this rank up to the checkpoint; None if they cannot be counted
    dataset: int | None  # size of the dataset as reported by the data loader
    killed: bool


class ScriptFailure(Record):
    """failure-<rank>.json: an uncaught exception."""

    version: Literal[1]
    task: str
    attempt: int
    rank: int | None  # None if unknown
    host: str
    pid: int
    where: Literal["script", "shim", "method"]  # method: the script does not support a method that the plan requests
    error: str  # qualified name of the exception's class
    message: RecordedText = ""  # message of the exception; empty from an older shim
    text: RecordedText  # traceback
    step: int  # optimizer steps so far
    batch_norm: Literal["", "batch", "sync"] | None = None
    """Kind of BatchNorm modules in the process, empty without any, sync if all are SyncBatchNorm; None if not recorded."""
    failed_at: float  # Unix time

    @property
    def description(self) -> str:
        """The last line of the traceback; for an unsupported method, the message of the exception."""
        if self.where == "method" and self.message:
            return self.message
        return (self.text.strip().splitlines() or [self.error])[-1].strip()


class Heartbeat(Record):
    """heartbeat-<rank>.json."""

    step: int
    samples: float | None  # samples of this rank so far; None if they cannot be counted
    stepped_at: float  # Unix time of the last step
    seconds: float  # step time, median of the last 100 steps
    step_samples: float | None = None  # samples per step of this rank, median of the last 20 steps; None if unknown
    totals: dict[Literal["training", "data", "eval", "epoch", "save"], float] | None = None
    """Seconds of an observed job by kind since its first step; None for other jobs."""
    alive_at: float  # Unix time of the last step or batch
    lost: str | None  # why the shim stopped recording, while the training continues; None if it records
    host: str
    pid: int
