"""Records of trainings: results, tuning, summaries, comparisons."""

import math
from typing import Literal

from pydantic import computed_field

from tula_cli.run.records.base import Record, RecordedText
from tula_cli.run.records.failures import Fallback, Recovery, Relaunch
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.spec.ags import Arm


class JobFile(Record):
    """The job file from which a run's settings came; the settings themselves are in the run's spec.yaml."""

    path: str  # of the job.yaml, absolute
    overrides: tuple[str, ...] = ()  # what --set laid over it


class Variant(Record):
    """The part of a job that a run measures, if the job names several node types or GPU counts.

    Each is a run of its own. A run of a job without variants has no such record.
    """

    node_type: str | None = None  # None if the job names none
    gpus: int | None = None  # per node, of search.gpus_per_node; None for all of a node
    # "gpus": as of JobSpec.measured_with_fewer_gpus; "length": measured by an earlier version at another text length
    in_addition: Literal["gpus", "length"] | None = None
    runs: tuple[str, ...] = ()  # names of the runs of all variants of the job
    chosen: str = ""  # name of the run that the job's recommendation is to train; empty without a recommendation

    @property
    def type(self) -> str | None:
        """The node type with its number of GPUs, as in `JobSpec.types`; None if the job names neither."""
        return "-".join(filter(None, (self.node_type, f"gpus-{self.gpus}" if self.gpus else ""))) or None


class StepParts(Record):
    """Breakdown of the step time; seconds, of the slowest rank."""

    step: float
    data: float | None  # waiting for the data loader; None of a script, of which whole steps are known
    compute: float | None  # None where it is not told apart from the synchronisation
    sync: float | None  # exposed synchronisation: of the rank that waits least, so not for a slow one


StepPart = Literal["compute", "network", "input"]


class StepChange(Record):
    """A lasting change of the step time, detected during a training."""

    samples: int  # trained when it began
    epoch: float | None  # None of a script where nothing tells how many samples one has
    began_at: float  # Unix time
    parts: tuple[StepPart, ...]  # what changed, the most first; empty where that is not known
    before: StepParts
    after: StepParts
    seconds_left: float | None  # to the end of the training, when it was found; None where nothing tells how long it is
    seconds_left_before: float | None  # the same at the step time before
    cost_more: float  # than at the step time before
    currency: str


class Branch(Record):
    """A short training from a common checkpoint, to compare its arm with others (train.method: auto)."""

    arm: str
    epochs: float  # trained, of the training set without the held-out part
    samples: int  # trained
    loss: float | None  # on the held-out part; None where it is not finite
    top1: float | None  # percent; None where there are no classes
    diverged: bool
    seconds: float


class Tuning(Record):
    """How a self-tuning training selected its settings; written by rank 0 after each branch."""

    signature: str
    batch: int
    start: int  # samples at the checkpoint where the arms part
    epoch: float  # epochs done there
    arms: tuple[Arm, ...]
    beginning: int = 0  # samples that the branches' common beginning was trained on, without the held-out part
    branches: tuple[Branch, ...] = ()
    chosen: Arm | None = None  # None while branches are missing
    broken: tuple[str, ...] = ()  # arms that were chosen before and broke down in the training
    lost: int = 0  # samples trained with them, which went with them

    @property
    def samples(self) -> int:
        """Samples trained in addition to the training itself."""
        return sum(branch.samples for branch in self.branches) + self.beginning + self.lost


LearningRateRule = Literal["none", "sqrt", "linear"]
"""A value of `train.lr_scaling` that says how the learning rate follows the batch."""


class RateBranch(Branch):
    """A branch with one batch and learning rate (`tula compare --learning-rates`)."""

    batch: int  # global
    rule: LearningRateRule
    factor: float  # of optimizer.lr
    lr: float  # at full height: the schedule and the branch itself lower it


class PlannedBranch(Record):
    """One start of a script in a search for a learning rate, before it runs."""

    rule: LearningRateRule | None  # None of the training up to the checkpoint, at the reference batch
    out: str  # the script's own folder


class RateSearch(Record):
    """A search for the learning rate of a large batch; written after each branch, by rank 0 or a script's supervisor."""

    key: str
    nodes: int
    batches: tuple[int, ...]  # the batch whose learning rate is searched, then others to compare with it
    reference_batch: int
    samples: int  # trained, without those of interrupted attempts
    total: int  # samples of a training
    start_epoch: float  # at which the branches start
    start_loss: float  # there, on the held-out samples; of a script, of its training steps before
    start_lr: float | None = None  # of a script's first step after it, if its optimizer has one
    noise: tuple[float, float, float | None] | None = (
        None  # gradient noise scale there with its 90 % interval; an upper end of None is open
    )
    branches: tuple[RateBranch, ...] = ()
    finished: bool = False


class ScalingSummary(Record):
    """The effect of adaptive gradient scaling in a training by a script."""

    steps: int  # optimizer steps, over all attempts
    scaled: float  # share of them that were scaled
    mean: float  # factor, over steps and tensors or elements
    apply_to: Literal["gradient", "update"]


class BestValue(Record):
    """The best value of the metric set in train.best_checkpoint."""

    metric: str
    value: float | None  # None where no evaluation came to a finite one

    @classmethod
    def from_metric(cls, metric: str, value: float | None) -> "BestValue | None":
        """Return the record, or None if there is no value because train.best_checkpoint names no metric.

        A value that is not finite becomes None.
        """
        return None if value is None else cls(metric=metric, value=value if math.isfinite(value) else None)


class TrainResult(Record):
    """The result of a training run, written once by rank 0 after the last epoch is evaluated and saved."""

    signature: str
    nodes: int
    batch: int  # at the end; a relaunch may have made it smaller
    samples: int
    steps: int
    epochs: int
    metrics: dict[str, float]  # of the last epoch: loss, top1, top5, perplexity, train.metrics; those that are finite
    best_top1: float | None  # None where there are no classes
    best_loss: float | None = None  # on the evaluation set, of the best epoch
    best_epoch: int  # by train.best_checkpoint: of the highest top-1, or of the least loss where there are no classes
    best: BestValue | None = None  # where train.best_checkpoint names a metric
    ended: str = ""  # why before the last epoch (train.early_stopping); empty where it did not
    step_time: float | None  # seconds, over all epochs at the last batch; None where all refreshed AGS
    finished_at: float
    tuning: Tuning | None = None  # of method auto
    scaled: ScalingSummary | None = None  # of a script, where the method scales


class ScriptProgress(Record):
    """The newest checkpoint of a training by a script. Written by the leader of the supervisors."""

    samples: int  # that it holds, to a few steps
    steps: int  # optimizer steps up to it
    batch: int  # with which it was written, global
    checkpoint: str  # its path
    saved_at: float  # Unix time


class Save(Record):
    """A checkpoint written by a script during training; steps and time count from the previous one, or the start."""

    saved_at: float  # Unix time
    batch: int  # global
    steps: int
    samples: int
    seconds: float | None  # None of the first one of a start, which took time to begin


class ScriptSaves(Record):
    """The checkpoints and lost steps of a training by a script. Written by the leader of the supervisors."""

    saves: tuple[Save, ...] = ()  # the newest ones
    lost: tuple[int, ...] = ()  # samples that came after the newest checkpoint, at each start that did not end well
    left_out: ScriptProgress | None = (
        None  # the newest checkpoint, where the script failed at it and the one before is tried
    )
    resumes_from: str = ""  # pattern of the checkpoints that the script loads by itself; empty while none was seen
    resumed_attempt: tuple[str, int] | None = None  # task and number of the attempt in which that was noticed


class EvaluationRecord(Record):
    """The evaluation of a training's weights on a set of samples (`tula evaluate`), written by rank 0."""

    signature: str  # of the training
    key: str
    weights: str  # best, last, or the path of a file
    path: str  # of the file
    samples: int | None  # that the weights were trained on; None of a file of the user's own
    test: bool  # on dataset.test; else on the samples that the training was evaluated on
    dataset: str  # its name, and root where it has one
    size: int  # samples evaluated
    metrics: dict[str, float]  # loss, top1 and top5 (percent), perplexity, train.metrics; those that are finite
    nodes: int
    local_batch: int  # one GPU's
    seconds: float  # of the evaluation itself
    evaluated_at: float  # Unix time


class CountedEnergy(Record):
    """The energy of a training from the counters of all GPUs, over all attempts; written by rank 0."""

    joules: float
    seconds: float  # over which they were read: not while ranks start, nor from an epoch's end to a failure

    @property
    def kwh(self) -> float:
        return self.joules / 3.6e6


class Summary(Record):
    """Predicted and actual figures, written when a training run has ended."""

    signature: str
    nodes: int
    start_batch: int
    batch: int
    attempts: int
    predicted_hours: float | None
    actual_hours: float
    predicted_cost: float | None
    actual_cost: float
    predicted_step: float | None  # at the batch, the micro-batches and the nodes that it ended with, as is actual_step
    actual_step: float | None
    predicted_parts: TimeParts | None = None
    actual_parts: TimeParts | None = None  # None of a script
    predicted_kwh: float | None = None
    actual_kwh: float | None = None  # None where the GPUs have no counter
    counted: float | None = None  # share of the actual hours over which it was counted
    metrics: dict[str, float]
    best_top1: float | None  # None where there are no classes
    best_loss: float | None = None  # on the evaluation set, of the best epoch; None of a script
    best_epoch: int
    best: BestValue | None = None  # where train.best_checkpoint names a metric
    ended: str = ""  # why before the last epoch, and how many it was (train.early_stopping)
    currency: str
    recoveries: tuple[Recovery, ...] = ()  # why each relaunch happened
    lost: tuple[int, ...] | None = None  # samples of a script that each of them cost; None of tula's own loop
    tuning: Tuning | None = None  # of method auto
    scaled: ScalingSummary | None = None  # of a script, where the method scales
    changes: tuple[StepChange, ...] = ()  # of the step time, while it trained
    warnings: tuple[RecordedText, ...] = ()  # of a script: what was not as its section says, and that it cannot resume

    @computed_field  # type: ignore[prop-decorator]
    @property
    def causes(self) -> tuple[RecordedText, ...]:
        """Why each relaunch happened, a sentence each."""
        return tuple(recovery.description for recovery in self.recoveries)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The configurations that it fell back to after out-of-memory errors."""
        decisions = (recovery.decision for recovery in self.recoveries)
        return tuple(
            decision.fallback
            for decision in decisions
            if isinstance(decision, Relaunch) and decision.fallback is not None
        )


class Cell(Record):
    """One training of a comparison: a method at a batch, with a seed."""

    method: str  # of train.method, or a variant of one (lbt-x4)
    batch: int  # the one it starts with
    seed: int
    nodes: int
    signature: str  # of its training run
    reference: bool = False  # the small batch that the others are held against
    short: tuple[int, int] | None = None  # a training of the first round: its epochs, of those of the job

    @property
    def share(self) -> float:
        """The share of the job's epochs for which it is trained."""
        return 1.0 if self.short is None else self.short[0] / self.short[1]

    @property
    def description(self) -> str:
        length = "" if self.short is None else f", {self.short[0]} of {self.short[1]} epochs"
        return f"{self.method}, batch {self.batch}, seed {self.seed}{length}"


class Comparison(Record):
    """The request of a `tula compare`, and its trainings in order of importance."""

    methods: tuple[str, ...]
    batches: tuple[int, ...]
    seeds: int
    nodes: int
    controls: bool | tuple[str, ...]  # their rows; of an older tula, and where asked for: all or none
    cells: tuple[Cell, ...]  # of all rows in full, though some may be dropped; before them those of the first round
    created_at: float
    job_row: str = ""  # the row that trains the job as it is

    @property
    def has_rounds(self) -> bool:
        """Whether there is a first round."""
        return any(cell.short for cell in self.cells)
