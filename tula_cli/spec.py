"""The job spec: one YAML, checked whole before anything runs.

`load_spec` merges defaults, site files, the file, `TULA_*` variables and `--set` overrides (later wins), and reports
every problem at once with its path and the nearest valid name. Units are in the names or the comments; `batch` is
global, `local_batch` is one GPU's.
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tula_cli.errors import Problem, SpecError

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


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]  # bytes
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
    warmup_epochs: NonNegativeFloat = 0.0
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
    method: Literal["ags", "lbt", "lrs"] = "ags"
    max_attempts: Positive = 8
    tensorboard: bool = False


class Every(Section):
    """Refresh the scaling factors every `every` optimizer steps."""

    every: Positive


class Ags(Section):
    """Adaptive gradient scaling, Algorithm 1 of the paper."""

    granularity: Literal["element", "tensor"] = "element"
    delta: NonNegativeFloat | Literal["inf"] = 0.5
    b_small: Literal["auto"] | Positive = "auto"  # auto: reference_batch, at most a quarter of the batch
    refresh: Literal["epoch"] | Every = "epoch"
    s_min: NonNegativeFloat = 1e-3
    eps: PositiveFloat = 1e-8
    consensus: Literal["broadcast", "check", "off"] = "broadcast"


class Search(Section):
    """What to measure."""

    nodes: Annotated[list[Positive], Field(min_length=1)] = [2, 4, 8, 16]
    min_batch: Positive = 32
    max_batch: Positive | None = None  # besides memory and the dataset's size
    strategy: Literal["sweep", "partial", "full"] = "sweep"
    steps: Annotated[int, Field(ge=5)] = 50  # timed optimizer steps a probe
    warmup_steps: Annotated[int, Field(ge=2)] = 10
    memory_margin: Annotated[float, Field(ge=0, lt=1)] = 0.1  # of the capacity, kept free
    max_node_hours: PositiveFloat | None = None  # the most profiling may cost
    max_minutes: PositiveFloat = 20.0  # the most one profiling job may last

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "Search":
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(f"max_batch {self.max_batch} is below min_batch {self.min_batch}")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes names a size twice: {self.nodes}")
        return self


class Slurm(Section):
    """What sbatch is asked for; nothing is emitted that is not given here."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    minutes: Positive = 120  # time limit of a training job
    memory: str | None = None  # a node, as sbatch's --mem
    cpus_per_task: Positive | None = None
    setup: list[str] = []  # shell lines before the job
    extra: dict[str, str | int | bool] = {}  # any other sbatch option


class Cluster(Section):
    """Where jobs run, and what one of its nodes is."""

    kind: Literal["local", "slurm"] = "local"
    gpus_per_node: Positive = 1  # ranks of one node (also where the ranks run on the CPU)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    memory_per_gpu: Size | None = None  # bytes; enforced on the CPU
    collective: Literal["ring", "tree", "reduce_scatter_allgather", "parameter_server"] = "ring"
    interface: str | None = None  # network interface of gloo and NCCL
    slurm: Slurm | None = None

    @model_validator(mode="after")
    def _slurm_settings_belong_to_slurm(self) -> "Cluster":
        if self.kind == "local" and self.slurm is not None:
            raise ValueError("slurm settings mean nothing to kind 'local'; set kind: slurm")
        return self


class Pricing(Section):
    """Price per node-hour, GPU-hour, or GB-hour of reserved GPU memory."""

    kind: Literal["node_hour", "gpu_hour", "gb_hour"] = "node_hour"
    price: NonNegativeFloat = 1.0
    currency: str = "USD"
    source: str = ""  # where the price comes from, shown beside it


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
    search: Search = Search()
    cluster: Cluster = Cluster()
    pricing: Pricing = Pricing()


def signature(spec: JobSpec) -> str:
    """Return 8 hex digits over what a measurement depends on: another price keeps the probes, another model does not."""
    train, cluster = spec.train, spec.cluster
    parts = {
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
        "ags": spec.ags.model_dump(include={"granularity", "b_small", "consensus"}),
        "cluster": cluster.model_dump(include={"kind", "gpus_per_node", "device", "memory_per_gpu", "interface"}),
        "collective": cluster.collective if cluster.collective in ("ring", "tree") else "ring",
    }  # fmt: skip
    return _digest(parts)


def train_signature(spec: JobSpec, *, nodes: int, batch: int) -> str:
    """Return 8 hex digits over everything that changes the weights; `batch` is the one the run starts with."""
    parts = spec.model_dump(
        include={"model", "dataset", "transforms", "loss", "optimizer", "schedule", "ags"},
        exclude={"dataset": {"download"}},
    )
    parts["train"] = spec.train.model_dump(exclude={"workers", "checkpoint_every", "max_attempts", "tensorboard"})
    parts["gpus_per_node"] = spec.cluster.gpus_per_node
    return _digest({**parts, "nodes": nodes, "batch": batch})


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
    for leaf in _leaves(into[last], key):
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
            for leaf in _leaves(value, path):
                origins[leaf] = source


def _leaves(value: Any, path: str) -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}")]
    return [path]


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


_UNION_BRANCHES = re.compile(r"^(literal\[|constrained-|function-|float|int$|str$|dict\[|Every$)")


def _readable_path(location: tuple[Any, ...]) -> str:
    """Return `a.b[2].c` without the names pydantic gives to the branches of a union."""
    parts = [part for part in location if isinstance(part, int) or not _UNION_BRANCHES.match(str(part))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".") or "the spec"


def _names_at(location: tuple[Any, ...]) -> list[str]:
    """Return the keys that the section at `location` knows."""
    section: Any = JobSpec
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
