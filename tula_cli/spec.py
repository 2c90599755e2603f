"""The job spec: one YAML, checked whole before anything runs.

`load_spec` merges defaults, site files, the file, `TULA_*` variables and `--set` overrides (later wins), and reports
every problem at once with its path and the nearest valid name. Units are in the names or the comments; `batch` is
global, `local_batch` is one GPU's.
"""

import datetime
import difflib
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from tula_cli.errors import Problem, SpecError
from tula_cli.presets import AGS_PRESETS, DIVIDING

SITE_FILES = (Path("/etc/tula/site.yaml"), Path("~/.config/tula/site.yaml"))
ENV_PREFIX = "TULA_SPEC_"
"""TULA_SPEC_SEARCH__STEPS=20 overrides search.steps: two underscores part the levels."""

_SIZE_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1024, "MI": 1024**2, "GI": 1024**3}


def parse_size(value: object) -> object:
    """Turn "16GiB" or "800 MB" into bytes; numbers are bytes already."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", value.upper())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write it like 16GiB or 800MB")
    return round(float(match[1]) * _SIZE_UNITS[match[2] or ""])


def parse_minutes(value: object) -> object:
    """Turn SLURM's D-HH, D-HH:MM, D-HH:MM:SS, HH:MM:SS and MM:SS into minutes, rounded up; numbers are minutes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a time limit; write minutes, or as SLURM does HH:MM:SS or D-HH:MM:SS")
    days, *parts = (int(part) if part else 0 for part in match.groups())
    if match[1] is None and match[4] is None:  # without days two parts are minutes and seconds
        parts = [0, *parts[:2]]
    hours, minutes, seconds = parts
    return (days * 24 + hours) * 60 + minutes + -(-seconds // 60)


def _one_line(value: object) -> object:
    """Take a number as the word it is written as (an account may be one); refuse what would end a line of a script."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{value!r} must be one line of text")
    return value


def _as_text(value: object) -> object:
    """Take a number as the word it is written as; true and false have no one spelling in a shell."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} must be quoted: 'true', '1', ...")
    return str(value) if isinstance(value, int | float) else value


def _word(value: str) -> str:
    if not value:
        raise ValueError("an empty word is no part of a command")
    return value


def _shell_words(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is no command: {str(error).lower()}") from None
    if not words:
        raise ValueError("the command is empty")
    return value


def _price(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
        raise ValueError(
            f"a price must be above 0, got {value:g}; where nothing is paid leave the section out: cost is then counted"
            " in node-hours"
        )
    return value


def _day(value: str) -> str:
    try:
        if value and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
            raise ValueError
        return datetime.date.fromisoformat(value).isoformat() if value else value
    except ValueError:
        raise ValueError(f"{value!r} is not a day; write it like 2025-11-30") from None


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]  # bytes
Minutes = Annotated[int, BeforeValidator(parse_minutes), Field(ge=1)]
Line = Annotated[str, BeforeValidator(_one_line)]
Command = Annotated[Line, AfterValidator(_shell_words)]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the spec: frozen, and no key it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Model(Section):
    """A torchvision model name, or `package.module:callable` that returns a torch.nn.Module."""

    name: str
    args: dict[str, Any] = {}


class Dataset(Section):
    """CIFAR10, CIFAR100, Caltech101, Caltech256, ImageNet, ImageFolder, FakeData, digits, or an import string.

    An import string names a callable `(train: bool, transform, **args) -> torch.utils.data.Dataset`.
    """

    name: str
    root: str = "data"
    args: dict[str, Any] = {}
    download: bool = False
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2  # held out, stratified, where there is no official split


class Transforms(Section):
    """Names of torchvision.transforms.v2 classes, {Name: {arguments}}, or import strings; empty means to tensor only."""

    train: list[str | dict[str, dict[str, Any]]] = []
    eval: list[str | dict[str, dict[str, Any]]] = []


class Loss(Section):
    """A name of tula's (cross_entropy), a class of torch.nn, or an import string of a callable(output, target)."""

    name: str = "cross_entropy"
    args: dict[str, Any] = {}


class Optimizer(Section):
    """Any class of torch.optim, or an import string."""

    name: str = "SGD"
    lr: PositiveFloat
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: NonNegativeFloat = 0.0
    args: dict[str, Any] = {}


class Schedule(Section):
    """Learning rate over epochs (fractional epochs count): warm-up from near zero, then one of the kinds."""

    kind: Literal["constant", "multistep", "cosine"] = "constant"
    milestones: list[NonNegativeFloat] = []  # epochs
    gamma: PositiveFloat = 0.1
    warmup_epochs: NonNegativeFloat | None = None  # None: what the method needs (WARMUP_EPOCHS)
    min_lr: NonNegativeFloat = 0.0  # cosine ends here

    @model_validator(mode="after")
    def _settings_belong_to_the_kind(self) -> "Schedule":
        if self.kind == "multistep" and not self.milestones:
            raise ValueError("multistep needs milestones (epochs), for example [30, 60, 80]")
        if self.kind != "multistep" and self.milestones:
            raise ValueError(f"milestones mean nothing to kind {self.kind!r}; use kind: multistep")
        if sorted(self.milestones) != self.milestones:
            raise ValueError(f"milestones must ascend, got {self.milestones}")
        if self.kind != "cosine" and self.min_lr:
            raise ValueError(f"min_lr means nothing to kind {self.kind!r}; use kind: cosine")
        return self


class Hessian(Section):
    """How often the largest Hessian eigenvalue is measured, and on how much; `train.hessian: true` takes the defaults."""

    every: Positive = 1  # epochs
    samples: Positive = 128  # of the training set, over all GPUs, always the same ones


Method = Literal["ags", "lbt", "lrs", "lars", "lamb", "polo", "adascale", "static", "ortho", "auto"]

LR_SCALING: dict[str, Literal["linear", "sqrt"]] = {
    "lrs": "linear",
    "lars": "linear",
    "lamb": "sqrt",
    "ortho": "linear",
}
"""How methods scale the learning rate by themselves: linearly (paper, IV-D), LAMB by the square root (You et al. 2020)."""

WARMUP_EPOCHS = {"lrs": 5.0, "lars": 5.0, "lamb": 5.0, "polo": 5.0, "ortho": 5.0}
"""Warm-up of methods where the spec gives none (paper, IV-D)."""


REPLACES: dict[str, tuple[str, ...]] = {"lars": ("SGD",), "lamb": ("Adam", "AdamW")}
"""Methods that are optimizers of their own, and the optimizers whose settings they take over."""

NEED_SGD = ("adascale", "ortho")
READ_AGS = ("ags", "static", "auto")
"""Methods that read the section ags."""


class Train(Section):
    """The training run itself."""

    epochs: Positive
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    workers: Annotated[int, Field(ge=0)] = 2  # data-loader processes a GPU
    accumulate: Positive = 1  # micro-batches an optimizer step
    max_grad_norm: PositiveFloat | None = None
    activation_checkpointing: bool = False
    checkpoint_every: Literal["auto"] | PositiveFloat = (
        "auto"  # seconds; auto is Young/Daly from the measured save time
    )
    reference_batch: Positive = 128  # the batch that optimizer.lr was tuned for
    method: Method = "ags"
    lr_scaling: Literal["auto", "none", "linear", "sqrt"] = "auto"  # in batch / reference_batch; auto: the method's
    ghost_batch: Annotated[int, Field(ge=2)] | None = None  # samples over which BatchNorm takes its statistics
    max_attempts: Positive = 8
    tensorboard: bool = False
    diagnostics: bool = False  # gradient norms also where the method does not take them by itself
    hessian: bool | Hessian = False  # the largest eigenvalue at epoch ends

    @model_validator(mode="after")
    def _scaling_fits_the_method(self) -> "Train":
        if self.method == "lrs" and self.lr_scaling == "none":
            raise ValueError("method lrs is the scaling of the learning rate; with lr_scaling: none use method lbt")
        if self.method == "adascale" and self.lr_scaling in ("linear", "sqrt"):
            raise ValueError(
                "method adascale multiplies the learning rate by its own gain, lr_scaling would scale it twice; leave"
                " lr_scaling out"
            )
        return self


class Every(Section):
    """Refresh the scaling factors every `every` optimizer steps."""

    every: Positive


def _threshold(value: object) -> object:
    """Take YAML's .inf as the word that JSON can hold."""
    return "inf" if isinstance(value, float) and value == math.inf else value


Threshold = Annotated[NonNegativeFloat | Literal["inf"], BeforeValidator(_threshold)]
Memory = Annotated[float, Field(ge=0, lt=1)]  # weight of what was before in a moving average; 0: none
Floor = Annotated[float, Field(ge=0, le=1)]


class Ags(Section):
    """Adaptive gradient scaling, Algorithm 1 of the paper. What is not given is taken from the preset."""

    preset: Literal["paper", "robust"] = "paper"
    granularity: Literal["element", "tensor"] | None = None
    delta: Threshold | None = None
    b_small: Literal["auto"] | Positive = "auto"  # auto: reference_batch, at most a quarter of the batch
    refresh: Literal["epoch"] | Every | None = None
    s_min: Floor | None = None
    eps: PositiveFloat | None = None
    source: Literal["small_batch", "local_norms"] | None = None
    norm_ewma: Memory | None = None
    scale_ema: Memory | None = None
    apply_to: Literal["gradient", "update"] | None = None
    consensus: Literal["broadcast", "check", "off"] = "broadcast"
    factor: Literal["auto"] | PositiveFloat = "auto"  # of method static; auto: sqrt(batch / b_small)

    def resolved(self) -> "ResolvedAgs":
        """Return the section with every field filled: what is given, else the preset's."""
        return _resolved(self)

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "Ags":
        preset = AGS_PRESETS[self.preset]
        source, granularity = self.source or preset["source"], self.granularity or preset["granularity"]
        if source != "local_norms":
            return self
        if granularity == "element":
            raise ValueError(
                "source local_norms knows one norm a tensor; set granularity: tensor or source: small_batch"
            )
        if self.b_small != "auto":
            raise ValueError(
                f"b_small {self.b_small} has no effect with source local_norms, where each GPU's own batch is the small"
                " one; leave it out or set source: small_batch"
            )
        return self


@cache
def _resolved(ags: Ags) -> "ResolvedAgs":  # a forecast asks for every configuration
    return ResolvedAgs.model_validate({**AGS_PRESETS[ags.preset], **ags.model_dump(exclude_none=True)})


class ResolvedAgs(Ags):
    """The section `ags` with nothing left to a preset."""

    granularity: Literal["element", "tensor"]
    delta: Threshold
    refresh: Literal["epoch"] | Every
    s_min: Floor
    eps: PositiveFloat
    source: Literal["small_batch", "local_norms"]
    norm_ewma: Memory
    scale_ema: Memory
    apply_to: Literal["gradient", "update"]

    @property
    def each_step(self) -> bool:
        """Whether every step refreshes: then that is a part of the step, and nothing beside it."""
        return isinstance(self.refresh, Every) and self.refresh.every == 1


class Arm(Section):
    """One way to go on that a self-tuning training tries."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
    method: Literal["lbt", "ags", "static", "ortho"] = "lbt"
    lr_factor: PositiveFloat = 1.0  # of the learning rate that the schedule gives
    warmup_epochs: NonNegativeFloat = 0.0  # in which the factor grows from 1
    ags: Ags | None = None  # in place of the job's section ags; None keeps that

    @model_validator(mode="after")
    def _settings_act(self) -> "Arm":
        if self.method in ("lbt", "ortho") and self.ags is not None:
            raise ValueError(f"ags means nothing to method {self.method}; set method: ags")
        if self.warmup_epochs and self.lr_factor == 1:
            raise ValueError("warmup_epochs means nothing to lr_factor 1")
        return self


class Auto(Section):
    """Self-tuning (train.method: auto): short branches from a checkpoint, judged on held-out training samples."""

    after: Positive = 1  # epochs, trained as lbt, after which the arms part
    # Of a branch in the first rung, each further one trains twice as long; auto: 2 % of train.epochs, at least 1.
    epochs: Literal["auto"] | PositiveFloat = "auto"
    holdout: Annotated[float, Field(gt=0, le=0.5)] = 0.1  # share of the training set, at most 10,000 samples
    arms: list[Arm] = []  # beside lbt, which is always one; empty: the default ones

    @model_validator(mode="after")
    def _arms_differ(self) -> "Auto":
        names = [arm.name for arm in self.arms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"arms need names of their own, got {', '.join(twice)} twice")
        if any(arm.name == "lbt" and arm != Arm(name="lbt") for arm in self.arms):
            raise ValueError("the arm lbt is the large batch as it is; give yours another name")
        return self


class Search(Section):
    """What to measure."""

    nodes: Annotated[list[Positive], Field(min_length=1)] = [2, 4, 8, 16]
    min_batch: Positive = 32
    max_batch: Positive | None = None  # besides memory and the dataset's size
    strategy: Literal["sweep", "partial", "full", "adaptive"] = "sweep"
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.01  # expected regret at which `adaptive` stops, a share
    steps: Annotated[int, Field(ge=5)] = 50  # timed optimizer steps a probe
    warmup_steps: Annotated[int, Field(ge=2)] = 10
    memory_margin: Annotated[float, Field(ge=0, lt=1)] = 0.1  # of the capacity, kept free
    max_node_hours: PositiveFloat | None = None  # the most profiling may cost
    max_minutes: PositiveFloat = 20.0  # the most one profiling job may last
    packing: Literal["jobs", "single"] = "jobs"  # a job a number of nodes, or one job for all

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "Search":
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(f"max_batch {self.max_batch} is below min_batch {self.min_batch}")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes names a size twice: {self.nodes}")
        return self


_SBATCH_SETTINGS = {
    "job-name": "name",
    "nodes": "search.nodes",
    "ntasks": "cluster.gpus_per_node",
    "ntasks-per-node": "cluster.gpus_per_node",
    "tasks-per-node": "cluster.gpus_per_node",
    "ntasks-per-gpu": "cluster.gpus_per_node",
    "time": "cluster.slurm.minutes for training jobs, search.max_minutes for measuring ones",
    "partition": "cluster.slurm.partition",
    "account": "cluster.slurm.account",
    "qos": "cluster.slurm.qos",
    "constraint": "cluster.slurm.constraint",
    "reservation": "cluster.slurm.reservation",
    "exclude": "cluster.slurm.exclude",
    "exclusive": "cluster.slurm.exclusive",
    "mem": "cluster.slurm.memory",
    "cpus-per-task": "cluster.slurm.cpus_per_task",
}
"""Options of sbatch that have a setting of their own."""
_SBATCH_OURS = frozenset({
    "array", "dependency", "error", "no-requeue", "open-mode", "output", "parsable", "quiet", "requeue", "signal",
    "test-only", "wait", "wrap",
})  # fmt: skip
_SRUN_OURS = frozenset({"error", "kill-on-bad-exit", "output", "unbuffered", "ntasks", "ntasks-per-node", "nodes"})
_GPU_OPTIONS = frozenset({"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "tres-per-task"})
_RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "SUBMITIT_EXECUTOR", "TULA_WRAPPER",
})  # fmt: skip


def option(name: str) -> str:
    """Return an option of sbatch or srun as it is written on a command line, without its dashes."""
    return name.replace("_", "-")


def _an_option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]+", name):
        raise ValueError(f"{name!r} is not the long name of an option, as mail-type is of --mail-type")
    return name


def _sbatch_option(name: str) -> str:
    if setting := _SBATCH_SETTINGS.get(option(_an_option(name))):
        raise ValueError(f"{name!r} has a setting of its own: {setting}")
    if option(name) in _SBATCH_OURS:
        raise ValueError(f"{name!r} is what tula itself tells sbatch; leave it out")
    return name


def _srun_option(name: str) -> str:
    if option(_an_option(name)) == "cpus-per-task":
        raise ValueError(f"{name!r} has a setting of its own: cluster.slurm.cpus_per_task")
    if option(name) in _SRUN_OURS:
        raise ValueError(f"{name!r} is what tula itself tells srun; leave it out")
    return name


def _slurm_memory(value: str) -> str:
    if value and not re.fullmatch(r"\d+[KMGT]?B?", value.upper()):
        raise ValueError(f"{value!r} is not a size as sbatch reads it; write it like 64G, or 0 for all of a node's")
    return value


def _gpu_type(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", value):
        raise ValueError(f"{value!r} is not the name of one type of GPU, as a100 is of gpu:a100:4")
    return value


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not the name of an environment variable")
    if name in _RANK_VARIABLES:
        raise ValueError(f"{name!r} is set by tula; leave it out")
    return name


def _option_value(value: object) -> object:
    values = value if isinstance(value, list) else [value]
    if not all(v is None or isinstance(v, bool | int | float | str) for v in values):
        raise ValueError(
            f"{value!r} must be a text, a number, a list of them, true (the bare option) or false (left out)"
        )
    lines = [_one_line(v) for v in values]
    return lines if isinstance(value, list) else value


OptionValue = Annotated[bool | int | float | str | list[str] | None, BeforeValidator(_option_value)]
"""True is the bare option; False, None, "" and [] leave it out; a list is joined by commas."""


class Slurm(Section):
    """What sbatch and srun are asked for; nothing is asked for that is not given here."""

    launcher: Literal["srun", "torchrun"] = "srun"  # one task a GPU; or one a node, which starts the node's ranks
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    exclude: Line | None = None
    minutes: Minutes = 120  # time limit of a training job
    memory: Annotated[Line, AfterValidator(_slurm_memory)] | None = None  # a node, as sbatch's --mem
    cpus_per_task: Positive | None = None  # a rank, with either launcher
    gpus: Literal["gpus_per_node", "gres", "gpus_per_task", "none"] = "gpus_per_node"  # how GPUs are asked for
    gpu_type: Annotated[Line, AfterValidator(_gpu_type)] | None = None  # as the site calls it: a100
    exclusive: bool = True  # whole nodes: neighbours would spoil the times
    extra: dict[Annotated[str, AfterValidator(_sbatch_option)], OptionValue] = {}  # any other option of sbatch
    srun_extra: dict[Annotated[str, AfterValidator(_srun_option)], OptionValue] = {}  # any other option of srun
    setup: list[str] = []  # shell lines before the job
    environment: dict[Annotated[str, AfterValidator(_variable)], Annotated[str, BeforeValidator(_as_text)] | None] = {}
    python: Command | None = None  # how python is started in the job: a command of the shell
    wrapper: list[Annotated[Line, AfterValidator(_word)]] = []  # words before the command of every rank
    setup_snippet: Line | bool = True  # a file; true: the site's, else tula's; false: none
    wrapper_snippet: Line | bool | None = None  # a file; true: the site's, else tula's; null: the site's, if any

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "Slurm":
        found = [*_unfit_gpus(self), *_unfit_options(self)]
        if found:  # all at once, each with its path
            details = [
                InitErrorDetails(type=PydanticCustomError("value_error", "{why}", {"why": why}), loc=path, input=None)
                for path, why in found
            ]
            raise ValidationError.from_exception_data("Slurm", details)
        return self


_Unfit = Iterator[tuple[tuple[str, ...], str]]


def _unfit_gpus(slurm: Slurm) -> _Unfit:
    if slurm.launcher == "torchrun" and slurm.gpus == "gpus_per_task":
        yield (
            ("gpus",),
            "gpus_per_task is a GPU a task, and launcher: torchrun has a task a node; use gpus_per_node or gres",
        )
    if slurm.gpus == "none":
        if slurm.gpu_type:
            yield ("gpu_type",), f"{slurm.gpu_type!r} means nothing to gpus: none"
        return
    for name, value in slurm.extra.items():
        # Other resources than GPUs have no other way in than gres.
        if option(name) in _GPU_OPTIONS and value and (option(name) != "gres" or "gpu" in str(value)):
            yield ("extra", name), "asks for GPUs a second time: gpus and gpu_type say how, or set gpus: none"


def _unfit_options(slurm: Slurm) -> _Unfit:
    given = [option(name) for name, value in slurm.extra.items() if value]
    for name in ("mem-per-cpu", "mem-per-gpu"):
        if name in given and slurm.memory:
            yield ("extra", name), f"and memory ({slurm.memory}) exclude each other"
    if "cpus-per-gpu" in given and slurm.cpus_per_task:
        yield ("extra", "cpus-per-gpu"), f"and cpus_per_task ({slurm.cpus_per_task}) exclude each other"
    for name in sorted({name for name in given if given.count(name) > 1}):
        yield ("extra", name), "is given twice, with '-' and with '_'"


class Cluster(Section):
    """Where jobs run, and what one of its nodes is."""

    kind: Literal["local", "slurm"] = "local"
    gpus_per_node: Positive = 1  # ranks of one node (also where the ranks run on the CPU)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    memory_per_gpu: Size | None = None  # bytes; enforced on the CPU
    collective: Literal["ring", "tree", "reduce_scatter_allgather", "parameter_server"] = "ring"  # the time model
    interface: str | None = None  # network interface of gloo and NCCL
    slurm: Slurm | None = None

    @model_validator(mode="after")
    def _slurm_settings_belong_to_slurm(self) -> "Cluster":
        if self.kind == "local" and self.slurm is not None:
            raise ValueError("slurm settings mean nothing to kind 'local'; set kind: slurm")
        return self


class Spot(Section):
    """The same nodes for less money, but they may be taken away (spot, preemptible).

    The rate is that of one node, as providers state it: a job loses its first node N times as often on N nodes, so that
    one number holds for the whole search.
    """

    discount: Annotated[float, Field(ge=0, lt=1)]  # share of the price that is saved
    interruptions_per_day: NonNegativeFloat  # of one node
    wait_minutes: NonNegativeFloat = 0.0  # until a lost node is replaced; nothing is paid meanwhile


class Pricing(Section):
    """Price per node-hour, GPU-hour, or GB-hour of reserved GPU memory."""

    kind: Literal["node_hour", "gpu_hour", "gb_hour"] = "node_hour"
    price: Annotated[PositiveFloat, BeforeValidator(_price)]
    currency: Annotated[Line, Field(min_length=1)] = "USD"
    source: Line = ""  # where the price comes from, shown beside it
    date: Annotated[str, AfterValidator(_day)] = ""  # when it was looked up, 2025-11-30; shown beside it
    spot: Spot | None = None


UNPRICED = Pricing(price=1.0, currency="node-h")
"""Where no price is given, cost is a number of node-hours."""


class NodeType(Section):
    """What is special about one type of node: laid over those sections of the job, level by level."""

    cluster: dict[str, Any] = {}
    pricing: dict[str, Any] = {}
    search: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_cap_for_all(self) -> "NodeType":
        if "max_node_hours" in self.search:
            raise ValueError("search.max_node_hours bounds all types together; set it in the job's own section search")
        return self


TypeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]


class JobSpec(Section):
    """A whole job. Everything has a default but the model, the dataset, the learning rate and the epochs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "job"
    model: Model
    dataset: Dataset
    transforms: Transforms = Transforms()
    loss: Loss = Loss()
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    train: Train
    ags: Ags = Ags()
    auto: Auto = Auto()
    search: Search = Search()
    cluster: Cluster = Cluster()
    pricing: Pricing = UNPRICED
    node_types: dict[TypeName, NodeType] = {}  # each is measured for itself; the choice is made over all

    @model_validator(mode="after")
    def _tuning_fits(self) -> "JobSpec":
        if self.train.method != "auto":
            return self
        if self.auto.after >= self.train.epochs:
            raise ValueError(
                f"auto.after {self.auto.after} leaves nothing of train.epochs {self.train.epochs} to train as tuned"
            )
        if self.train.lr_scaling in ("linear", "sqrt"):
            raise ValueError(
                f"train.lr_scaling {self.train.lr_scaling} would scale the learning rate under method auto, whose arms"
                " scale it themselves; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _types_are_sound(self) -> "JobSpec":
        problems: list[InitErrorDetails] = []
        currencies: dict[str, str] = {}
        for name in self.node_types:
            try:
                currencies[name] = self.of_type(name).pricing.currency
            except ValidationError as error:
                problems += [_under(item, "node_types", name) for item in error.errors()]
        if problems:
            raise ValidationError.from_exception_data("JobSpec", problems)
        if len(set(currencies.values())) > 1:
            found = ", ".join(f"{name} in {currency}" for name, currency in currencies.items())
            raise ValueError(f"node_types must be priced in one currency to be compared, got {found}")
        return self

    def by_type(self, only: str | None = None) -> dict[str, "JobSpec"]:
        """Return the whole job on each type of node (on the named one); where it names none, itself under "".

        Raises:
            SpecError: there is no such type.
        """
        if only is not None and only not in self.node_types:
            there_are = ", ".join(self.node_types)
            raise SpecError(
                f"no node type {only!r}",
                f"there are: {there_are}" if there_are else "the job has no section node_types",
            )
        if not self.node_types:
            return {"": self}
        return {name: self.of_type(name) for name in self.node_types if only in (None, name)}

    def of_type(self, name: str) -> "JobSpec":
        """Return the whole job on one type of node; it knows of no others.

        Raises:
            ValidationError: what the type has of its own does not fit.
        """
        # A section that is there but empty, as a written spec has it, says nothing of its own.
        own = {key: value for key, value in self.node_types[name].model_dump(exclude_unset=True).items() if value}
        base = self.model_dump(mode="json", exclude_unset=True, exclude={"node_types"})
        if self.pricing == UNPRICED:  # nothing of it holds beside a price
            base.pop("pricing", None)
        _merge(base, own, {}, source=name)
        return JobSpec.model_validate(base)


def _under(item: Any, *path: str) -> InitErrorDetails:
    """Return a problem that pydantic found in a part, with the path of the whole."""
    kind = PydanticCustomError("value_error", "{why}", {"why": item["msg"].removeprefix("Value error, ")})
    own = kind if item["type"] == "value_error" else item["type"]
    return InitErrorDetails(type=own, loc=(*path, *item["loc"]), input=item["input"], ctx=item.get("ctx", {}))


def signature(spec: JobSpec, code: str = "") -> str:
    """Return 8 hex digits over what a measurement depends on: another price keeps the probes, another model does not.

    Args:
        spec: the job.
        code: digest of the user's own code that the spec names; empty for none.
    """
    train, cluster = spec.train, spec.cluster
    parts: dict[str, Any] = {
        "model": spec.model.model_dump(),
        "dataset": spec.dataset.model_dump(exclude={"download"}),
        "transforms": spec.transforms.model_dump(),
        "loss": spec.loss.model_dump(),
        "optimizer": spec.optimizer.model_dump(exclude={"lr", "weight_decay"}),
        "train": train.model_dump(
            include={
                "precision", "workers", "accumulate", "max_grad_norm", "activation_checkpointing", "reference_batch", "method",
            }
        ),
        "ags": _ags(spec.ags, {"granularity", "b_small", "consensus", "source", "apply_to", *_steps_refresh(spec)}),
        "cluster": cluster.model_dump(include={"kind", "gpus_per_node", "device", "memory_per_gpu", "interface"}),
    }  # fmt: skip
    if train.ghost_batch is not None:
        parts["train"]["ghost_batch"] = train.ghost_batch
    if spec.node_types:  # where it runs is told by each type's own signature; a type more keeps the run
        parts = {**parts, "cluster": None, "node_types": True}
    return _digest({**parts, "code": code} if code else parts)


def warmup_epochs(spec: JobSpec) -> float:
    """Return how many epochs the learning rate grows: as given, else as the method needs."""
    given = spec.schedule.warmup_epochs
    return WARMUP_EPOCHS.get(spec.train.method, 0.0) if given is None else given


def misfit(spec: JobSpec) -> str:
    """Return why the job's method does not go with its optimizer; empty where it does, or where only loading it tells."""
    method, name = spec.train.method, spec.optimizer.name
    if name not in REPLACES.get(method, (name,)):
        return f"takes the place of {' or '.join(REPLACES[method])}, not of optimizer.name: {name}"
    if method in NEED_SGD and name != "SGD" and ":" not in name:
        return f"needs optimizer.name: SGD, not {name}"
    if method in ("ags", "static") and name in DIVIDING and spec.ags.resolved().apply_to == "gradient":
        return f"scales gradients, whose magnitude {name} divides by: set ags.apply_to: update"
    return ""


def train_signature(spec: JobSpec, *, nodes: int, batch: int, code: str = "") -> str:
    """Return 8 hex digits over everything that changes the weights; `batch` is the one the run starts with.

    Args:
        spec: the job.
        nodes: number of nodes.
        batch: global batch.
        code: digest of the user's own code that the spec names; empty for none.
    """
    parts = spec.model_dump(
        include={"model", "dataset", "transforms", "loss", "optimizer", "schedule"},
        exclude={"dataset": {"download"}},
    )
    acts = spec.ags if spec.train.method in READ_AGS else Ags()  # to others the section means nothing
    parts["ags"] = _ags(acts, set(Ags.model_fields) - {"preset"})
    parts["train"] = spec.train.model_dump(
        exclude={"workers", "checkpoint_every", "max_attempts", "tensorboard", "diagnostics", "hessian"}
    )
    _keep_older_signature(spec, parts)
    parts["gpus_per_node"] = spec.cluster.gpus_per_node
    if spec.train.method == "auto":
        parts["auto"] = spec.auto.model_dump()
    if code:
        parts["code"] = code
    return _digest({**parts, "nodes": nodes, "batch": batch})


def _keep_older_signature(spec: JobSpec, parts: dict[str, Any]) -> None:
    """Leave out settings that came later where they change nothing."""
    for name, unused in (("lr_scaling", "auto"), ("ghost_batch", None)):
        if parts["train"][name] == unused:
            del parts["train"][name]
    if spec.schedule.warmup_epochs is None:
        parts["schedule"]["warmup_epochs"] = 0.0
    elif spec.schedule.warmup_epochs == 0 and spec.train.method in WARMUP_EPOCHS:
        del parts["schedule"]["warmup_epochs"]


def _steps_refresh(spec: JobSpec) -> set[str]:
    """Return the setting that changes what a step takes: how often AGS refreshes, where every step does."""
    return {"refresh"} if spec.ags.resolved().each_step else set()


def _ags(ags: Ags, names: set[str]) -> dict[str, Any]:
    """Return the resolved settings; those that came later only where they act, so that older signatures stand."""
    paper = AGS_PRESETS["paper"]
    later = paper.keys() - {"granularity", "delta", "refresh", "s_min", "eps"}
    unused = {name: paper[name] for name in later} | {"factor": "auto"}
    settings = ags.resolved().model_dump(include=names)
    return {name: value for name, value in settings.items() if unused.get(name) != value}


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]


class _Loader(yaml.SafeLoader):
    """YAML with 1.2's plain scalars: 1e-3 is a number, `on`, 1:30 and 2025-01-01 are words; a key given twice is refused."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or `_Loader` would not read as a word."""


_PLAIN_SCALARS = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.nan|\.NaN|\.NAN)$",
        list("-+0123456789."),
    ),
    ("merge", r"^<<$", ["<"]),
)
for _name, _pattern, _first in _PLAIN_SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


def parse_yaml(text: str, *, source: str) -> Any:
    """Parse YAML text.

    Raises:
        SpecError: it does not parse; names the source, line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = (
            f", line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
            if error.problem_mark
            else ""
        )
        raise SpecError(f"{source}{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{source}: not valid YAML: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML file that holds a mapping.

    Raises:
        SpecError: the file is missing, unreadable, not text, not YAML or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"no such file: {path}", "tula init writes a job.yaml to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    content = parse_yaml(text, source=str(path))
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise SpecError(
            f"{path}: a job spec is a mapping of sections, found {found}", "tula init writes one to start from"
        )
    return content


def load_spec(
    path: Path,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
    site_files: Iterable[Path] = SITE_FILES,
) -> JobSpec:
    """Read, merge and check a job spec.

    Args:
        path: the YAML file.
        overrides: `a.b=c`, c in YAML; later wins.
        environ: where TULA_SPEC_* variables are looked up.
        site_files: YAML files of site-wide values, weaker than the spec; those that exist are read.

    Raises:
        SpecError: with all problems at once.
    """
    merged, _ = merge_sources(path, overrides=overrides, environ=environ, site_files=site_files)
    return validate(merged, source=str(path))


def merge_sources(
    path: Path,
    *,
    overrides: Iterable[str],
    environ: Mapping[str, str] = os.environ,
    site_files: Iterable[Path] = SITE_FILES,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the merged mapping, and for each leaf `a.b.c` the source its value came from."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for site_file in site_files:
        site_path = site_file.expanduser()
        if site_path.is_file():
            _merge(merged, read_yaml(site_path), origins, source=str(site_path))
    _merge(merged, read_yaml(path), origins, source=str(path))
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX):
            key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            _assign(merged, key, environ[variable], origins, source=variable)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise SpecError(f"--set {override}: not of the form a.b=c", "for example --set search.nodes=[2,4]")
        _assign(merged, key.strip(), value, origins, source="--set")
    return merged, origins


def _assign(into: dict[str, Any], key: str, text: str, origins: dict[str, str], *, source: str) -> None:
    """Set `a.b.c` to a value in YAML; a mapping replaces what was there."""
    *sections, last = key.split(".")
    for part in sections:
        if not isinstance(into.get(part), dict):
            into[part] = {}
        into = into[part]
    into[last] = parse_yaml(text, source=f"{source} {key}")
    for leaf in [known for known in origins if known == key or known.startswith(f"{key}.")]:
        del origins[leaf]
    for leaf, _ in leaves(into[last], key):
        origins[leaf] = source


def _merge(
    into: dict[str, Any], new: Mapping[str, Any], origins: dict[str, str], *, source: str, prefix: str = ""
) -> None:
    """Merge mappings level by level; a value that is not a mapping on both sides is replaced."""
    for key, value in new.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, origins, source=source, prefix=f"{path}.")
        else:
            into[key] = value
            for leaf, _ in leaves(value, path):
                origins[leaf] = source


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its key, `a.b.c`; a list is one value, and so is an empty mapping."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


def validate(content: Mapping[str, Any], *, source: str) -> JobSpec:
    """Check a mapping as a job spec.

    Raises:
        SpecError: with all problems at once; each names its path, the value and what is wanted.
    """
    try:
        return JobSpec.model_validate(content)
    except ValidationError as error:
        problems = _merge_unions([_problem(item) for item in error.errors()])
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SpecError(f"{source} has {count}", problems=problems) from None


def _problem(item: Any) -> Problem:
    path = _readable_path(item["loc"])
    if item["type"] == "extra_forbidden":
        names = _names_at(item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(names))}"
        return Problem(path, "no such key", hint)
    if item["type"] == "missing":
        return Problem(path, "is required")
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if item["type"] == "literal_error":
        expected = item["ctx"]["expected"].replace(" or ", ", ")
        close = difflib.get_close_matches(str(item["input"]), re.findall(r"'([^']+)'", expected), n=1)
        return Problem(path, f"{item['input']!r} is none of {expected}", f"did you mean {close[0]}?" if close else "")
    if item["type"] == "string_pattern_mismatch":
        return Problem(path, f"{item['input']!r} must be letters, digits, '.', '_' or '-', at most 64 of them")
    shown = "" if item["type"] == "value_error" or isinstance(item["input"], dict) else f", got {item['input']!r}"
    return Problem(path, message[:1].lower() + message[1:] + shown)


def _merge_unions(problems: list[Problem]) -> tuple[Problem, ...]:
    """Fold the problems pydantic reports for each branch of a union into one a path."""
    by_path: dict[str, list[Problem]] = {}
    for problem in problems:
        by_path.setdefault(problem.path, []).append(problem)
    return tuple(
        found[0]
        if len(found) == 1
        else Problem(
            path, "; or ".join(dict.fromkeys(p.message for p in found)), next((p.hint for p in found if p.hint), "")
        )
        for path, found in by_path.items()
    )


_UNION_BRANCHES = re.compile(
    r"^(literal\[|constrained-|function-|float|int$|str$|bool$|dict\[|list\[|\[key\]$|Every$|Hessian$)"
)


def _readable_path(location: tuple[Any, ...]) -> str:
    """Return `a.b[2].c` without the names pydantic gives to the branches of a union."""
    parts = [part for part in location if isinstance(part, int) or not _UNION_BRANCHES.match(str(part))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".") or "the spec"


def _names_at(location: tuple[Any, ...]) -> list[str]:
    """Return the keys that the section at `location` knows."""
    section: Any = JobSpec
    if len(location) > 1 and location[0] == "node_types":
        section, location = (JobSpec, location[2:]) if len(location) > 2 else (NodeType, ())
    for part in location:
        if not (isinstance(section, type) and issubclass(section, Section)) or part not in section.model_fields:
            break
        section = _section_of(section.model_fields[part].annotation)
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, Section) else []


def _section_of(annotation: Any) -> Any:
    """Return the Section in an annotation like `Slurm | None`."""
    if isinstance(annotation, type):
        return annotation
    return next(
        (a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, Section)), None
    )


def dump_yaml(spec: JobSpec) -> str:
    """Return the whole spec as YAML that `load_spec` reads back to an equal spec."""
    content = spec.model_dump(mode="json")
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
