"""Records of trainings: results, tuning, summaries, comparisons."""

import math
from typing import Literal

from pydantic import computed_field

from tula_cli.run.records.base import Record, RecordedText
from tula_cli.run.records.failures import Fallback, Recovery, Relaunch
from tula_cli.run.records.recommendations import TimeParts
from tula_cli.spec.ags import Arm
from tula_cli.spec.methods import LrRule


class JobFile(Record):
    """The job file from which a run's settings came; the settings themselves are in the run's spec.yaml."""

    path: str  # absolute path of the job.yaml
    overrides: tuple[str, ...] = ()  # values of --set, as typed


class Variant(Record):
    """The node type and GPU count that a run measures, if its job names several.

    Each is a run of its own. A run of a job without variants has no such record.
    """

    node_type: str | None = None  # None if the job names none
    gpus: int | None = None  # GPUs per node, one of search.gpus_per_node; None: all GPUs of a node
    in_addition: Literal["gpus", "length"] | None = None
    """Why it is measured in addition to the job's own settings; "gpus": with fewer GPUs per node
    (`JobSpec.is_supplement_with_fewer_gpus`); "length": at another text length, by an earlier version."""
    runs: tuple[str, ...] = ()  # names of the runs of all variants of the job
    chosen: str = ""  # name of the run with the recommended configuration; empty without a recommendation

    @property
    def type(self) -> str | None:
        """The node type with its number of GPUs, as in `JobSpec.types`; None if the job names neither."""
        return "-".join(filter(None, (self.node_type, f"gpus-{self.gpus}" if self.gpus else ""))) or None


class StepParts(Record):
    """Breakdown of the step time. Seconds of the slowest rank."""

    step: float
    data: float | None  # wait for the data loader; None for a script, where only whole steps are measured
    compute: float | None  # None if not measured separately from synchronisation
    sync: float | None  # exposed synchronisation on the rank that waits least, which excludes waits for slower ranks


StepPart = Literal["compute", "network", "input"]


class StepChange(Record):
    """A lasting change of the step time, detected during a training."""

    samples: int  # samples trained before the change
    epoch: float | None  # epochs trained before the change; None for a script whose epoch size is unknown
    began_at: float  # Unix time
    parts: tuple[StepPart, ...]  # causes of the change, largest first; empty if unknown
    before: StepParts
    after: StepParts
    seconds_left: float | None  # remaining time of the training at detection; None if its length is unknown
    seconds_left_before: float | None  # the remaining time if the step time had not changed
    cost_more: float  # additional cost of the remaining training due to the change, in `currency`; 0 if unknown
    currency: str


class Branch(Record):
    """A short training from a common checkpoint, to compare its arm with others (train.method: auto)."""

    arm: str
    epochs: float  # epochs trained, of the training set without the held-out part
    samples: int  # samples trained
    loss: float | None  # on the held-out part; None if not finite
    top1: float | None  # percent; None if there are no classes
    diverged: bool
    seconds: float


class Tuning(Record):
    """The settings that a self-tuning training has tried and selected; written by rank 0 after each branch."""

    signature: str
    batch: int
    start: int  # samples trained before the common checkpoint of all branches
    epoch: float  # epochs trained before the common checkpoint
    arms: tuple[Arm, ...]
    beginning: int = 0
    """Samples trained up to the common checkpoint without the held-out part, repeated by the training."""
    branches: tuple[Branch, ...] = ()
    chosen: Arm | None = None  # None until all branches are trained
    broken: tuple[str, ...] = ()
    """Names of arms that were chosen before, but fell behind the control during the training."""
    lost: int = 0  # samples trained with `broken` arms, which were discarded

    @property
    def samples(self) -> int:
        """Samples trained in addition to the training itself."""
        return sum(branch.samples for branch in self.branches) + self.beginning + self.lost


class RateBranch(Branch):
    """A branch with one batch and learning rate (`tula compare --learning-rates`)."""

    batch: int  # global
    rule: LrRule
    factor: float  # lr divided by optimizer.lr
    lr: float  # peak learning rate, before the factors of the schedule and of the branch


class PlannedBranch(Record):
    """One start of a script in a search for a learning rate, before it runs."""

    rule: LrRule | None  # None for the training up to the checkpoint, at the reference batch
    out: str  # output folder of the script


class RateSearch(Record):
    """A search for the learning rate of a large batch; written after each branch, by rank 0 or a script's supervisor."""

    key: str
    nodes: int
    batches: tuple[int, ...]  # the batch whose learning rate is searched, then others to compare with it
    reference_batch: int
    samples: int  # samples trained, without interrupted attempts
    total: int  # samples of the whole training
    start_epoch: float  # epochs trained before the branches start
    start_loss: float  # loss at the start of the branches, on held-out samples; for a script the loss of its last steps
    start_lr: float | None = None  # learning rate of a script's first step after the checkpoint; None if unknown
    noise: tuple[float, float, float | None] | None = None
    """Gradient noise scale (samples) at the start of the branches, then lower and upper end of its 90 % interval; an upper
    end of None is open. None if not measured."""
    branches: tuple[RateBranch, ...] = ()
    finished: bool = False


class ScalingSummary(Record):
    """The effect of adaptive gradient scaling in a training by a script."""

    steps: int  # optimizer steps, over all attempts
    scaled: float  # share of the steps that were scaled
    mean: float  # mean scaling factor over steps and tensors (or elements)
    apply_to: Literal["gradient", "update"]


class BestValue(Record):
    """The best value of the metric set in train.best_checkpoint."""

    metric: str
    value: float | None  # None if no evaluation gave a finite value

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
    batch: int  # global batch at the end, which a relaunch may have reduced
    samples: int
    steps: int
    epochs: int
    metrics: dict[str, float]  # after the last epoch: loss, top1, top5, perplexity, train.metrics; finite values only
    best_top1: float | None  # percent; None if there are no classes
    best_loss: float | None = None  # loss of the best epoch on the evaluation set
    best_epoch: int  # best by train.best_checkpoint: with the highest top-1, or the lowest loss if there are no classes
    best: BestValue | None = None  # None if train.best_checkpoint names no metric
    ended: str = ""  # reason for early stopping (train.early_stopping); empty if all epochs were trained
    step_time: float | None  # seconds, mean over all epochs at the last batch; None if every step refreshed AGS factors
    finished_at: float  # Unix time
    tuning: Tuning | None = None  # None unless train.method is auto
    scaled: ScalingSummary | None = None  # None unless a script's method scales gradients


class Splits(Record):
    """The numbers of parts into which micro-batches can be split at one batch, and why not into more."""

    batch: int  # global
    micro_batch: int  # samples per micro-batch on one GPU, before splitting
    micro_batches: int  # micro-batches per step on one GPU, before splitting
    into: tuple[int, ...]  # possible numbers of parts, 2 or more, ascending; empty if it cannot be split
    limit: str  # reason why micro-batches cannot be split into more parts, for messages


class MicroBatches(Record):
    """The splits of every batch that a training may fall back to; written by rank 0, which knows the model."""

    splits: tuple[Splits, ...]
    normalised: int
    """Micro-batches over which BatchNorm computes its statistics: 1, or several with SyncBatchNorm; 0 without either."""

    def get_splits(self, batch: int) -> Splits | None:
        """Return the splits of a batch, or None if it is not included."""
        return next((splits for splits in self.splits if splits.batch == batch), None)


class ScriptProgress(Record):
    """The newest checkpoint of a training by a script. Written by the leader of the supervisors."""

    samples: int  # samples trained up to it, accurate to a few steps
    steps: int  # optimizer steps up to it
    batch: int  # global batch when it was written
    checkpoint: str  # path
    saved_at: float  # Unix time


class ScriptCheckpointSave(Record):
    """A checkpoint written by a script during training; steps and time count from the previous one, or the start."""

    saved_at: float  # Unix time
    batch: int  # global
    steps: int
    samples: int
    seconds: float | None  # None for the first checkpoint of a start, as that includes the startup


class ScriptSaves(Record):
    """The checkpoints and lost steps of a training by a script. Written by the leader of the supervisors."""

    saves: tuple[ScriptCheckpointSave, ...] = ()  # the newest checkpoints only
    lost: tuple[int, ...] = ()  # samples after the newest checkpoint, for each start that failed
    left_out: ScriptProgress | None = None
    """The newest checkpoint if the script failed to resume from it, so that the previous one is used; else None."""
    resumes_from: str = ""  # pattern of the checkpoints that the script loads by itself; empty if none was observed
    resumed_attempt: tuple[str, int] | None = None  # task and number of the attempt in which this was observed


class EvaluationRecord(Record):
    """The evaluation of a training's weights on a set of samples (`tula evaluate`), written by rank 0."""

    signature: str  # signature of the training
    key: str  # id of the evaluation among those of the training
    weights: str  # best, last, or the path of a file
    path: str  # path of the weights file
    samples: int | None  # samples that the weights were trained on; None for the user's own file
    test: bool  # evaluated on dataset.test; else on the evaluation set of the training
    dataset: str  # name of the dataset, and its root if it has one
    size: int  # samples evaluated
    metrics: dict[str, float]  # loss, top1 and top5 (percent), perplexity, train.metrics; finite values only
    nodes: int
    local_batch: int  # samples per batch on one GPU
    seconds: float  # duration of the evaluation, without startup
    evaluated_at: float  # Unix time


class CountedEnergy(Record):
    """The energy of a training from the counters of all GPUs, over all attempts; written by rank 0."""

    joules: float
    seconds: float
    """Time covered by the counters: without starts of ranks, and without the part of an epoch before a failure."""

    @property
    def kwh(self) -> float:
        return self.joules / 3.6e6


MIN_COUNTED_SHARE = 0.95
"""Minimum share of the time over which energy must be counted to be compared with its prediction."""


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
    predicted_step: float | None  # seconds per step at the final batch, micro-batches and nodes
    actual_step: float | None  # measured seconds per step at the same settings
    predicted_parts: TimeParts | None = None
    actual_parts: TimeParts | None = None  # of a script, `evaluation` includes checkpoints and new epochs
    predicted_kwh: float | None = None
    actual_kwh: float | None = None  # None if a GPU has no energy counter
    counted: float | None = None  # share of actual_hours covered by the energy counters
    metrics: dict[str, float]
    best_top1: float | None  # percent; None if there are no classes
    best_loss: float | None = None  # loss of the best epoch on the evaluation set; None for a script
    best_epoch: int
    best: BestValue | None = None  # None if train.best_checkpoint names no metric
    ended: str = ""  # epoch of and reason for early stopping (train.early_stopping); empty without
    currency: str
    recoveries: tuple[Recovery, ...] = ()  # reason for each relaunch
    lost: tuple[int, ...] | None = None  # samples of a script lost at each failed start; None for tula's own loop
    tuning: Tuning | None = None  # None unless train.method is auto
    scaled: ScalingSummary | None = None  # None unless a script's method scales gradients
    changes: tuple[StepChange, ...] = ()  # changes of the step time during the training
    warnings: tuple[RecordedText, ...] = ()
    """For a script: deviations from its section of the job file, and that it cannot resume. Empty for tula's own loop."""

    @property
    def has_complete_energy(self) -> bool:
        """Whether the energy was counted long enough to be compared with its prediction."""
        return (self.counted or 0.0) >= MIN_COUNTED_SHARE

    @computed_field  # type: ignore[prop-decorator]
    @property
    def causes(self) -> tuple[RecordedText, ...]:
        """The reason for each relaunch, one sentence each."""
        return tuple(recovery.description for recovery in self.recoveries)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The configurations that the training fell back to after out-of-memory errors."""
        decisions = (recovery.decision for recovery in self.recoveries)
        return tuple(
            decision.fallback
            for decision in decisions
            if isinstance(decision, Relaunch) and decision.fallback is not None
        )


class Cell(Record):
    """One training of a comparison: a method at a batch, with a seed."""

    method: str  # value of train.method, or a variant of one (lbt-x4)
    batch: int  # global batch at the start
    seed: int
    nodes: int
    signature: str  # signature of its training run
    reference: bool = False  # the training at the small batch that the others are compared with
    short: tuple[int, int] | None = None  # (its epochs, epochs of the job) for a training of the first round, else None

    @property
    def epoch_share(self) -> float:
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
    seeds: int  # number of seeds
    nodes: int
    controls: bool | tuple[str, ...]  # names of the control rows; true or false: all or none
    cells: tuple[Cell, ...]
    """Trainings of the first round, then full trainings of all rows, some of which may be dropped."""
    created_at: float  # Unix time
    job_row: str = ""  # name of the row that trains the job unchanged
    earlier: tuple[str, ...] = ()
    """Signatures of other trainings of earlier comparisons than those of the job unchanged."""

    @property
    def signatures(self) -> frozenset[str]:
        """Signatures of this comparison's trainings, and of those of earlier comparisons with other job settings."""
        return frozenset((*self.earlier, *(cell.signature for cell in self.cells)))

    @property
    def unchanged_job_signatures(self) -> frozenset[str]:
        """Signatures of the full trainings of this comparison that train the job unchanged, except for batch and seed."""
        return frozenset(cell.signature for cell in self.cells if cell.method == self.job_row and not cell.short)

    @property
    def has_rounds(self) -> bool:
        """Whether there is a first round."""
        return any(cell.short for cell in self.cells)
