"""The sections of a spec that define the training and the search."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from tula_cli.plugins import is_import_string, suggest_name, suggest_nearest
from tula_cli.spec.kinds import (
    MAX_MINUTES,
    Arguments,
    GpusPerNode,
    Method,
    Nodes,
    NonNegativeFloat,
    OneLineText,
    Positive,
    PositiveFloat,
    Section,
)
from tula_cli.spec.methods import DEFAULT_METHOD, TrainingMethod, get_training_method

MIN_STAGE_SHARE = 0.02
"""Minimum share of the training for a stage derived from the gradient noise or the schedule."""


class RampStage(Section):
    """One stage of a batch-size ramp (`train.ramp`): a smaller batch at the beginning of a training."""

    epochs: PositiveFloat  # Duration of the stage in epochs; may be fractional
    batch: Positive  # Global batch size of the stage
    nodes: Nodes | None = None  # Number of nodes, at most that of the training; null: set by train.ramp_nodes


Stages = Literal["auto", "noise", "decay"] | Annotated[list[RampStage], Field(min_length=1)]


HESSIAN_SAMPLES = 128
"""Samples of the training set, over all GPUs, on which the Hessian's eigenvalue is measured; always the same ones."""
NOISE_BATCHES = 32
"""Micro-batches per GPU, forward and backward, for measuring the gradient noise; the next ones of the training."""


Measurement = Literal["gradient_norms", "gradient_noise", "hessian"]
"""A quantity that a training measures in addition to the loss and its metrics."""
_ANY_MEASUREMENT = {"enum": list(get_args(Measurement))}
_WRITTEN_MEASUREMENTS = {
    "anyOf": [_ANY_MEASUREMENT, {"type": "array", "items": _ANY_MEASUREMENT, "uniqueItems": True}, {"type": "null"}]
}


def _read_measurements(value: object) -> object:
    """Read the name of one measurement, null, false and other collections as a list; refuse true and entries that occur twice."""
    if value is None or value is False or isinstance(value, str):
        return [value] if isinstance(value, str) else []
    if value is True:
        raise ValueError("must be a list of measurements such as [gradient_norms], got true")
    if isinstance(value, tuple | set | frozenset):
        value = list(value)
    if isinstance(value, list):
        for entry in value:
            if value.count(entry) > 1:
                raise ValueError(f"must list each measurement once, but lists {entry} twice")
    return value


FALLING_METRICS = ("loss", "perplexity")
"""Metrics for which lower values are better."""


class BestCheckpoint(Section):
    """The metric by which the best checkpoint is chosen."""

    # top1, top5, loss, perplexity or a name in train.metrics; auto: top1, or loss if there are no classes
    metric: str = "auto"
    # Whether larger or smaller values are better; auto: min for loss and perplexity, else max
    mode: Literal["auto", "max", "min"] = "auto"

    @property
    def is_lower_better(self) -> bool:
        return self.mode == "min" or (self.mode == "auto" and self.metric in FALLING_METRICS)


class EarlyStopping(Section):
    """Conditions that end a training before its last epoch, checked after the evaluation of each epoch."""

    # Stop when train.best_checkpoint.metric reaches this value. For top1 and top5, a value up to 1 is a share (0.76 is
    # 76 %), and a larger one is in percent.
    target: float | None = None
    # Stop after this many epochs in a row without a better value of train.best_checkpoint.metric
    patience: Positive | None = None
    epochs: Positive | None = None  # Stop after this many epochs; schedules still use train.epochs

    @property
    def depends_on_metric(self) -> bool:
        """Whether the evaluations determine when the training ends."""
        return self.target is not None or self.patience is not None

    @model_validator(mode="after")
    def _check_end_condition(self) -> "EarlyStopping":
        if not self.depends_on_metric and self.epochs is None:
            raise ValueError("must set target, patience or epochs, for example {target: 0.76}")
        return self


class Model(Section):
    """A torchvision or tula model, `transformers:CLASS`, or `package.module:callable` that returns a torch.nn.Module."""

    name: str  # A torchvision or tula model, transformers:CLASS, or package.module:callable
    # Arguments of the constructor or configuration. num_classes defaults to the number of classes in the dataset.
    args: Arguments = {}
    # File with initial weights: a state_dict or checkpoint written by torch.save, a .safetensors file, or a checkpoint
    # of tula. null: the model initialises its weights itself.
    weights: str | None = None
    # true: weights whose name or shape does not match are an error. false: they are skipped and listed.
    strict: bool = True
    # Parameters that are not trained: patterns of parameter or module names. The words norms, biases and
    # embeddings match all such parameters of the model. ! makes an exception: ["*", "!head"] freezes all parameters except those of head.
    frozen: list[str] = []

    @model_validator(mode="after")
    def _check_strict_has_weights(self) -> "Model":
        if not self.strict and self.weights is None:
            raise ValueError("strict: false has no effect without model.weights; set model.weights, or remove strict")
        return self


class SeparateTest(Section):
    """A test set for `tula evaluate`. It is used neither for training nor for choosing the best epoch."""

    # ImageFolder, or package.module:callable, which is called with train=False; null: the name of the dataset
    name: str | None = None
    # Folder of an ImageFolder, with one subfolder per class; only for ImageFolder, and required there
    root: str | None = None
    # Arguments of the test set. If it has the name of the dataset, they override single keys of dataset.args.
    args: Arguments = {}
    length: Positive | None = None  # Number of samples of an iterable test set; null: its len()


class Dataset(Section):
    """CIFAR10, CIFAR100, Caltech101, Caltech256, ImageNet, ImageFolder, FakeData, digits, python_source, python_packages, or an import string.

    An import string names a callable `(train: bool, transform, **args) -> torch.utils.data.Dataset`. A callable
    without a parameter `transform` is called without it.
    """

    name: str  # A built-in dataset (CIFAR10, ImageNet, ImageFolder, digits ...), or package.module:callable
    root: str = "data"  # Folder with the files of a built-in dataset
    args: Arguments = {}  # Arguments of the dataset
    download: bool = False  # Download the dataset with torchvision
    # Share of samples that are held out for evaluation, stratified by class, if the dataset has no official split
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    # Callable that makes a batch from a list of samples: an import string, or {import string: {arguments}}. null: the
    # default of the dataset or of torch.
    collate_fn: str | dict[str, Arguments] | None = None
    # Callable that returns the indices of one epoch for all GPUs: an import string, or {import string: {arguments}}.
    # Its parameters are the dataset, and optionally epoch and seed. null: a random order.
    sampler: str | dict[str, Arguments] | None = None
    length: Positive | None = None  # Samples per epoch of an iterable dataset; null: its len()
    eval_length: Positive | None = None  # Samples of an iterable evaluation set; null: its len()
    # For iterable datasets. true: the dataset itself yields different samples on each GPU. false: tula distributes its
    # samples over the GPUs.
    sharded: bool = False
    test: SeparateTest | None = None  # Test set for tula evaluate; null: tula evaluate uses the evaluation samples

    @property
    def test_dataset(self) -> "Dataset":
        """The dataset whose evaluation samples are those of `test`."""
        assert self.test is not None
        name, root = self.test.name or self.name, self.test.root or self.root
        args = {**self.args, **self.test.args} if name == self.name else self.test.args
        return self.model_copy(
            update={"name": name, "root": root, "args": args, "eval_length": self.test.length, "test": None}
        )

    @model_validator(mode="after")
    def _check_test_set(self) -> "Dataset":
        if self.test is None:
            return self
        tested = self.test_dataset
        if tested.name != "ImageFolder" and not is_import_string(tested.name):
            raise ValueError(
                f"test: dataset {tested.name} has no separate test set; set dataset.test.name: ImageFolder or package.module:callable"
            )
        if (tested.name, tested.root, tested.args) == (self.name, self.root, self.args):
            raise ValueError(
                "test: must differ from the training set; set another name, root or args in dataset.test, for example dataset.test.args: {split: test}"
            )
        if tested.name == "ImageFolder" and self.test.root is None:
            raise ValueError("test.root: is required with ImageFolder; set it to a folder with one subfolder per class")
        if tested.name != "ImageFolder" and self.test.root is not None:
            raise ValueError(
                f"test.root: has no effect with dataset {tested.name}; to select the test set, set dataset.test.args, for example {{split: test}}"
            )
        return self

    @model_validator(mode="after")
    def _check_import_strings(self) -> "Dataset":
        for key in IMPORTABLE_DATASET_KEYS:
            parse_import_string(getattr(self, key), key)
        return self

    @property
    def further_imports(self) -> tuple[str, ...]:
        """The import strings of the dataset other than its name."""
        names = (parse_import_string(getattr(self, key), key) for key in IMPORTABLE_DATASET_KEYS)
        return tuple(name for name in names if name)


IMPORTABLE_DATASET_KEYS = ("collate_fn", "sampler")
"""Keys of section dataset whose value is an import string, alone or with arguments."""


def parse_import_string(entry: str | dict[str, dict[str, Any]] | None, key: str) -> str | None:
    """Return the import string of an entry that may have arguments.

    Raises:
        ValueError: the entry is not an import string.
    """
    if isinstance(entry, dict) and len(entry) != 1:
        raise ValueError(f"{key}: must be one import string package.module:attribute, got {', '.join(entry) or 'none'}")
    name = next(iter(entry)) if isinstance(entry, dict) else entry
    if name is not None and ":" not in name:
        raise ValueError(f"{key}: must be an import string package.module:attribute, got {name!r}")
    return name


class Transforms(Section):
    """Transforms: names of torchvision.transforms.v2 classes, {Name: {arguments}}, or import strings. An empty list is ToTensor."""

    train: list[str | dict[str, Arguments]] = []  # Transforms of training samples
    eval: list[str | dict[str, Arguments]] = []  # Transforms of evaluation and test samples


class Loss(Section):
    """cross_entropy, a class of torch.nn, or an import string of a callable(output, target) or (outputs, batch)."""

    name: str = "cross_entropy"  # cross_entropy, a class of torch.nn, or package.module:callable
    args: Arguments = {}  # Arguments of the loss


class ParameterGroup(Section):
    """Parameters with a different learning rate or weight decay."""

    parameters: Annotated[list[str], Field(min_length=1)]  # Patterns as in model.frozen, for example [norms, biases]
    lr_factor: PositiveFloat = 1.0  # Factor by which the learning rate of these parameters is multiplied
    weight_decay: NonNegativeFloat | None = None  # Weight decay of these parameters; null: optimizer.weight_decay


class Optimizer(Section):
    """Any class of torch.optim, or an import string."""

    name: str = "SGD"  # A class of torch.optim, or package.module:callable
    lr: PositiveFloat  # Learning rate, tuned for train.reference_batch
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  # Momentum; null: not passed to the optimizer
    weight_decay: NonNegativeFloat = 0.0  # Weight decay
    # Further arguments of the optimizer, for example {nesterov: true}. If betas is not set, method ramp with Adam-like
    # optimizers uses a beta1 of 0.8 above 8 times train.reference_batch.
    args: Arguments = {}
    # Number of samples after which Adam's second moment has decayed by half, at any batch. auto: that of beta2 at
    # train.reference_batch. null: auto with methods ramp and ortho; with other methods, beta2 is the same at any batch.
    beta2_half_life: Literal["auto"] | Annotated[float, Field(gt=0, le=1e12)] | None = None
    # Parameter groups with different settings. If several groups match a parameter, only the last one applies.
    groups: list[ParameterGroup] = []

    @model_validator(mode="after")
    def _check_duplicate_values(self) -> "Optimizer":
        for key in ("momentum", "weight_decay"):
            value = getattr(self, key)
            if value and key in self.model_fields_set and self.args.get(key, value) != value:
                raise ValueError(
                    f"{key}: is {value:g}, but optimizer.args.{key} is {self.args[key]}; remove one of the two keys"
                )
        return self


FALLING_SCHEDULES = ("cosine", "linear", "one-cycle")
SCHEDULES = ("constant", "multistep", *FALLING_SCHEDULES)
ONE_CYCLE_PEAK = 0.3
"""Share of the epochs at which one-cycle reaches the full learning rate."""


class Schedule(Section):
    """Learning-rate schedule over (fractional) epochs: a linear warm-up, then one of the kinds."""

    # Shape after the warm-up: constant, multistep, cosine, linear, one-cycle, or package.module:callable. A callable
    # gets the number of epochs done (may be fractional), and train.epochs if it has a parameter epochs, and returns a
    # factor of the learning rate. If kind is not set, method ramp with Adam-like optimizers uses linear with decay_from
    # 0.7.
    kind: str = "constant"
    milestones: list[NonNegativeFloat] = []  # multistep: epochs at which the learning rate is multiplied by gamma
    gamma: PositiveFloat = 0.1  # multistep: factor of the learning rate at each milestone
    # Epochs of warm-up; not for one-cycle. null: with methods lrs, lars, lamb, polo, ortho and schedule_free, 5 % of
    # train.epochs, but at most 5; with other methods, and with any train.ramp other than decay, no warm-up.
    warmup_epochs: NonNegativeFloat | None = None
    min_lr: NonNegativeFloat = 0.0  # cosine, linear, one-cycle: final learning rate
    # linear: share of train.epochs after which the learning rate begins to fall; until then it is constant
    decay_from: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _check_settings_fit_kind(self) -> "Schedule":
        if self.kind not in SCHEDULES and not is_import_string(self.kind):
            hint = suggest_name(self.kind, SCHEDULES) or f"use {', '.join(SCHEDULES)}, or package.module:callable"
            raise ValueError(f"kind: unknown schedule {self.kind!r}; {hint}")
        kind = (
            f"with schedule.kind: {self.kind}" if "kind" in self.model_fields_set else "while schedule.kind is not set"
        )
        if self.kind == "multistep" and not self.milestones:
            raise ValueError("milestones: is required with schedule.kind: multistep, for example [30, 60, 80] (epochs)")
        if self.kind != "multistep" and self.milestones:
            raise ValueError(f"milestones: has no effect {kind}; remove the key, or set schedule.kind: multistep")
        if sorted(self.milestones) != self.milestones:
            raise ValueError(f"milestones: must be in ascending order, got {self.milestones}")
        if self.kind not in FALLING_SCHEDULES and self.min_lr:
            raise ValueError(
                f"min_lr: has no effect {kind}; remove the key, or set schedule.kind to {', '.join(FALLING_SCHEDULES[:-1])} or {FALLING_SCHEDULES[-1]}"
            )
        if self.kind == "one-cycle" and self.warmup_epochs:
            raise ValueError(
                "warmup_epochs: has no effect with schedule.kind: one-cycle, which has a warm-up itself; remove the key"
            )
        if self.kind != "linear" and self.decay_from:
            raise ValueError(f"decay_from: has no effect {kind}; remove the key, or set schedule.kind: linear")
        return self


MetricName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]


Workers = Literal["auto"] | Annotated[int, Field(ge=0)]
MIN_AUTO_WORKERS, MAX_AUTO_WORKERS = 2, 8
"""Limits of data-loader processes with `auto`.

Two processes that share a core still load while the GPU computes; more than eight are faster than the GPU and only
take memory.
"""


BUILT_IN_METRICS = ("top1", "top5", "loss", "perplexity")
"""The metrics that every evaluation computes if possible."""
_RESERVED_METRIC_NAMES = {"auto", "eval_loss", *BUILT_IN_METRICS}


class Train(Section):
    """Settings of the training."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)]  # Number of epochs, the same for every batch and method
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # Seed of weights, data order and augmentation
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # Precision of forward and backward pass; parameters stay fp32
    workers: Workers = "auto"  # Data-loader processes per GPU; auto: the CPU cores of the rank minus one, from 2 to 8
    # Compile with torch.compile: true, or one of its modes
    compile: bool | Literal["default", "max-autotune-no-cudagraphs"] = False
    # Use only operations with bitwise reproducible results. The training fails if an operation has no reproducible
    # implementation. false: cuDNN selects the fastest algorithms (NVIDIA GPUs).
    deterministic: bool = False
    # ddp: each GPU holds a copy of the model (DistributedDataParallel). fsdp: parameters, gradients and optimizer
    # states are sharded over the GPUs (FSDP2). This needs less memory, but causes 1.5 times the network traffic.
    parallel: Literal["ddp", "fsdp"] = "ddp"
    accumulate: Annotated[int, Field(ge=1, le=1_000_000)] = 1  # Micro-batches per optimizer step
    # Clip gradients to this norm; null: no clipping. If not set, 1 with methods ramp and auto if the optimizer is SGD
    # and the loss a cross-entropy, otherwise no clipping.
    max_grad_norm: PositiveFloat | None = None
    # Recompute activations in the backward pass: needs less memory but more time
    activation_checkpointing: bool = False
    # Seconds between checkpoints. auto: the optimal interval for the measured save time (Young and Daly).
    checkpoint_every: Literal["auto"] | PositiveFloat = "auto"
    reference_batch: Positive = 128  # Global batch for which optimizer.lr was tuned
    # How the large batch is trained: a built-in method, or package.module:attribute of your own method. Default for
    # scripts: lrs with lr_scaling: sqrt if the command has {lr} or {lr_factor}, otherwise lbt.
    method: Method = DEFAULT_METHOD
    # Rule for the learning rate at k times reference_batch. linear: k times the learning rate; sqrt: sqrt(k) times;
    # none: unchanged. auto: linear with methods lrs and lars; sqrt with lamb; with ortho and ramp, sqrt if the
    # optimizer is Adam-like, otherwise linear; none with other methods.
    lr_scaling: Literal["auto", "none", "linear", "sqrt"] = "auto"
    # Upper limit of the factor by which the learning rate is scaled; null: no limit. auto: with method ramp (also as an
    # arm of method auto) 8, or 16 with a cross-entropy loss; no limit with other methods.
    max_lr_factor: Literal["auto"] | Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = "auto"
    # How the batch grows during training. auto: it doubles from reference_batch every 5 % of the training. noise: it
    # grows with the measured gradient noise scale. decay: it doubles each time the schedule halves the learning rate;
    # the learning rate then falls only by sqrt(2), and with SGD it does not fall. Or a list of stages, such as
    # [{epochs: 1, batch: 128}, {epochs: 0.5, batch: 256}]. null: auto with method ramp, otherwise a constant batch.
    ramp: Stages | None = None
    # Number of nodes in the stages of the ramp. same: that of the training. auto: chosen for each stage from
    # search.nodes, based on the measurements; this is the default with ramp: decay.
    ramp_nodes: Literal["same", "auto"] = "same"
    # Reaction to an out-of-memory error. accumulate: keep the batch and compute it in smaller micro-batches, if
    # possible. shrink: use the next smaller batch.
    oom_policy: Literal["accumulate", "shrink"] = "accumulate"
    # Maximum number of consecutive failures without a newer checkpoint; then the training ends
    max_attempts: Positive = 8
    # Additional measurements. gradient_norms: the gradient norm of every step, which methods that scale gradients always
    # record. gradient_noise: the noise scale at the end of each epoch, from 32 micro-batches per GPU. hessian: the largest
    # eigenvalue of the Hessian at the end of each epoch, on 128 samples; it takes as long as some dozen steps.
    diagnostics: Annotated[
        list[Measurement], BeforeValidator(_read_measurements), WithJsonSchema(_WRITTEN_MEASUREMENTS)
    ] = []
    # Additional evaluation metrics by name. A value is the import string of a callable(outputs, batch), whose results
    # are averaged over samples, or of a class with update, compute and reset, as in torchmetrics. Give arguments of a
    # class as {import string: {arguments}}.
    metrics: dict[MetricName, str | dict[str, Arguments]] = {}
    best_checkpoint: BestCheckpoint = BestCheckpoint()  # Which epoch's checkpoint is kept as `best`
    early_stopping: EarlyStopping | None = None  # Conditions that end the training before its last epoch; null: none

    @model_validator(mode="after")
    def _check_metrics(self) -> "Train":
        for name, entry in self.metrics.items():
            if name in _RESERVED_METRIC_NAMES:
                raise ValueError(f"metrics.{name}: tula uses this name itself; choose another name")
            parse_import_string(entry, f"metrics.{name}")
        known = ("auto", *BUILT_IN_METRICS, *self.metrics)
        stopping = self.early_stopping
        name = self.best_checkpoint.metric
        if name not in known:
            raise ValueError(
                f"best_checkpoint.metric: there is no metric {name!r}; {suggest_nearest(name, known) or 'use ' + ', '.join(known)}"
            )
        if stopping is not None and stopping.target is not None and name == "auto":
            raise ValueError(
                "early_stopping.target: needs a metric, but train.best_checkpoint.metric is auto; set the metric, for example train.best_checkpoint.metric: top1"
            )
        return self

    @property
    def max_epochs(self) -> int:
        """Maximum number of epochs, whatever the metrics; the schedules remain those of `epochs`."""
        stopping = self.early_stopping
        return self.epochs if stopping is None else min(self.epochs, stopping.epochs or self.epochs)

    @property
    def is_sharded(self) -> bool:
        return self.parallel == "fsdp"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The import strings of the metrics."""
        return tuple(name for entry in self.metrics.values() if (name := parse_import_string(entry, "metrics")))

    @model_validator(mode="before")
    @classmethod
    def _set_default_ramp_nodes(cls, content: Any) -> Any:
        by_decay = isinstance(content, Mapping) and content.get("ramp") == "decay"
        return {"ramp_nodes": "auto", **content} if by_decay else content

    @model_validator(mode="after")
    def _check_ramp(self) -> "Train":
        if why := self.training_method.describe_train_conflict(self.ramp, self.lr_scaling):
            raise ValueError(why)
        named = self.ramp if isinstance(self.ramp, list) else []
        batches = [stage.batch for stage in named]
        if sorted(set(batches)) != batches:
            raise ValueError(f"ramp: the batches of the stages must increase, got {batches}")
        nodes = [stage.nodes for stage in named if stage.nodes is not None]
        if sorted(nodes) != nodes:
            raise ValueError(f"ramp: the numbers of nodes of the stages must not decrease, got {nodes}")
        if (epochs := sum(stage.epochs for stage in named)) >= self.epochs:
            raise ValueError(
                f"ramp: the stages last {epochs:g} epochs and must end before train.epochs ({self.epochs}); shorten the stages, or raise train.epochs"
            )
        return self

    @property
    def stages(self) -> Stages | None:
        """How the batch grows; None if it does not."""
        return "auto" if self.ramp is None and self.training_method.grows_batch else self.ramp

    def count_loaders(self, cores: float) -> int:
        """Return the number of data-loader processes of a rank with `cores` CPU cores."""
        if self.workers != "auto":
            return self.workers
        return max(MIN_AUTO_WORKERS, min(MAX_AUTO_WORKERS, int(cores) - 1))

    @property
    def training_method(self) -> TrainingMethod:
        return get_training_method(self.method)


# --- Section `search`

MEMORY_MARGIN = 0.1
"""Share of a GPU's memory that a configuration must leave free."""
MIN_TIMED_STEPS = 5
"""Minimum number of steps that a probe times, however long they take, so that their spread is known."""
EXTRA_TIMINGS = 3
"""Additional timings of a probe with separate steps: on available data, of synchronisation, and of local work."""


class Search(Section):
    """Which configurations are measured, and how."""

    nodes: Annotated[list[Nodes], Field(min_length=1)] = [2, 4, 8, 16]  # Numbers of nodes to search
    # Numbers of GPUs per node to search; null: only cluster.gpus_per_node
    gpus_per_node: Annotated[list[GpusPerNode], Field(min_length=1)] | None = None
    min_batch: Positive = 32  # Smallest global batch; tula considers min_batch x 2^k
    max_batch: Positive | None = None  # Largest global batch; null: limited only by memory and dataset size
    # Which configurations are measured. full: all. partial: the fewest and the most nodes, each with the smallest and
    # the largest batch. sweep: all batches on the fewest nodes, the smallest batch on all other numbers of nodes, and
    # the middle and the largest batch on the most nodes. adaptive: tula chooses them in rounds from earlier results.
    # auto: sweep for a long training, otherwise adaptive.
    strategy: Literal["auto", "sweep", "partial", "full", "adaptive"] = "auto"
    # Minimum number of steps in each of the two phases of a probe: the warm-up, which lasts until step times are stable,
    # and the timing, which lasts at least min_seconds and until the standard error of the mean step time is below 1 %.
    min_steps: Annotated[int, Field(ge=5)] = 10
    # Minimum duration of the timed steps in seconds, so that GPU clocks and power become stable
    min_seconds: Annotated[NonNegativeFloat, Field(le=60 * MAX_MINUTES)] = 2.0
    # Maximum duration in seconds of the warm-up, and of the timed steps (at least 5 steps are timed)
    max_seconds: Annotated[PositiveFloat, Field(le=60 * MAX_MINUTES)] = 60.0
    # Maximum node-hours of all probes and resume tests together; null: no limit
    max_node_hours: PositiveFloat | None = None
    # Maximum duration of one profiling job in minutes. tula requests 2 more minutes from the scheduler (and includes
    # them in costs), so that it can stop the job itself and record the reason.
    max_minutes: Annotated[PositiveFloat, Field(le=MAX_MINUTES)] = 20.0

    @model_validator(mode="after")
    def _check_bounds(self) -> "Search":
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(f"max_batch: must be at least search.min_batch ({self.min_batch}), got {self.max_batch}")
        if self.max_seconds < self.min_seconds:
            raise ValueError(
                f"max_seconds: must be at least search.min_seconds ({self.min_seconds:g} s), got {self.max_seconds:g}"
            )
        for name, sizes in (("nodes", self.nodes), ("gpus_per_node", self.gpus_per_node or [])):
            if len(set(sizes)) != len(sizes):
                raise ValueError(f"{name}: must list each number once, got {sizes}")
        return self

    @property
    def max_extra_timing_steps(self) -> int:
        """Maximum number of steps for each additional timing of a probe, and for measuring gradients."""
        return self.min_steps

    def estimate_timed_steps(self, step_time: float) -> int:
        """Return the number of steps that a probe is expected to time if each takes `step_time` seconds."""
        requested_steps = max(self.min_steps, math.ceil(self.min_seconds / step_time))
        return max(MIN_TIMED_STEPS, min(requested_steps, math.ceil(self.max_seconds / step_time)))

    def estimate_probe_seconds(self, step_time: float) -> float:
        """Return the expected seconds of a probe's warm-up, timed steps and additional timings, at `step_time` per step."""
        # With steady steps, the additional timings take the minimum number of steps.
        extra_timings = EXTRA_TIMINGS * MIN_TIMED_STEPS + self.max_extra_timing_steps
        return (self.min_steps + self.estimate_timed_steps(step_time) + extra_timings) * step_time


# --- Exports

TRACKERS = ("mlflow", "wandb", "tensorboard")
_URL_PASSWORD_PATTERN = re.compile(r"://[^/@\s]*@")


def strip_password(uri: str) -> str:
    """Return the address of a tracker.

    Raises:
        ValueError: the address contains a user name or password, which would be stored in the run's files.
    """
    if _URL_PASSWORD_PATTERN.search(uri):
        raise ValueError(
            "must not contain a user name or password; set the environment variables of the tracker instead, such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        )
    return uri


class Export(Section):
    """A tracker that receives results while a command waits for jobs. Trainings do not depend on it."""

    to: OneLineText  # mlflow, wandb, tensorboard, or package.module:callable that returns an exporter
    # mlflow: the tracking URI; null: $MLFLOW_TRACKING_URI, otherwise a database in the run. tensorboard: a folder;
    # null: one in the run. wandb: a server (https://...), or a folder for offline data; null: a folder in the run.
    uri: Annotated[OneLineText, AfterValidator(strip_password)] | None = None
    project: OneLineText | None = None  # MLflow experiment or W&B project; null: the job's name

    @model_validator(mode="after")
    def _check_tracker(self) -> "Export":
        if self.to not in TRACKERS and not is_import_string(self.to):
            hint = suggest_name(self.to, TRACKERS) or f"use {', '.join(TRACKERS)}, or package.module:callable"
            raise ValueError(f"to: unknown tracker {self.to!r}; {hint}")
        uri = self.uri or ""
        if self.to == "tensorboard" and "://" in uri and not uri.startswith("file:///"):
            raise ValueError(f"uri: must be a folder for tensorboard, got {uri}; set a path, or file:///path")
        return self
