"""The sections of a spec that define the training and the search."""

import difflib
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tula_cli.plugins import is_import_string, suggest_nearest
from tula_cli.spec.kinds import Arguments, Line, Method, NonNegativeFloat, Positive, PositiveFloat, Section
from tula_cli.spec.methods import DEFAULT_METHOD, Facts, get_facts

# --- Parts of `train`

MIN_STAGE_SHARE = 0.02
"""Minimum share of the training for a stage derived from the gradient noise or the schedule."""


class RampStage(Section):
    """A smaller batch for a while, at the beginning of a training."""

    epochs: PositiveFloat  # how long it lasts; fractions count
    batch: Positive  # global
    nodes: Positive | None = None  # that it runs on, fewer than the training; null: as train.ramp_nodes says


Stages = Literal["auto", "noise", "decay"] | Annotated[list[RampStage], Field(min_length=1)]


HESSIAN_SAMPLES = 128
"""Samples of the training set, over all GPUs, on which the Hessian's eigenvalue is measured; always the same ones."""
NOISE_BATCHES = 32
"""Micro-batches per GPU, forward and backward, for measuring the gradient noise; the next ones of the training."""


Measurement = Literal["gradient_norms", "gradient_noise", "hessian"]
"""A quantity that a training measures in addition to the loss and its metrics."""


def _require_different(value: object) -> object:
    """Reject a list with duplicate entries."""
    if isinstance(value, list):
        for entry in value:
            if value.count(entry) > 1:
                raise ValueError(f"has {entry} twice")
    return value


class BestCheckpoint(Section):
    """The metric by which the best checkpoint is chosen."""

    metric: str = "auto"  # top1, top5, loss, perplexity or one of train.metrics; auto: top1, loss without classes
    mode: Literal["auto", "max", "min"] = "auto"  # auto: min of loss and perplexity, max of all others

    @property
    def falls(self) -> bool:
        """Whether lower values are better."""
        return self.mode == "min" or (self.mode == "auto" and self.metric in ("loss", "perplexity"))


class EarlyStopping(Section):
    """Conditions that end a training before its last epoch, checked after the evaluation of each epoch."""

    # of train.best_checkpoint.metric, reached or passed; of top1 and top5 in percent, or up to 1 as a share: 0.76 is 76 %
    target: float | None = None
    patience: Positive | None = None  # epochs in a row without a better value of train.best_checkpoint.metric
    epochs: Positive | None = None  # that are done; schedules stay those of train.epochs

    @property
    def by_metric(self) -> bool:
        """Whether the evaluations determine when the training ends."""
        return self.target is not None or self.patience is not None

    @model_validator(mode="after")
    def _something_ends_it(self) -> "EarlyStopping":
        if not self.by_metric and self.epochs is None:
            raise ValueError("needs target, patience or epochs, for example {target: 0.76}")
        return self


# --- Sections

LengthOption = Annotated[str, Field(pattern=r"^(dataset|model)\.args\.[A-Za-z_][A-Za-z0-9_]*$")]
_POSITIONS = ("n_positions", "max_position_embeddings")
"""Settings of transformers' models that limit the sequence length."""


class Model(Section):
    """A torchvision model name, `transformers:CLASS`, or `package.module:callable` that returns a torch.nn.Module."""

    name: str  # of torchvision, of tula, transformers:CLASS, or package.module:callable
    args: Arguments = {}  # to the constructor, or the configuration; num_classes comes from the dataset
    # file of the weights to start from: a state_dict or checkpoint by torch.save (a tula one too), or .safetensors
    weights: str | None = None
    strict: bool = True  # false: of that file what fits by name and shape is taken, and the rest is told
    # patterns of parameters that are not trained, or modules; norms, biases, embeddings are those of the whole model
    frozen: list[str] = []  # for example [features.*], or ["*", "!head"]: all but the head

    @property
    def longest_text(self) -> dict[str, int]:
        """The given model arguments that are known to limit the sequence length."""
        limits = {key: self.args.get(key) for key in _POSITIONS if self.name.startswith("transformers:")}
        return {key: value for key, value in limits.items() if isinstance(value, int)}

    @model_validator(mode="after")
    def _strict_is_about_weights(self) -> "Model":
        if not self.strict and self.weights is None:
            raise ValueError("strict means nothing without weights, the file that it is about")
        return self


class SequenceLengths(Section):
    """Lengths of text at which memory and time are measured, beside the length that the job trains with."""

    lengths: Annotated[
        list[Positive], Field(min_length=1)
    ]  # for example [128, 256, 512]; the job's own is always measured
    # the arguments that each length is written into; the first one holds the job's own, for example add model.args.n_positions
    lengths_map_to: Annotated[list[LengthOption], Field(min_length=1)] = ["dataset.args.length"]

    @model_validator(mode="after")
    def _each_is_named_once(self) -> "SequenceLengths":
        for key, values in (("lengths", self.lengths), ("lengths_map_to", self.lengths_map_to)):
            if len(set(values)) < len(values):
                raise ValueError(f"{key} names one twice: {values}")
        return self


class SeparateTest(Section):
    """A test set that no training and no choice of the best epoch sees: `tula evaluate` takes it."""

    name: str | None = None  # ImageFolder, or package.module:callable, called with train=False; null: the dataset's own
    root: str | None = None  # of ImageFolder, a folder with one sub-folder a class; null: the dataset's
    args: Arguments = {}  # to the callable; where it is the dataset's own, laid over dataset.args
    length: Positive | None = None  # samples of an iterable one that does not tell it


class Dataset(Section):
    """CIFAR10, CIFAR100, Caltech101, Caltech256, ImageNet, ImageFolder, FakeData, digits, python_source, python_packages, or an import string.

    An import string names a callable `(train: bool, transform, **args) -> torch.utils.data.Dataset`; `transform` is given
    where it takes it.
    """

    name: str  # one of these, or package.module:callable
    root: str = "data"  # folder of its files
    args: Arguments = {}  # to the dataset
    download: bool = False  # let torchvision download it
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2  # held out, stratified, where there is no official split
    # import string of a callable (list of samples) -> batch, or {import string: {arguments}}
    collate_fn: str | dict[str, Arguments] | None = None
    # import string of a callable (dataset, and epoch, seed where it takes them) -> indices of an epoch, of all GPUs
    sampler: str | dict[str, Arguments] | None = None
    length: Positive | None = None  # samples of an epoch of an iterable dataset that does not tell it
    eval_length: Positive | None = None  # of the evaluation's
    sharded: bool = False  # an iterable dataset gives each GPU its own samples by itself
    test: SeparateTest | None = None  # for tula evaluate; null: it takes the samples that training is evaluated on

    @property
    def tested(self) -> "Dataset":
        """The dataset whose evaluation samples are those of `test`."""
        assert self.test is not None
        name, root = self.test.name or self.name, self.test.root or self.root
        args = {**self.args, **self.test.args} if name == self.name else self.test.args
        return self.model_copy(
            update={"name": name, "root": root, "args": args, "eval_length": self.test.length, "test": None}
        )

    @model_validator(mode="after")
    def _test_is_another_set(self) -> "Dataset":
        if self.test is None:
            return self
        tested = self.tested
        if tested.name != "ImageFolder" and not is_import_string(tested.name):
            raise ValueError(f"test: {tested.name} has no third part; name ImageFolder or package.module:callable")
        if (tested.name, tested.root, tested.args) == (self.name, self.root, self.args):
            raise ValueError(
                "test: it is the same as the dataset; give another name or root, or args such as {split: test}"
            )
        if tested.name == "ImageFolder" and self.test.root is None:
            raise ValueError("test: ImageFolder needs a root, the folder with one sub-folder a class")
        return self

    @model_validator(mode="after")
    def _own_parts_are_import_strings(self) -> "Dataset":
        for key in OWN_PARTS:
            import_string_of(getattr(self, key), key)
        return self

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The import strings of the dataset other than its name."""
        names = (import_string_of(getattr(self, key), key) for key in OWN_PARTS)
        return tuple(name for name in names if name)


OWN_PARTS = ("collate_fn", "sampler")
"""Keys of section dataset whose value is an import string, alone or with arguments."""


def import_string_of(entry: str | dict[str, dict[str, Any]] | None, key: str) -> str | None:
    """Return the import string of an entry that may have arguments.

    Raises:
        ValueError: the entry is not an import string.
    """
    if isinstance(entry, dict) and len(entry) != 1:
        raise ValueError(f"{key}: one import string, got {', '.join(entry) or 'none'}")
    name = next(iter(entry)) if isinstance(entry, dict) else entry
    if name is not None and ":" not in name:
        raise ValueError(f"{key}: an import string is package.module:attribute, got {name!r}")
    return name


class Transforms(Section):
    """Names of torchvision.transforms.v2 classes, {Name: {arguments}}, or import strings; empty means to tensor only."""

    train: list[str | dict[str, Arguments]] = []  # of the training samples
    eval: list[str | dict[str, Arguments]] = []  # of the samples that are evaluated


class Loss(Section):
    """A name of tula's (cross_entropy), a class of torch.nn, or an import string of a callable(output, target) or (outputs, batch)."""

    name: str = "cross_entropy"  # one of these
    args: Arguments = {}  # to the loss


class ParameterGroup(Section):
    """Parameters that are trained otherwise than the rest."""

    parameters: Annotated[list[str], Field(min_length=1)]  # patterns as in model.frozen, for example [norms, biases]
    lr_factor: PositiveFloat = 1.0  # of the learning rate, at every point of the schedule
    weight_decay: NonNegativeFloat | None = None  # in place of optimizer.weight_decay


class Optimizer(Section):
    """Any class of torch.optim, or an import string."""

    name: str = "SGD"  # one of these
    lr: PositiveFloat  # tuned for train.reference_batch
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  # to the optimizer, where given
    weight_decay: NonNegativeFloat = 0.0  # to the optimizer
    # to the optimizer, for example {nesterov: true}; with method ramp and Adam and its like the first of betas is 0.8 above 8
    # times train.reference_batch if betas are not given
    args: Arguments = {}
    # samples in which the second moment of Adam and its like forgets half, whatever the batch; auto: those of its beta2 at
    # train.reference_batch; null: beta2 stays, as a share a step
    beta2_half_life: Literal["auto"] | Annotated[float, Field(gt=0, le=1e12)] | None = None
    groups: list[ParameterGroup] = []  # of several that name a parameter the last one counts


FALLING = ("cosine", "linear", "one-cycle")
SCHEDULES = ("constant", "multistep", *FALLING)
PEAK = 0.3
"""Share of the epochs at which one-cycle reaches the full learning rate."""


class Schedule(Section):
    """Learning rate over epochs (fractional epochs count): warm-up from near zero, then one of the kinds."""

    # after the warm-up: constant, multistep, cosine, linear, one-cycle, or an import string of a callable (epochs done, with
    # fraction) -> factor of the learning rate; with method ramp and Adam and its like linear with decay_from 0.7 if not given
    kind: str = "constant"
    milestones: list[NonNegativeFloat] = []  # epochs
    gamma: PositiveFloat = 0.1  # multistep: the factor at each milestone
    # null: what the method needs, for lrs, lars, lamb, polo, ortho and schedule_free 5 and at most 5 % of train.epochs, else 0;
    # with train.ramp 0
    warmup_epochs: NonNegativeFloat | None = None
    min_lr: NonNegativeFloat = 0.0  # cosine, linear and one-cycle end here
    # linear: share of the epochs at which it starts to fall; before, after the warm-up, the rate is constant
    decay_from: Annotated[float, Field(ge=0, lt=1)] = 0.0
    args: Arguments = {}  # to an import string; epochs, those of the training, is given where it takes it

    @model_validator(mode="after")
    def _settings_belong_to_the_kind(self) -> "Schedule":
        if self.kind not in SCHEDULES and not is_import_string(self.kind):
            hint = suggest_nearest(self.kind, SCHEDULES) or f"use {', '.join(SCHEDULES)}, or package.module:callable"
            raise ValueError(f"unknown kind {self.kind!r}; {hint}")
        kind = f"to kind {self.kind!r}" if "kind" in self.model_fields_set else "where schedule.kind is not given"
        if self.kind == "multistep" and not self.milestones:
            raise ValueError("multistep needs milestones (epochs), for example [30, 60, 80]")
        if self.kind != "multistep" and self.milestones:
            raise ValueError(f"milestones mean nothing {kind}; use kind: multistep")
        if sorted(self.milestones) != self.milestones:
            raise ValueError(f"milestones must ascend, got {self.milestones}")
        if self.kind not in FALLING and self.min_lr:
            raise ValueError(f"min_lr means nothing {kind}; use kind: {', '.join(FALLING)}")
        if self.kind == "one-cycle" and self.warmup_epochs:
            raise ValueError("one-cycle has a warm-up of its own; leave warmup_epochs out")
        if self.kind != "linear" and self.decay_from:
            raise ValueError(f"decay_from means nothing {kind}; use kind: linear")
        if self.args and not is_import_string(self.kind):
            raise ValueError(f"args mean nothing {kind}: they go to an import string")
        return self


MetricName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]


Workers = Literal["auto"] | Annotated[int, Field(ge=0)]
FEWEST_WORKERS, MOST_WORKERS = 2, 8
"""Limits of data-loader processes with `auto`.

Two processes that share a core still load while the GPU computes; more than eight are faster than the GPU and only
take memory.
"""


BUILT_IN = ("top1", "top5", "loss", "perplexity")
"""The metrics that every evaluation computes if possible."""
_RESERVED = {"auto", "eval_loss", *BUILT_IN}


class Train(Section):
    """The training run itself."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)]  # the job's, whatever the batch and the method
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # of weights, data order and augmentation
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of forward and backward pass; parameters stay fp32
    workers: Workers = "auto"  # data-loader processes a GPU; auto: the cores that its rank has, less one, from 2 to 8
    tf32: bool = True  # NVIDIA GPUs round what float32 products and convolutions multiply to 10 bits of mantissa
    # images' memory ordered by pixels; auto: networks with 2-d convolutions, where NVIDIA GPUs use their tensor cores
    channels_last: Literal["auto"] | bool = "auto"
    compile: bool | Literal["default", "max-autotune-no-cudagraphs"] = False  # torch.compile; true or a mode of it
    # operations that repeat bit for bit, or an error where there is none; else cuDNN takes the fastest (NVIDIA GPUs)
    deterministic: bool = False
    # a copy of the model on each GPU (DistributedDataParallel), or parameters, gradients and optimizer states divided among
    # them (FSDP2): memory falls with the GPUs, traffic is half as much again
    parallel: Literal["ddp", "fsdp"] = "ddp"
    # of fsdp: class names of what is gathered at a time; auto: the members of every nn.ModuleList and nn.Sequential
    fsdp_blocks: Literal["auto"] | Annotated[list[str], Field(min_length=1)] = "auto"
    accumulate: Positive = 1  # micro-batches an optimizer step
    # gradients are clipped to this norm; if not given 1 with methods ramp and auto, SGD and a cross-entropy; null: not clipped
    max_grad_norm: PositiveFloat | None = None
    activation_checkpointing: bool = False  # less memory, more computing
    checkpoint_every: Literal["auto"] | PositiveFloat = (
        "auto"  # seconds; auto is Young/Daly from the measured save time
    )
    reference_batch: Positive = 128  # the batch that optimizer.lr was tuned for
    # how the large batch is trained; or package.module:attribute of one of your own. A script without a method has lrs with
    # lr_scaling: sqrt if its command takes a learning rate, else lbt
    method: Method = DEFAULT_METHOD
    lr_scaling: Literal["auto", "none", "linear", "sqrt"] = "auto"  # in batch / reference_batch; auto: the method's
    # the most that the learning rate is multiplied by; auto: with method ramp, and in the ramps of method auto, 8, with a
    # cross-entropy 16, else no limit; null: no limit
    max_lr_factor: Literal["auto"] | Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = "auto"
    # the batch grows over the first epochs: auto: from reference_batch, doubled every 5 % of the training, up to its own; noise:
    # doubled as the gradient noise scale that was measured grows; decay: doubled where the schedule halves the learning rate,
    # which then falls by the root of 2, with SGD not at all; or stages such as [{epochs: 1, batch: 128},
    # {epochs: 0.5, batch: 256}]; null: it does not, but for method ramp
    ramp: Stages | None = None
    ramp_noise: PositiveFloat | None = (
        None  # of ramp: noise: the batch is at most so many times the noise scale; null: 1
    )
    # the nodes of the stages: same: the training's; auto, which ramp: decay has where nothing is given: as many of search.nodes
    # as each is worth, by what was measured
    ramp_nodes: Literal["same", "auto"] = "same"
    # after an out-of-memory: first the same batch in smaller micro-batches and more of them; or the next smaller batch
    oom_policy: Literal["accumulate", "shrink"] = "accumulate"
    max_attempts: Positive = 8  # starts, or allocations, in a row that save nothing new
    # what else is measured. gradient_norms: of every step, which methods that scale gradients log anyway; gradient_noise: the
    # noise scale at epoch ends, by 32 micro-batches of each GPU; hessian: its largest eigenvalue at epoch ends, on 128 samples
    # (costs some dozen steps)
    diagnostics: Annotated[list[Measurement], BeforeValidator(_require_different)] = []
    # of the evaluation, by a name of yours: an import string, or {import string: {arguments}}, of a callable(outputs, batch),
    # whose mean over samples it is, or of a class with update, compute and reset, as torchmetrics has them
    metrics: dict[MetricName, str | dict[str, Arguments]] = {}
    best_checkpoint: BestCheckpoint = BestCheckpoint()  # which epoch's checkpoint is `best`
    early_stopping: EarlyStopping | None = None  # what ends the training before its last epoch

    @model_validator(mode="after")
    def _metrics_are_known(self) -> "Train":
        for name, entry in self.metrics.items():
            if name in _RESERVED:
                raise ValueError(f"metrics.{name}: the name is taken")
            import_string_of(entry, f"metrics.{name}")
        known = ("auto", *BUILT_IN, *self.metrics)
        stopping = self.early_stopping
        name = self.best_checkpoint.metric
        if name not in known:
            raise ValueError(
                f"best_checkpoint.metric: there is no metric {name!r}; {suggest_nearest(name, known) or ', '.join(known)}"
            )
        if stopping is not None and stopping.target is not None and name == "auto":
            raise ValueError(
                "early_stopping.target is a value of best_checkpoint.metric, which is auto: set it, for example to top1"
            )
        return self

    @property
    def epochs_at_most(self) -> int:
        """Maximum number of epochs, whatever the metrics; the schedules remain those of `epochs`."""
        stopping = self.early_stopping
        return self.epochs if stopping is None else min(self.epochs, stopping.epochs or self.epochs)

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded over the GPUs."""
        return self.parallel == "fsdp"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The import strings of the metrics."""
        return tuple(name for entry in self.metrics.values() if (name := import_string_of(entry, "metrics")))

    @model_validator(mode="after")
    def _scaling_fits_the_method(self) -> "Train":
        if why := self.facts.refuses_lr_scaling.get(self.lr_scaling):
            raise ValueError(why)
        return self

    @model_validator(mode="before")
    @classmethod
    def _decay_has_nodes_of_its_stages(cls, content: Any) -> Any:
        by_decay = isinstance(content, Mapping) and content.get("ramp") == "decay"
        return {"ramp_nodes": "auto", **content} if by_decay else content

    @model_validator(mode="after")
    def _batch_grows(self) -> "Train":
        if self.ramp_noise is not None and self.ramp != "noise":
            raise ValueError("ramp_noise means nothing without ramp: noise")
        if self.ramp is None:
            return self
        if self.facts.tunes:
            raise ValueError(f"ramp: method {self.method} compares settings at one batch; use method ramp, or another")
        if self.ramp == "decay":
            if self.facts.scales:
                raise ValueError(
                    f"ramp: decay scales the learning rate with the batch, and method {self.method} gradients by factors of its"
                    " own; use method ramp, ortho, lbt or lrs"
                )
            if self.facts.constant_schedule:
                raise ValueError(
                    f"ramp: decay spends the decay of the learning rate as batch, and method {self.method} has none; use ramp:"
                    " auto, or another method"
                )
            if why := self.facts.refuses_lr_scaling.get("linear"):
                raise ValueError(f"ramp: decay scales the learning rate with the batch: {why}")
            if self.lr_scaling == "none":
                raise ValueError("ramp: decay scales the learning rate with the batch; leave lr_scaling: none out")
        named = self.ramp if isinstance(self.ramp, list) else []
        batches = [stage.batch for stage in named]
        if sorted(set(batches)) != batches:
            raise ValueError(f"ramp: batches must ascend, got {batches}")
        nodes = [stage.nodes for stage in named if stage.nodes is not None]
        if sorted(nodes) != nodes:
            raise ValueError(f"ramp: nodes must not become fewer, got {nodes}")
        if (epochs := sum(stage.epochs for stage in named)) >= self.epochs:
            raise ValueError(f"ramp: its stages last {epochs:g} epochs, and epochs is {self.epochs}")
        return self

    @property
    def stages(self) -> Stages | None:
        """How the batch grows; None if it does not."""
        return "auto" if self.ramp is None and self.facts.ramps else self.ramp

    @property
    def measures_noise(self) -> bool:
        """Whether the training measures its gradient noise, because the job requests it or its stages depend on it."""
        return "gradient_noise" in self.diagnostics or self.stages == "noise"

    def loaders(self, cores: float) -> int:
        """Return the number of data-loader processes of a rank with `cores` CPU cores."""
        if self.workers != "auto":
            return self.workers
        return max(FEWEST_WORKERS, min(MOST_WORKERS, int(cores) - 1))

    @property
    def lr_rule(self) -> Literal["none", "linear", "sqrt"]:
        """The scaling rule of the learning rate: as requested, otherwise that of the method."""
        return self.facts.lr_scaling if self.lr_scaling == "auto" else self.lr_scaling

    @property
    def facts(self) -> Facts:
        """The facts of the method."""
        return get_facts(self.method)


# --- Parts of `search`

MEMORY_MARGIN = 0.1
"""Share of a GPU's memory that a configuration must leave free."""
LEAST_STEPS = 5
"""Minimum number of steps that a probe times, however long they take, so that their spread is known."""
LOOKS = 3
"""Additional timings of a probe with separate steps: on available data, of synchronisation, and of local work."""

REMOVED_STRATEGIES: Mapping[str, str] = {
    "five": "use adaptive, which costs as little and chooses better, or partial, the four corners",
    "few": "use partial, the four corners",
    "two": "use partial, the four corners",
}
"""Values of `strategy` that were removed, and what to use instead."""


class Search(Section):
    """The configurations that are measured, and how."""

    nodes: Annotated[list[Positive], Field(min_length=1)] = [2, 4, 8, 16]  # numbers of nodes
    gpus_per_node: Annotated[list[Positive], Field(min_length=1)] | None = (
        None  # to use of each, searched too; none: all that it has
    )
    min_batch: Positive = 32  # smallest global batch; candidates are min_batch x 2^k
    max_batch: Positive | None = None  # besides memory and the dataset's size
    # auto: adaptive, or sweep for a long training; sweep: all batches on the fewest nodes, the smallest elsewhere, the middle
    # and the largest on the most; partial: the four corners; full: all; adaptive: in rounds
    strategy: Literal["auto", "sweep", "partial", "full", "adaptive"] = "auto"
    sequence: SequenceLengths | None = None  # lengths of text to measure too, a few batches of each on the fewest nodes
    # a probe times steps until it has as many, they have taken min_seconds, and the standard error of their mean is below 1 %
    min_steps: Annotated[int, Field(ge=5)] = 10
    min_seconds: NonNegativeFloat = 2.0  # clocks and power have settled by then
    max_seconds: PositiveFloat = 60.0  # it ends then in any case, if it has 5; so does the warm-up
    warmup_steps: Annotated[int, Field(ge=2)] = (
        10  # at least, before those that are timed; it lasts until they are alike
    )
    max_node_hours: PositiveFloat | None = None  # the most that probes, and rehearsals of a script, may cost
    max_minutes: PositiveFloat = 20.0  # the most one profiling job may last; SLURM is asked for 2 more, to end it first and write why, and prices count them

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "Search":
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(f"max_batch {self.max_batch} is below min_batch {self.min_batch}")
        if self.max_seconds < self.min_seconds:
            raise ValueError(f"max_seconds {self.max_seconds:g} is below min_seconds {self.min_seconds:g}")
        for name, sizes in (("nodes", self.nodes), ("gpus_per_node", self.gpus_per_node or [])):
            if len(set(sizes)) != len(sizes):
                raise ValueError(f"{name} names a size twice: {sizes}")
        return self

    @property
    def split_steps(self) -> int:
        """Maximum number of steps for each additional timing of a probe, and for measuring gradients."""
        return self.min_steps

    def timed_steps(self, step_time: float) -> int:
        """Return the number of steps that a probe is expected to time if steps are steady.

        Args:
            step_time: seconds per step.
        """
        wanted = max(self.min_steps, math.ceil(self.min_seconds / step_time))
        return max(LEAST_STEPS, min(wanted, math.ceil(self.max_seconds / step_time)))

    def probe_seconds(self, step_time: float) -> float:
        """Return the expected duration of a probe's steps in seconds: warm-up, timed steps and additional timings.

        Args:
            step_time: seconds per step.
        """
        looks = LOOKS * LEAST_STEPS + self.split_steps  # steady steps are looked at for as few as tell anything
        return (self.warmup_steps + self.timed_steps(step_time) + looks) * step_time


# --- Exports

TRACKERS = ("mlflow", "wandb", "tensorboard")
_WITH_PASSWORD = re.compile(r"://[^/@\s]*@")


def without_password(uri: str) -> str:
    """Return the address of a tracker.

    Raises:
        ValueError: the address contains a user name or password, which would be stored in the run's files.
    """
    if _WITH_PASSWORD.search(uri):
        raise ValueError(
            "a user's name or password does not belong into the address: give them to the tracker's own variables, such as"
            " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        )
    return uri


class Export(Section):
    """A tracker that what is recorded is sent to while jobs run. It reads the run's files: the training knows nothing of it."""

    to: Line  # mlflow, wandb, tensorboard, or package.module:callable that returns an exporter
    # mlflow: a tracking URI; null: $MLFLOW_TRACKING_URI, else a database in the run. tensorboard, wandb: a folder; null: one in
    # the run. wandb: https://... sends to that server, a folder is its offline mode
    uri: Annotated[Line, AfterValidator(without_password)] | None = None
    project: Line | None = None  # MLflow's experiment, W&B's project; null: the job's name
    # who sends: command: a command that waits for jobs, while it waits; job: the first node of a training, also where no command
    # waits
    by: Literal["command", "job"] = "command"

    @model_validator(mode="after")
    def _tracker_is_known(self) -> "Export":
        if self.to not in TRACKERS and not is_import_string(self.to):
            near = difflib.get_close_matches(self.to.lower(), TRACKERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(TRACKERS)}, or package.module:callable"
            raise ValueError(f"to: unknown tracker {self.to!r}; {hint}")
        return self

    @model_validator(mode="after")
    def _tensorboard_has_a_folder(self) -> "Export":
        uri = self.uri or ""
        if self.to == "tensorboard" and "://" in uri and not uri.startswith("file:///"):
            raise ValueError(f"tensorboard writes into a folder, and {uri} is none; give a path, or file:///path")
        return self
